"""`jaxmem.dynamic_loss_scale`: halves on overflow, doubles after good steps, skips a step whole."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem

dynamic_loss_scale: Any = jaxmem.dynamic_loss_scale

# Real overflow: 300 × 300 is more than float16 holds.
PARAMS = {"layers": jnp.full((3, 4, 4), 0.25), "head": jnp.array([1.0, -0.0, 0.5, 2.0])}
SMALL, LARGE = jnp.full((2, 4), 0.5), jnp.full((2, 4), 300.0)


@jaxmem.mixed_precision(compute_dtype="float16")
def loss(params: Any, x: jax.Array) -> jax.Array:
    h, _ = jax.lax.scan(lambda h, w: (h @ w, None), x, params["layers"])
    return ((h * params["head"]) ** 2).mean()


def scaled(params: Any, x: jax.Array, scale: Any) -> jax.Array:
    return loss(params, x) * scale


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def step(optimizer: Any) -> Any:
    @jax.jit
    def run(params: Any, state: Any, x: jax.Array) -> tuple[Any, Any, Any]:
        scale = jaxmem.loss_scale(state)
        value, gradients = jax.value_and_grad(scaled)(params, x, scale)
        updates, state = optimizer.update(gradients, state, params)
        return value / scale, optax.apply_updates(params, updates), state

    return run


def in_steps(optimizer: Any, run: Any, batches: Any, params: Any = PARAMS) -> list[Any]:
    """(value, parameters, state) after each batch, with the beginning first."""
    state = optimizer.init(params)
    found = [(None, params, state)]
    for x in batches:
        value, params, state = run(params, state, x)
        found.append((value, params, state))
    return found


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "quantized": jaxmem.quantize_state(optax.adamw(1e-2), min_size=1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_leaves_parameters_and_state_as_they_were_bit_for_bit(name: str):
    optimizer = dynamic_loss_scale(OPTIMIZERS[name], initial=4)
    found = in_steps(optimizer, step(optimizer), [SMALL, LARGE, SMALL])
    (_, _, begin), (_, params, state), (value, after, skipped), (_, last, end) = found
    assert not np.isfinite(value)
    assert bits(after) == bits(params) != bits(PARAMS)
    assert bits(skipped.inner_state) == bits(state.inner_state) != bits(begin.inner_state)
    assert [float(s.scale) for s in (begin, state, skipped, end)] == [4, 4, 2, 2]
    assert [int(s.skipped) for s in (state, skipped, end)] == [0, 1, 1]
    assert [bool(s.finite) for s in (state, skipped, end)] == [True, False, True]
    assert bits(last) != bits(after)


def test_a_skipped_step_keeps_negative_zeros():
    optimizer = dynamic_loss_scale(optax.sgd(1.0))
    state = optimizer.init(PARAMS)
    updates, _ = optimizer.update(jax.tree.map(lambda w: w * jnp.nan, PARAMS), state, PARAMS)
    assert bits(optax.apply_updates(PARAMS, updates)) == bits(PARAMS)
    assert np.signbit(PARAMS["head"][1])


def test_steps_are_those_of_the_optimizer_alone():
    """A power of two divides out of gradients of float32 exactly."""
    plain, optimizer = optax.adamw(1e-2), dynamic_loss_scale(optax.adamw(1e-2), initial=2.0**15)
    gradients = jax.tree.map(lambda w: w * 0.3 + 0.01, PARAMS)
    large = jax.tree.map(lambda g: g * 2.0**15, gradients)
    expected, _ = plain.update(gradients, plain.init(PARAMS), PARAMS)
    updates, _ = optimizer.update(large, optimizer.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(updates, expected)


def test_it_grows_after_good_steps_and_shrinks_within_its_bounds():
    optimizer = dynamic_loss_scale(optax.sgd(0.0), 8, 2, min_scale=4, max_scale=16, factor=2)
    state, scales = optimizer.init(PARAMS), []
    good, bad = jnp.float32(1.0), jnp.float32(jnp.inf)
    for factor in (good, good, good, good, good, bad, bad, bad, good, bad, good, good):
        gradients = jax.tree.map(lambda w, f=factor: (w + 1) * f, PARAMS)
        _, state = optimizer.update(gradients, state, PARAMS)
        scales.append(float(state.scale))
    assert scales == [8, 16, 16, 16, 16, 8, 4, 4, 4, 4, 4, 8]


def test_it_keeps_small_gradients_of_float16_from_vanishing():
    @jaxmem.mixed_precision(compute_dtype="float16")
    def tiny(w: jax.Array, x: jax.Array) -> jax.Array:
        return (w * x * jnp.float16(1e-4)).sum() * jnp.float16(1e-4)

    w, x = jnp.ones(3), jnp.full(3, 0.5)
    assert not np.any(jax.grad(tiny)(w, x))
    optimizer = dynamic_loss_scale(optax.sgd(1.0))
    state = optimizer.init(w)
    gradient = jax.grad(lambda w: tiny(w, x) * jaxmem.loss_scale(state))(w)
    updates, _ = optimizer.update(gradient, state, w)
    np.testing.assert_allclose(updates, -0.5e-8, rtol=2e-3)


def test_inside_multisteps_an_overflow_costs_the_window():
    optimizer = jaxmem.MultiSteps(dynamic_loss_scale(optax.adam(1e-2), 4), 2)
    tx = optimizer.gradient_transformation()
    found = in_steps(tx, step(tx), [SMALL, LARGE, SMALL, SMALL])
    states = [state for _, _, state in found]
    assert [float(jaxmem.loss_scale(state)) for state in states] == [4, 4, 2, 2, 2]
    chex.assert_trees_all_equal(found[2][1], PARAMS)
    assert bits(found[2][1]) != bits(found[4][1])
    inner = [bits(state.inner_opt_state.inner_state) for state in states]
    assert inner[2] == inner[0] != inner[4]


def test_around_multisteps_an_overflow_costs_the_microbatch():
    inner = jaxmem.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
    optimizer = dynamic_loss_scale(inner, 4)
    found = in_steps(optimizer, step(optimizer), [SMALL, LARGE, SMALL])
    assert [int(state.inner_state.mini_step) for _, _, state in found] == [0, 1, 1, 0]
    assert bits(found[2][1]) == bits(found[1][1]) != bits(found[3][1])


@pytest.mark.parametrize("microbatches", [None, 2])
def test_in_the_backward_pass(microbatches: int | None):
    """`value_and_update` finds the overflow in a first pass, and then updates nothing."""
    optimizer = dynamic_loss_scale(optax.adam(1e-2), 4)
    own: Any = jaxmem.value_and_update(scaled, optimizer, microbatches=microbatches)

    @jax.jit
    def run(params: Any, state: Any, x: jax.Array) -> Any:
        return own(params, state, x, jaxmem.loss_scale(state))

    batches = [SMALL, LARGE, SMALL]
    found = in_steps(optimizer, run, batches)
    expected = in_steps(optimizer, step(optimizer), batches)
    assert bits(found[2][1]) == bits(found[1][1]) != bits(PARAMS)
    assert bits(found[2][2].inner_state) == bits(found[1][2].inner_state)
    for (_, params, state), (_, other, wanted) in zip(found, expected, strict=True):
        chex.assert_trees_all_close((params, state), (other, wanted), rtol=1e-3, atol=1e-4)
    plan = own.explain(PARAMS, optimizer.init(PARAMS), SMALL, jnp.float32(1.0))
    assert {leaf.path: leaf.in_backward for leaf in plan.leaves}["layers"]
    assert plan.passes == 2


def test_with_microbatches():
    optimizer = dynamic_loss_scale(optax.adam(1e-2), 4)
    gradient: Any = jaxmem.value_and_grad(scaled, microbatches=2)

    @jax.jit
    def run(params: Any, state: Any, x: jax.Array) -> Any:
        value, gradients = gradient(params, x, jaxmem.loss_scale(state))
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    one_of_two = jnp.concatenate([SMALL[:1], LARGE[:1]])
    found = in_steps(optimizer, run, [SMALL, one_of_two])
    assert [float(state.scale) for *_, state in found] == [4, 4, 2]
    assert bits(found[2][1]) == bits(found[1][1])


def test_the_optimizer_is_told_the_loss_itself():
    def update(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        return jax.tree.map(lambda g: g * 0 + value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)  # pyright: ignore
    optimizer = dynamic_loss_scale(inner, 8)
    w = jnp.ones(2)
    updates, _ = optimizer.update(w, optimizer.init(w), w, value=jnp.float32(24.0))
    np.testing.assert_array_equal(updates, 3.0)


def test_an_overflow_on_one_device_is_one_on_all():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.full((8, 4), 0.5).at[5].set(300.0)
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    optimizer = dynamic_loss_scale(optax.adam(1e-2), 2**15)
    found = in_steps(optimizer, step(optimizer), [x, x.at[5].set(0.5)], params)
    assert [float(state.scale) for *_, state in found] == [2**15, 2**14, 2**14]
    assert bits(found[1][1]) == bits(PARAMS) != bits(found[2][1])


def test_axis_name_where_gradients_differ():
    """Inside shard_map, each device with a gradient of its own."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    optimizer = dynamic_loss_scale(optax.sgd(1.0), 4, axis_name="data")
    w = jnp.ones(8)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P("data")))
    def run(gradient: jax.Array) -> Any:
        state = optimizer.init(gradient)
        updates, state = optimizer.update(gradient, state, gradient)
        return updates, jax.lax.pcast(state.scale[None], "data", to="varying")

    updates, scale = run(w)
    np.testing.assert_array_equal(updates, -0.25)
    np.testing.assert_array_equal(scale, 4)
    updates, scale = run(w.at[3].set(jnp.nan))
    assert bits(updates) == bits(jnp.full(8, -0.0))
    np.testing.assert_array_equal(scale, 2)


def test_nnx():
    from flax import nnx

    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, dynamic_loss_scale(optax.adam(1e-2), 4), wrt=nnx.Param)
    before = bits(nnx.state(model))

    @nnx.jit
    def run(model: Any, optimizer: Any, x: jax.Array) -> None:
        scale = jaxmem.loss_scale(optimizer.opt_state)
        forward = jaxmem.mixed_precision(lambda m, x: (m(x) ** 2).mean(), "float16")
        optimizer.update(model, nnx.grad(lambda m: forward(m, x) * scale)(model))

    run(model, optimizer, LARGE * 100)
    assert float(jaxmem.loss_scale(optimizer.opt_state)) == 2
    assert bits(nnx.state(model)) == before
    run(model, optimizer, SMALL)
    assert bits(nnx.state(model)) != before


def test_the_scale_of_an_nnx_optimizer_stays_what_it_was():
    from flax import nnx

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, dynamic_loss_scale(optax.sgd(1.0), 4), wrt=nnx.Param)
    scale = jaxmem.loss_scale(optimizer.opt_state)
    assert isinstance(scale, jax.Array)
    infinite = jax.tree.map(lambda leaf: leaf * jnp.inf, nnx.state(model, nnx.Param))
    optimizer.update(model, infinite)
    assert (float(scale), float(jaxmem.loss_scale(optimizer.opt_state))) == (4, 2)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"initial": 0}, ValueError, "initial must be finite and greater than 0, got 0"),
        ({"initial": "2"}, TypeError, "initial must be a number, got '2' of type str"),
        ({"factor": 1}, ValueError, "factor must be greater than 1, got 1"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1, got 0"),
        ({"min_scale": 2.0**16}, ValueError, "must be between min_scale=65536.0 and max_scale="),
        ({"max_scale": jnp.inf}, ValueError, "max_scale must be finite"),
    ],
)
def test_bad_options(options: Any, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        dynamic_loss_scale(optax.sgd(1.0), **options)


def test_bad_arguments():
    with pytest.raises(TypeError, match="takes an optax transformation"):
        dynamic_loss_scale(0.1)
    optimizer = dynamic_loss_scale(optax.sgd(1.0))
    with pytest.raises(TypeError, match="the state must be what init or the last update returned"):
        optimizer.update(PARAMS, optax.sgd(1.0).init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="no state of dynamic_loss_scale in what was passed"):
        jaxmem.loss_scale(optax.sgd(1.0).init(PARAMS))
    both = dynamic_loss_scale(optimizer).init(PARAMS)
    with pytest.raises(ValueError, match="several states of dynamic_loss_scale"):
        jaxmem.loss_scale(both)
