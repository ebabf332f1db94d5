"""What all layers say of arguments that they cannot take."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import _jax

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
        is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
        cause = (
            "for complex numbers it is not defined: pass real and imaginary part by themselves"
            if is_complex
            else "integers have no gradient: convert them first, with x.astype(jnp.float32)"
        )
        raise TypeError(
            f"{name} takes an array of floats, got {array.dtype} of shape {array.shape}; {cause}"
        )
    return array


def rate(name: str, value: Any) -> float:
    """`value` as the probability of dropping an element.

    Raises:
      TypeError: it is no number of Python or numpy.
      ValueError: it is not from 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(
            f"{name} takes the rate as a Python number from 0 to 1, got {value!r} of type "
            f"{type(value).__name__}"
        )
    if not 0 <= value <= 1:
        raise ValueError(f"{name} takes a rate from 0 to 1, got {value}")
    return float(value)


def dtype(name: str, value: Any) -> Any:
    """`value` as a dtype of floats.

    Raises:
      TypeError: it is none.
    """
    try:
        found = jnp.dtype(value)
    except TypeError:
        raise TypeError(
            f"{name} takes a dtype of floats, such as jnp.bfloat16 or its name, got {value!r}"
        ) from None
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name} takes a dtype of floats, got {found}")
    return found


def epsilon(name: str, value: Any) -> float:
    """`value` as what is added to a variance.

    Raises:
      TypeError: it is no number, or one that is not known before the code runs.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        got = "an array that is traced" if _jax.is_tracer(value) else repr(value)
        raise TypeError(f"{name} takes epsilon as a Python number, got {got}") from None


def key(name: str, value: Any) -> jax.Array:
    """`value` as one key of `jax.random`.

    Raises:
      TypeError: it is none.
      ValueError: it is several.
    """
    advice = "pass jax.random.key(0), or one that it was split into"
    if not _jax.is_key(value):
        try:
            value = jax.random.wrap_key_data(value)
        except (TypeError, ValueError):
            dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
            got = type(value).__name__ if dtype is None else f"{dtype} of shape {shape}"
            raise TypeError(f"{name} takes a key of jax.random, got {got}; {advice}") from None
    if value.shape:
        raise ValueError(
            f"{name} takes one key, got keys of shape {value.shape}; {advice}, or use jax.vmap"
        )
    return value


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


def vector(name: str, what: str, value: Any, shape: tuple[int, ...], like: str) -> jax.Array | None:
    """`value` as an array of this shape, that of what `like` says, None if it is None.

    Raises:
      TypeError: it is no array of floats.
      ValueError: it has another shape.
    """
    if value is None:
        return None
    array = floats(f"{name}: {what}", value)
    if array.shape != shape:
        raise ValueError(
            f"{name}: {what} has shape {array.shape}, and must have {shape}, that of {like}"
        )
    return array
