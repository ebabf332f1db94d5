"""Where a traced function recomputes what it had, for lints.

All of these read the jaxpr of a differentiated function, in which `jax.checkpoint`
has become the forward pass and, in the backward pass, its evaluation again.

Known gap: of jax 0.10 under its flag `jax_remat3` no checkpoint is left in the
jaxpr, so that all of these find nothing there.
"""

from collections import defaultdict
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.estimate.counting.ops import Op, Place, Walk
from jaxmem.estimate.counting.walk import walk
from jaxmem.trace.casts import is_recast
from jaxmem.trace.source import source_line

# ---------------------------------------------------------------- API


def two_levels(closed: ClosedJaxpr) -> tuple[str, ...]:
    """Source lines of matrix products that are evaluated more than once again.

    So it is where a checkpointed layer stands in a checkpointed segment.  What
    only policies of jaxmem evaluate again, however often, is as planned and not listed.
    """
    forward: dict[Any, list[Op]] = defaultdict(list)
    again: dict[Any, list[Op]] = defaultdict(list)
    for op in walk(closed).ops:
        if op.matmul_flops and op.place.recomputed:
            again[_key(op)].append(op)
    unplanned = {key: ops for key, ops in again.items() if not all(op.place.planned for op in ops)}
    if not unplanned:
        return ()
    # If only gradients are asked for, the last layer's forward evaluation is dead code.
    for op in walk(closed, dead=True).ops:
        if op.matmul_flops and not op.place.recomputed and not op.place.transposed:
            forward[_key(op)].append(op)
    lines = []
    for key, ops in unplanned.items():
        first = forward.get(key)
        if not first:
            continue
        # jax moves what does not change out of the forward loop, not out of the backward one.
        moved = not any(op.place.looped for op in first) and all(op.place.looped for op in ops)
        if not moved and _runs(ops) > _runs(first):
            lines.append(key[0])
    return tuple(dict.fromkeys(line for line in lines if line))


def unrolled_remat(closed: ClosedJaxpr) -> tuple[str, ...]:
    """Source lines where a checkpoint outside of every loop is evaluated again."""
    return _unrolled(walk(closed), only_without_barriers=False)


def unrolled_without_barriers(closed: ClosedJaxpr) -> tuple[str, ...]:
    """The same, of checkpoints with `prevent_cse=False` alone.

    Nothing keeps a compiler from finding that it has such values already, so that
    nothing is saved.
    """
    return _unrolled(walk(closed), only_without_barriers=True)


# ---------------------------------------------------------------- implementation


def _key(op: Op) -> Any:
    shapes = tuple(atom.aval.shape for atom in (*op.eqn.invars, *op.eqn.outvars))
    return source_line(op.eqn), op.eqn.primitive.name, shapes


def _runs(ops: list[Op]) -> int:
    return sum(op.place.times for op in ops)


def _unrolled(found: Walk, only_without_barriers: bool) -> tuple[str, ...]:
    lines = []
    for eqn, place in found.checkpoints:
        # What is computed again of casts is the casts.
        if place.looped or is_recast(eqn) or not _evaluates_again(eqn, place):
            continue
        if not (only_without_barriers and _prevents_cse(eqn)):
            lines.append(_line(eqn))
    return tuple(dict.fromkeys(lines))


def _line(eqn: Any) -> str:
    """Of a checkpoint, or where that has none, of the first operation in it that has one."""
    inner = _jax.in_checkpoint(eqn)
    lines = (source_line(e) for e in (eqn, *(inner.jaxpr.eqns if inner is not None else ())))
    return next(filter(None, lines), "(unknown line)")


def _evaluates_again(eqn: Any, place: Place) -> bool:
    """Whether a checkpoint is one in a backward pass, not what it was before."""
    return bool(eqn.params.get("differentiated", place.recomputed))


def _prevents_cse(eqn: Any) -> bool:
    # A parameter of the equation, or (under the flag jax_remat3) of what its parameter holds.
    held = (getattr(value, "prevent_cse", None) for value in eqn.params.values())
    flags = eqn.params.get("prevent_cse", next((flag for flag in held if flag is not None), True))
    return any(flags) if isinstance(flags, tuple) else bool(flags)
