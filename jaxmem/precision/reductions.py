"""Sums, means, variances and softmaxes in float32, where the code has fewer bits.

What an exponential, a logarithm, a root or a reduction makes is computed in the wide type and stays
in it through elementwise operations, as in a softmax, until something else reads it: a product, a
loop, a call.  There, and where it is returned, it is cast to the type that the code has for it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _jax

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Wide:
    """A value that is known in more bits than the code has for it.

    Attributes:
      value: in the wide type.
      dtype: the code's.
    """

    value: Any
    dtype: Any

    def cast(self) -> Any:
        """In the code's type."""
        return lax.convert_element_type(self.value, self.dtype)


# ---------------------------------------------------------------- API


def begins(eqn: Any) -> bool:
    """Whether an operation is computed in the wide type."""
    return eqn.primitive.name in _BEGINNING and _is_floating(eqn.invars[0].aval)


def goes_on(eqn: Any) -> bool:
    """Whether an operation on what is wide is wide."""
    return eqn.primitive.name in _GOING_ON and _is_floating(eqn.outvars[0].aval)


def computed(eqn: Any, dtype: Any, operands: Sequence[Any], here: Callable[[Any], Any]) -> Any:
    """What an operation makes, in the wide type.

    Args:
      here: from an operand that is not wide to its value.
    """

    def widened(value: Any) -> Any:
        if isinstance(value, Wide):
            return value.value
        value = here(value)
        is_narrow = jnp.issubdtype(jnp.result_type(value), jnp.floating)
        return lax.convert_element_type(value, dtype) if is_narrow else value

    if eqn.primitive.name == "convert_element_type":
        return widened(operands[0])
    (out,) = _jax.bound(eqn, *map(widened, operands))
    return out


# ---------------------------------------------------------------- implementation

# fmt: off
_BEGINNING = frozenset({
    "exp", "exp2", "expm1", "log", "log1p", "rsqrt", "sqrt", "reduce_sum", "reduce_prod",
    "reduce_max", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum",
})
_GOING_ON = _BEGINNING | {
    "add", "sub", "mul", "div", "neg", "max", "min", "select_n", "square", "sign", "abs", "pow",
    "integer_pow", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose",
    "stop_gradient",
}
# fmt: on


def _is_floating(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)
