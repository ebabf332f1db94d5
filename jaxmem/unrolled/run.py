"""Unrolled code under its plan: segments in nested `jax.checkpoint`, and kept in part.

A segment of which single values are kept is a layer that no loop is around: a stack of one.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax

from jaxmem import _jax
from jaxmem.plans.plan import Plan
from jaxmem.policies import Keep, Names
from jaxmem.stacked import Form
from jaxmem.stacked.stack import Stack
from jaxmem.trace.context import platform
from jaxmem.trace.layer import Layer, nbytes
from jaxmem.unrolled.casts import read_behind
from jaxmem.unrolled.code import Code
from jaxmem.unrolled.gradients import of_a_kind_together, with_gradients_together
from jaxmem.unrolled.plan import Piece, UnrolledPlan


def run(code: Code, plan: UnrolledPlan, args: Sequence[Any]) -> list[Any]:
    """The results of the function."""
    jaxpr = code.closed.jaxpr
    values = dict(zip(jaxpr.constvars, code.closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    _run(code, plan, plan.pieces, values)
    return [values[a] if _jax.is_var(a) else a.val for a in jaxpr.outvars]


def _run(
    code: Code,
    plan: UnrolledPlan,
    pieces: Sequence[Piece],
    values: dict[Any, Any],
    through: Sequence[Any] = (),
) -> None:
    """Evaluate pieces of a plan; `values` holds what they read, and then what they make.

    Args:
      through: what is read behind them, too.
    """
    readers = Counter(var for piece in pieces for var in code.reads(piece.first, piece.last))
    readers.update(through)
    shared = {var for var, count in readers.items() if count > 1}
    passing = shared - (_inputs(code) - code.summed)
    before: Collection[Any] = values.keys() - _inputs(code)
    for piece in pieces:
        reads, gives = code.reads(piece.first, piece.last), code.gives(piece.first, piece.last)
        behind = plan.waits or piece.last < len(code)
        sums = behind and not piece.is_kept_whole
        given = _together(code, reads, shared, values, sums, _gradients_at_once(code, piece))
        # Later pieces read what has been through this one's barrier, so that their gradients are
        # added to its own there, and not all at once behind the last of them.
        values.update((var, made) for var, made in zip(reads, given, strict=True) if var in passing)
        if plan.orders_casts:
            given = _cast_behind(code, dict(zip(reads, given, strict=True)), before)
        # So they do what has been through the pieces in it: at each level their gradients would
        # else be held till all of these are reversed.
        through = [var for var in reads if var in passing] if piece.inner else []
        made = _function(code, plan, piece, through, behind)(*given)
        values.update(zip([*gives, *through], made, strict=True))
        before = gives


# Parameters no larger than this part of what a piece reads have gradients that are sums over it.
_SUMS = 256


def _gradients_at_once(code: Code, piece: Piece) -> bool:
    """Whether all of a piece is kept, and others are reversed behind it.

    Nothing in it waits for anything, so that the compiler of GPUs at times puts the gradients of
    its matrices off, which only the optimizer reads, and holds what they are made of while the next
    pieces are reversed.  They are made in one go with those of its inputs, if it is less than a
    layer: those of several layers would all be there at once.
    """
    if not piece.is_kept_whole or piece.first == 0:
        return False
    return platform() != "tpu" and not code.has_layer(piece.first, piece.last)


def _together(
    code: Code,
    reads: Sequence[Any],
    shared: Collection[Any],
    values: dict[Any, Any],
    sums: bool,
    matrices: bool,
) -> list[Any]:
    """What a piece reads, its gradients made in one go, before earlier pieces are reversed.

    A gradient that is a part of a larger array, as of a concatenation, would else be cut out when
    it is wanted, and all of the array be held till then.  The gradient of an input of the function
    (a parameter) that other pieces read too is made by itself: the compiler of TPUs would else make
    it where it adds theirs to it, and hold all that it is made of till then.  So is, for GPUs, that
    of a matrix: the compiler would else make it in a layout in which the optimizer does not update
    the matrix in its place, and copy that, or all of its state; but where it is made by itself in
    the dtype that the matrix was cast to.  If it is a sum of several terms, it is among those that
    are made in one go: compilers would else add them up behind the last of them.

    Args:
      sums: whether gradients of small parameters (biases, scales of norms) are made in the same go.
        The compiler of GPUs at times computes these only where the optimizer reads them, and holds
        the gradient that each is a sum of till then, of every layer.
      matrices: whether those of matrices are, which no other piece reads.
    """
    inputs = _inputs(code)
    given = {var: values[var] for var in reads}
    reached = [var for var in reads if _jax.has_tangent(var.aval)]
    made = [var for var in reached if var not in inputs]
    own = [var for var in reached if var in inputs and var not in shared]
    most = max((nbytes(var.aval) for var in made), default=0)
    small = [var for var in own if sums and nbytes(var.aval) * _SUMS <= most]
    summed = [var for var in reached if var in shared and var in code.summed]
    alone = [var for var in reached if var in inputs and var in shared and var not in summed]
    if platform() != "tpu":
        alone += [var for var in own if var not in small and len(var.aval.shape) > 1]
        alone = [var for var in alone if var not in code.casts.only]
    whole = [var for var in alone if var in own] if matrices else []
    for var in alone:
        if var not in whole:
            (given[var],) = with_gradients_together([given[var]])
    whole += summed
    several = [[given[var] for var in group] for group in (made, small, whole)]
    given.update(zip([*made, *small, *whole], of_a_kind_together(*several), strict=True))
    return list(given.values())


def _cast_behind(code: Code, given: dict[Any, Any], before: Collection[Any]) -> list[Any]:
    """What a piece reads; parameters that are cast are only read when the one before it is done.

    Args:
      before: what that gives.
    """
    carries = [var for var in given if var in before and _jax.has_tangent(var.aval)]
    if carries and platform() != "tpu":
        first, kind = given[carries[0]], _jax.varying(given[carries[0]])
        cast = [var for var in given if var in code.casts.only]
        cast = [var for var in cast if _jax.varying(given[var]) == kind]
        given[carries[0]], later = read_behind(first, [given[var] for var in cast])
        given.update(zip(cast, later, strict=True))
    return list(given.values())


def _inputs(code: Code) -> set[Any]:
    """What the function is given, and its constants."""
    return {*code.closed.jaxpr.invars, *code.closed.jaxpr.constvars}


def _function(
    code: Code, plan: UnrolledPlan, piece: Piece, through: Sequence[Any], waits: bool
) -> Any:
    """A piece of a plan as a function from what it reads to what it gives.

    Args:
      through: what of that it gives, too, as its pieces read it.
      waits: see `UnrolledPlan`.
    """
    if piece.inner:

        def again(*given: Any) -> list[Any]:
            reads, gives = (at(piece.first, piece.last) for at in (code.reads, code.gives))
            values = dict(zip(reads, _jax.same_keys(given), strict=True))
            _run(code, plan, piece.inner, values, through)
            return _jax.same_keys([values[var] for var in (*gives, *through)])

        return _by_plan(jax.checkpoint(again))

    def as_it_stands(*given: Any) -> list[Any]:
        together = _gradients_at_once(code, piece)
        sums = piece.last - piece.first < len(code)
        return code.run(piece.first, piece.last, given, together, sums)

    if piece.keep is None and not code.has_loops(piece.first, piece.last):
        return as_it_stands
    # The gradients of the last results are another's, who may not have them as arrays.
    casts_wait = plan.orders_casts and piece.last < len(code)
    return _kept(code, piece, waits, casts_wait)


def _by_plan(again: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def run(*given: Any) -> list[Any]:
        with jax.named_scope(_jax.PIECE):
            return again(*given)

    return run


def _kept(code: Code, piece: Piece, waits: bool, casts_wait: bool) -> Callable[..., list[Any]]:
    """A piece of which single values are kept, or all, as a loop in it is jaxmem's to reverse.

    Args:
      waits, casts_wait: see `jaxmem.stacked.Form`.
    """
    body, first = code.body(piece.first, piece.last)
    shift = first - piece.first
    keep = None if piece.keep is None else tuple(place + shift for place in piece.keep)
    offload = tuple(place + shift for place in piece.offload)

    def run(*given: Any) -> list[Any]:
        form = Form(body, 1, interleaved=True, waits=waits, casts_wait=casts_wait)
        stack = KeptSegment(form, Names(), keep=keep, offload=offload, known=code.known_layers)
        numbers = code.numbers(piece.first, piece.last).values()
        return [out[0] for out in _jax.bind_stack(stack, [*given, *numbers])]

    return run


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KeptSegment(Stack):
    """A stack of one layer that keeps what a piece says.

    Attributes:
      keep, offload: the operations whose results are kept, and sent to the host; `keep` is None
        for all that the backward pass reads.
      known: layers that were taken apart, by their body and what of it is differentiated; one
        for all segments of the code that are equal.
    """

    keep: tuple[int, ...] | None
    offload: tuple[int, ...]
    known: dict[Hashable, tuple[Any, Layer]]

    def layer(self, operands: Sequence[bool]) -> Layer:
        body = self.form.body
        key = id(body), tuple(operands)
        if key not in self.known:
            self.known[key] = (
                body,
                super().layer(operands),
            )  # held, so that its number stays its own
        return self.known[key][1]

    def plan(self, layer: Layer) -> Plan:
        if self.keep is None:
            return Plan.keep([(1, None)])
        policy = Keep(_places(layer, self.keep), _places(layer, self.offload))
        return Plan.keep([(1, policy)])


def _places(layer: Layer, operations: Sequence[int]) -> tuple[int, ...]:
    """Where among the values of the layer the results of these operations are."""
    wanted = frozenset(operations)
    return tuple(
        place
        for place, var in enumerate(layer.values)
        if (eqn := layer.made_by(var)) is not None and _jax.place_named_by(eqn) in wanted
    )
