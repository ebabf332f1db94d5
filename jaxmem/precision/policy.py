"""What is held and computed in which type, in the words of jmp and flax."""

import dataclasses
import difflib
from typing import Any

import jax.numpy as jnp
import numpy as np

_KEYS = {
    "params": "param_dtype",
    "p": "param_dtype",
    "compute": "compute_dtype",
    "c": "compute_dtype",
    "output": "output_dtype",
    "o": "output_dtype",
    "reductions": "reductions",
}
_SHORT = {"f64": "float64", "f32": "float32", "full": "float32", "bf16": "bfloat16"}
_SHORT |= {"f16": "float16"}
_KNOWN = ("float32", "bfloat16", "float16", "float64")

# ---------------------------------------------------------------- API


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which types parameters are held, a function computes, and results come out.

    Compares by value.  Fields may be given as dtypes or by their names, also jmp's short ones.

    Attributes:
      param_dtype: of parameters.
      compute_dtype: what floating-point arguments are cast to.
      output_dtype: what floating-point results are cast to; None leaves them as computed.
      reductions: what sums, means, variances, norms and softmaxes are computed in; None computes
        them as the code says.

    Raises:
      TypeError: a field is no dtype.
      ValueError: it is one of other than real floating-point numbers.

    >>> Precision.parse("params=float32,compute=bfloat16,output=float32") == Precision()
    True
    >>> Precision.parse("float16").compute_dtype
    dtype('float16')
    """

    param_dtype: Any = "float32"
    compute_dtype: Any = "bfloat16"
    output_dtype: Any = "float32"
    reductions: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in ("output_dtype", "reductions"):
                continue
            object.__setattr__(self, field.name, _dtype(field.name, value))

    @classmethod
    def parse(cls, policy: Any, **fields: Any) -> "Precision":
        """A policy from jmp's words, or from one of its objects.

        Args:
          policy: "params=float32,compute=bfloat16,output=float32", the name of the type to compute
            in alone, a `Precision` or a `jmp.Policy`; None for all by default.
          **fields: that replace those of the policy.

        Raises:
          TypeError: it is none of these.
          ValueError: a word in it means nothing, or stands there twice.
        """
        given = {name: value for name, value in fields.items() if value is not _UNSET}
        if policy is None:
            return cls(**given)
        if isinstance(policy, Precision):
            return dataclasses.replace(policy, **given)
        if all(hasattr(policy, name) for name in ("param_dtype", "compute_dtype", "output_dtype")):
            names = ("param_dtype", "compute_dtype", "output_dtype")
            return cls(**{name: getattr(policy, name) for name in names} | given)
        if isinstance(policy, str) and "=" in policy:
            return cls(**_words(policy) | given)
        return cls(**{"compute_dtype": policy} | given)


# ---------------------------------------------------------------- implementation


class _Unset:
    def __repr__(self) -> str:
        return "as in the policy"


_UNSET: Any = _Unset()


def _words(policy: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in policy.split(","):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in _KEYS:
            raise ValueError(
                f"{policy!r}: {key!r} is no part of a policy; one is written "
                '"params=float32,compute=bfloat16,output=float32", where reductions=float32 may '
                "be added"
            )
        if _KEYS[key] in found:
            raise ValueError(f"{policy!r} gives {key} twice")
        found[_KEYS[key]] = None if value.lower() == "none" else value
    return found


def _dtype(field: str, value: Any) -> np.dtype:
    what = f"mixed precision: {field}"
    if value == "half":
        raise ValueError(
            f"{what}='half' is another type on each kind of accelerator; say bfloat16 or float16"
        )
    name = _SHORT.get(value, value) if isinstance(value, str) else value
    try:
        # To numpy None is float64.
        if name is None or name == "none":
            raise TypeError
        dtype = np.dtype(jnp.dtype(name))
    except TypeError:
        close = difflib.get_close_matches(str(value), _KNOWN, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise TypeError(
            f"{what} must be a floating-point dtype, such as jax.numpy.bfloat16 or its name, got "
            f"{value!r}{hint}"
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{what} must be a floating-point dtype, such as jax.numpy.bfloat16, got {dtype}"
        )
    if dtype.itemsize < 2:
        raise ValueError(
            f"{what}={dtype} has 8 bits or fewer, in which plain casts lose all but the order of "
            "magnitude; products in such types need scales: see flax.linen.fp8_ops"
        )
    return dtype
