"""Max-pooling that keeps, of each window, the place where its greatest element is.

That is two bits for a window of 2 x 2, four for one of 3 x 3, where the plain form keeps all that
was pooled.  In the backward pass the elements of windows are taken one place after the other, which
compilers for GPUs do in one kernel, without the atomic additions of a scatter.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmem.layers import checks
from jaxmem.layers.bits import packed, unpacked
from jaxmem.layers.linear import linear

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Windows:
    """Where windows are, in each dimension of an array.

    Attributes:
      shape: of the array.
      sizes, strides: of windows; 1 in dimensions in which nothing is pooled.
      padding: with elements that are less than all others.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def places(self) -> int:
        """In a window."""
        return math.prod(self.sizes)

    @property
    def bits(self) -> int:
        """For the number of a place."""
        return next(bits for bits in (1, 2, 4, 8) if self.places <= 2**bits)

    @property
    def outs(self) -> tuple[int, ...]:
        """The shape of what is pooled."""
        each = zip(self.shape, self.sizes, self.strides, self.padding, strict=True)
        return tuple(max(0, (n + sum(p) - size) // step + 1) for n, size, step, p in each)

    def elements(self, x: jax.Array, filler: Any) -> Iterator[jax.Array]:
        """Of the shape of what is pooled: the first element of each window, the second, and on."""
        x = lax.pad(x, jnp.asarray(filler, x.dtype), [(low, high, 0) for low, high in self.padding])
        for start in itertools.product(*map(range, self.sizes)):
            each = zip(start, self.outs, self.strides, strict=True)
            ends = [first + (count - 1) * step + 1 for first, count, step in each]
            yield lax.slice(x, start, ends, self.strides)


# More would need more than a byte; the elements of a window are read one by one.
MOST_PLACES = 256

# ---------------------------------------------------------------- API


def max_pool(
    x: Any,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
) -> jax.Array:
    """`flax.linen.max_pool` (and `nnx.max_pool`) that keeps a place for each window.

    Values are those of Flax's, and gradients, too, but for rounding where windows overlap: of equal
    elements the first one has the gradient.  For GPUs and CPUs: a TPU's compiler writes an array of
    the size of `x` for each place of a window, and needs more than for the plain form.  Therefore
    `jaxmem.low_memory` leaves poolings as they are.

    Args:
      x: floats, [..., window dimensions..., features].
      window_shape: of windows, at most 256 elements.
      strides: from window to window; 1 by default.
      padding: "VALID", "SAME", or before and after each of the window's dimensions.

    Returns:
      The greatest element of each window.  What is kept has the name "pool_places": a bit for each
      window of two elements, two bits up to 4, four up to 16, and a byte for one of more.

    Raises:
      TypeError: `x` is no array of floats, or `padding` neither a word nor pairs.
      ValueError: the window has more than 256 elements, more dimensions than `x`, or strides and
        padding are not of its dimensions.

    Source: Jain et al. 2018, "Gist" (ISCA 2018, DOI 10.1109/ISCA.2018.00070), section 3.

    >>> import jax, jaxmem
    >>> x = jax.ShapeDtypeStruct((8, 32, 32, 64), "bfloat16")
    >>> pool = lambda x: jaxmem.layers.max_pool(x, (2, 2), (2, 2))
    >>> jaxmem.saved_residuals(pool, x).total_bytes == 8 * 16 * 16 * 64 // 4
    True
    """
    x = checks.floats("max_pool", x)
    return pooled(_windows(x.shape, window_shape, strides, padding), x)


def pooled(windows: Windows, x: jax.Array) -> jax.Array:
    """The greatest element of each window."""
    return _plain(windows, x) if 0 in windows.outs else _pooled(windows, x)


# ---------------------------------------------------------------- implementation


def _windows(
    shape: tuple[int, ...],
    window: Sequence[int],
    strides: Sequence[int] | None,
    padding: str | Sequence[tuple[int, int]],
) -> Windows:
    """Of an array with features in the last dimension."""
    window = _whole("window_shape", window)
    steps = (1,) * len(window) if strides is None else _whole("strides", strides)
    if not window or len(window) >= len(shape):
        raise ValueError(
            f"max_pool takes a window of 1 to {max(1, len(shape) - 1)} dimensions for an array of "
            f"{len(shape)}, whose last one are the features, got {window}"
        )
    if len(steps) != len(window):
        raise ValueError(f"max_pool takes as many strides as the window {window}, got {steps}")
    if math.prod(window) > MOST_PLACES:
        raise ValueError(
            f"max_pool keeps a byte for each window, and one of {window} has "
            f"{math.prod(window)} elements, more than {MOST_PLACES}; pool in two steps, or use "
            "jnp.max over the dimensions of a window that is as large as the array"
        )
    before = (1,) * (len(shape) - 1 - len(window))
    sizes, steps = (*before, *window, 1), (*before, *steps, 1)
    if isinstance(padding, str):
        if padding.upper() not in ("VALID", "SAME"):
            raise ValueError(f'max_pool takes padding as "VALID", "SAME" or pairs, got {padding!r}')
        pads = lax.padtype_to_pads(shape, sizes, steps, padding.upper())
    else:
        if not isinstance(padding, Iterable):
            raise TypeError(f'max_pool takes padding as "VALID", "SAME" or pairs, got {padding!r}')
        given = [_whole("padding", pair) for pair in padding]
        if len(given) != len(window) or any(len(pair) != 2 for pair in given):
            raise ValueError(
                f"max_pool takes padding as one pair for each dimension of the window {window}, "
                f"got {padding!r}"
            )
        pads = [*([(0, 0)] * len(before)), *given, (0, 0)]
    return Windows(shape, sizes, steps, tuple((int(low), int(high)) for low, high in pads))


def _whole(what: str, values: Any) -> tuple[int, ...]:
    least = 0 if what == "padding" else 1
    try:
        found = tuple(map(int, values))
        fine = found == tuple(values) and all(value >= least for value in found)
    except (TypeError, ValueError):
        found, fine = (), False
    if not fine:
        raise ValueError(f"max_pool takes {what} as whole numbers from {least} on, got {values!r}")
    return found


def _plain(windows: Windows, x: jax.Array) -> jax.Array:
    how = windows.sizes, windows.strides, windows.padding
    return lax.reduce_window(x, -jnp.inf, lax.max, *how)


@dataclasses.dataclass(frozen=True)
class _AtPlaces:
    """Of each window the element of a tangent at its place."""

    windows: Windows

    def __call__(self, tangent: Any, codes: Any) -> Any:
        places = unpacked(codes, self.windows.bits, self.windows.outs)
        parts = [
            lax.select(places == jnp.uint8(number), element, jnp.zeros_like(element))
            for number, element in enumerate(self.windows.elements(tangent, 0))
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pooled(windows: Windows, x: Any) -> Any:
    return _plain(windows, x)


@_pooled.defjvp
def _(windows: Windows, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    out = _plain(windows, x)
    places = jnp.zeros(windows.outs, jnp.uint8)
    # The first one stays, of equals; what is not a number is above all others.
    for number, element in reversed(list(enumerate(windows.elements(x, -jnp.inf)))):
        is_less = (element < out) | ((out != out) & (element == element))
        places = lax.select(is_less, places, jnp.full_like(places, number))
    codes = checkpoint_name(packed(places, windows.bits), "pool_places")
    return out, linear(_AtPlaces(windows), tangent, codes)
