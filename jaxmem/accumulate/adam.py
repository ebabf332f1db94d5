"""Adam without a gradient: each microbatch's goes directly into the moments.

AdamA, "Adam Accumulation" (Zhang et al. 2023, arXiv 2305.19982), saves the accumulator, a buffer of
the parameters' size.  The first moment is Adam's; the second is a sum of squares where Adam
has the square of a sum, which makes it another optimizer.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem._util.imported import nnx_is_used
from jaxmem.accumulate import devices, modules
from jaxmem.accumulate.call import positional
from jaxmem.accumulate.gradient import accumulate, outputs
from jaxmem.accumulate.mapped import axes_of
from jaxmem.accumulate.parts import Parts
from jaxmem.accumulate.trees import (
    at_least_float32,
    described,
    floating,
    own_zero,
    sum_dtype,
    weighed,
)
from jaxmem.trace.arguments import is_array

if TYPE_CHECKING:
    from flax import nnx

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

    With the rows over D devices there are two forms.  Where the compiler shards the program
    by itself, gᵢ is summed over the devices in each of the K microbatches, and the step is that
    of one device.  With `batch_sharding`, each device adds the shares gᵢₔ of its own rows to
    moments of its own, which are summed over the devices once a step:

        m ← β₁ m + (1 − β₁) Σₔ Σᵢ gᵢₔ        the same
        v ← β₂ v + (1 − β₂) Σₔ Σᵢ gᵢₔ²       which is v of K·D microbatches on one device

    What is said above of K then holds of K·D.  One message of both moments is sent in a step,
    where the other form sends K of a gradient; to keep the v of K microbatches, those K are
    needed, for the square of a sum is not known from its parts.

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

        Args:
          params: a tree of arrays, or an NNX module, which stands for its `nnx.Param`s.

        Raises:
          TypeError: an NNX module is in the tree; the text says what to pass instead.
        """
        if nnx_is_used():
            from flax import nnx

            if isinstance(params, nnx.Module):
                params = nnx.state(params, nnx.Param)
        modules.present((params,), {})

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
        batch_sharding: NamedSharding | PartitionSpec | None = None,
        return_weight: bool = False,
    ) -> Callable[..., Any]:
        """A function of (state, *arguments of fun) that returns value, updates and state.

        With NNX modules what else `fun` changes in them, such as batch statistics, is carried
        from microbatch to microbatch and written back.  Parameters stay as they are, for the
        updates to be added to, unless the state is an `nnx.Optimizer`:

            optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
            step = nnx.jit(adam.value_and_update(loss, microbatches=8))
            value = step(optimizer, model, batch)

        It and the module are then updated in place, as by `optimizer.update`, and the value
        alone is returned.  (Its own `update` cannot be called: it wants the gradient.)

        Args:
          fun: as for `jaxmem.value_and_grad`; its first argument are the parameters, or an NNX
            module that stands for its `nnx.Param`s, or for what `wrt` of the optimizer says.
          has_aux: `fun` returns a pair; the value is then (value, aux).
          microbatches, batch_argnums, rng_argnums, carry_argnums, aux, return_weight: as for
            `jaxmem.value_and_grad`, positions being those of fun's arguments.
          batch_sharding: how the batch lies over devices, as for `jaxmem.value_and_grad`: to sum
            the moments over them once per step.  Each device's part of a microbatch is then a
            microbatch of its own, which changes the second moment; see `AdamA`.

        Returns:
          The function.  For a loss that is a `Weighted`, what computes the weights runs
          twice: a microbatch's share is wanted before the last one has run.

        Raises:
          TypeError, ValueError: as `jaxmem.value_and_grad`; at the call: the state is not of
            these parameters, or an `nnx.Optimizer` of another optimizer.
        """
        parts = Parts.checked(
            argnums=0,
            has_aux=has_aux,
            microbatches=microbatches,
            aux=aux,
            batch_argnums=batch_argnums,
            rng_argnums=rng_argnums,
            carry_argnums=carry_argnums,
            batch_sharding=batch_sharding,
            return_weight=return_weight,
        )

        def step(state: AdamAState, filters: Any, args: Any, kwargs: Any) -> Any:
            axes, *_ = axes_of(batch_sharding)
            sink = _Moments(
                self.b1, self.b2, axes, (jax.tree.leaves(state.mu), jax.tree.leaves(state.nu))
            )
            result, call = accumulate(fun, parts, sink, args, kwargs, filters)
            tree = call.trees[0]
            mu, nu = (tree.unflatten([held[k] for held in result.held]) for k in range(2))
            params = call.argument(0, call.leaves)
            count = jnp.asarray(optax.safe_increment(state.count))
            direction = jax.tree.map(
                functools.partial(self._direction, count=count), mu, nu, params
            )
            updates, tail = self._tail.update(direction, state.tail, params)
            return outputs(parts, result), params, updates, AdamAState(count, mu, nu, tail)

        @functools.wraps(fun)
        def wrapped(state: Any, *args: Any, **kwargs: Any) -> Any:
            if nnx_is_used():
                from flax import nnx

                if isinstance(state, nnx.Optimizer):
                    given, named = positional(fun, args, kwargs)
                    self._check_optimizer(state, given)
                    value, params, updates, new = step(
                        nnx.as_pure(state.opt_state), {0: state.wrt}, given, named
                    )
                    nnx.update(given[0], optax.apply_updates(params, updates))
                    nnx.update(state.opt_state, nnx.state(nnx.as_pure(new)))
                    state.step[...] += 1
                    return value
            if not isinstance(state, AdamAState):
                raise TypeError(
                    f"the first argument must be the state that AdamA.init returned, got "
                    f"{described(state)}"
                )
            value, _, updates, state = step(state, {}, args, kwargs)
            return value, updates, state

        return wrapped

    def _check_optimizer(self, optimizer: "nnx.Optimizer", args: Sequence[Any]) -> None:
        """Raises `TypeError` or `ValueError` if it cannot be the state."""
        from flax import nnx

        if optimizer.tx is not self:
            raise ValueError(
                "the nnx.Optimizer was made with another optimizer, of type "
                f"{type(optimizer.tx).__name__}; pass nnx.Optimizer(model, adam, wrt=nnx.Param) "
                "with the AdamA whose value_and_update this is"
            )
        if not args or not isinstance(args[0], nnx.Module):
            raise TypeError(
                "an nnx.Optimizer is followed by the module that it was made for, got "
                f"{described(args[0]) if args else 'nothing'}; pass what AdamA.init returned with "
                "parameters that are no module"
            )

    def _direction(self, mu: jax.Array, nu: jax.Array, param: jax.Array, count: Any) -> jax.Array:
        dtype = at_least_float32(mu.dtype)
        real = jnp.finfo(dtype).dtype
        first = mu.astype(dtype) / (1 - self.b1 ** count.astype(real))
        second = nu.astype(dtype).real / (1 - self.b2 ** count.astype(real))
        return (first / (jnp.sqrt(second) + self.eps)).astype(param.dtype)


# ---------------------------------------------------------------- implementation


@dataclasses.dataclass(frozen=True)
class _Moments:
    """Both moments of each leaf, decayed once and then added to.

    Attributes:
      axes: mesh axes over which other parts of the batch lie.
      arrays: the moments before, two lists.
    """

    b1: float
    b2: float
    axes: tuple[str, ...]
    arrays: Any
    in_backward = False
    wants_share = True
    zero = None

    def specs(
        self, leaves: Sequence[jax.Array], names: Sequence[str], axes: Sequence[str]
    ) -> PartitionSpec:
        return PartitionSpec()

    def with_arrays(self, arrays: Any) -> "_Moments":
        return dataclasses.replace(self, arrays=arrays)

    def begin(
        self, leaves: Sequence[jax.Array], names: Sequence[str], axes: Sequence[str]
    ) -> list[tuple[jax.Array, jax.Array]]:
        mu, nu = self.arrays
        if [m.shape for m in mu] != [leaf.shape for leaf in leaves]:
            raise ValueError(
                "the state is not of these parameters: its moments are "
                f"{', '.join(map(described, mu))}, and the parameters "
                f"{', '.join(map(described, leaves))}; pass what AdamA.init(parameters) returned"
            )
        return [
            (self._decayed(m, self.b1), self._decayed(v, self.b2))
            for m, v in zip(mu, nu, strict=True)
        ]

    def _decayed(self, moment: jax.Array, decay: float) -> jax.Array:
        decayed = (moment * decay).astype(moment.dtype)
        if not self.axes:
            return decayed
        # What was before is in the sum over the devices once.
        first = jax.lax.axis_index(self.axes) == 0
        return jnp.where(first, decayed, own_zero(moment.dtype))

    def divided(self, total: jax.Array, divisor: Any, leaf: jax.Array) -> jax.Array:
        return total

    def end(self, held: Any, divisor: Any, axes: Sequence[str]) -> Any:
        return devices.summed(held, axes)

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
