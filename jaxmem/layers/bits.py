"""Small numbers, several to a byte."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# ---------------------------------------------------------------- API


def packed(numbers: jax.Array, bits: int) -> jax.Array:
    """Numbers of so many bits, 8 / `bits` of them to a byte.

    They are packed along one axis, the last one of which the length is a multiple of 8 / `bits`, so
    that all others may be split over devices as they are.  Where there is none such, along the one
    that is filled up with the fewest zeros.

    Args:
      numbers: of any integer type, below 2 ** `bits`.
      bits: 1, 2 or 4.

    Returns:
      uint8 of the same shape but for that axis.

    >>> import numpy as np
    >>> packed(np.uint8([1, 2, 3, 0, 1]), 2)
    Array([57,  1], dtype=uint8)
    """
    each = 8 // bits
    numbers = jnp.asarray(numbers).astype(jnp.uint8)
    axis = _axis(numbers.shape, each)
    if not numbers.ndim:
        numbers = numbers.reshape(1)
    if missing := -numbers.shape[axis] % each:
        widths = [(0, 0, 0)] * numbers.ndim
        widths[axis] = (0, missing, 0)
        numbers = lax.pad(numbers, jnp.uint8(0), widths)
    shape = numbers.shape
    split = numbers.reshape(*shape[:axis], shape[axis] // each, each, *shape[axis + 1 :])
    return jnp.sum(split << _shifts(split, axis + 1, bits), axis + 1, dtype=jnp.uint8)


def unpacked(codes: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    """The numbers that `packed` made `codes` of, of this shape, as uint8.

    >>> import numpy as np
    >>> unpacked(np.uint8([57, 1]), 2, (5,))
    Array([1, 2, 3, 0, 1], dtype=uint8)
    """
    each = 8 // bits
    axis = _axis(shape, each)
    several = jnp.expand_dims(jnp.asarray(codes), axis + 1)
    several = jnp.broadcast_to(
        several, (*several.shape[: axis + 1], each, *several.shape[axis + 2 :])
    )
    numbers = (several >> _shifts(several, axis + 1, bits)) & jnp.uint8(2**bits - 1)
    if not shape:
        return numbers.reshape(-1)[0]
    whole = numbers.reshape(*shape[:axis], codes.shape[axis] * each, *shape[axis + 1 :])
    return lax.slice_in_dim(whole, 0, shape[axis], axis=axis)


def packed_bytes(shape: tuple[int, ...], bits: int) -> int:
    """Of how many bytes `packed` numbers of this shape are.

    >>> packed_bytes((3, 8), 2), packed_bytes((3, 5), 2), packed_bytes((), 1)
    (6, 5, 1)
    """
    each = 8 // bits
    axis = _axis(shape, each)
    total = 1
    for k, length in enumerate(shape):
        total *= -(-length // each) if k == axis else length
    return total


# ---------------------------------------------------------------- implementation


def _axis(shape: tuple[int, ...], each: int) -> int:
    def waste(axis: int) -> float:
        length = shape[axis]
        return -(-length // each) * each / length if length else 1.0

    # Of equals the last.
    return min(reversed(range(len(shape))), key=waste, default=0)


def _shifts(like: Any, axis: int, bits: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.uint8, like.shape, axis) * jnp.uint8(bits)
