"""Plans of two kinds: single values kept, or layers recomputed whole; the compiler is asked."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem

fit_module: Any = importlib.import_module("jaxmem.fitting.fit")

# Rows of no multiple of eight, which products are padded to.
BATCH, LENGTH, WIDTH, LAYERS, HEADS = 8, 1020, 512, 6, 8


def spec(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def block(h: jax.Array, w: Any) -> jax.Array:
    q, k, v = (h @ w[name] for name in "qkv")
    q, k, v = (part.reshape(*h.shape[:2], HEADS, -1) for part in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape)
    h = h + y @ w["out"]
    return h + jax.nn.gelu(h @ w["up"]) @ w["down"]


@jaxmem.remat_auto
def net(ws: Any, h: jax.Array) -> jax.Array:
    for w in ws:
        h = block(h, w)
    return h


def step(ws: Any, h: jax.Array) -> Any:
    return jax.grad(lambda ws: jnp.square(net(ws, h).astype("float32")).mean())(ws)


def args(length: int = LENGTH) -> Any:
    shapes = dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH))
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layer = {name: spec(*shape) for name, shape in shapes.items()}
    return [layer] * LAYERS, spec(BATCH, length, WIDTH)


@pytest.mark.slow
def test_the_fastest_of_two_kinds_is_the_compilers_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes through a barrier is cut out of a padded product, and padded again behind it."""
    how: Any = {"budget": "1.4GiB", "target": "h100-80g", "progress": False}
    found = jaxmem.fit(step, *args(), **how)
    fewest = jaxmem.fit(step, *args(), cost="flops", **how)
    monkeypatch.setattr(fit_module, "_CHALLENGES", 0)
    alone = jaxmem.fit(step, *args(), **how)
    assert _milliseconds(found) < 0.95 * _milliseconds(alone)
    assert "recomputed whole" in str(found.explain())
    assert "recomputed whole" not in str(alone.explain())
    # Where few FLOPs are wanted nobody asks for it.
    flops = [one.report.matmul_flops or 0 for one in (fewest, alone, found)]
    assert flops[0] < min(flops[1:])
    assert "recomputed whole" not in str(fewest.explain())


@pytest.mark.slow
def test_where_nothing_is_padded_predictions_tell_the_kinds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer is the same as if the compiler had been asked."""
    how: Any = {"budget": "1.4GiB", "target": "h100-80g", "progress": False}
    found = jaxmem.fit(step, *args(1024), **how)
    monkeypatch.setattr(fit_module, "_DOUBT", 1.0)
    asked = jaxmem.fit(step, *args(1024), **how)
    assert found.plan == asked.plan
    assert found.compiles < asked.compiles


def _milliseconds(fitted: jaxmem.Fitted) -> float:
    return 1e3 * (fitted.report.estimated_seconds or 0.0)
