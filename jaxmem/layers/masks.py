"""ReLU that keeps a bit an element for the backward pass, and dropout that keeps its key.

Both are exact.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxmem.layers import checks
from jaxmem.layers.bits import packed, unpacked
from jaxmem.layers.linear import linear

# ---------------------------------------------------------------- API


def relu(x: Any) -> jax.Array:
    """`jax.nn.relu`, of which the backward pass reads one bit an element: whether it is above 0.

    Values and gradients are those of `jax.nn.relu`, bit for bit.

    Args:
      x: floats of any shape.

    Returns:
      Of the shape and dtype of `x`.  What is kept has the name "relu_mask", and an eighth of a byte
      an element.

    Raises:
      TypeError: `x` is no array of floats.

    Source: Chen et al. 2021, "ActNN" (arXiv 2104.14129), section 4.1, for one.

    >>> import jax, jaxmem
    >>> x = jax.ShapeDtypeStruct((256, 64), "float32")
    >>> jaxmem.saved_residuals(jaxmem.layers.relu, x).total_bytes
    2048
    """
    return _relu(checks.floats("relu", x))


def dropout(x: Any, rate: float, key: Any, broadcast_dims: Sequence[int] = ()) -> jax.Array:
    """Dropout of which the backward pass reads the key, and makes the mask again.

    Values and gradients are those of `flax.linen.Dropout` with this key, bit for bit.

    Args:
      x: floats of any shape.
      rate: the probability of dropping an element; the others are divided by what is left to 1.
      key: of `jax.random`.
      broadcast_dims: axes along which all elements share one mask.

    Returns:
      Of the shape and dtype of `x`.  What is kept has the name "dropout_key", and the bytes of a
      key.

    Raises:
      TypeError: `x` is no array of floats, `rate` no Python number, or `key` no key.
      ValueError: `rate` is not from 0 to 1, or `key` is several keys.

    >>> import jax, jaxmem
    >>> x = jax.ShapeDtypeStruct((256, 64), "float32")
    >>> drop = lambda x, key: jaxmem.layers.dropout(x, 0.1, key)
    >>> jaxmem.saved_residuals(drop, x, jax.eval_shape(lambda: jax.random.key(0))).total_bytes
    8
    """
    x = checks.floats("dropout", x)
    rate = checks.rate("dropout", rate)
    if rate == 0:
        return x
    if rate == 1:
        return jnp.zeros_like(x)
    key = checks.key("dropout", key)
    shape = list(x.shape)
    for axis in checks.axes("dropout", tuple(broadcast_dims), x.ndim) if broadcast_dims else ():
        shape[axis] = 1
    what = _Dropout(rate, x.shape, tuple(shape), jax.random.key_impl(key))
    return _dropout(what, x, jax.random.key_data(key))


# ---------------------------------------------------------------- implementation


@jax.custom_jvp
def _relu(x: Any) -> Any:
    return jax.nn.relu(x)


@_relu.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    bits = checkpoint_name(packed(x > jnp.zeros((), x.dtype), 1), "relu_mask")
    return lax.max(x, jnp.zeros((), x.dtype)), linear(_Masked(x.shape), tangent, bits)


@dataclasses.dataclass(frozen=True)
class _Masked:
    """The tangent where a packed mask is set, else 0."""

    shape: tuple[int, ...]

    def __call__(self, tangent: Any, bits: Any) -> Any:
        mask = unpacked(bits, 1, self.shape).astype(bool)
        return lax.select(mask, tangent, jnp.zeros_like(tangent))


@dataclasses.dataclass(frozen=True)
class _Dropout:
    """What is dropped, as a function of the data of a key; in it what is dropped from is linear."""

    rate: float
    shape: tuple[int, ...]
    mask_shape: tuple[int, ...]
    impl: Any

    def __call__(self, x: Any, data: Any) -> Any:
        key = jax.random.wrap_key_data(data, impl=self.impl)
        left = 1.0 - self.rate
        mask = jax.random.bernoulli(key, p=left, shape=self.mask_shape)
        return lax.select(jnp.broadcast_to(mask, self.shape), x / left, jnp.zeros_like(x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _dropout(what: _Dropout, x: Any, data: Any) -> Any:
    return what(x, data)


# With symbolic zeros: plans know no arrays of the type that tangents of integers have.
@functools.partial(_dropout.defjvp, symbolic_zeros=True)
def _(what: _Dropout, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (x, data), (tangent, _) = primals, tangents
    data = checkpoint_name(data, "dropout_key")
    return what(x, data), linear(what, _filled(tangent), data)


def _filled(tangent: Any) -> Any:
    if isinstance(tangent, SymbolicZero):
        aval: Any = tangent.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return tangent


@dataclasses.dataclass(frozen=True)
class Remasked:
    """What zeros some elements, as a function of the data of keys; in it what is masked is linear.

    Attributes:
      piece: from keys to the mask.
      impls: of the keys.
      kept_where: the value of the mask where elements stay.
    """

    piece: Any
    impls: tuple[Any, ...]
    kept_where: bool

    def __call__(self, x: Any, *data: Any) -> Any:
        keys = (jax.random.wrap_key_data(d, impl=i) for d, i in zip(data, self.impls, strict=True))
        (mask,) = self.piece(*keys)
        zeros = jnp.zeros_like(x)
        return lax.select(mask, x, zeros) if self.kept_where else lax.select(mask, zeros, x)


def remasked(piece: Any, kept_where: bool, x: Any, *keys: Any) -> Any:
    """`x` with zeros where a mask says, that is made of the keys again in the backward pass."""
    what = Remasked(piece, tuple(map(jax.random.key_impl, keys)), kept_where)
    return _remasked(what, x, *map(jax.random.key_data, keys))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _remasked(what: Remasked, x: Any, *data: Any) -> Any:
    return what(x, *data)


@functools.partial(_remasked.defjvp, symbolic_zeros=True)
def _(what: Remasked, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (x, *data), (tangent, *_) = primals, tangents
    data = [checkpoint_name(d, "dropout_key") for d in data]
    return what(x, *data), linear(what, _filled(tangent), *data)
