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
    if not any(map(_makes_keys, _jax.all_equations(closed.jaxpr))):
        return closed, list(args)
    opened = _jax.inlined(closed)
    places = _jax.needed(opened, _small_keys(opened), keep_effects=False)
    if not places:
        return closed, list(args)
    makes, rest = _jax.parted(opened, places)
    return rest, [*args, *_jax.evaluate(makes, args)]


# ---------------------------------------------------------------- implementation

_OF_KEYS = frozenset({"random_fold_in", "random_seed", "random_split"})
# Larger arrays of keys, as for each example of a batch, stay where they are made.
_MOST = 1024


def _makes_keys(eqn: Any) -> bool:
    return eqn.primitive.name in _OF_KEYS


def _small_keys(closed: ClosedJaxpr) -> list[Any]:
    """Keys that are made of arguments, all of it small."""
    jaxpr = closed.jaxpr
    small = set(filter(_is_small, [*jaxpr.constvars, *jaxpr.invars]))
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        follows = not eqn.effects and small.issuperset(filter(_jax.is_var, eqn.invars))
        if follows and all(map(_is_small, eqn.outvars)):
            small.update(eqn.outvars)
            found += eqn.outvars if _makes_keys(eqn) else []
    return found


def _is_small(var: Any) -> bool:
    return not _jax.has_tangent(var.aval) and nbytes(var.aval) <= _MOST
