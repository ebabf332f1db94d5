"""Casts of parameters inside `jax.checkpoint`, kept in the loop over layers."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.trace.layer import Body, rounded_cast

# Operations whose results are the numbers of a row in another shape.
_RESHAPING = frozenset({"reshape", "squeeze", "transpose", "broadcast_in_dim"})

# ---------------------------------------------------------------- API


def rounded_rows(body: Body) -> Body:
    """A layer that rounds its row of a stacked input before it casts it to a narrower type.

    The numbers are the same; itself if it casts none.  Why: see `Layer.casting_rows`, which does it
    outside of checkpoints.
    """
    closed = _jax.inlined(body.jaxpr)
    rows = closed.jaxpr.invars[body.num_consts + body.num_carry :]
    rounded: list[Any] = []
    new = _jax.trace(lambda *flat: _evaluated(closed, flat, rows, rounded), closed.in_avals)
    return Body(new, body.num_consts, body.num_carry) if rounded else body


# ---------------------------------------------------------------- implementation


def _evaluated(
    closed: ClosedJaxpr, flat: Sequence[Any], rows: Sequence[Any], rounded: list[Any]
) -> list[Any]:
    known = set(rows)

    def special(eqn: Any, operands: list[Any]) -> list[Any] | None:
        is_row = [_jax.is_var(atom) and atom in known for atom in eqn.invars]
        if not any(is_row):
            return None
        if eqn.primitive.name in _RESHAPING:
            known.update(eqn.outvars)
        if eqn.primitive.name == "convert_element_type":
            found = rounded_cast(eqn, operands[0])
            rounded.extend(found or ())
            return found
        inner = _jax.in_checkpoint(eqn)
        if inner is None or not hasattr(eqn.params.get("jaxpr"), "eqns"):
            return None
        own = [var for var, flag in zip(inner.jaxpr.invars, is_row, strict=True) if flag]
        new = _jax.trace(lambda *flat: _evaluated(inner, flat, own, rounded), inner.in_avals)
        if new.consts:
            return None
        return _jax.bound_with(eqn, {"jaxpr": new.jaxpr}, *operands)

    return _jax.evaluate(closed, flat, special)
