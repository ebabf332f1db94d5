"""Gradients of parameters in unrolled code: where optimizers update in place."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.budgeted import problem, question

import jaxmem
from jaxmem.unrolled import Piece, UnrolledPlan

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


@pytest.mark.slow
def test_gradients_of_what_is_kept_whole_do_not_wait_for_the_optimizer() -> None:
    """Else what they are made of would: three arrays, while attention is reversed."""
    batch, length, width, inner, heads, words = 8, 1024, 512, 2048, 8, 4096
    spec = jax.ShapeDtypeStruct

    def norm(h: jax.Array) -> jax.Array:
        return jax.nn.standardize(h.astype("float32")).astype(h.dtype)

    @jaxmem.remat_auto
    def model(params: Any, tokens: jax.Array) -> jax.Array:
        h = params["embedding"].astype("bfloat16")[tokens]
        for layer in params["layers"]:
            w = {name: matrix.astype(h.dtype) for name, matrix in layer.items()}
            x = norm(h)
            q, k, v = (
                (x @ w[name]).reshape(batch, length, heads, -1).swapaxes(1, 2) for name in "qkv"
            )
            mixed = jax.nn.softmax((q @ k.swapaxes(2, 3)).astype("float32")).astype(h.dtype) @ v
            h = h + mixed.swapaxes(1, 2).reshape(h.shape) @ w["o"]
            x = norm(h)
            h = h + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
        return norm(h) @ params["head"].astype(h.dtype)

    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = model(params, tokens).astype("float32")
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    square = {name: spec((width, width), "float32") for name in "qkvo"}
    wide = {name: spec((width, inner), "float32") for name in ("gate", "up")}
    params = {
        "embedding": spec((words, width), "float32"),
        "layers": [{**square, **wide, "down": spec((inner, width), "float32")}] * 4,
        "head": spec((width, words), "float32"),
    }
    args = params, jax.eval_shape(optimizer.init, params), spec((batch, length), "int32")
    how: Any = {"target": "h100-80g", "donate": (0, 1)}
    found, ask = problem(step, *args, **how), question(step, *args, **how)

    def is_whole(piece: Piece) -> bool:
        return piece.first > 0 and piece.keep is None and not piece.inner

    def last_piece(candidate: int) -> Piece:
        plan = found.plan(candidate).regions[0].plan
        assert isinstance(plan, UnrolledPlan)
        return plan.pieces[-1]

    # Of plans that keep some of the last layer whole, but not all of it, one in the middle.
    whole = [k for k in range(len(found.front)) if found.kinds[k] == "" and is_whole(last_piece(k))]
    several = [k for k in whole if 40 < last_piece(k).last - last_piece(k).first < 60]
    place = several[len(several) // 2]
    report = found.report(ask, place)
    off = abs(found.predicted[place] - report.required_bytes)
    assert off < 0.01 * report.temp_bytes
    with mock.patch.object(MODULES[1], "_gradients_at_once", return_value=False):
        other = found.report(ask, place)
    assert report.temp_bytes < 0.95 * other.temp_bytes
    assert report.matmul_flops == other.matmul_flops
