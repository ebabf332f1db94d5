"""Averages over devices of which only signs are sent, 8 to a byte, and what they get wrong is kept.

Error feedback in both directions (Tang et al. 2021, "1-bit Adam", arXiv 2102.02888; the idea is
that of Seide et al.'s 1-bit SGD, 2014).  Each device sends the signs of its numbers and one scale,
and adds to its next numbers what that was wrong by.  Each device owns a part of the numbers: it
averages what all others sent of it, and sends the average in the same way, with an error of
its own.  So an array of n numbers costs a device about n / 8 bytes in an all-to-all and
n / 8 in an all-gather, where a ring's all-reduce of float32 sends 8 n.

Every array is cut into equal parts, one for each device, so that both collectives are of all arrays
at once; scales are of one array, and go as 4 bytes among the signs.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# ---------------------------------------------------------------- types


class Exchanged(NamedTuple):
    """What comes of an exchange.

    Attributes:
      averages: of the devices' arrays, in their shapes; the same on all devices.
      sent: the signs that this device sent, uint8[devices, part_size / 8] of each array.
      scales: what it sent with them, float32[arrays].
      owned_errors: what the signs of the averages that it owns were wrong by, float32[part_size] of
        each array.
      finite: whether all numbers of all devices were; otherwise nothing else here is of use.
    """

    averages: list[jax.Array]
    sent: list[jax.Array]
    scales: jax.Array
    owned_errors: list[jax.Array]
    finite: jax.Array


# ---------------------------------------------------------------- API


def part_size(numbers: int, devices: int) -> int:
    """How many numbers of an array a device owns: whole bytes of signs, the last ones padding.

    >>> part_size(1000, 4)
    256
    """
    return 8 * math.ceil(numbers / (8 * devices))


def wire_bytes(sizes: Sequence[int], devices: int) -> int:
    """What a device sends for arrays of so many numbers: signs, padding and scales, by rings."""
    row = sum(part_size(size, devices) // 8 + 4 for size in sizes)
    return 2 * (devices - 1) * row


def pack(signs: jax.Array) -> jax.Array:
    """Signs as bits.

    Byte k of n holds the signs k, n + k, 2n + k, …, the first of them in its lowest bit: rows of
    eight would be 128 wide on a TPU.

    Args:
      signs: bool[..., 8 n], whether a number is positive.

    Returns:
      uint8[..., n].

    >>> pack(jnp.asarray([True, True, False, False, False, False, False, True])).tolist()
    [131]
    """
    rows = signs.reshape(*signs.shape[:-1], 8, signs.shape[-1] // 8).astype(jnp.uint8)
    return (rows << _BITS).sum(-2, dtype=jnp.uint8)


def unpack(packed: jax.Array) -> jax.Array:
    """bool[..., 8 n] of uint8[..., n], as `pack` had them."""
    rows = (packed[..., None, :] >> _BITS) & jnp.uint8(1)
    return rows.reshape(*packed.shape[:-1], 8 * packed.shape[-1]) != 0


def exchange(
    arrays: Sequence[jax.Array],
    owned_errors: Sequence[jax.Array],
    counted: Sequence[jax.Array],
    axis: Any,
    *,
    feedback: bool = True,
) -> Exchanged:
    """Averages of the devices' arrays, by their signs.  Inside `jax.shard_map` over `axis`.

    Args:
      arrays: float32, this device's, with what earlier signs of them were wrong by (`sent_error`).
      owned_errors: of the exchange before, or zeros.
      counted: bool, in the shape of each array, the same on all devices: the others are zero in the
        average, and count in no scale.
      feedback: whether owned errors are added.
    """
    devices = lax.axis_size(axis)
    parts = [part_size(array.size, devices) for array in arrays]
    sent = [pack(_cut(x, devices, part) >= 0) for x, part in zip(arrays, parts, strict=True)]
    scales = jnp.stack([_scale(x, mask) for x, mask in zip(arrays, counted, strict=True)])
    got = lax.all_to_all(
        _with_scales(sent, jnp.broadcast_to(scales, (devices, len(arrays)))), axis, 0, 0, tiled=True
    )
    signs, of_devices = _without_scales(got, parts)

    own = lax.axis_index(axis)
    rows, owned_scales, new_owned = [], [], []
    for k, (error, mask, part) in enumerate(zip(owned_errors, counted, parts, strict=True)):
        mine = lax.dynamic_index_in_dim(_cut(mask, devices, part), own, keepdims=False)
        numbers = jnp.where(unpack(signs[k]), of_devices[:, k, None], -of_devices[:, k, None])
        average = jnp.where(mine, numbers.mean(0) + (error if feedback else 0.0), 0.0)
        scale = _scale(average, mine)
        is_positive = average >= 0
        new_owned.append(_error(average, is_positive, scale, mine))
        owned_scales.append(scale)
        rows.append(pack(is_positive)[None])
    got = lax.all_gather(
        _with_scales(rows, jnp.stack(owned_scales)[None]), axis, axis=0, tiled=True, to="invarying"
    )
    signs, of_owners = _without_scales(got, parts)
    # What is not finite on one device makes such a scale there, and of it one of an owner's, which
    # all devices have: they agree without a word more.
    finite = jnp.isfinite(of_owners).all()
    averages = []
    for k, (array, mask) in enumerate(zip(arrays, counted, strict=True)):
        numbers = jnp.where(unpack(signs[k]), of_owners[:, k, None], -of_owners[:, k, None])
        averages.append(jnp.where(mask, _joined(numbers, array.shape), 0.0))
    return Exchanged(averages, sent, scales, new_owned, finite)


def sent_error(
    array: jax.Array, sent: jax.Array, scale: jax.Array, counted: jax.Array
) -> jax.Array:
    """What signs of an array were wrong by, to be added to the array of the next exchange.

    It is computed from the signs that were sent: those of numbers near 0 may be others where a
    compiler computes the array once more.

    Args:
      array, counted: as in `exchange`.
      sent, scale: its, of this array.
    """
    return _error(array, _joined(unpack(sent), array.shape), scale, counted)


# ---------------------------------------------------------------- implementation

_BITS = np.arange(8, dtype=np.uint8)[:, None]


def _scale(array: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean magnitude: of all scales the one that leaves the least squared error."""
    total = jnp.abs(jnp.where(mask, array, 0.0)).sum()
    return total / jnp.maximum(mask.sum(), 1).astype(jnp.float32)


def _error(array: Any, is_positive: jax.Array, scale: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, array - jnp.where(is_positive, scale, -scale), 0.0)


def _cut(array: jax.Array, devices: int, part: int) -> jax.Array:
    """[devices, part] of an array of any shape, padded with zeros."""
    flat = array.reshape(-1)
    return jnp.pad(flat, (0, devices * part - flat.size)).reshape(devices, part)


def _joined(parts: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The array of this shape that was cut."""
    return parts.reshape(-1)[: math.prod(shape)].reshape(shape)


def _with_scales(rows: Sequence[jax.Array], scales: jax.Array) -> jax.Array:
    """uint8[rows, bytes] of signs and the scales of each row, float32[rows, arrays]."""
    as_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
    return jnp.concatenate([*rows, as_bytes.reshape(scales.shape[0], -1)], axis=1)


def _without_scales(payload: jax.Array, parts: Sequence[int]) -> tuple[list[jax.Array], jax.Array]:
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part // 8)
    signs = [payload[:, a:b] for a, b in itertools.pairwise(ends)]
    scales = payload[:, ends[-1] :].reshape(len(payload), len(parts), 4)
    return signs, lax.bitcast_convert_type(scales, jnp.float32)
