"""Adam without a gradient: each microbatch's goes straight into the moments.

AdamA, "Adam Accumulation" (Zhang et al. 2023, arXiv 2305.19982), saves the accumulator, a buffer of
the parameters' size.  The first moment is Adam's; the second is a sum of squares where Adam
has the square of a sum, which makes it another optimizer.
"""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.accumulate import modules
from jaxmem.accumulate.gradient import accumulate, outputs
from jaxmem.accumulate.parts import Parts
from jaxmem.accumulate.trees import at_least_float32, described, floating, sum_dtype, weighed
from jaxmem.arguments import is_array

# ---------------------------------------------------------------- types


class AdamAState(NamedTuple):
    """What `AdamA` remembers.

    Attributes:
      count: int32, steps so far.
      mu: first moments.
      nu: second moments.
      tail: state of what comes after, weight decay and learning rate.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Any
    nu: Any
    tail: Any


# ---------------------------------------------------------------- API


class AdamA:
    """Adam (or AdamW) over microbatches, without a buffer for the gradient.

        adam = jaxmem.AdamA(3e-4, weight_decay=0.01)
        state = adam.init(params)
        step = adam.value_and_update(loss, microbatches=8)
        value, updates, state = step(state, params, batch)
        params = optax.apply_updates(params, updates)

    This is an approximation.  With gradients gᵢ of K microbatches, each its share of the
    whole (their sum is the gradient of the batch), one step is

        m ← β₁ m + (1 − β₁) Σᵢ gᵢ        as in Adam
        v ← β₂ v + (1 − β₂) Σᵢ gᵢ²       where Adam has (Σᵢ gᵢ)²

    v is never less than 1/K of Adam's, so that a step is at most √K times as long: that
    long where the microbatches agree.  Where they are noise around 0, the expected v is
    Adam's.  Where they cancel out, v is larger than Adam's, without a bound.  With one
    microbatch it is Adam.  Twice as many microbatches are thus like a learning rate up to
    √2 times as high, for what the data agree on.

    The gradient as a whole never exists: it cannot be clipped, and there is none to look at
    before it is in the moments, so that a NaN stays in them.

    Args:
      learning_rate: a number, or a schedule of optax.
      b1, b2: decay of the moments.
      eps: added to the root of the second moment.
      weight_decay: as in AdamW.
      moment_dtype: of both moments; None for each parameter's own.

    Raises:
      ValueError: a decay is not in [0, 1), or the dtype is not floating.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> adam = jaxmem.AdamA(0.1)
    >>> loss = lambda w, x: ((x @ w) ** 2).mean()
    >>> w, x = jnp.ones(3), jax.random.normal(jax.random.key(0), (12, 3))
    >>> step = jax.jit(adam.value_and_update(loss, microbatches=4))
    >>> value, updates, state = step(adam.init(w), w, x)
    >>> bool(jnp.allclose(value, loss(w, x))), updates.shape, int(state.count)
    (True, (3,), 1)
    """

    def __init__(
        self,
        learning_rate: float | Callable[[Any], Any],
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        *,
        weight_decay: float = 0.0,
        moment_dtype: Any = jnp.float32,
    ) -> None:
        for name, decay in (("b1", b1), ("b2", b2)):
            if not 0 <= decay < 1:
                raise ValueError(f"AdamA: {name} must be at least 0 and less than 1, got {decay}")
        if not (callable(learning_rate) or _is_number(learning_rate)):
            raise TypeError(
                "AdamA: learning_rate is a number or a schedule of optax, got "
                f"{learning_rate!r} of type {type(learning_rate).__name__}"
            )
        self.b1, self.b2, self.eps = b1, b2, eps
        self._dtype = floating("moment_dtype", moment_dtype)
        decay = optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()
        self._tail = optax.chain(decay, optax.scale_by_learning_rate(learning_rate))

    def init(self, params: Any) -> AdamAState:
        """The state before the first step.

        Raises:
          TypeError: the parameters are an NNX module; the text says how to take it apart.
        """
        modules.refuse("AdamA", params)

        def zeros() -> Any:
            return jax.tree.map(
                lambda leaf: jnp.zeros_like(leaf, dtype=sum_dtype(leaf, self._dtype)), params
            )

        return AdamAState(jnp.zeros((), jnp.int32), zeros(), zeros(), self._tail.init(params))

    def value_and_update(
        self,
        fun: Callable[..., Any],
        has_aux: bool = False,
        *,
        microbatches: int = 8,
        batch_argnums: int | Sequence[int] = (1,),
        rng_argnums: int | Sequence[int] = (),
        carry_argnums: int | Sequence[int] = (),
        aux: Any = "stack",
        return_weight: bool = False,
    ) -> Callable[..., Any]:
        """A function of (state, *arguments of fun) that returns value, updates and state.

        Args:
          fun: as for `jaxmem.value_and_grad`; its first argument are the parameters.
          has_aux: `fun` returns a pair; the value is then (value, aux).
          microbatches, batch_argnums, rng_argnums, carry_argnums, aux, return_weight: as for
            `jaxmem.value_and_grad`, positions being those of fun's arguments.

        Returns:
          The function.  For a loss that is a `Weighted`, what computes the weights runs
          twice: a microbatch's share is wanted before the last one has run.

        Raises:
          TypeError, ValueError: as `jaxmem.value_and_grad`.
        """
        parts = Parts.checked(
            argnums=0,
            has_aux=has_aux,
            microbatches=microbatches,
            aux=aux,
            batch_argnums=batch_argnums,
            rng_argnums=rng_argnums,
            carry_argnums=carry_argnums,
            batch_sharding=None,
            return_weight=return_weight,
        )

        @functools.wraps(fun)
        def step(state: AdamAState, *args: Any, **kwargs: Any) -> tuple[Any, Any, AdamAState]:
            if not isinstance(state, AdamAState):
                raise TypeError(
                    f"the first argument must be the state that AdamA.init returned, got "
                    f"{described(state)}"
                )
            modules.refuse("AdamA", args, kwargs)
            sink = _Moments(self.b1, self.b2, state)
            result, call = accumulate(fun, parts, sink, args, kwargs)
            tree = call.trees[0]
            mu, nu = (tree.unflatten([held[k] for held in result.held]) for k in range(2))
            params = call.argument(0, call.leaves)
            count = jnp.asarray(optax.safe_increment(state.count))
            direction = jax.tree.map(
                functools.partial(self._direction, count=count), mu, nu, params
            )
            updates, tail = self._tail.update(direction, state.tail, params)
            return outputs(parts, result), updates, AdamAState(count, mu, nu, tail)

        return step

    def _direction(self, mu: jax.Array, nu: jax.Array, param: jax.Array, count: Any) -> jax.Array:
        dtype = at_least_float32(mu.dtype)
        real = jnp.finfo(dtype).dtype
        first = mu.astype(dtype) / (1 - self.b1 ** count.astype(real))
        second = nu.astype(dtype).real / (1 - self.b2 ** count.astype(real))
        return (first / (jnp.sqrt(second) + self.eps)).astype(param.dtype)


# ---------------------------------------------------------------- implementation


class _Moments:
    """Both moments of each leaf, decayed once and then added to."""

    wants_share = True

    def __init__(self, b1: float, b2: float, state: AdamAState) -> None:
        self.b1, self.b2 = b1, b2
        self.state = state

    def begin(self, leaves: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        mu, nu = jax.tree.leaves(self.state.mu), jax.tree.leaves(self.state.nu)
        if [m.shape for m in mu] != [leaf.shape for leaf in leaves]:
            raise ValueError(
                "the state is not of these parameters: its moments are "
                f"{', '.join(map(described, mu))}, and the parameters "
                f"{', '.join(map(described, leaves))}; pass what AdamA.init(parameters) returned"
            )
        return [
            ((m * self.b1).astype(m.dtype), (v * self.b2).astype(v.dtype))
            for m, v, _ in zip(mu, nu, leaves, strict=True)
        ]

    def divided(self, total: jax.Array, divisor: Any, leaf: jax.Array) -> jax.Array:
        return total

    def end(self, held: Any, divisor: Any, axes: Sequence[str]) -> Any:
        return held

    def add(self, held: Any, gradient: jax.Array, factor: Any) -> tuple[jax.Array, jax.Array]:
        mu, nu = held
        dtype = at_least_float32(mu.dtype, gradient.dtype)
        share = weighed(gradient, factor).astype(dtype)
        square = (share * share.conj()) if jnp.iscomplexobj(share) else share * share
        return (
            (mu.astype(dtype) + (1 - self.b1) * share).astype(mu.dtype),
            (nu.astype(dtype) + (1 - self.b2) * square).astype(nu.dtype),
        )


def _is_number(rate: Any) -> bool:
    return isinstance(rate, numbers.Real) or is_array(rate)
