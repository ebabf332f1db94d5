"""Sums that know what they are to be divided by."""

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmem.accumulate.trees import at_least_float32, described, own_zero, promoted

# ---------------------------------------------------------------- API


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, init=False, eq=False)
class Weighted:
    """A loss as a sum and its denominator, so that parts of a batch add up to the whole.

    The mean of the losses of microbatches is not the loss of the batch where
    the microbatches differ in their number of tokens; the sum of the sums over
    the sum of the weights is.  Terms with other denominators are added:

        Weighted(cross_entropy.sum(), mask.sum()) + 0.01 * Weighted(balance.sum(), balance.size)

    Over microbatches i the loss is then the sum over the terms t of
    (Σᵢ totalₜᵢ) / (Σᵢ weightₜᵢ), and its gradient takes the weights as constants.  A term
    that every microbatch has alike, such as a penalty on the parameters, has
    the weight 1.

    Where the weights of the whole batch sum to 0, the term is 0, whatever the totals are.  A
    microbatch of weight 0 in a batch that has some still counts with its total, which need
    not be 0 (of a focal loss, divided by the number of positives: that of the negatives).  Its
    total is left out if it is not finite, and if it is 0 or left out, so is what is not
    finite of its gradient: a mean over nothing does no harm.  (Where only one of
    several terms has no weight and is NaN, its gradient is NaN, as it is in jax: mask what
    the NaN is computed from.)

    Args:
      total: a real scalar, the sum over what the weight counts.
      weight: a real scalar of at least 0, such as the number of tokens.  It is held in
        float32, and in float64 with a total in float64.

    Raises:
      TypeError: one of them is not a real number.
      ValueError: one of them is not a scalar, or the weight is known here and
        is negative or not finite.  Where it is not known, under `jit`, a
        negative weight makes the mean NaN.

    >>> import jaxmem
    >>> loss = jaxmem.Weighted(6.0, 3) + 0.5 * jaxmem.Weighted(8.0, 2)
    >>> float(loss.mean)
    4.0
    """

    terms: tuple[tuple[Any, Any], ...]

    def __init__(self, total: Any, weight: Any) -> None:
        total = scalar("Weighted: total", total)
        weight = checked_weight("Weighted: weight", weight, at_least_float32(total.dtype))
        object.__setattr__(self, "terms", ((total, weight),))

    @classmethod
    def of(cls, terms: Any) -> "Weighted":
        """From pairs of totals and weights that are known to be right."""
        self = object.__new__(cls)
        object.__setattr__(self, "terms", tuple(tuple(term) for term in terms))
        return self

    @property
    def mean(self) -> jax.Array:
        """The sum over the terms of total / weight; a term of no weight is 0."""
        return summed([ratio(total, weight) for total, weight in self.terms])

    def __add__(self, other: Any) -> "Weighted":
        if isinstance(other, Weighted):
            return Weighted.of(self.terms + other.terms)
        if isinstance(other, int) and other == 0:  # where `sum` begins
            return self
        raise TypeError(
            f"cannot add {described(other)} to a Weighted: over several microbatches it is not "
            "known what it would be divided by; add jaxmem.Weighted(x, 1) for a term that every "
            "microbatch has alike, or jaxmem.Weighted(x.sum(), x.size) for one per example"
        )

    __radd__ = __add__

    def __mul__(self, factor: Any) -> "Weighted":
        if isinstance(factor, Weighted):
            raise TypeError("a Weighted can be multiplied by a number, not by another Weighted")
        factor = scalar("the factor of a Weighted", factor)
        return Weighted.of((total * factor, weight) for total, weight in self.terms)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Weighted":
        if isinstance(divisor, Weighted):
            raise TypeError("a Weighted can be divided by a number, not by another Weighted")
        return self * (1 / divisor)

    def __neg__(self) -> "Weighted":
        return self * -1

    def __sub__(self, other: Any) -> "Weighted":
        return self + -other

    def __rsub__(self, other: Any) -> "Weighted":
        return -self + other

    def tree_flatten_with_keys(self) -> tuple[Any, int]:
        keys = [jax.tree_util.SequenceKey(index) for index in range(2 * len(self.terms))]
        return list(zip(keys, (part for term in self.terms for part in term), strict=True)), 0

    @classmethod
    def tree_unflatten(cls, _: int, parts: Any) -> "Weighted":
        parts = list(parts)
        return cls.of(zip(parts[::2], parts[1::2], strict=True))


# ---------------------------------------------------------------- implementation


def ratio(total: jax.Array, weight: jax.Array) -> jax.Array:
    """total / weight in float32 or wider, and 0 where there is no weight, whatever the total."""
    dtype = at_least_float32(jnp.result_type(total))
    weight = jnp.asarray(weight, dtype)
    none = weight == 0
    total = jnp.where(none, own_zero(dtype), jnp.asarray(total, dtype))
    return total / jnp.where(none, jnp.ones((), dtype), weight)


def counted(total: jax.Array, weight: jax.Array) -> jax.Array:
    """A microbatch's total as it counts in the batch: 0 if it has no weight and is not finite."""
    out = (weight == 0) & ~jnp.isfinite(total)
    return jnp.where(out, jnp.zeros_like(total), total)


def summed(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum of scalars, in what they promote to."""
    dtype = promoted(*(part.dtype for part in parts))
    return functools.reduce(jnp.add, [part.astype(dtype) for part in parts])


def checked_weight(what: str, weight: Any, dtype: Any = jnp.float32) -> Any:
    """`weight` in this dtype, if it can be one; where it is not known yet and negative, NaN.

    Raises:
      TypeError: it is not a real number.
      ValueError: it is not a scalar, or is known and negative or not finite.
    """
    found = scalar(what, weight, "the number of tokens or examples")
    if isinstance(weight, Tracer):
        found = jax.lax.stop_gradient(found).astype(dtype)
        return jnp.where(found >= 0, found, jnp.nan)
    if not 0 <= float(weight) < float("inf"):
        raise ValueError(
            f"{what} must be at least 0 and finite, got {float(weight)}; pass the number of tokens "
            "or examples that count"
        )
    return jnp.asarray(weight, dtype)


def check_finished(weights: Any) -> None:
    """Raises `ValueError` if a sum of weights is known and NaN, as one negative weight makes it."""
    for weight in weights:
        if not isinstance(weight, Tracer) and np.isnan(np.asarray(weight)):
            raise ValueError(
                "the weight of a microbatch is negative or NaN; jaxmem.Weighted(total, weight) "
                "wants the number of tokens or examples that count, which is at least 0"
            )


def scalar(what: str, value: Any, example: str = "") -> Any:
    """`value`, if it is a real number or an array of one, without axes.

    Raises:
      TypeError: it is not a number, or a complex one.
      ValueError: it has axes.
    """
    pass_ = f"; pass {example}" if example else ""
    known = isinstance(value, numbers.Real | np.ndarray | np.generic | jax.Array)
    dtype = jnp.result_type(value) if known else None
    if dtype is None or not (
        jnp.issubdtype(dtype, jnp.floating)
        or jnp.issubdtype(dtype, jnp.integer)
        or jnp.issubdtype(dtype, jnp.bool_)
    ):
        raise TypeError(f"{what} must be a real number, got {described(value)}{pass_}")
    if jnp.shape(value):
        raise ValueError(
            f"{what} must be a scalar, got {described(value)}; sum it first"
            if not example
            else f"{what} must be a scalar, got {described(value)}{pass_}"
        )
    return value if isinstance(value, jax.Array) else jnp.asarray(value)
