"""`use_policy`: other policies without another line of code, and what is recorded of them."""

import gc
import weakref
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.trace.context import recording

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
    expected = r"Full\(\) around .* does nothing: .* further in, test_context.py:\d+ .* another one"
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
    assert "test_context.py" in record.twice[0]


# ---------------------------------------------------------------- eager calls are traced once

DECORATORS = {
    "full": jaxmem.remat_full,
    "dots": jaxmem.remat_dots,
    "sqrt": jaxmem.remat_sqrt,
    "revolve": jaxmem.remat_revolve(slots=3),
    "none": lambda fn: jaxmem.remat(fn, "none"),
}


class Counted:
    """A stack of layers that counts its traces; reads what `self` holds at that time."""

    def __init__(self) -> None:
        self.traces = 0

    def function(self, weights, h, scale=1.0):
        self.traces += 1
        return scale * jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()


def counted():
    counter = Counted()

    def fn(weights: Any, h: Any, scale: Any = 1.0) -> Any:
        return counter.function(weights, h, scale)

    return counter, fn


def eager_arguments():
    return jnp.full((9, 4, 4), 0.3), jnp.linspace(0.0, 1.0, 8).reshape(2, 4)


@pytest.mark.parametrize("decorator", DECORATORS.values(), ids=list(DECORATORS))
def test_ten_eager_calls_and_their_gradients_are_one_trace(decorator):
    counter, fn = counted()
    weights, h = eager_arguments()
    decorated = decorator(fn)
    found = [decorated(weights, h) for _ in range(10)]
    assert counter.traces == 1
    gradients = [jax.grad(decorated)(weights, h) for _ in range(3)]
    mapped = jax.vmap(decorated, in_axes=(None, 0))(weights, h)
    assert counter.traces == 2  # for the type of one row, too
    chex.assert_trees_all_close(found, [fn(weights, h)] * 10)
    chex.assert_trees_all_close(gradients, [jax.grad(fn)(weights, h)] * 3, rtol=1e-5)
    chex.assert_trees_all_close(mapped, jax.vmap(fn, in_axes=(None, 0))(weights, h))


@pytest.mark.slow
def test_what_decides_a_trace_makes_another():
    counter, fn = counted()
    weights, h = eager_arguments()
    decorated = jaxmem.remat_sqrt(fn)
    assert decorated(weights, h, 1.0) == decorated(weights, h, 1.0)
    assert counter.traces == 1
    for scale in (1, True, 0.0, -0.0, jnp.float32(1)):
        negative = np.signbit(fn(weights, h, scale))
        for _ in range(2):
            assert np.signbit(decorated(weights, h, scale)) == negative
    traced = counter.traces = 0
    for context in (
        jax.default_matmul_precision("highest"),
        jaxmem.use_policy("full"),
        jax.numpy_dtype_promotion("strict"),
    ):
        with context:
            decorated(weights, h, 1.0)
            decorated(weights, h, 1.0)
        traced += 1
        assert counter.traces == traced
    decorated(weights.astype(jnp.bfloat16), h.astype(jnp.bfloat16), 1.0)
    assert counter.traces == traced + 1
    jax.clear_caches()
    decorated(weights, h, 1.0)
    assert counter.traces == traced + 2


def test_objects_that_may_change_are_no_key():
    class Scaled:
        by = 1.0

        @jaxmem.remat_sqrt
        def __call__(self, weights, h):
            return self.by * jax.lax.scan(lambda h, w: (h @ w, None), h, weights)[0].sum()

    model, arguments = Scaled(), eager_arguments()
    first = model(*arguments)
    model.by = 2.0
    assert model(*arguments) == 2 * first
    _, fn = counted()
    decorated: Any = jaxmem.remat_sqrt(fn)
    for scale in (np.array(1.0), np.array(2.0)):
        chex.assert_trees_all_close(decorated(*arguments, scale), fn(*arguments, scale))


@pytest.mark.slow
def test_tracers_that_a_function_closes_over_are_not_kept():
    weights, h = eager_arguments()
    seen: dict[str, jax.Array] = {}

    @jaxmem.remat_sqrt
    def decorated(h):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, seen["weights"])[0].sum()

    def loss(weights):
        seen["weights"] = weights
        found = decorated(h)
        seen.clear()
        return found

    with jax.checking_leaks():
        for factor in (1.0, 2.0):
            found = jax.grad(loss)(factor * weights)
            jitted = jax.jit(jax.grad(loss))(factor * weights)
            chex.assert_trees_all_close(found, jitted, rtol=1e-5)


def test_functions_and_arrays_of_eager_calls_die():
    weights, h = eager_arguments()
    counter, fn = counted()
    decorated = jaxmem.remat_sqrt(fn)

    @jaxmem.remat_sqrt
    def applied(activation, weights, h):
        return jax.lax.scan(lambda h, w: (activation(h @ w), None), h, weights)[0].sum()

    def activation(x):
        return jnp.tanh(x)

    array = weights + 1
    jax.grad(decorated)(array, h)
    jax.grad(applied, argnums=1)(activation, array, h)
    dead = [weakref.ref(o) for o in (fn, counter, activation, array, decorated)]
    del array, activation, fn, counter, decorated
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)


def test_warnings_and_stacks_are_told_at_each_call():
    weights, h = eager_arguments()

    @jaxmem.remat_full
    def no_stack(weights, h):
        return jnp.tanh(h @ weights[0])

    for _ in range(2):
        with pytest.warns(jaxmem.NoStackWarning, match="no layer stack") as warned:
            no_stack(weights, h)
        assert [w.filename for w in warned] == [__file__]
    _, fn = counted()
    decorated = jaxmem.remat_sqrt(fn)
    decorated(weights, h)
    for _ in range(2):
        [stack] = jaxmem.stacks(decorated, weights, h)
        assert stack.stack.length == 9
        with recording() as record:
            jax.grad(decorated)(weights, h)
        assert len(record.regions) == len(record.plans) == 1


def test_a_jitted_function_inside_is_traced_once():
    counter, fn = counted()
    decorated = jaxmem.remat_sqrt(jax.jit(fn))
    for _ in range(3):
        decorated(*eager_arguments())
    assert counter.traces == 1


@pytest.mark.slow
def test_eager_calls_of_modules_are_traced_once():
    traces = []

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dropout(0.5, deterministic=False)(nn.tanh(nn.Dense(4)(x))), None

    class Encoder(nn.Module):
        width: int = 4

        @nn.compact
        def __call__(self, x):
            traces.append(1)
            self.sow("sown", "x", x.sum())
            stack = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=5,
            )
            return nn.Dense(self.width)(stack()(x, None)[0])

    class Twice(nn.Module):
        kind: type

        def setup(self):
            self.inner = self.kind()

        def __call__(self, x):
            return self.inner(x) + self.inner(x)

    x = jnp.ones((2, 4))
    for make in (lambda kind: kind(), Twice):
        plain, model = make(Encoder), make(jaxmem.remat_sqrt(Encoder))
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = {"params": plain.init(rngs, x)["params"]}

        def run(model, seed, params=params):
            rngs = {"dropout": jax.random.key(seed)}
            return model.apply(params, x, rngs=rngs, mutable=["sown"])

        traces.clear()
        found = [run(model, seed) for seed in (1, 1, 2)]
        assert len(traces) == (2 if make is Twice else 1)  # the keys left by the first call differ
        chex.assert_trees_all_equal(found, [run(plain, seed) for seed in (1, 1, 2)])


def test_eager_calls_of_nnx_modules_are_traced_once():
    traces = []

    class Model(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))
            self.layers = make(jax.random.split(rngs.params(), 5))
            self.calls = nnx.Variable(jnp.zeros(()))
            self.scale = 1.0

        def __call__(self, x):
            traces.append(1)
            self.calls[...] += 1
            forward = nnx.scan(
                lambda x, layer: x + jnp.tanh(layer(x)),
                in_axes=(nnx.Carry, 0),
                out_axes=nnx.Carry,
            )
            return self.scale * forward(x, self.layers).sum()

    plain, model = Model(nnx.Rngs(0)), jaxmem.remat_sqrt(Model)(nnx.Rngs(0))
    x = jnp.ones((2, 4))
    first = [model(x) for _ in range(3)]
    assert len(traces) == 1
    chex.assert_trees_all_equal(first, [plain(x) for _ in range(3)])
    assert model.calls[...] == 3
    model.scale = 2.0
    chex.assert_trees_all_close(model(x), 2 * first[0])


def test_a_plan_is_not_hashed_anew_for_each_operation(monkeypatch):
    """jax asks for what holds while it traces with each operation; a step's plan is large."""
    hashed = []
    plain = jaxmem.policies.Revolve.__hash__

    def counted(self):
        hashed.append(self)
        return plain(self)

    def long(x):
        for _ in range(200):
            x = jnp.sin(x)
        return x

    monkeypatch.setattr(jaxmem.policies.Revolve, "__hash__", counted)
    with jaxmem.use_policy("revolve", slots=903):
        jaxmem.stacks(model, WEIGHTS, H)
        before = len(hashed)
        jax.make_jaxpr(long)(1.0)
        assert len(hashed) - before < 50
