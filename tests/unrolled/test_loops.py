"""Layers called one after the other, each with a scan inside."""

import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from helpers.budgeted import problem, question
from helpers.releases import SINCE_0_12
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxmem
from jaxmem import _jax

# ---------------------------------------------------------------- arrays of a loop's own


def scans(x: jax.Array, reverse: bool, unroll: int, start: float) -> Any:
    """Carries that are given, constant and counted; rows of three types; operands that are none."""
    key = jax.random.key(3)

    def turn(carry: Any, row: jax.Array) -> Any:
        total, best, count = carry
        noise = jax.random.uniform(jax.random.fold_in(key, count), row.shape)
        total = total + row * noise
        best = jnp.maximum(best, total)
        return (total, best, count + 1), (total, count, best > 1)

    begin = x[0], jnp.full(x.shape[1:], start, x.dtype), jnp.int32(0)
    outs = lax.scan(turn, begin, x, reverse=reverse, unroll=unroll)
    counted = lax.scan(lambda count, _: (count + 1, count), jnp.int32(2), length=5)
    return outs, counted


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([0.0, -0.0, -jnp.inf, 0.5]),
)
def test_loops_with_arrays_of_their_own_compute_the_same(
    length: int, reverse: bool, unroll: int, start: float
) -> None:
    x = jnp.linspace(-1, 1, 3 * length).reshape(length, 3)
    closed = jax.make_jaxpr(lambda x: scans(x, reverse, unroll, start))(x)
    special = _jax.with_own_arrays(_jax.inlined(closed))
    found = _jax.evaluate(_jax.inlined(closed), [x], special)
    chex.assert_trees_all_equal(found, jax.tree.leaves(scans(x, reverse, unroll, start)))
    for one, aval in zip(found, closed.out_avals, strict=True):
        assert jax.typeof(one) == aval


# ---------------------------------------------------------------- layers

HEADS, LENGTH, WIDTH = 2, 8, 16


def attention(h: jax.Array, w: jax.Array, chunks: int = 4) -> jax.Array:
    """Over chunks of the queries, scores of a chunk at a time."""
    q, k, v = (h @ part for part in jnp.split(w, 3, 1))

    def turn(_: None, part: jax.Array) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", part, k))
        return None, jnp.einsum("bqk,bkd->bqd", scores, v)

    parts = q.reshape(len(h), chunks, -1, h.shape[-1]).swapaxes(0, 1)
    return lax.scan(turn, None, parts)[1].swapaxes(0, 1).reshape(h.shape)


def recurrent(h: jax.Array, w: jax.Array) -> jax.Array:
    """From zeros, along the sequence."""

    def turn(state: jax.Array, row: jax.Array) -> Any:
        state = jnp.tanh(row @ w[:, : h.shape[-1]] + state @ w[:, h.shape[-1] : 2 * h.shape[-1]])
        return state, state

    return lax.scan(turn, jnp.zeros_like(h[:, 0]), h.swapaxes(0, 1))[1].swapaxes(0, 1)


def model(ws: list[jax.Array], h: jax.Array, inner: Any = attention) -> jax.Array:
    for w in ws:
        h = h + inner(jnp.sin(h), w)
        h = h + jnp.tanh(h @ w) @ w.T
    return jnp.square(h).sum()


def arrays(layers: int, batch: int, length: int, width: int) -> Any:
    keys = jax.random.split(jax.random.key(0), layers)
    ws = [jax.random.normal(key, (width, 3 * width)) * width**-0.5 for key in keys]
    return ws, jax.random.normal(jax.random.key(1), (batch, length, width))


def shapes(layers: int, batch: int, length: int, width: int) -> Any:
    return jax.eval_shape(lambda: arrays(layers, batch, length, width))


@pytest.mark.slow
@pytest.mark.parametrize("inner", [attention, recurrent])
def test_each_way_to_take_scans_computes_the_same(inner: Any) -> None:
    def loss(ws: Any, h: Any) -> Any:
        return model(ws, h, inner)

    args = arrays(3, 2, LENGTH, WIDTH)
    wanted = jax.value_and_grad(loss, (0, 1))(*args)
    step = jax.value_and_grad(jaxmem.remat_auto(loss), (0, 1))
    found = problem(step, *args)
    assert {own.scans for own in found.variants} == {"stacks", "parts", "checkpointed"}
    picked = {}  # of each way the leanest plan, and one in the middle
    for place, one in enumerate(found.front):
        picked.setdefault(one.variant, []).append(place)
    assert len(picked) > 1
    for places in picked.values():
        for place in {places[-1], places[len(places) // 2]}:
            plan = jaxmem.StepPlan.from_json(found.plan(place).to_json())
            with jaxmem.use_plan(plan):
                chex.assert_trees_all_close(jax.jit(step)(*args), wanted, rtol=2e-5, atol=5e-4)


@pytest.mark.slow
def test_plans_of_code_with_scans_are_mapped_and_sharded() -> None:
    ws, h = arrays(3, 2, LENGTH, WIDTH)
    several = jnp.stack([h, 2 * h])
    wanted = jax.vmap(jax.grad(model), (None, 0))(ws, several)
    step = jax.grad(jaxmem.remat_auto(model))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def of_one(ws: Any, h: Any) -> Any:
        return jax.tree.map(lambda g: g[None], step(lax.pcast(ws, "data", to="varying"), h[0]))

    by_data = PartitionSpec("data")
    spread = jax.shard_map(
        of_one, mesh=mesh, in_specs=(PartitionSpec(), by_data), out_specs=by_data
    )
    for run in (jax.vmap(step, (None, 0)), spread):
        found = problem(run, ws, several)
        of_code = [
            place
            for place, one in enumerate(found.front)
            if found.variants[one.variant].scans == "parts"
        ]
        with jaxmem.use_plan(found.plan(of_code[-1])):
            chex.assert_trees_all_close(jax.jit(run)(ws, several), wanted, rtol=2e-5, atol=5e-4)


def test_a_plan_from_before_scans_could_be_parts_is_read() -> None:
    old = jaxmem.StepPlan().to_json().replace(',\n "scans": "stacks"', "")
    assert "scans" not in old
    assert jaxmem.StepPlan.from_json(old) == jaxmem.StepPlan()


# ---------------------------------------------------------------- memory

TARGET: Any = {"target": "h100-80g"}


def update(loss: Any) -> Any:
    def step(ws: Any, h: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, h))

    return step


def around(ws: Any, h: Any, recomputed: Any = lambda layer: layer) -> jax.Array:
    for w in ws:
        h = recomputed(lambda h, w: h + attention(h, w))(h, w)
    return jnp.square(h).sum()


@pytest.mark.slow
def test_a_layer_that_is_recomputed_does_not_hold_the_arrays_of_the_others_loops() -> None:
    """Compilers before jax 0.12's make those of all at once where nothing is in their way."""
    args = shapes(4, 8, 1024, 64)
    by_jax = jaxmem.memory_report(
        update(lambda ws, h: around(ws, h, jax.checkpoint)), *args, **TARGET
    )
    step = update(jaxmem.remat_auto(around, min_length=5))
    found, ask = problem(step, *args, **TARGET), question(step, *args, **TARGET)
    leanest = len(found.front) - 1
    report = found.report(ask, leanest)
    assert (1 if SINCE_0_12 else 3) * report.temp_bytes < by_jax.temp_bytes
    assert found.predicted[leanest] == pytest.approx(report.required_bytes, rel=0.1)


def test_a_policy_for_equal_scans_inside_of_layers_tells_what_it_leaves() -> None:
    args = arrays(3, 2, LENGTH, WIDTH)
    with pytest.warns(jaxmem.NoStackWarning, match=r"its 3 scans, equal ones, with \d+% of its"):
        jax.grad(jaxmem.remat_full(model))(*args)
    with pytest.warns(jaxmem.NoStackWarning, match="pass min_length=5: then the policy is for"):
        jax.grad(jaxmem.remat_sqrt(model))(*args)


@pytest.mark.slow
def test_sqrt_cuts_layers_with_scans_inside_that_it_is_told_of() -> None:
    args = arrays(6, 2, LENGTH, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = jax.grad(jaxmem.remat_sqrt(model, min_length=5))(*args)
    chex.assert_trees_all_close(found, jax.grad(model)(*args), rtol=2e-5, atol=1e-6)
    several = shapes(6, 8, 1024, 64)
    plain, cut = (
        jaxmem.memory_report(update(fn), *several, **TARGET).temp_bytes
        for fn in (around, jaxmem.remat_sqrt(around, min_length=5))
    )
    assert 3 * cut < plain
