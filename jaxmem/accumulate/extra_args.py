"""Extra arguments of an optimizer, such as `value=`, over the microbatches of a window.

Each has its own sum of weights, for it may be given with some microbatches and not with others.
"""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.accumulate.trees import at_least_float32, described, difference
from jaxmem.accumulate.weighted import ratio

Sums = dict[str, tuple[Any, jax.Array]]


def examples(names: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """An example of each argument to accumulate; None for one of which the last is meant.

    Raises:
      TypeError: something in it is not a name.
    """
    if (
        isinstance(names, str)
        or not isinstance(names, Iterable)
        or not all(isinstance(name, str) for name in names)
    ):
        raise TypeError(
            'accumulated_args must be names of extra arguments, such as ("value",), or a mapping '
            f"from them to examples, got {names!r}"
        )
    return dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 0.0)


def zero_sums(examples: Mapping[str, Any]) -> Sums:
    """The sums before the first microbatch."""
    sums = {}
    for name, example in examples.items():
        if example is not None:
            zeros = jax.tree.map(_zero, example)
            dtype = at_least_float32(*(leaf.dtype for leaf in jax.tree.leaves(zeros)))
            sums[name] = zeros, jnp.zeros((), jnp.finfo(dtype).dtype)
    return sums


def added(name: str, sums: tuple[Any, jax.Array], value: Any, weight: Any) -> Any:
    """The sums with one more microbatch in them.

    Raises:
      TypeError: the value is not made of numbers.
      ValueError: the value is not like the example.
    """
    total, weights = sums
    for leaf in jax.tree.leaves(value):
        if not isinstance(leaf, numbers.Number | np.generic | np.ndarray | jax.Array):
            raise TypeError(
                f"MultiSteps.update: the mean of {name}= over the window cannot be taken, got "
                f"{described(leaf)}; pass numbers, or MultiSteps(..., accumulated_args="
                f"{{{name!r}: None}}) to hand on the last"
            )
    if found := difference(value, total, (f"{name}=", "accumulated_args")):
        raise ValueError(
            f"MultiSteps.update: {found}; pass MultiSteps(..., accumulated_args="
            f"{{{name!r}: an example}}) for a value that is not a scalar"
        )
    weight = jnp.ones((), weights.dtype) if weight is None else weight.astype(weights.dtype)

    def add(old: jax.Array, new: Any) -> jax.Array:
        return old + jnp.asarray(new, old.dtype) * weight.astype(old.dtype)

    return jax.tree.map(add, total, value), weights + weight


def mean(sums: tuple[Any, jax.Array]) -> Any:
    """What the wrapped optimizer gets."""
    total, weights = sums
    return jax.tree.map(lambda leaf: ratio(leaf, weights), total)


def check_no_mean(name: str, value: Any) -> None:
    """Raises `ValueError` if an argument that is not accumulated has a mean."""
    floats = [
        leaf
        for leaf in jax.tree.leaves(value)
        if isinstance(leaf, float)
        or (
            isinstance(leaf, jax.Array | np.ndarray | np.generic)
            and jnp.issubdtype(leaf.dtype, jnp.inexact)
        )
    ]
    if floats:
        raise ValueError(
            f"MultiSteps.update: {name}= is {described(floats[0])} of one microbatch, and the "
            "wrapped optimizer runs once for several; pass MultiSteps(..., accumulated_args="
            f"{{{name!r}: an example}}) for their mean, or {{{name!r}: None}} for the last"
        )


# ---------------------------------------------------------------- implementation


def _zero(example: Any) -> jax.Array:
    return jnp.zeros(jnp.shape(example), at_least_float32(jnp.result_type(example)))
