"""What all layers say of arguments that they cannot take."""

from typing import Any

import jax
import jax.numpy as jnp

# ---------------------------------------------------------------- API


def floats(name: str, x: Any) -> jax.Array:
    """`x` as an array of floats.

    Raises:
      TypeError: it is none; integers are not converted, since what they mean is not known.
    """
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} takes an array of floats, got an object of type {type(x).__name__}"
        ) from None
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{name} takes an array of floats, got {array.dtype} of shape {array.shape}; integers "
            "have no gradient: convert them first, with x.astype(jnp.float32)"
        )
    return array


def rate(name: str, value: Any) -> float:
    """`value` as the probability of dropping an element.

    Raises:
      TypeError: it is no Python number.
      ValueError: it is not from 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{name} takes the rate as a Python number from 0 to 1, got {value!r} of type "
            f"{type(value).__name__}"
        )
    if not 0 <= value <= 1:
        raise ValueError(f"{name} takes a rate from 0 to 1, got {value}")
    return float(value)


def axes(name: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """`axis`, one or several, as different numbers from 0 on, ascending.

    Raises:
      TypeError, ValueError: one is no axis of an array of `ndim` dimensions, or stands there twice.
    """
    several = axis if isinstance(axis, tuple | list) else (axis,)
    found = []
    for one in several:
        if isinstance(one, bool) or not isinstance(one, int):
            raise TypeError(f"{name} takes axis as a whole number or several, got {axis!r}")
        if not -ndim <= one < ndim:
            raise ValueError(
                f"{name}: axis {one} is none of an array of {ndim} dimension{'s' * (ndim != 1)}"
            )
        found.append(one % ndim)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{name} takes axis as one or several different axes, got {axis!r}")
    return tuple(sorted(found))


def vector(name: str, what: str, value: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """`value` as an array of this shape, None if it is None.

    Raises:
      TypeError: it is no array of floats.
      ValueError: it has another shape.
    """
    if value is None:
        return None
    array = floats(f"{name}: {what}", value)
    if array.shape != shape:
        raise ValueError(
            f"{name}: {what} has shape {array.shape}, and the axes that are normalised have {shape}"
        )
    return array
