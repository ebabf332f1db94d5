"""What `jaxmem.value_and_grad` needs: the memory of one microbatch, and one accumulator."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.accumulating import on_each_stack, wide_loss
from helpers.compiled import compiled
from helpers.grads import whole

import jaxmem

WIDE, ROWS = 2048, 2048
LAYER = WIDE * WIDE * 4


def by_hand(loss: Callable[..., Any], m: int) -> Callable[..., Any]:
    def both(w: Any, x: jax.Array) -> Any:
        def body(carry: Any, x: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(w, x)
            return (carry[0] + value, jax.tree.map(jnp.add, carry[1], gradient)), None

        start = jnp.float32(0), jax.tree.map(jnp.zeros_like, w)
        found, _ = jax.lax.scan(body, start, x.reshape(m, -1, *x.shape[1:]))
        return jax.tree.map(lambda leaf: leaf / m, found)

    return both


def by_optax(loss: Callable[..., Any], m: int) -> Callable[..., Any]:
    return optax.microbatching.microbatch(
        jax.value_and_grad(loss),
        argnums=1,
        microbatch_size=ROWS // m,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )


def adam_step(both: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, state: Any, x: jax.Array) -> Any:
        value, gradient = both(w, x)
        updates, state = optax.adam(1e-3).update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    return step


def size(scanned: bool) -> int:
    """Of all parameters; each layer that is written out is compiled for itself."""
    return (8 if scanned else 4) * LAYER


def required(where: str, both: Callable[..., Any], scanned: bool, rows: int = ROWS) -> float:
    """Device memory of a step of Adam in units of the parameters, all of its state donated."""
    one, depth = jax.ShapeDtypeStruct((WIDE, WIDE), jnp.float32), size(scanned) // LAYER
    w = jax.ShapeDtypeStruct((depth, WIDE, WIDE), jnp.float32) if scanned else [one] * depth
    state = jax.eval_shape(optax.adam(1e-3).init, w)
    x = jax.ShapeDtypeStruct((rows, WIDE), jnp.float32)
    leaves = len(jax.tree.leaves((w, state)))
    needed = compiled(where, adam_step(both), w, state, x, donate=range(leaves)).required
    return needed / size(scanned)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "gpu"])  # the TPU's copies activations in loops
def test_memory_is_one_microbatch_and_one_accumulator(where: str) -> None:
    """Activations fall as 1 / microbatches: to those of a plain step on so many rows."""
    rows = 2**15
    batch = rows * WIDE * 4 / size(scanned=True)
    loss = wide_loss(scanned=True, weighted=True)
    found = []
    for m in (1, 8):
        plain = required(where, whole(loss), True, rows // m)
        found.append(required(where, jaxmem.value_and_grad(loss, microbatches=m), True, rows))
        # The batch is there as a whole; of the rows of a microbatch there is a copy.
        bound = plain + batch + 1.05
        assert found[-1] <= bound
        activations = found[0] - 3 - batch - 1  # and a gradient
        assert activations > 10  # of the parameters' size
        assert found[-1] - 3 - batch <= activations / m + batch / m + 2.05
    assert found[-1] < 0.3 * found[0]


@on_each_stack
def test_memory_is_that_of_a_scan_by_hand_or_less(
    where: str, scanned: bool, weighted: bool
) -> None:
    ours = jaxmem.value_and_grad(wide_loss(scanned, weighted), microbatches=8)
    mean = wide_loss(scanned, weighted=False)
    found = required(where, ours, scanned)
    small = 2**16 / size(scanned)  # scalars, which on TPUs are tiles
    hand = required(where, by_hand(mean, 8), scanned)
    # Stacked parameters have no gradient next to the accumulator.
    assert found <= (hand - 0.85 if scanned else hand + small)
    assert found <= required(where, by_optax(mean, 8), scanned) + small
