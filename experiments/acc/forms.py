"""The ways to accumulate: each makes a train step from a loss, an optimizer and microbatches.

They get the same losses and use what they can: a tool that supports weights is given them, one
that does not takes the mean.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxmem

# ---------------------------------------------------------------- types


class Losses(NamedTuple):
    """One loss, as tools want it; each is a function of parameters and a batch."""

    mean: Callable[[Any, Any], jax.Array]
    weighted: Callable[[Any, Any], jaxmem.Weighted]
    weight: Callable[[Any], Any]  # of a batch alone: what the mean is over


class Step(NamedTuple):
    """A train step.

    Attributes:
      init: from parameters to the state.
      update: from parameters, state and rows to parameters, state and loss.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to accumulate.

    Attributes:
      name: in tables.
      takes: what one call of the step sees.
      make: from losses, an optimizer and the number of microbatches to a step.
      approximate: it takes no optimizer but is one, and not quite Adam.
    """

    name: str
    takes: Literal["batch", "microbatch"]
    make: Callable[[Losses, optax.GradientTransformation, int], Step]
    approximate: bool = False

    @property
    def ours(self) -> bool:
        return self.name.startswith("jaxmem")


# ---------------------------------------------------------------- implementation


def _inside(gradient: Callable[[Losses, int], Callable[..., Any]]) -> Callable[..., Step]:
    def make(losses: Losses, inner: optax.GradientTransformation, microbatches: int) -> Step:
        value_and_grad = gradient(losses, microbatches)

        def update(params: Any, state: Any, rows: Any) -> Any:
            value, grads = value_and_grad(params, rows)
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return Step(inner.init, update)

    return make


def _across(wrapper: Any, skip: bool, weights: bool) -> Callable[..., Step]:
    def make(losses: Losses, inner: optax.GradientTransformation, microbatches: int) -> Step:
        options = {"should_skip_update_fn": optax.skip_not_finite} if skip else {}
        tx = wrapper(inner, microbatches, **options)

        def update(params: Any, state: Any, rows: Any) -> Any:
            value, grads = jax.value_and_grad(losses.mean)(params, rows)
            extra = {"weight": losses.weight(rows)} if weights else {}
            updates, state = tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state, value

        return Step(tx.init, update)

    return make


def _adam_a(losses: Losses, inner: optax.GradientTransformation, microbatches: int) -> Step:
    adam = jaxmem.AdamA(1e-3)
    value_and_update = adam.value_and_update(losses.weighted, microbatches=microbatches)

    def update(params: Any, state: Any, rows: Any) -> Any:
        value, updates, state = value_and_update(state, params, rows)
        return optax.apply_updates(params, updates), state, value

    return Step(adam.init, update)


def _at_once(losses: Losses, microbatches: int) -> Callable[..., Any]:
    return jax.value_and_grad(losses.mean)


def _ours(losses: Losses, microbatches: int) -> Callable[..., Any]:
    return jaxmem.value_and_grad(losses.mean, microbatches=microbatches)


def _ours_weighted(losses: Losses, microbatches: int) -> Callable[..., Any]:
    return jaxmem.value_and_grad(losses.weighted, microbatches=microbatches)


def _optax_microbatch(losses: Losses, microbatches: int) -> Callable[..., Any]:
    def value_and_grad(params: Any, rows: Any) -> Any:
        count = jax.tree.leaves(rows)[0].shape[0]
        return optax.microbatching.microbatch(
            jax.value_and_grad(losses.mean),
            argnums=1,
            microbatch_size=-(-count // microbatches),
            accumulator=optax.microbatching.AccumulationType.MEAN,
        )(params, rows)

    return value_and_grad


def _by_hand(losses: Losses, microbatches: int) -> Callable[..., Any]:
    """What most would write."""

    def value_and_grad(params: Any, rows: Any) -> Any:
        def body(total: Any, rows: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(losses.mean)(params, rows)
            return jax.tree.map(jnp.add, total, found), None

        parts = jax.tree.map(
            lambda leaf: leaf.reshape(microbatches, leaf.shape[0] // microbatches, *leaf.shape[1:]),
            rows,
        )
        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        total, _ = jax.lax.scan(body, zeros, parts)
        return jax.tree.map(lambda leaf: leaf / microbatches, total)

    return value_and_grad


# ---------------------------------------------------------------- the list

ONE_MICROBATCH = Form("one microbatch, nothing accumulated", "microbatch", _inside(_at_once))
AT_ONCE = Form("whole batch at once", "batch", _inside(_at_once))
BY_HAND = Form("lax.scan by hand", "batch", _inside(_by_hand))
OURS = Form("jaxmem.value_and_grad", "batch", _inside(_ours))
WEIGHTED = Form("jaxmem.value_and_grad, Weighted", "batch", _inside(_ours_weighted))
ADAM_A = Form("jaxmem.AdamA (approximate)", "batch", _adam_a, approximate=True)
MICROBATCH = Form("optax.microbatch, MEAN", "batch", _inside(_optax_microbatch))
MULTI_STEPS = Form("jaxmem.MultiSteps", "microbatch", _across(jaxmem.MultiSteps, False, True))
OPTAX_MULTI_STEPS = Form("optax.MultiSteps", "microbatch", _across(optax.MultiSteps, False, False))

FORMS = (
    AT_ONCE,
    OURS,
    WEIGHTED,
    ADAM_A,
    BY_HAND,
    MICROBATCH,
    MULTI_STEPS,
    Form("jaxmem.MultiSteps, skipping", "microbatch", _across(jaxmem.MultiSteps, True, True)),
    OPTAX_MULTI_STEPS,
    Form("optax.MultiSteps, skipping", "microbatch", _across(optax.MultiSteps, True, False)),
)
