"""GELU and SiLU that keep two bits an element for the backward pass: ReGELU2 and ReSiLU2.

The forward pass is exact.  In the backward pass the derivative is that of a sum of three ReLUs that
was fitted to the function, a step function with four values; which of them is two bits.  Forward
mode has the same derivative, so that it agrees with reverse mode.

Source: Yang et al. 2024, "Reducing Fine-Tuning Memory Overhead by Approximate and Memory-Sharing
Backpropagation" (arXiv 2406.16282), section 4.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem.errors import check_flags
from jaxmem.layers.bits import packed, unpacked
from jaxmem.layers.checks import floats
from jaxmem.layers.linear import linear

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Steps:
    """A step function, the derivative of a weighted sum of three ReLUs.

    Attributes:
      at: where the ReLUs start, ascending.
      weights: of each.
    """

    at: tuple[float, float, float]
    weights: tuple[float, float, float]

    @property
    def values(self) -> tuple[float, float, float, float]:
        """Left of all steps, and right of each.

        >>> [round(value, 3) for value in GELU.values]
        [0.0, -0.049, 1.049, 1.0]
        """
        a, b, c = self.weights
        return 0.0, a, a + b, a + b + c

    def index(self, x: Any) -> jax.Array:
        """Which of the values is that of each element, 0 to 3, as uint8; 0 for NaN."""
        # Not in bfloat16: the steps are then where they are in float32.
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        a, b, c = (wide > jnp.asarray(at, wide.dtype) for at in self.at)
        return a.astype(jnp.uint8) + b.astype(jnp.uint8) + c.astype(jnp.uint8)

    def __call__(self, x: Any) -> jax.Array:
        """The value at each element, in its dtype."""
        return _chosen(self, self.index(x), x.dtype)


@dataclasses.dataclass(frozen=True)
class Stepped:
    """A function that is differentiated by a step function.

    Attributes:
      name: of what is kept.
      steps: the derivative.
      forward: the function; it is compared by identity.
    """

    name: str
    steps: Steps
    forward: Callable[[Any], Any]


GELU = Steps((-3.18588100, -0.00117882, 3.19083261), (-0.04922261, 1.09796321, -0.04874060))
SILU = Steps((-6.30504610, -0.00086849, 6.32581524), (-0.04060357, 1.08092543, -0.04032186))

# ---------------------------------------------------------------- API


def regelu2(x: Any, approximate: bool = True) -> jax.Array:
    """GELU, of which the backward pass reads two bits an element and not the input.

    The value is that of `jax.nn.gelu`, bit for bit.  The gradient is approximate: the derivative is
    a step function, that of the sum of three ReLUs nearest to GELU in the mean square.  Over a
    standard normal the sum is 0.044 from GELU in the mean, and the step function 0.178 from its
    derivative.  A NaN has the slope 0: where it made the loss NaN the gradient is NaN as well.

    Args:
      x: floats of any shape.
      approximate: as for `jax.nn.gelu`.

    Returns:
      Of the shape and dtype of `x`.  What is kept has the name "regelu2", and a quarter of a byte
      an element.

    Raises:
      TypeError: `x` is no array of floats, or `approximate` neither True nor False.

    Source: arXiv 2406.16282, section 4.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.ShapeDtypeStruct((256, 64), "bfloat16")
    >>> kept = jaxmem.saved_residuals(jaxmem.layers.regelu2, x)
    >>> kept.total_bytes, kept.rows[0].name
    (4096, 'regelu2')
    """
    check_flags(approximate=approximate)
    return stepped(GELU_TANH if approximate else GELU_ERF, floats("regelu2", x))


def resilu2(x: Any) -> jax.Array:
    """SiLU (swish), of which the backward pass reads two bits an element and not the input.

    As `regelu2`, for `jax.nn.silu`; what is kept has the name "resilu2".  Over a standard normal
    the sum of ReLUs is 0.084 from SiLU in the mean, and its derivative 0.238 from that of SiLU.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> jax.grad(lambda x: jaxmem.layers.resilu2(x).sum())(jnp.array([-9.0, -1.0, 1.0, 9.0]))
    Array([ 0.        , -0.04060357,  1.0403218 ,  1.        ], dtype=float32)
    """
    return stepped(SWISH, floats("resilu2", x))


# ---------------------------------------------------------------- implementation

GELU_TANH = Stepped("regelu2", GELU, functools.partial(jax.nn.gelu, approximate=True))
GELU_ERF = Stepped("regelu2", GELU, functools.partial(jax.nn.gelu, approximate=False))
SWISH = Stepped("resilu2", SILU, jax.nn.silu)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def stepped(what: Stepped, x: Any) -> Any:
    """The function's value, with the derivative of a step function."""
    return what.forward(x)


@stepped.defjvp
def _(what: Stepped, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    codes = checkpoint_name(packed(what.steps.index(x), 2), what.name)
    # In operations of jax, not by the function itself: plans see each value.
    return what.forward(x), linear(_Slope(what.steps, x.shape), tangent, codes)


@dataclasses.dataclass(frozen=True)
class _Slope:
    """The tangent times the value of a step function, the indices of which were packed."""

    steps: Steps
    shape: tuple[int, ...]

    def __call__(self, tangent: Any, codes: Any) -> Any:
        return tangent * _chosen(self.steps, unpacked(codes, 2, self.shape), tangent.dtype)


def _chosen(steps: Steps, index: jax.Array, dtype: Any) -> jax.Array:
    a, b, c, d = (jnp.asarray(value, dtype) for value in steps.values)
    two = jnp.uint8(2)
    low = jnp.where(index == jnp.uint8(0), a, b)
    return jnp.where(index < two, low, jnp.where(index == two, c, d))
