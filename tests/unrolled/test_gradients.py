"""Gradients of parameters in unrolled code: where optimizers update in place."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem

WIDTH, INNER, LAYERS, ROWS = 512, 2048, 8, 1024
# `jaxmem.unrolled.run` is a function, too.
MODULES = [importlib.import_module(f"jaxmem.unrolled.{name}") for name in ("code", "run")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_updated_in_their_places(dtype: str) -> None:
    """By Adam: else its moments are made elsewhere, transposed, and copied back."""

    @jaxmem.remat_sqrt
    def loss(ws: Any, h: jax.Array) -> jax.Array:
        for w in ws:
            up, down = (w[name].astype(dtype) for name in ("up", "down"))
            h = h + jnp.tanh(h @ up) @ down
        return jnp.square(h.astype(jnp.float32)).mean()

    optimizer = optax.adamw(1e-3)

    def step(ws: Any, state: Any, h: jax.Array) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(ws, h), state, ws)
        return optax.apply_updates(ws, updates), state

    layer = {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    ws = [{name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in layer.items()}] * LAYERS
    args: Any = ws, jax.eval_shape(optimizer.init, ws), jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)

    def report() -> Any:
        options: Any = {"donate_argnums": (0, 1), "target": "h100-80g", "suggest": False}
        return jaxmem.memory_report(step, *args, **options)

    ours = report()
    without_rule = [mock.patch.object(one, "platform", return_value="tpu") for one in MODULES]
    with without_rule[0], without_rule[1]:
        without = report()
    assert ours.required_bytes < without.required_bytes
    assert ours.fusions.bytes < 0.97 * without.fusions.bytes


@pytest.mark.slow
def test_gradients_of_what_all_layers_read_are_added_layer_by_layer() -> None:
    """As of a bias that a table gives; else each layer's would be live to the end."""
    batch, heads, length, width = 4, 4, 256, 128
    spec = jax.ShapeDtypeStruct

    @jaxmem.remat_sqrt
    def loss(ws: Any, table: jax.Array, mask: jax.Array, h: jax.Array) -> jax.Array:
        apart = jnp.arange(length)[:, None] - jnp.arange(length) + length
        bias = table[:, apart].astype(h.dtype) + mask
        for w in ws:
            q, k, v = (
                (h @ w[name].astype(h.dtype)).reshape(batch, length, heads, -1).swapaxes(1, 2)
                for name in "qkv"
            )
            mixed = jax.nn.softmax(q @ k.swapaxes(2, 3) + bias) @ v
            h = h + mixed.swapaxes(1, 2).reshape(h.shape) @ w["o"].astype(h.dtype)
        return jnp.square(h.astype(jnp.float32)).mean()

    def temp_bytes(layers: int) -> int:
        args = (
            [{name: spec((width, width), "float32") for name in "qkvo"}] * layers,
            spec((heads, 2 * length), "float32"),
            spec((batch, 1, length, length), "bfloat16"),
            spec((batch, length, width), "bfloat16"),
        )
        step = jax.value_and_grad(loss, (0, 1))
        return jaxmem.memory_report(step, *args, target="h100-80g", suggest=False).temp_bytes

    assert temp_bytes(16) < 1.2 * temp_bytes(8)
