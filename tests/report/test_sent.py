"""The collectives of reports: under the user's names, on disk and back, and in a difference."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.xla_flags import quick
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem

LAYERS, WIDTH, BATCH = 4, 256, 64
LAYER = WIDTH * WIDTH * 4  # bytes
TARGET = "h100-80g"


def loss(params: Any, x: jax.Array) -> jax.Array:
    return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0] ** 2).mean()


def step(params: Any, x: jax.Array) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))


def report(fn: Any, *args: Any, **options: Any) -> jaxmem.MemoryReport:
    return jaxmem.memory_report(
        fn, *args, target=TARGET, compiler_options=quick(TARGET), suggest=False, **options
    )


def split_over(axis: str) -> tuple[Any, Any]:
    mesh = jaxmem.target(TARGET, devices=8).mesh({axis: 8})
    over = {"w": P(None, axis)}, P(axis)
    shapes = {"w": (LAYERS, WIDTH, WIDTH)}, (BATCH, WIDTH)
    return jax.tree.map(
        lambda axes, shape: jax.ShapeDtypeStruct(
            shape, "float32", sharding=NamedSharding(mesh, axes)
        ),
        over,
        shapes,
        is_leaf=lambda node: isinstance(node, P),
    )


def test_arguments_have_their_paths_and_the_sum_is_that_of_one_call():
    found = report(step, *split_over("fsdp"))
    gathers = [c for c in found.collectives if c.kind == "all-gather"]
    scattered = [c for c in found.collectives if c.kind == "reduce-scatter"]
    # In the forward and in the backward pass.
    assert [(c.name, c.times, c.bytes, c.over) for c in gathers] == [
        ("params/w", 2 * LAYERS, LAYER, "fsdp")
    ]
    assert [(c.times, c.bytes) for c in scattered] == [(LAYERS, LAYER)]
    assert found.collective_bytes == 3 * LAYERS * LAYER * 7 // 8
    sent, steps = found.collective_bytes, 3 * LAYERS * 7
    assert found.communication_seconds == pytest.approx(sent / 450e9 + steps * 3.4e-6)
    assert "if none of it is hidden" in str(found)
    assert list(found.collectives) == sorted(found.collectives, key=lambda c: -c.total_bytes)


def test_from_the_cache_and_in_json_they_are_the_same():
    first = report(jax.grad(loss), *split_over("kept"))
    again = report(jax.grad(loss), *split_over("kept"))
    assert again.cached
    assert again.collectives == first.collectives != ()
    assert {c.axes for c in again.collectives} == {("kept",)}
    assert jaxmem.MemoryReport.from_json(first.to_json()) == first
    data = json.loads(first.to_json())
    assert data["collective_bytes"] == first.collective_bytes
    assert data["collectives"][0]["axes"] == ["kept"]


def test_axes_that_only_the_jitted_function_names():
    mesh = jaxmem.target(TARGET, devices=8).mesh({"rows": 8})
    shardings = {"w": NamedSharding(mesh, P())}, NamedSharding(mesh, P("rows"))
    step = jax.jit(jax.grad(loss), in_shardings=shardings)
    shapes = {"w": (LAYERS, WIDTH, WIDTH)}, (BATCH, WIDTH)
    args = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple) and isinstance(node[0], int),
    )
    found = report(step, *args)
    assert found.devices == 8
    assert [(c.kind, c.over) for c in found.collectives] == [("all-reduce", "rows")]


def test_a_difference_has_what_is_sent_more():
    args = split_over("fsdp")
    whole = report(loss, *args)
    gradient = report(jax.grad(loss), *args)
    change = gradient - whole
    assert change.collective_bytes == gradient.collective_bytes - whole.collective_bytes > 0
    assert json.loads(change.to_json())["collective_bytes"] == change.collective_bytes
    assert "sent to other devices" in str(change)


@pytest.mark.parametrize("target", ["local", TARGET])
def test_one_device_has_none(target: str):
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    found = jaxmem.memory_report(lambda x: x @ x, x, target=target)
    assert (found.collectives, found.collective_bytes) == ((), 0)
    assert found.communication_seconds == 0.0
    assert "sent by each device" not in str(found)
