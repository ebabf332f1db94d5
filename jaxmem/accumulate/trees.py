"""Trees of gradients: their dtypes, their zeros, and what is said of two that differ."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def described(value: Any) -> str:
    """How an error calls a value: "float32[8, 3]", or its type and how it is written.

    >>> described(jnp.zeros((8, 3))), described(2.5)
    ('float32[8, 3]', '2.5 of type float')
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return f"{value!r} of type {type(value).__name__}"


def floating(name: str, dtype: Any) -> np.dtype | None:
    """`dtype` as a dtype of real floating-point numbers; None stays None.

    Raises:
      TypeError: it is no dtype.
      ValueError: it is one of other numbers.
    """
    if dtype is None:
        return None
    try:
        found = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        raise TypeError(
            f"{name} must be a floating-point dtype, such as jax.numpy.float32, got "
            f"{described(dtype)}"
        ) from None
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"{name} must be a floating-point dtype, such as jax.numpy.float32, got {found}: sums "
            "of gradients cannot be held in it"
        )
    return np.dtype(found)


def sum_dtype(leaf: Any, dtype: np.dtype | None) -> np.dtype:
    """What a leaf's gradients are summed in: `dtype`, or the leaf's own if that is None or wider.

    "Wider" are the dtypes of 64 bits only.  A complex leaf is summed in the complex dtype
    that has the same precision.
    """
    own = np.dtype(jnp.result_type(leaf))
    if dtype is None or own in (np.float64, np.complex128):
        return own
    if jnp.issubdtype(own, jnp.complexfloating):
        return np.dtype(promoted(dtype, np.complex64))
    return dtype


def at_least_float32(*dtypes: Any) -> Any:
    """The dtype to compute in: what all of these promote to, and float32 at the least."""
    return promoted(jnp.float32, *dtypes)


def promoted(*dtypes: Any) -> Any:
    """What dtypes promote to, also where the user forbids that it happens unasked."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def own_zero(dtype: Any) -> jax.Array:
    """A zero to choose by `where` for an array of any size.

    XLA takes arrays of zeros that are alike for one.  If another is where a loop begins,
    that one must exist, and is kept for this use: a buffer as large as the parameters.
    """
    return jax.lax.optimization_barrier(jnp.zeros((), dtype))


def weighed(gradient: jax.Array, factor: Any) -> jax.Array:
    """A gradient that counts `factor` times; with 0 it is zero, even if it is NaN.

    With less than 0 it counts −factor times, and what is not finite of it is zero.
    """
    dtype = at_least_float32(gradient.dtype)
    out = (factor == 0) | ((factor < 0) & ~jnp.isfinite(gradient))
    times = jnp.abs(factor).astype(dtype)
    return jnp.where(out, own_zero(dtype), gradient.astype(dtype) * times)


def leaf_names(tree: Any, root: str = "") -> list[str]:
    """The path of each leaf: "encoder/kernel"."""
    found = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        rest = jax.tree_util.keystr(path, simple=True, separator="/")
        found.append("/".join(part for part in (root, rest) if part) or "the value itself")
    return found


def difference(first: Any, second: Any, of: tuple[str, str]) -> str | None:
    """Where two trees of arrays differ in structure or shape, in words; None if they do not.

    >>> difference({"a": jnp.zeros(3)}, {"a": jnp.zeros(2)}, ("the gradient", "the parameters"))
    'the gradient has a as float32[3] and the parameters as float32[2]'
    """
    here, there = jax.tree.leaves(first), jax.tree.leaves(second)
    names = leaf_names(first), leaf_names(second)
    if jax.tree.structure(first) != jax.tree.structure(second):
        for one, own, other in ((0, *names), (1, *reversed(names))):
            missing = [name for name in own if name not in set(other)]
            if missing:
                return f"{of[one]} has {missing[0]}, which {of[1 - one]} lacks"
        return (
            f"{of[0]} is {jax.tree.structure(first)} and {of[1]} {jax.tree.structure(second)}, "
            "with the same leaves"
        )
    for name, one, other in zip(names[0], here, there, strict=True):
        if jnp.shape(one) != jnp.shape(other):
            return f"{of[0]} has {name} as {described(one)} and {of[1]} as {described(other)}"
    return None
