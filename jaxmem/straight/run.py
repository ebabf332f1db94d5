"""Straight-line code under its plan, in plain `jax.checkpoint`: nested, and by name."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxmem import _jax
from jaxmem.policies import Names
from jaxmem.straight.code import Code
from jaxmem.straight.plan import Piece, StraightPlan


def run(code: Code, plan: StraightPlan, args: Sequence[Any]) -> list[Any]:
    """The results of the function."""
    jaxpr = code.closed.jaxpr
    values = dict(zip(jaxpr.constvars, code.closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    _run(code, plan.pieces, values)
    return [values[a] if _jax.is_var(a) else a.val for a in jaxpr.outvars]


def _run(code: Code, pieces: Sequence[Piece], values: dict[Any, Any]) -> None:
    """Evaluate pieces; `values` holds what they read, and then what they make."""
    for piece in pieces:
        reads, gives = code.reads(piece.first, piece.last), code.gives(piece.first, piece.last)
        found = _function(code, piece)(*(values[var] for var in reads))
        values.update(zip(gives, found, strict=True))


def _function(code: Code, piece: Piece) -> Any:
    """A piece as a function from what it reads to what it gives."""
    if piece.inner:

        def again(*given: Any) -> list[Any]:
            values = dict(zip(code.reads(piece.first, piece.last), given, strict=True))
            _run(code, piece.inner, values)
            return [values[var] for var in code.gives(piece.first, piece.last)]

        return jax.checkpoint(again)

    def straight(*given: Any) -> list[Any]:
        return code.run(piece.first, piece.last, given)

    if piece.keep is None:
        return straight
    names = Names(
        save=tuple(map(_jax.place_name, piece.keep)),
        offload=tuple(map(_jax.place_name, piece.offload)),
    )
    return jax.checkpoint(straight, policy=names.jax_policy)
