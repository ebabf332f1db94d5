"""Keys of random numbers, made outside of the code that is planned.

A key is a few bytes, and what makes one of another is some two hundred operations to a compiler.  A
model with dropout makes one for each mask.  Where its layers are planned, all of that would be
computed again with them, of which a compiler's time is the longer.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.trace.layer import nbytes

# ---------------------------------------------------------------- API


def keys_outside(closed: ClosedJaxpr, args: Sequence[Any]) -> tuple[ClosedJaxpr, list[Any]]:
    """Code that is given the keys which follow from its arguments, and these behind the arguments.

    The calls in it are looked into; what gives it no keys is left as it is.
    """
    opened = _jax.inlined(closed)
    places = _making_keys(opened)
    if not places:
        return closed, list(args)
    makes, rest = _jax.parted(opened, places)
    return rest, [*args, *_jax.evaluate(makes, args)]


# ---------------------------------------------------------------- implementation

_OF_KEYS = frozenset({"random_fold_in", "random_seed", "random_split"})
# Larger arrays of keys, as for each example of a batch, stay where they are made.
_MOST = 1024


def _making_keys(closed: ClosedJaxpr) -> list[int]:
    """The operations that make keys from arguments, and those on the way to these."""
    jaxpr = closed.jaxpr
    small = set(filter(_is_small, [*jaxpr.constvars, *jaxpr.invars]))
    makers: dict[Any, int] = {}
    wanted: set[int] = set()
    for at, eqn in enumerate(jaxpr.eqns):
        operands = list(filter(_jax.is_var, eqn.invars))
        follows = not eqn.effects and small.issuperset(operands)
        if not follows or not all(map(_is_small, eqn.outvars)):
            continue
        small.update(eqn.outvars)
        makers.update((var, at) for var in eqn.outvars)
        if eqn.primitive.name in _OF_KEYS:
            wanted.add(at)
    for at in sorted(wanted, reverse=True):
        pending = [at]
        while pending:
            here = pending.pop()
            wanted.add(here)
            operands = filter(_jax.is_var, jaxpr.eqns[here].invars)
            before = (makers[var] for var in operands if var in makers)
            pending += [one for one in before if one not in wanted]
    return sorted(wanted)


def _is_small(var: Any) -> bool:
    return not _jax.has_tangent(var.aval) and nbytes(var.aval) <= _MOST
