"""Casts of parameters in loops over layers, which XLA for TPUs would make of all layers at once."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.stacked import stack
from jaxmem.trace.layer import Body
from jaxmem.trace.row_casts import rounded_rows

LAYERS, WIDTH = 16, 256


def model(cast: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ cast(w["up"])) @ cast(w["down"]), None

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        x = jax.lax.scan(layer, x, weights)[0]
        return jnp.square(x.astype(jnp.float32)).mean()

    return loss


def plainly(w: jax.Array) -> jax.Array:
    return w.astype(jnp.bfloat16)


@jax.jit
def in_a_jit(w: jax.Array) -> jax.Array:
    return w.T.astype(jnp.bfloat16).T


def arrays(layers: int = LAYERS, width: int = WIDTH) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (layers, width, 2 * width), "down": (layers, 2 * width, width)}
    weights = {
        name: jax.random.normal(key, shape) / width**0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return weights, jax.random.normal(keys[2], (width, width), jnp.bfloat16)


POLICIES = {
    "full": jaxmem.policies.full(),
    "sqrt": jaxmem.policies.sqrt(),
    "dots": jaxmem.policies.dots(),
    "revolve": jaxmem.policies.revolve(3),
}


@pytest.mark.parametrize(
    ("name", "cast"), [*((name, plainly) for name in POLICIES), ("full", in_a_jit)]
)
def test_the_numbers_are_the_same(name: str, cast: Any) -> None:
    gradient = jax.grad(jaxmem.remat(model(cast), POLICIES[name]))
    given = arrays(width=16)
    as_elsewhere = jax.jit(lambda *args: gradient(*args))(*given)
    with mock.patch.object(stack, "platform", return_value="tpu"):
        assert "reduce_precision" in str(jax.make_jaxpr(gradient)(*given))
        on_tpu = jax.jit(lambda *args: gradient(*args))(*given)
    chex.assert_trees_all_equal(on_tpu, as_elsewhere)


def test_a_layer_that_casts_nothing_is_itself() -> None:
    half, whole = jnp.ones((2, 2), jnp.bfloat16), jnp.ones((2, 2))
    closed = jax.make_jaxpr(lambda x, w: (x @ w.astype(jnp.float32), -w))(whole, half)
    body = Body(closed, 0, 1)
    assert rounded_rows(body) is body


@pytest.mark.parametrize("name", ["full", "sqrt"])
def test_there_is_no_second_copy_of_the_parameters_on_a_tpu(name: str) -> None:
    """Gradients of the parameters' size, and little more; the copy is half of that."""
    weights, x = jax.eval_shape(lambda: arrays(width=1024))
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(weights))
    gradient = jax.grad(jaxmem.remat(model(plainly), POLICIES[name]))

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient(weights, x))

    report = jaxmem.memory_report(
        step, weights, x, target="v5e-16g", donate_argnums=(0,), suggest=False
    )
    assert report.temp_bytes < 1.2 * size
