"""Casts of parameters in plans: computed when the piece that reads them begins, not all ahead."""

import dataclasses
import importlib
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import pytest
from helpers.budgeted import plans, problem, question

import jaxmem
from jaxmem import StepPlan
from jaxmem.unrolled import Piece, UnrolledPlan

HEADS = 8


def attention(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.reshape(x @ p[n].astype(x.dtype), (*x.shape[:2], HEADS, -1)) for n in "qkv")
    probabilities = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / 4, axis=-1)
    mixed = jnp.einsum("bhij,bjhd->bihd", probabilities, v)
    return x + mixed.reshape(x.shape) @ p["o"].astype(x.dtype)


def mlp(p: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)


def hourglass(params: Any, x: jax.Array) -> jax.Array:
    """As in a U-net: few rows in the middle, with the large matrices, and many rows around it."""
    x = x.astype(jnp.bfloat16)
    inner = params["inner"][0]["up"].shape[0]
    for p in params["outer"][:2]:
        x = attention(p, x)
    y = x.reshape(x.shape[0], -1, inner)[:, ::8]
    for p in params["inner"]:
        y = mlp(p, y)
    x = x + jnp.repeat(y, 8, axis=1).reshape(x.shape)
    for p in params["outer"][2:]:
        x = attention(p, x)
    return x


def step(fn: Any) -> Any:
    def updated(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.square(fn(params, x).astype(jnp.float32)).mean()

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return updated


def specs(tokens: int, width: int, inner: int, depth: int) -> tuple[Any, Any]:
    def matrix(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {"up": matrix(inner, 4 * inner), "down": matrix(4 * inner, inner)}
    outer = {name: matrix(width, width) for name in "qkvo"}
    return {"inner": [layer] * depth, "outer": [outer] * 4}, matrix(4, tokens, width)


def ordered(plan: StepPlan, orders_casts: bool) -> StepPlan:
    own = [dataclasses.replace(one.plan, orders_casts=orders_casts) for one in plan.regions]  # pyright: ignore[reportCallIssue, reportArgumentType]
    pairs = zip(plan.regions, own, strict=True)
    regions = tuple(dataclasses.replace(region, plan=one) for region, one in pairs)
    return dataclasses.replace(plan, regions=regions)


@pytest.mark.slow
def test_where_matrices_are_large_their_casts_are_not_all_there_at_once() -> None:
    ask = question(
        step(jaxmem.remat_auto(hourglass)),
        *specs(1024, 128, 1024, 6),
        target="h100-80g",
        donate=(0,),
    )
    found = problem(ask.step, *ask.args, target="h100-80g", donate=(0,)).in_full()
    least = len(found.front) - 1
    plan = found.plan(least)
    assert all(getattr(region.plan, "orders_casts", False) for region in plan.regions)
    ours = found.report(ask, least)
    assert abs(ours.required_bytes - found.predicted[least]) < 0.02 * ours.temp_bytes
    without = ask.begin(ordered(plan, False)).result()
    assert ours.temp_bytes < 0.9 * without.temp_bytes
    assert ours.fusions is not None
    assert without.fusions is not None
    assert ours.fusions.bytes < 1.01 * without.fusions.bytes
    # What is recomputed for a stage has casts of its own, which wait for the gradient.
    backward = importlib.import_module("jaxmem.estimate.backward")
    with mock.patch.object(backward, "_late_parameters", return_value={}):
        ahead = ask.begin(plan).result()
    assert ours.temp_bytes < ahead.temp_bytes


def test_the_order_of_casts_changes_no_value() -> None:
    params, x = specs(16, 32, 64, 2)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    params, x = jax.tree.map(lambda s: 0.1 * jax.random.normal(next(keys), s.shape), (params, x))
    planned = step(jaxmem.remat_auto(hourglass))
    plain = jax.jit(step(hourglass))(params, x)
    for plan in plans(planned, params, x, most=3):
        for orders_casts in (False, True):
            with jaxmem.use_plan(ordered(plan, orders_casts)):
                values = jax.jit(lambda *args: planned(*args))(params, x)
            chex.assert_trees_all_close(values, plain, rtol=2e-2, atol=2e-3)


def test_a_plan_tells_whether_it_orders_casts() -> None:
    plan = UnrolledPlan(4, (Piece(0, 4),), orders_casts=True)
    assert UnrolledPlan.from_data(plan.to_data()) == plan
    assert "orders_casts" not in UnrolledPlan(4, (Piece(0, 4),)).to_data()
    with pytest.raises(ValueError, match="orders_casts: expected true or false, got 1"):
        UnrolledPlan.from_data({**plan.to_data(), "orders_casts": 1})


def test_few_casts_are_left_where_the_compiler_puts_them() -> None:
    """What is computed in front of a piece and in it can be done in one kernel then."""
    for inner, orders_casts in ((1024, True), (128, False)):
        args = specs(1024, 128, inner, 2)
        step_ = step(jaxmem.remat_auto(hourglass))
        found = problem(step_, *args, target="h100-80g", donate=(0,))
        [region] = found.plan(len(found.front) - 1).regions
        assert getattr(region.plan, "orders_casts", None) is orders_casts
