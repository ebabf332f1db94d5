"""What it takes to keep a value of a layer, against the compiler's own programs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.estimate.arrays import bytes_of_rows, in_memory

LAYERS, HEADS, LENGTH, WIDTH = 4, 8, 1024, 64


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    """Attention with a softmax written out, what its rows are reduced to by name."""
    q, k, v, out = w
    scores = (x @ q @ jnp.swapaxes(x @ k, 1, 2)).astype(jnp.float32)
    most = checkpoint_name(jax.lax.stop_gradient(scores.max(-1, keepdims=True)), "most")
    powers = jnp.exp(scores - most)
    total = checkpoint_name(powers.sum(-1, keepdims=True), "total")
    found = checkpoint_name((powers / total).astype(x.dtype) @ (x @ v), "attended")
    return x + found @ out, None


def step(policy: Any) -> Any:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        stack = jaxmem.remat(lambda ws, x: jax.lax.scan(layer, x, ws)[0], policy)
        return stack(weights, x).astype(jnp.float32).sum()

    return jax.grad(loss)


ARGS = (
    jax.ShapeDtypeStruct((LAYERS, 4, WIDTH, WIDTH), "bfloat16"),
    jax.ShapeDtypeStruct((HEADS, LENGTH, WIDTH), "bfloat16"),
)


def test_what_rows_are_reduced_to_is_told_with_the_bytes_of_the_rows() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        narrow = x @ w
        wide = narrow.astype(jnp.float32)
        scale = jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + 1)
        return (wide * scale).astype(x.dtype) @ w.T + wide.sum(0)[: w.shape[0]]

    x, w = jnp.ones((64, 32), "bfloat16"), jnp.ones((32, 256), "bfloat16")
    jaxpr = jax.make_jaxpr(f)(x, w).jaxpr
    found = bytes_of_rows(jaxpr, in_memory(jaxpr))
    # Those of the product in bfloat16, not of its square in float32; and no sum over rows.
    assert set(found.values()) == {64 * 256 * 2}
    assert {var.aval.shape for var in found} == {(64,), (64, 1)}


def test_a_softmax_of_which_more_is_kept_is_read_more_often() -> None:
    def moved(*names: str) -> int:
        policy = jaxmem.policies.names(["attended", *names])
        report = jaxmem.memory_report(step(policy), *ARGS, target="h100-80g")
        assert report.roofline is not None
        return report.roofline.bytes

    scores = LAYERS * HEADS * LENGTH * LENGTH * 4
    # Once more for either, in the forward pass; what the backward pass spares is less.
    assert moved("most", "total") > moved() + scores


def test_on_a_gpu_fit_keeps_nothing_that_the_rows_of_a_softmax_are_reduced_to() -> None:
    plain = jaxmem.memory_report(step("none"), *ARGS, target="h100-80g")
    budget = plain.required_bytes - plain.temp_bytes * 2 // 3
    fitted = jaxmem.fit(step("auto"), *ARGS, budget=budget, target="h100-80g", progress=False)
    rows = fitted.explain().rows
    kept = {row.name for row in rows if row.decision == "keep"}
    assert "attended" in kept
    assert not kept & {"most", "total", "reduce_max", "reduce_sum"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100-80g", "v5e-16g"])
def test_with_room_for_everything_what_loops_keep_is_worth_its_traffic(target: str) -> None:
    plain = jaxmem.memory_report(step("none"), *ARGS, target=target)
    asked: Any = {"budget": plain.required_bytes, "target": target, "progress": False}
    fitted = jaxmem.fit(step("auto"), *ARGS, **asked).report
    assert plain.estimated_seconds is not None
    assert fitted.estimated_seconds is not None
    assert fitted.estimated_seconds < 0.7 * plain.estimated_seconds
    assert fitted.temp_bytes < 0.5 * plain.temp_bytes
    fewest = jaxmem.fit(step("auto"), *ARGS, cost="flops", **asked).report
    assert fewest.matmul_flops == plain.matmul_flops
