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
