"""Flax linen modules of the norms and the dropout that keep less.

Names, shapes and initial values of parameters are those of the modules that they replace.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes

from jaxmem.layers import masks, norms

# ---------------------------------------------------------------- API


class MSLayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm`, of which the backward pass reads what is returned: `ms_layer_norm`.

    Fields, parameters and values are those of Flax's.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> norm = jaxmem.layers.linen.MSLayerNorm(dtype=jnp.bfloat16)
    >>> variables = norm.init(jax.random.key(0), jnp.ones((2, 8)))
    >>> sorted(variables["params"])
    ['bias', 'scale']
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        """Normalises the axes `reduction_axes`, in this form those of `feature_axes`."""
        return _normalised(self, True, x, mask, self.use_fast_variance)


class MSRMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm`, of which the backward pass reads what is returned: `ms_rms_norm`.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> norm = jaxmem.layers.linen.MSRMSNorm()
    >>> norm.apply({"params": {"scale": jnp.ones(3)}}, jnp.array([3.0, 3.0, -3.0])).round(3)
    Array([ 1.,  1., -1.], dtype=float32)
    """

    @nn.compact
    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        """Normalises the axes `reduction_axes`, in this form those of `feature_axes`."""
        return _normalised(self, False, x, mask, True)


class MSNormDense(nn.Module):
    """A norm and the dense layer behind it, into which scale and bias of the norm are folded.

    The parameters are those of ``Dense(features)(LayerNorm()(x))``, in two groups: "norm" (scale,
    bias) and "dense" (kernel, bias).  The backward pass reads y, the normalised input, once, for
    both: see `jaxmem.layers.norm_linear`.  Values are those of the two layers but for rounding.

    Attributes:
      features: how many the dense layer returns.
      centered: layer norm; False for RMS norm, which has no bias.
      epsilon: what is added to the variance.
      use_scale, use_norm_bias: whether the norm has them.
      use_bias: whether the dense layer has one.
      dtype: of the computation; None for that of arguments and parameters.
      param_dtype: of the parameters.
      kernel_init, bias_init: of the dense layer.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> layer = jaxmem.layers.linen.MSNormDense(16, dtype=jnp.bfloat16)
    >>> x = jnp.ones((2, 8), jnp.bfloat16)
    >>> jax.tree.map(jnp.shape, layer.init(jax.random.key(0), x)["params"])["dense"]
    {'bias': (16,), 'kernel': (8, 16)}
    """

    features: int
    centered: bool = True
    epsilon: float = 1e-6
    use_scale: bool = True
    use_norm_bias: bool = True
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal()
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Of [..., in], [..., features]."""
        width = jnp.shape(x)[-1]
        has_shift = self.use_norm_bias and self.centered
        norm = _Vectors(
            {
                **({"scale": nn.initializers.ones_init()} if self.use_scale else {}),
                **({"bias": nn.initializers.zeros_init()} if has_shift else {}),
            },
            (width,),
            self.param_dtype,
            name="norm",
        )()
        inits = {"kernel": self.kernel_init} | ({"bias": self.bias_init} if self.use_bias else {})
        dense = _Vectors(inits, (width, self.features), self.param_dtype, name="dense")()
        values = [norm.get("scale"), norm.get("bias"), dense["kernel"], dense.get("bias")]
        x, *values = dtypes.promote_dtype(x, *values, dtype=self.dtype)
        scale, shift, kernel, bias = values
        bare = norms.ms_layer_norm if self.centered else norms.ms_rms_norm
        y = bare(x, epsilon=self.epsilon)
        return norms.norm_linear(y, kernel, bias, norm_scale=scale, norm_bias=shift)


class KeyedDropout(nn.Dropout):
    """`flax.linen.Dropout` that makes its mask of the key again: `jaxmem.layers.dropout`.

    Masks are those of Flax's, for the same keys.
    """

    @nn.compact
    def __call__(self, inputs: Any, deterministic: bool | None = None, rng: Any = None) -> Any:
        """As for `flax.linen.Dropout`."""
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        if self.rate == 0.0 or deterministic:
            return inputs
        if self.rate == 1.0:
            return jnp.zeros_like(inputs)
        rng = self.make_rng(self.rng_collection) if rng is None else rng
        return masks.dropout(inputs, self.rate, rng, self.broadcast_dims)


# ---------------------------------------------------------------- implementation


class _Vectors(nn.Module):
    """Parameters in a group of their own; a bias has the last axis alone."""

    inits: dict[str, Callable[..., Any]]
    shape: tuple[int, ...]
    param_dtype: Any

    @nn.compact
    def __call__(self) -> dict[str, Any]:
        return {
            name: self.param(
                name,
                init,
                self.shape[-1:] if name == "bias" else self.shape,
                self.param_dtype,
            )
            for name, init in self.inits.items()
        }


def _normalised(module: Any, centered: bool, x: Any, mask: Any, fast_variance: bool) -> Any:
    norms.check_module(type(module).__name__, module, mask)
    x = jnp.asarray(x)
    several = module.reduction_axes
    several = tuple(several) if isinstance(several, tuple | list) else (several,)
    axes = tuple(sorted(axis % x.ndim for axis in several))
    shape = tuple(x.shape[axis] for axis in axes)
    scale = bias = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, shape, module.param_dtype)
    if centered and module.use_bias:
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    dtype = dtypes.canonicalize_dtype(x, scale, bias, dtype=module.dtype)
    name = type(module).__name__
    return norms.checked(name, centered, x, scale, bias, axes, module.epsilon, dtype, fast_variance)
