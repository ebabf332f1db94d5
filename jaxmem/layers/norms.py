"""Layer and RMS norms that keep what they return for the backward pass, not what they are given.

The gradient follows from the normalised values y and their factor r = 1 / σ alone:

    dx = r (g − mean(g) − y mean(g y)), for RMS norm without mean(g).

Also known as memory-sharing backpropagation: y is what the next layer keeps anyway, if the scale
and the bias of the norm are folded into that layer (`norm_linear`).  Where they are applied to y
itself, y is kept for them, in the dtype of what is normalised if that is the narrower one.

Source: Yang et al. 2024, "Reducing Fine-Tuning Memory Overhead by Approximate and Memory-Sharing
Backpropagation" (arXiv 2406.16282), section 5.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxmem.layers import checks
from jaxmem.layers.linear import linear

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Norm:
    """How something is normalised.

    Attributes:
      centered: whether the mean is subtracted (layer norm) or not (RMS norm).
      axes: from 0 on, ascending.
      epsilon: what is added to the variance.
      dtype: of the result.
      fast_variance: whether the variance is E[x²] − E[x]², in one pass, or E[(x − E[x])²].
    """

    centered: bool
    axes: tuple[int, ...]
    epsilon: float
    dtype: Any
    fast_variance: bool = True

    def bare(self, x: Any) -> tuple[Any, Any]:
        """(y, r = 1 / σ), computed as Flax does, in float32 at least."""
        wide, rstd = self._parts(x)
        return (wide * rstd).astype(self.dtype), rstd

    def affine(self, x: Any, scale: Any, bias: Any) -> tuple[Any, Any, Any]:
        """(y scaled and shifted, y, r); y in the narrower dtype of argument and result."""
        wide, rstd = self._parts(x)
        # In the order of Flax's layers, for the same bits.
        out = wide * (rstd if scale is None else rstd * scale)
        out = out if bias is None else out + bias
        return out.astype(self.dtype), (wide * rstd).astype(self.narrower(x.dtype)), rstd

    def narrower(self, dtype: Any) -> Any:
        """In which dtype y is kept of an argument of this one, where it is no result."""
        # In the type of integers y would be rounded to them, in 8 bits to an order of magnitude.
        can_hold = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
        several = (dtype, self.dtype) if can_hold else (self.dtype,)
        return min(several, key=lambda dtype: dtype.itemsize)

    def _parts(self, x: Any) -> tuple[Any, Any]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = functools.partial(jnp.mean, axis=self.axes, keepdims=True)
        if not self.centered:
            variance = mean(lax.square(wide))
        elif self.fast_variance:
            center = mean(wide)
            variance = mean(lax.square(wide)) - lax.square(center)
            variance = jnp.maximum(jnp.zeros((), wide.dtype), variance)
            wide = wide - center
        else:
            center = mean(wide)
            variance = mean(lax.square(wide - center))
            wide = wide - center
        return wide, lax.rsqrt(variance + jnp.asarray(self.epsilon, wide.dtype))


# ---------------------------------------------------------------- API


def ms_layer_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-6,
    dtype: Any = None,
    fast_variance: bool = True,
) -> jax.Array:
    """Layer norm, of which the backward pass reads what is returned and not `x`.

    Exact, as `flax.linen.LayerNorm`.  Statistics are in float32 at least.  What is kept has the
    names "norm" (y) and "norm_rstd" (4 bytes for each mean; 8 in float64).  Without `scale` and
    `bias` y is the result itself, and costs nothing where the next layer keeps that.

    Args:
      x: floats of any shape.
      scale, bias: of the shape of the axes that are normalised; None for none.
      axis: one or several axes.
      epsilon: what is added to the variance.
      dtype: of the result; None for that of `x`.
      fast_variance: E[x²] − E[x]², as Flax has it by default; else E[(x − E[x])²].

    Raises:
      TypeError: `x`, `scale` or `bias` is no array of floats, or `axis` no whole number.
      ValueError: an axis that `x` has not, or a shape that does not fit.

    Source: arXiv 2406.16282, section 5.

    >>> import jax, jaxmem
    >>> x = jax.ShapeDtypeStruct((256, 64), "bfloat16")
    >>> kept = jaxmem.saved_residuals(jaxmem.layers.ms_layer_norm, x)
    >>> [(row.name, row.bytes) for row in kept]
    [('norm', 32768), ('norm_rstd', 1024)]
    """
    return checked("ms_layer_norm", True, x, scale, bias, axis, epsilon, dtype, bool(fast_variance))


def ms_rms_norm(
    x: Any,
    scale: Any = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-6,
    dtype: Any = None,
) -> jax.Array:
    """RMS norm, of which the backward pass reads what is returned and not `x`.

    As `ms_layer_norm`, without mean and bias: `flax.linen.RMSNorm`.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.layers.ms_rms_norm(jnp.array([3.0, 3.0, -3.0]), epsilon=0.0)
    Array([ 1.,  1., -1.], dtype=float32)
    """
    return checked("ms_rms_norm", False, x, scale, None, axis, epsilon, dtype, True)


def norm_linear(
    y: Any, kernel: Any, bias: Any = None, *, norm_scale: Any = None, norm_bias: Any = None
) -> jax.Array:
    """A linear layer with the scale and the bias of the norm before it folded into it.

    ``(y * norm_scale + norm_bias) @ kernel + bias``, computed as ``y @ (norm_scale[:, None] *
    kernel) + (norm_bias @ kernel + bias)``: equal but for rounding.  The backward pass reads y and
    parameters, from which it makes the scaled kernel again.

    Args:
      y: what a norm without scale and bias returned, [..., in].
      kernel: [in, out].
      bias: [out].
      norm_scale, norm_bias: those of the norm, [in].

    Raises:
      TypeError: something is no array of floats.
      ValueError: shapes do not fit.

    Source: arXiv 2406.16282, section 5.

    >>> import jax.numpy as jnp, jaxmem
    >>> x = jnp.array([[1.0, 2.0, 6.0]])
    >>> scale, shift, kernel = jnp.array([1.0, 2.0, 3.0]), jnp.ones(3), jnp.ones((3, 2))
    >>> plain = jaxmem.layers.ms_layer_norm(x, scale, shift) @ kernel
    >>> y = jaxmem.layers.ms_layer_norm(x)
    >>> folded = jaxmem.layers.norm_linear(y, kernel, norm_scale=scale, norm_bias=shift)
    >>> bool(jnp.allclose(plain, folded))
    True
    """
    y, kernel = checks.floats("norm_linear", y), checks.floats("norm_linear: kernel", kernel)
    if kernel.ndim != 2 or not y.ndim or y.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"norm_linear takes y of shape [..., in] and a kernel [in, out], got {y.shape} and "
            f"{kernel.shape}"
        )
    ins, outs = kernel.shape
    parts = [
        checks.vector("norm_linear", what, value, (length,), like)
        for what, value, length, like in (
            ("norm_scale", norm_scale, ins, "the kernel's rows"),
            ("norm_bias", norm_bias, ins, "the kernel's rows"),
            ("bias", bias, outs, "the kernel's columns"),
        )
    ]
    return _norm_linear(y, kernel, *parts)


# ---------------------------------------------------------------- implementation


def check_module(name: str, module: Any, mask: Any) -> None:
    """That a module of Flax asks for nothing that these norms cannot do.

    Raises:
      ValueError: it does.
    """
    if mask is not None:
        raise ValueError(
            f"{name} takes no mask: the mean in its backward pass is one of all elements; use "
            "Flax's module there"
        )
    if module.axis_name is not None:
        raise ValueError(
            f"{name} takes no axis_name: what it normalises is on one device or split by a "
            "sharding, not by hand; use Flax's module there"
        )
    if module.reduction_axes != module.feature_axes:
        raise ValueError(
            f"{name} has scale and bias along the axes that it normalises, got "
            f"reduction_axes={module.reduction_axes} and feature_axes={module.feature_axes}"
        )


def checked(
    name: str,
    centered: bool,
    x: Any,
    scale: Any,
    bias: Any,
    axis: Any,
    epsilon: Any,
    dtype: Any,
    fast_variance: bool,
) -> jax.Array:
    """Normalised, what was asked for being looked at; `name` is for messages."""
    x = checks.floats(name, x)
    axes = checks.axes(name, axis, x.ndim)
    shape = tuple(x.shape[k] for k in axes)
    like = "the axes that are normalised"
    scale = checks.vector(name, "scale", scale, shape, like)
    bias = checks.vector(name, "bias", bias, shape, like)
    dtype = checks.dtype(name, x.dtype if dtype is None else dtype)
    epsilon = checks.epsilon(name, epsilon)
    return normalised(Norm(centered, axes, epsilon, dtype, fast_variance), x, scale, bias)


def normalised(how: Norm, x: Any, scale: Any = None, bias: Any = None) -> jax.Array:
    """Normalised, scaled and shifted; the parameters have the shape of the axes, or are None."""
    if scale is None and bias is None:
        return bare(how, x)
    shape = [length if k in how.axes else 1 for k, length in enumerate(x.shape)]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scale, bias = (
        None if p is None else p.reshape(shape).astype(jnp.promote_types(p.dtype, wide))
        for p in (scale, bias)
    )
    return affine(how, x, scale, bias)


# In the rules values are computed in operations of jax, not by the function itself: plans see each
# of them, and derivatives of higher order are those of the plain code.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def bare(how: Norm, x: Any) -> Any:
    """Normalised."""
    return how.bare(x)[0]


@bare.defjvp
def _(how: Norm, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    y, rstd = how.bare(x)
    y, rstd = checkpoint_name(y, "norm"), checkpoint_name(rstd, "norm_rstd")
    return y, linear(_Pushed(how.centered, how.axes, y.dtype), tangent, y, rstd)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def affine(how: Norm, x: Any, scale: Any, bias: Any) -> Any:
    """Normalised, scaled and shifted by what broadcasts to `x`, or is None."""
    return how.affine(x, scale, bias)[0]


@functools.partial(affine.defjvp, symbolic_zeros=True)
def _(how: Norm, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (x, scale, bias), (of_x, of_scale, of_bias) = primals, tangents
    out, y, rstd = how.affine(x, scale, bias)
    y, rstd = checkpoint_name(y, "norm"), checkpoint_name(rstd, "norm_rstd")
    parts = []
    if _moves(of_x):
        scaled = () if scale is None else (scale,)
        parts.append(linear(_Pushed(how.centered, how.axes, out.dtype), of_x, y, rstd, *scaled))
    if _moves(of_scale):
        parts.append(linear(_Scaled(out.dtype), of_scale, y))
    if _moves(of_bias):
        parts.append(jnp.broadcast_to(of_bias, out.shape).astype(out.dtype))
    return out, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(out)


def _moves(tangent: Any) -> bool:
    return tangent is not None and not isinstance(tangent, SymbolicZero)


@dataclasses.dataclass(frozen=True)
class _Pushed:
    """The tangent of y, scaled."""

    centered: bool
    axes: tuple[int, ...]
    dtype: Any

    def __call__(self, tangent: Any, y: Any, rstd: Any, *scale: Any) -> Any:
        tangent, y = tangent.astype(rstd.dtype), y.astype(rstd.dtype)
        mean = functools.partial(jnp.mean, axis=self.axes, keepdims=True)
        pushed = tangent - y * mean(tangent * y)
        if self.centered:
            pushed = pushed - mean(tangent)
        pushed = rstd * pushed
        for factor in scale:
            pushed = pushed * factor
        return pushed.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """y times the tangent of the scale."""

    dtype: Any

    def __call__(self, tangent: Any, y: Any) -> Any:
        return (y.astype(tangent.dtype) * tangent).astype(self.dtype)


@jax.custom_jvp
def _norm_linear(y: Any, kernel: Any, scale: Any, shift: Any, bias: Any) -> Any:
    return _folded(y, kernel, scale, shift, bias)


def _folded(y: Any, kernel: Any, scale: Any, shift: Any, bias: Any) -> Any:
    out = y @ (kernel if scale is None else _rows(scale) * kernel)
    return _shifted(out, kernel, shift, bias)


def _shifted(out: Any, kernel: Any, shift: Any, bias: Any) -> Any:
    parts = [part for part in (None if shift is None else shift @ kernel, bias) if part is not None]
    for part in parts[1:]:
        parts[0] = parts[0] + part
    return out + jnp.broadcast_to(parts[0], out.shape) if parts else out


def _rows(scale: Any) -> Any:
    return jnp.expand_dims(scale, 1)


@functools.partial(_norm_linear.defjvp, symbolic_zeros=True)
def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (y, kernel, scale, shift, _), (of_y, of_kernel, of_scale, of_shift, of_bias) = (
        primals,
        tangents,
    )
    out = _folded(*primals)
    parts = []
    if _moves(of_y):
        # The scaled kernel is as large as the kernel; it is made again in the backward pass.
        scaled = (kernel,) if scale is None else (kernel, _rows(scale))
        parts.append(linear(_Through(), of_y, *scaled))
    folded = []
    if _moves(of_kernel):
        folded.append(of_kernel if scale is None else _rows(scale) * of_kernel)
    if _moves(of_scale):
        folded.append(_rows(of_scale) * kernel)
    if folded:
        parts.append(y @ functools.reduce(jnp.add, folded))
    row = []
    if shift is not None and _moves(of_kernel):
        row.append(shift @ of_kernel)
    if _moves(of_shift):
        row.append(of_shift @ kernel)
    if _moves(of_bias):
        row.append(of_bias)
    if row:
        parts.append(jnp.broadcast_to(functools.reduce(jnp.add, row), out.shape))
    if not parts:
        return out, jnp.zeros_like(out)
    return out, functools.reduce(jnp.add, parts).astype(out.dtype)


@dataclasses.dataclass(frozen=True)
class _Through:
    """The tangent through the scaled kernel."""

    def __call__(self, tangent: Any, kernel: Any, *scale: Any) -> Any:
        for factor in scale:
            kernel = factor * kernel
        return tangent @ kernel
