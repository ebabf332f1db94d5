"""How one array of optimizer state is stored in about 8 bits per number.

The numbers of an array are divided, block by block, by the one of largest magnitude in the block,
and each ratio is rounded to one of 256 levels.  The levels are computed: a look-up in a table is
slow on a TPU, and a search for the nearest of 256 levels either runs through all of them or
makes temporaries larger than the array.

For a GPU, XLA makes of each `encode` and `decode` loops that hold nothing else of the array's size.
For a TPU it holds the array in float32 once or twice more, in the shape of the blocks; and on both,
an update between the two may keep its numbers in float32 while the scales are found.  So large
arrays are updated by rows, and then this is the size of a row.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxmem import _jax

# ---------------------------------------------------------------- types


class Coded(NamedTuple):
    """An array in 8 bits per number.

    Attributes:
      codes: one byte per number, in the shape of the array, so that it can be sharded, sliced and
        donated as the array would be: int8 of numbers with signs, uint8 of those without.
      scales: the number of each block that the block is divided by, float32, in the shape
        `scales_shape`.
    """

    codes: jax.Array
    scales: jax.Array


@runtime_checkable
class Codec(Protocol):
    """What stores an array in fewer bytes: a value that can be hashed and compared."""

    @property
    def block(self) -> int:
        """How many numbers share a scale."""
        ...

    @property
    def bytes_per_number(self) -> float:
        """Bytes of codes and scales per number, in an array of whole blocks."""
        ...

    def encode(self, value: jax.Array, *, signed: bool) -> Coded:
        """A real floating-point array, stored; without `signed`, what is below 0 becomes 0."""
        ...

    def decode(self, coded: Coded, dtype: Any) -> jax.Array:
        """The array again, rounded, in this dtype."""
        ...


# ---------------------------------------------------------------- API


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Block-wise dynamic quantisation (Dettmers et al. 2022, arXiv 2110.02861).

    The levels are those of the paper: seven decades below the scale, in each of them equal steps,
    and in each twice as many as in the one below.  A ratio is stored as the nearest level, and
    halfway between two as the one further from 0.  With signs a number is off by at most 0.71 %
    of the scale, and in the highest decade by at most 7.1 % of itself; the latter doubles from
    decade to decade downwards, and ratios below 2.75e-7 become 0.  Without signs there
    are twice as many levels, errors are half of that, and the least level above 0 is 3.25e-7: what
    is more than 0 is stored as that at the least, for updates divide by second moments.

    Of a block with signs, the scale is the number of largest magnitude *with its sign*, where
    the paper takes the magnitude.  The levels include 1 but end at −0.993: a block whose largest
    number is negative would shrink by 0.7 % each time that it is stored.  So that number is
    kept exactly, and what is decoded is encoded to the same codes and scales again.

    A block with a NaN decodes to NaN throughout.  In one with an infinity, that is kept and
    no other number is finite.

    Args:
      block: how many numbers share a scale.

    Raises:
      TypeError, ValueError: `block` is not a positive integer.

    >>> Dynamic().bytes_per_number
    1.015625
    """

    block: int = 256

    def __post_init__(self) -> None:
        _check_block("Dynamic", self.block)

    @property
    def bytes_per_number(self) -> float:
        return _bytes_per_number(self.block)

    def encode(self, value: jax.Array, *, signed: bool) -> Coded:
        blocks = _blocks(value, self.block, signed, "Dynamic.encode")
        scales = _largest(blocks) if signed else _magnitude(blocks)
        ratio = blocks / _divisors(scales)
        levels = _nearest_level(jnp.abs(ratio), signed)
        if signed:
            # −1 is no level: that is there if a number and its negative both are the largest.
            levels = jnp.where(ratio < 0, -jnp.minimum(levels, 127), levels)
            codes = (levels - 1).astype(jnp.int8)  # the paper's number of the level less 128
        else:
            codes = jnp.maximum(levels, jnp.sign(blocks)).astype(jnp.uint8)
        return Coded(_joined(codes, value.shape), scales)

    def decode(self, coded: Coded, dtype: Any) -> jax.Array:
        codes, signed = _coded_blocks(coded, self)
        levels = codes.astype(jnp.float32)
        if signed:
            levels = levels + 1
        ratio = jnp.sign(levels) * _level(jnp.abs(levels), signed)
        return _joined((ratio * coded.scales[..., None]).astype(dtype), coded.codes.shape)


@dataclasses.dataclass(frozen=True)
class Companding:
    """Levels on a curve, finer towards 0: x → 2x / (1 + |x|) with signs, √x without.

    Of the ratio x of a number to the largest magnitude in its block, that is stored in 255
    equal steps from −1 to 1 (int8), or in 256 from 0 to 1 (uint8).  Numbers with signs are
    off by at most 0.8 % of the largest, less towards 0, and become 0 below 0.2 % of it; without
    signs the *square root* is off by at most 0.2 % of the largest one's (0.4 % near 0: what is
    more than 0 does not become 0), which is what Adam divides by.  Small blocks make up for a
    range that is less than that of `Dynamic`.

    The scales are in float32.  In float16 those of small numbers would be 0: below 6e-8, which
    first moments are, and second moments even after the root.  bfloat16 has the range, but
    rounds to 2 or 3 digits: a block that decays by 0.1 % a step, as one does whose gradients
    have gone, would be rounded back to where it was each time and stay there for ever.  A
    float32 scale decays, and the block with it.  (The bytes that it takes can be had back:
    blocks of 64 need what blocks of 32 would with 16 bits.)

    A block with a NaN decodes to NaN throughout, and one with an infinity to no finite number.

    Args:
      block: how many numbers share a scale.

    Raises:
      TypeError, ValueError: `block` is not a positive integer.

    >>> Companding().bytes_per_number, Companding(block=64).bytes_per_number
    (1.125, 1.0625)
    """

    block: int = 32

    def __post_init__(self) -> None:
        _check_block("Companding", self.block)

    @property
    def bytes_per_number(self) -> float:
        return _bytes_per_number(self.block)

    def encode(self, value: jax.Array, *, signed: bool) -> Coded:
        blocks = _blocks(value, self.block, signed, "Companding.encode")
        scales = _magnitude(blocks)
        ratio = blocks / _divisors(scales)
        if signed:
            codes = jnp.round(254 * ratio / (1 + jnp.abs(ratio))).astype(jnp.int8)
        else:
            codes = jnp.round(255 * jnp.sqrt(ratio))
            codes = jnp.maximum(codes, jnp.sign(blocks)).astype(jnp.uint8)
        return Coded(_joined(codes, value.shape), scales)

    def decode(self, coded: Coded, dtype: Any) -> jax.Array:
        codes, signed = _coded_blocks(coded, self)
        levels = codes.astype(jnp.float32)
        if signed:
            ratio = levels / (254 - jnp.abs(levels))
        else:
            # The largest number is exact, which the compilers' ways to divide by 255² need not be.
            ratio = jnp.where(levels == 255, 1.0, levels * levels * (1 / 255**2))
        return _joined((ratio * coded.scales[..., None]).astype(dtype), coded.codes.shape)


CODECS: dict[str, type[Dynamic] | type[Companding]] = {
    "dynamic": Dynamic,
    "companding": Companding,
}


def codec(name_or_codec: str | Codec, block: int | None = None) -> Codec:
    """The codec of this name, with blocks of this size; or the codec that is given.

    Raises:
      TypeError: it is neither, or `block` is no integer or goes with a codec.
      ValueError: there is none of this name, or `block` is less than 1.

    >>> codec("dynamic"), codec("companding", block=64)
    (Dynamic(block=256), Companding(block=64))
    """
    choice = f"{' or '.join(map(repr, CODECS))}, or a codec such as Dynamic(block=256)"
    if isinstance(name_or_codec, str):
        if name_or_codec not in CODECS:
            raise ValueError(f"there is no codec {name_or_codec!r}; pass {choice}")
        kind = CODECS[name_or_codec]
        return kind() if block is None else kind(block=block)
    if isinstance(name_or_codec, type) or not isinstance(name_or_codec, Codec):
        raise TypeError(
            f"a codec is given by its name or as a value, got {name_or_codec!r} of type "
            f"{type(name_or_codec).__name__}; pass {choice}"
        )
    if block is not None:
        raise TypeError(
            f"block={block!r} goes with the name of a codec, and {name_or_codec!r} has its own; "
            "leave it out, or give the codec that block"
        )
    return name_or_codec


def rows_are_apart(shape: tuple[int, ...], block: int) -> bool:
    """Whether no block has numbers of two rows of axis 0.

    Each row of `codes` and `scales` then is what that row of the array, as an array with
    one row, is encoded to.

    >>> rows_are_apart((12, 768), 256), rows_are_apart((12, 100), 256)
    (True, False)
    """
    return len(shape) >= 2 and math.prod(shape[1:]) >= block


def scales_shape(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """The shape of the scales of an array of this shape.

    A block runs over as few of the last axes as hold one, and over axis 0 only if the others
    do not; the last block of them may be partial.

    >>> scales_shape((12, 768, 3072), 256), scales_shape((12, 3, 100), 256)
    ((12, 768, 12), (12, 2))
    >>> scales_shape((12, 100), 256), scales_shape((), 256)
    ((5,), (1,))
    """
    leading, merged = _split(shape, block)
    return (*leading, -(-merged // block))


# ---------------------------------------------------------------- implementation: levels

# With n levels in decade i, n = 2^i or 2^(i+1), the magnitudes of all levels are numbered so
# that those of a decade are q = n ... 2n − 1.  Level q is 10^(i−7)/n · (9q − 8n + 4.5), halfway
# between what 9q − 8n and 9(q+1) − 8n are in place of the bracket: those are integers, and so
# is n · 10^(7−i), exact in float32.  Only one multiplication by it rounds.


def _decades(signed: bool) -> list[tuple[int, int, float]]:
    """Of each decade: n, n · 10^(7−i), and from which magnitude its levels are the nearest."""
    found, below = [], 0.0
    for i in range(7):
        n = 2**i if signed else 2 ** (i + 1)
        unit = n * 10 ** (7 - i)
        found.append((n, unit, (below + (n + 4.5) / unit) / 2))
        below = (10 * n - 4.5) / unit
    return found


def _nearest_level(magnitude: jax.Array, signed: bool) -> jax.Array:
    """The number of the level that is nearest to a magnitude of at most 1, as a float.

    It is counted from 0, the level 0.  What is larger than 1, or NaN, is nearest to 1.
    """
    decades = _decades(signed)
    first, last = decades[0], decades[-1]
    n = jnp.full_like(magnitude, first[0])
    unit = jnp.full_like(magnitude, first[1])
    for count, times, begin in decades[1:]:
        n = jnp.where(magnitude >= begin, float(count), n)
        unit = jnp.where(magnitude >= begin, float(times), unit)
    place = magnitude * unit
    # The nearest of the points halfway between levels, and on which side of it this is.  That
    # is a comparison of exact numbers, so that compilers that round otherwise find the same.
    q = jnp.floor((place + 8 * n) * (1 / 9) + 0.5)
    q = jnp.where(place < 9 * q - 8 * n, q - 1, q)
    # Beyond the last point of its decade, up to halfway to the first level of the next one.
    q = jnp.minimum(q, 2 * n - 1)
    highest = (10 * last[0] - 4.5) / last[1]
    q = jnp.where(magnitude < (highest + 1) / 2, q, 2.0 * last[0])
    return jnp.where(magnitude < first[2], 0.0, q - (first[0] - 1))


def _level(number: jax.Array, signed: bool) -> jax.Array:
    """The level of this number: 0 to 128 with signs, 0 to 255 without."""
    decades = _decades(signed)
    q = number + (decades[0][0] - 1)
    n = jnp.full_like(q, decades[0][0])
    half = jnp.full_like(q, 0.5 / decades[0][1])
    for count, times, _ in decades[1:]:
        n = jnp.where(q >= count, float(count), n)
        half = jnp.where(q >= count, 0.5 / times, half)
    # The levels 0 and 1 would lie just outside of the first and the last decade.
    return jnp.clip((18 * q + 9 - 16 * n) * half, 0.0, 1.0)


# ---------------------------------------------------------------- implementation: blocks


def _split(shape: tuple[int, ...], block: int) -> tuple[tuple[int, ...], int]:
    """The axes that are left as they are, and the size of the others, merged."""
    if rows_are_apart(shape, block):
        for axis in reversed(range(1, len(shape))):
            merged = math.prod(shape[axis:])
            if merged >= block:
                return shape[:axis], merged
    return (), math.prod(shape)


def _blocks(value: jax.Array, block: int, signed: bool, caller: str) -> jax.Array:
    """The numbers in float32, one more axis: blocks, the last of them filled up with zeros."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise TypeError(
            f"{caller} takes an array of real floating-point numbers, got one of "
            f"{jnp.result_type(value)}; leave such an array as it is"
        )
    value = jnp.asarray(value, jnp.float32)
    return _cut(value if signed else jnp.where(value < 0, 0.0, value), block)


def _coded_blocks(coded: Coded, codec: Codec) -> tuple[jax.Array, bool]:
    """The codes with one more axis, if they are such as this codec makes; whether with signs."""
    codes, scales = coded
    shape = scales_shape(codes.shape, codec.block)
    if codes.dtype not in (jnp.int8, jnp.uint8) or scales.shape != shape:
        raise ValueError(
            f"{codec!r} cannot decode {codes.dtype} codes of shape {codes.shape} with scales of "
            f"shape {scales.shape}: for this it needs int8 or uint8 codes and scales of shape "
            f"{shape}; decode with the codec and the block of encode"
        )
    return _cut(codes, codec.block), codes.dtype == jnp.int8


def _cut(value: jax.Array, block: int) -> jax.Array:
    leading, merged = _split(value.shape, block)
    count = -(-merged // block)
    flat = _in_whole_blocks(value, block).reshape(*leading, merged)
    if merged % block:
        flat = jnp.pad(flat, [(0, 0)] * len(leading) + [(0, count * block - merged)])
    return flat.reshape(*leading, count, block)


def _in_whole_blocks(value: jax.Array, block: int) -> jax.Array:
    """An array that is split over devices, as its type tells: whole, if that cuts blocks apart."""
    leading, merged = _split(value.shape, block)
    axes = _jax.split(value)
    first, *others = axes[len(leading) :] or (None,)
    names = (first,) if isinstance(first, str) else first or ()
    devices = math.prod(jax.typeof(value).sharding.mesh.shape[name] for name in names)
    if any(others) or merged % (devices * block):
        return _jax.split_so(value, (*axes[: len(leading)], *[None] * (value.ndim - len(leading))))
    return value


def _joined(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of this shape that was cut into these blocks."""
    leading, merged = _split(shape, blocks.shape[-1])
    flat = blocks.reshape(*leading, blocks.shape[-2] * blocks.shape[-1])
    return flat[..., :merged].reshape(shape)


def _largest(blocks: jax.Array) -> jax.Array:
    """Of each block the number of largest magnitude, with its sign; NaN if there is one.

    One reduction: with two of them, for the maximum and the minimum, XLA's GPU compiler keeps
    the numbers in float32 from one to the other.  So the sign becomes the last bit of an
    integer that is as large as the magnitude is, and of two alike the positive one counts.
    """
    bits = jax.lax.bitcast_convert_type(blocks, jnp.uint32)
    ordered = jnp.max((bits << 1) | (1 - (bits >> 31)), axis=-1)
    bits = (ordered >> 1) | ((1 - (ordered & 1)) << 31)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _magnitude(blocks: jax.Array) -> jax.Array:
    """Of each block the largest magnitude; NaN if there is one.

    Magnitudes are in order as integers as well, NaN above all others: the maximum of floats that
    XLA's CPU compiler computes can lose it.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def _divisors(scales: jax.Array) -> jax.Array:
    """The scales to divide by: a block of zeros is divided by 1."""
    return jnp.where(scales == 0, 1.0, scales)[..., None]


def _bytes_per_number(block: int) -> float:
    return 1 + jnp.dtype(jnp.float32).itemsize / block


def _check_block(name: str, block: Any) -> None:
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(
            f"{name}: block must be an integer, got {block!r} of type {type(block).__name__}; it "
            "is how many numbers share a scale, such as 256"
        )
    if block < 1:
        raise ValueError(
            f"{name}: block must be at least 1, got {block}; it is how many numbers share a "
            "scale, such as 256"
        )
