"""Casts of parameters that are made where they are read, and again in the backward pass.

An operation that reads a parameter in a narrower type is put into a `jax.checkpoint` of its own
together with the cast: what jax then keeps for the backward pass is the parameter, which is there
anyway, and not the narrower copy of it.  Such a checkpoint is told from others by its policy.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax

# ---------------------------------------------------------------- API


def recast(primitive: Any, *avals: Any, **params: Any) -> bool:
    """The policy of these checkpoints: nothing but what goes in is kept."""
    return False


def is_recast(eqn: Any) -> bool:
    """Whether an equation is an operation with the cast of a parameter that it reads."""
    found = _jax.checkpointed_by(eqn)
    return found is not None and found[0] is recast


def opened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr with these checkpoints gone, for those that decide value by value what is kept."""
    if not _holds_recast(closed):
        return closed
    return _jax.trace(lambda *flat: _jax.evaluate(closed, flat, _opened), closed.in_avals)


# ---------------------------------------------------------------- implementation


def _holds_recast(closed: ClosedJaxpr) -> bool:
    return any(
        is_recast(eqn) or (_jax.in_call(eqn) is not None and any(map(_holds_recast, subs)))
        for eqn in closed.jaxpr.eqns
        for subs in [_jax.all_subjaxprs(eqn)]
    )


def _opened(eqn: Any, operands: Sequence[Any]) -> list[Any] | None:
    if is_recast(eqn):
        inner = _jax.in_checkpoint(eqn)
        assert inner is not None
        return _jax.evaluate(inner, operands)
    return _jax.without_jit(eqn, list(operands)) if _jax.is_jit(eqn) else None
