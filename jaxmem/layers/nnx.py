"""Flax NNX modules of the norms and the dropout that keep less.

Variables are those of the modules that they replace.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxmem.layers import masks, norms

# ---------------------------------------------------------------- API


class MSLayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, of which the backward pass reads what is returned: `ms_layer_norm`.

    Arguments, variables and values are those of Flax's.

    >>> import jax.numpy as jnp, jaxmem
    >>> from flax import nnx
    >>> norm = jaxmem.layers.nnx.MSLayerNorm(4, rngs=nnx.Rngs(0))
    >>> norm(jnp.array([1.0, 1.0, -1.0, -1.0])).round(3)
    Array([ 1.,  1., -1., -1.], dtype=float32)
    """

    def __call__(self, x: Any, *, mask: Any = None) -> Any:
        """Normalises the axes `reduction_axes`, in this form those of `feature_axes`."""
        return _normalised(self, True, x, self.bias, mask)


class MSRMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, of which the backward pass reads what is returned: `ms_rms_norm`.

    >>> import jax.numpy as jnp, jaxmem
    >>> from flax import nnx
    >>> norm = jaxmem.layers.nnx.MSRMSNorm(3, rngs=nnx.Rngs(0))
    >>> norm(jnp.array([3.0, 3.0, -3.0])).round(3)
    Array([ 1.,  1., -1.], dtype=float32)
    """

    def __call__(self, x: Any, mask: Any = None) -> Any:
        """Normalises the axes `reduction_axes`, in this form those of `feature_axes`."""
        return _normalised(self, False, x, None, mask)


class MSNormLinear(nnx.Module):
    """A norm and the linear layer behind it, into which scale and bias of the norm are folded.

    The variables are those of ``linear(norm(x))``: "norm" is a Flax norm, "linear" a `nnx.Linear`,
    and neither is called.  The backward pass reads y, the normalised input, once, for both: see
    `jaxmem.layers.norm_linear`.  Values are those of the two layers but for rounding.

    Args:
      in_features, out_features: of the linear layer.
      centered: layer norm; False for RMS norm, which has no bias.
      epsilon: what is added to the variance.
      dtype: of the computation; None for that of arguments and parameters.
      param_dtype: of the parameters.
      norm, linear: further arguments of the two modules, by name.
      rngs: for the parameters.

    >>> import jax.numpy as jnp, jaxmem
    >>> from flax import nnx
    >>> layer = jaxmem.layers.nnx.MSNormLinear(8, 16, rngs=nnx.Rngs(0))
    >>> x = jnp.arange(8.0)
    >>> bool(jnp.allclose(layer(x), layer.linear(layer.norm(x)), atol=1e-5))
    True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        centered: bool = True,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        norm: Mapping[str, Any] | None = None,
        linear: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        common: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        made = nnx.LayerNorm if centered else nnx.RMSNorm
        self.norm = made(in_features, **{**common, "epsilon": epsilon, **(norm or {})})
        self.linear = nnx.Linear(in_features, out_features, **{**common, **(linear or {})})
        self.centered, self.dtype = centered, dtype

    def __call__(self, x: Any) -> Any:
        """Of [..., in], [..., out]."""
        several = _values(self.norm.scale, getattr(self.norm, "bias", None))
        several += _values(self.linear.kernel, self.linear.bias)
        x, scale, shift, kernel, bias = dtypes.promote_dtype((x, *several), dtype=self.dtype)
        bare = norms.ms_layer_norm if self.centered else norms.ms_rms_norm
        y = bare(x, epsilon=self.norm.epsilon)
        return norms.norm_linear(y, kernel, bias, norm_scale=scale, norm_bias=shift)


class KeyedDropout(nnx.Dropout):
    """`flax.nnx.Dropout` that makes its mask of the key again: `jaxmem.layers.dropout`.

    Arguments, state and masks are those of Flax's, for the same keys.

    >>> import jax.numpy as jnp, jaxmem
    >>> from flax import nnx
    >>> kinds = nnx.Dropout, jaxmem.layers.nnx.KeyedDropout
    >>> one, other = (kind(0.5, rngs=nnx.Rngs(0))(jnp.ones((4, 8))) for kind in kinds)
    >>> bool((one == other).all())
    True
    """

    def __call__(self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None) -> Any:
        """As for `flax.nnx.Dropout`."""
        off = self.deterministic if deterministic is None else deterministic
        source = self.rngs if rngs is None else rngs
        known = isinstance(source, nnx.Rngs | nnx.RngStream | jax.Array)
        if off is None or off or not 0 < self.rate < 1 or not known:
            # Nothing is dropped, or all, or Flax says what is missing.
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        if isinstance(source, nnx.Rngs):
            source = source[self.rng_collection]
        key = source() if isinstance(source, nnx.RngStream) else source
        return masks.dropout(inputs, self.rate, key, self.broadcast_dims)


# ---------------------------------------------------------------- implementation


def _values(*variables: Any) -> list[Any]:
    return [variable[...] if variable else None for variable in variables]


def _normalised(module: Any, centered: bool, x: Any, bias: Any, mask: Any) -> Any:
    name = type(module).__name__
    norms.check_module(name, module, mask)
    x, scale, bias = module.promote_dtype((x, *_values(module.scale, bias)), dtype=module.dtype)
    x = jnp.asarray(x)
    dtype = x.dtype if module.dtype is None else module.dtype
    fast = getattr(module, "use_fast_variance", True) if centered else True
    axes = module.reduction_axes
    return norms.checked(name, centered, x, scale, bias, axes, module.epsilon, dtype, fast)
