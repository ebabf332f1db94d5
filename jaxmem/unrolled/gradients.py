"""Values whose gradients are made in one go, and in a layout of their own."""

from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero


@jax.custom_jvp
def with_gradients_together(values: list[Any]) -> list[Any]:
    """These values; in a backward pass none of their gradients is read before all are made."""
    return values


def _with_tangents_together(
    values: tuple[list[Any]], tangents: tuple[list[Any]]
) -> tuple[list[Any], list[Any]]:
    # Of the values themselves a barrier would only keep compilers from fusing them; and what is
    # not differentiated, as a frozen bias, would get a gradient.
    moving = [t for t in tangents[0] if not isinstance(t, SymbolicZero)]
    if len(moving) == 1 < len(tangents[0]):
        return values[0], tangents[0]  # nothing that it could be made together with
    fenced = iter(lax.optimization_barrier(moving))
    found = [t if isinstance(t, SymbolicZero) else next(fenced) for t in tangents[0]]
    return values[0], found


with_gradients_together.defjvp(_with_tangents_together, symbolic_zeros=True)
