"""`use_policy`: other policies without another line of code, and what is recorded of them."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.tracing import recording

WEIGHTS = jnp.linspace(-1, 1, 24 * 4 * 4).reshape(24, 4, 4)
H = jnp.ones(4)


@jaxmem.remat_sqrt(segments=6)
def model(weights: jax.Array, h: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()


def kinds_in(fn: Any, *args: Any) -> list[str]:
    return [found.plan.kind for found in jaxmem.stacks(fn, *args)]


@pytest.mark.parametrize("name", ["none", "full", "dots", "sqrt", "revolve"])
def test_another_policy_is_traced_and_the_numbers_stay(name: str):
    expected = jax.grad(model)(WEIGHTS, H)
    with jaxmem.use_policy(name):
        found = jax.grad(model)(WEIGHTS, H)
        (planned,) = jaxmem.stacks(model, WEIGHTS, H)
    chex.assert_trees_all_equal(found, expected)
    assert (
        planned.plan.kind
        == {
            "none": "none",
            "full": "full",
            "dots": "full",
            "sqrt": planned.plan.kind,
            "revolve": "revolve",
        }[name]
    )
    assert jaxmem.stacks(model, WEIGHTS, H)[0].plan.lengths == (4,)


def test_a_function_jitted_before_is_traced_again_inside_and_not_outside():
    traces = []

    @jax.jit
    @jaxmem.remat_sqrt
    def stack(weights: jax.Array, h: jax.Array) -> jax.Array:
        traces.append(1)
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()

    def temporaries() -> int:
        memory: Any = jax.jit(jax.grad(stack)).lower(WEIGHTS, H).compile().memory_analysis()
        return memory.temp_size_in_bytes

    first = temporaries()
    with jaxmem.use_policy("none"):
        plain = temporaries()
    assert plain != first
    before = len(traces)
    assert temporaries() == first
    assert len(traces) == before


def test_linen_modules_and_scanned_layers_follow():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.tanh(nn.Dense(8)(x)), None

    @jaxmem.remat_full
    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=9
            )
            return stack()(x)[0]

    x = jnp.ones((2, 8))
    params = Encoder().init(jax.random.key(0), x)
    assert kinds_in(Encoder().apply, params, x) == ["full"]
    with jaxmem.use_policy("revolve", slots=3):
        assert kinds_in(Encoder().apply, params, x) == ["revolve"]


def bare(weights: jax.Array, h: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()


def test_undecorated_code_stays_as_it_is_and_it_is_said():
    expected = r"use_policy\(Revolve\(slots=901\)\) changed nothing"
    with (
        pytest.warns(jaxmem.NoEffectWarning, match=expected) as said,
        jaxmem.use_policy("revolve", slots=901),
    ):
        (planned,) = jaxmem.stacks(bare, WEIGHTS, H)
    assert planned.plan.kind == "none"
    assert said[0].filename == __file__


def test_what_is_traced_after_it_is_closed_is_not_under_it():
    with (
        pytest.warns(jaxmem.NoEffectWarning, match="jax.jit alone traces nothing"),
        jaxmem.use_policy("revolve", slots=902),
    ):
        jitted = jax.jit(model)
    jitted(WEIGHTS, H)


def test_what_jax_need_not_trace_again_was_under_it():
    jitted = jax.jit(model)
    for _ in range(2):
        with jaxmem.use_policy("revolve", slots=903):
            jitted(WEIGHTS, H)
    with jax.disable_jit(), jaxmem.use_policy("revolve", slots=904):
        model(WEIGHTS, H)


def test_a_plan_around_undecorated_code_is_spoken_of():
    plan = jaxmem.StepPlan(target="nowhere")
    with (
        pytest.warns(jaxmem.NoEffectWarning, match="use_plan changed nothing"),
        jaxmem.use_plan(plan),
    ):
        jax.grad(bare)(WEIGHTS, H)


def test_two_decorators_around_one_stack():
    outer = jaxmem.remat_full(lambda *arrays: model(*arrays) + 1)
    expected = r"Full\(\) around .* does nothing: .* further in, test_tracing.py:\d+ .* another one"
    with pytest.warns(jaxmem.NoEffectWarning, match=expected):
        assert kinds_in(outer, WEIGHTS, H) == ["periodic"]
    with jaxmem.use_policy("full"):  # the same for both: nothing is lost
        assert kinds_in(outer, WEIGHTS, H) == ["full"]
    for policy in ("full", "dots", "sqrt", "revolve", "none"):
        assert kinds_in(jaxmem.remat(jaxmem.remat(bare, policy), policy), WEIGHTS, H)
    plan = jaxmem.remat(jaxmem.remat_full(bare), jaxmem.Plan.full(8))  # for another length
    with pytest.warns(jaxmem.NoEffectWarning, match="does nothing"):
        assert kinds_in(plan, WEIGHTS, H) == ["full"]
    with_another = jaxmem.remat_full(lambda *arrays: model(*arrays) + bare(*arrays))
    assert kinds_in(with_another, WEIGHTS, H) == ["periodic", "full"]


def test_the_innermost_counts_and_the_outer_one_comes_back():
    with jaxmem.use_policy("full"):
        with jaxmem.use_policy("revolve", slots=2):
            assert kinds_in(model, WEIGHTS, H) == ["revolve"]
        assert kinds_in(model, WEIGHTS, H) == ["full"]
    with pytest.raises(RuntimeError, match="mine"), jaxmem.use_policy("full"):
        raise RuntimeError("mine")
    assert jaxmem.stacks(model, WEIGHTS, H)[0].plan.lengths == (4,)


def test_wrong_policies_are_refused_at_once():
    with (
        pytest.raises(TypeError, match="a Plan fits stacks of one length"),
        jaxmem.use_policy(jaxmem.Plan.full(24)),
    ):
        pass
    with pytest.raises(ValueError, match="sqrtt"), jaxmem.use_policy("sqrtt"):
        pass


def test_what_is_decided_is_recorded():
    with recording() as record:
        jax.make_jaxpr(jax.grad(model))(WEIGHTS, H)
    assert record.regions == [jaxmem.policies.sqrt(segments=6)]
    ((policy, plan),) = record.plans
    assert (policy, plan.lengths) == (jaxmem.policies.sqrt(segments=6), (4,))
    assert record.twice == []

    @jaxmem.remat_full
    def twice(weights: jax.Array, h: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))
        return jax.lax.scan(lambda h, w: (layer(h, w), None), h, weights)[0].sum()

    with recording() as record:
        jax.make_jaxpr(jax.grad(twice))(WEIGHTS, H)
    assert len(record.twice) == 1
    assert "test_tracing.py" in record.twice[0]
