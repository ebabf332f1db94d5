"""`jaxmem.MultiSteps` in its places: devices, derivatives, other libraries, memory."""

import functools
from collections.abc import Iterable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers.accumulating import PARAMS, filled, gradients, weighted_mean
from helpers.compiled import PLATFORMS, compiled
from helpers.menagerie import assert_close, assert_same, exact_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem


def run(tx: Any, grads: Iterable[Any], params: Any = PARAMS, **given: Any) -> list[Any]:
    """Each call's updates, and the state after it."""
    state, found = tx.init(params), []
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params, **given)
        found.append((updates, state))
    return found


# ---------------------------------------------------------------- devices, dtypes, derivatives


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


X = jax.random.normal(jax.random.key(1), (4, 16, 8))


def regression(params: Any, x: jax.Array) -> jax.Array:
    return (jnp.tanh(x @ params["kernel"] + params["bias"]) ** 2).mean()


WIDE = {"kernel": jax.random.normal(jax.random.key(0), (8, 16)), "bias": jnp.zeros(16)}


def trained(tx: Any, params: Any, x: jax.Array, step: Any, **put: Any) -> Any:
    state = tx.init(params)
    for part, weight in zip(x, (1.0, 4.0, 2.0, 3.0), strict=True):
        params, state = step(params, state, part, weight)
    return params, state


def tx_and_step(**options: Any) -> Any:
    tx = jaxmem.MultiSteps(optax.adamw(1e-2), 2, **options)

    def step(params: Any, state: Any, x: jax.Array, weight: Any) -> Any:
        grads = jax.grad(regression)(params, x)
        updates, state = tx.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    return tx, step


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_and_donated_states(kind: AxisType) -> None:
    tx, step = tx_and_step()
    expected = trained(tx, WIDE, X, jax.jit(step))
    grid = mesh(kind)
    with jax.set_mesh(grid):
        shardings = {
            "kernel": NamedSharding(grid, P(None, "data")),
            "bias": NamedSharding(grid, P("data")),
        }
        params = jax.device_put(WIDE, shardings)
        state = tx.init(params)
        jitted: Any = jax.jit(step, donate_argnums=(0, 1))
        for part, weight in zip(X, (1.0, 4.0, 2.0, 3.0), strict=True):
            old = params, state.acc_grads, state.inner_opt_state
            params, state = jitted(params, state, part, weight)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert jitted._cache_size() == 1
    for name, sharding in shardings.items():
        for leaf in (params[name], state.acc_grads[name], state.inner_opt_state[0].mu[name]):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert_close((params, state), expected, 1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_shard_map(check_vma: bool, sharded: bool) -> None:
    """Each device has rows of the batch, and of the parameters all or a part."""
    tx, step = tx_and_step()
    expected = trained(tx, WIDE, X, jax.jit(step))
    spec = (
        {"kernel": P(None, "data"), "bias": P("data")} if sharded else {"kernel": P(), "bias": P()}
    )

    def local(params: Any, state: Any, x: jax.Array, weight: jax.Array) -> Any:
        def gathered(leaf: jax.Array, axis: int) -> jax.Array:
            return jax.lax.all_gather(leaf, "data", axis=axis, tiled=True)

        whole = params
        if sharded:
            whole = {name: gathered(leaf, leaf.ndim - 1) for name, leaf in params.items()}
        elif check_vma:
            whole = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(regression)(whole, x)
        if sharded:
            grads = {
                name: jax.lax.psum_scatter(
                    leaf, "data", scatter_dimension=leaf.ndim - 1, tiled=True
                )
                for name, leaf in grads.items()
            }
        else:
            grads = jax.lax.psum(grads, "data")
        grads = jax.tree.map(lambda leaf: leaf / 8, grads)
        tokens = jax.lax.psum(weight[0], "data")
        updates, state = tx.update(grads, state, params, weight=tokens)
        return optax.apply_updates(params, updates), state

    state_spec = jax.tree.map(lambda _: P(), jax.eval_shape(tx.init, WIDE))
    adam, *rest = state_spec.inner_opt_state
    state_spec = state_spec._replace(
        inner_opt_state=(adam._replace(mu=spec, nu=spec), *rest), acc_grads=spec
    )
    mapped = jax.shard_map(
        local,
        mesh=mesh(),
        in_specs=(spec, state_spec, P("data"), P("data")),
        out_specs=(spec, state_spec),
        check_vma=check_vma,
    )
    jitted = jax.jit(lambda params, state, x, w: mapped(params, state, x, jnp.full(8, w / 8)))
    assert_close(trained(tx, WIDE, X, jitted), expected, 1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11), (jnp.complex64, 1e-6)]
)
def test_params_and_gradients_of_other_dtypes(dtype: Any, tolerance: float) -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)
    if dtype == jnp.complex64:
        params = jax.tree.map(lambda leaf: leaf * (1 + 2j), params)
    grads = gradients(3, params=params)
    tx = jaxmem.MultiSteps(optax.scale(1.0), 3)
    updates: Any = None
    state = tx.init(params)
    update = jax.jit(tx.update)
    for grad, weight in zip(grads, (1, 10, 2), strict=True):
        updates, state = update(grad, state, params, weight=weight)
    chex.assert_trees_all_equal_dtypes(updates, params)
    wide = jnp.complex64 if dtype == jnp.complex64 else jnp.float32
    assert all(leaf.dtype == wide for leaf in jax.tree.leaves(state.acc_grads))
    expected = weighted_mean(grads, [1, 10, 2])
    chex.assert_trees_all_close(
        jax.tree.map(lambda leaf: np.asarray(leaf.astype(wide)), updates), expected, rtol=tolerance
    )


def test_64_bits_are_kept() -> None:
    with jax.enable_x64(True):
        params = {"a": jnp.arange(1.0, 4.0), "b": jnp.ones(2, jnp.float32)}
        assert params["a"].dtype == jnp.float64
        tx = jaxmem.MultiSteps(optax.scale(1.0), 3)
        updates: Any = None
        start = state = tx.init(params)
        grads = [jax.tree.map(lambda leaf, i=i: leaf / (3 + i), params) for i in range(3)]
        for grad, weight in zip(grads, (1.0, np.int64(7), 3), strict=True):
            updates, state = jax.jit(tx.update)(grad, state, params, weight=weight, value=1.0)
        chex.assert_trees_all_equal_dtypes((updates, state), (params, start))
        expected = weighted_mean(grads, [1, 7, 3])
        np.testing.assert_allclose(updates["a"], expected["a"], rtol=1e-15)
        np.testing.assert_allclose(updates["b"], expected["b"], rtol=1e-6)


@pytest.mark.usefixtures("strict")
def test_no_dtype_is_promoted_unasked() -> None:
    dtypes = {"a": jnp.float32, "b": jnp.bfloat16, "c": jnp.complex64}
    params = {name: jnp.ones(2, dtype) for name, dtype in dtypes.items()}
    tx = jaxmem.MultiSteps(
        optax.scale(-1.0),
        lambda step: jnp.full((), 2, jnp.bfloat16) + 0 * step.astype(jnp.bfloat16),
        should_skip_update_fn=optax.skip_not_finite,
    )
    updates, state = None, tx.init(params)
    for options in ({}, {"weight": 3, "value": 1, "emit": True}, {"weight": jnp.bfloat16(2)}):
        updates, state = jax.jit(tx.update)(params, state, params, **options)
    chex.assert_trees_all_equal_dtypes(updates, params)


def outcome(kind: Any, n: int, point: Any) -> Any:
    """A number that depends on all that comes out of n microbatches in windows of two."""
    grads, params, rate = point
    tx = kind(optax.sgd(rate, momentum=0.9), 2)
    state = tx.init(params)
    for grad in grads[:n]:
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
    leaves = jax.tree.leaves((params, state.acc_grads, state.inner_opt_state))
    return sum((jnp.sin(leaf) * (2 + leaf)).sum() for leaf in leaves)


POINT = gradients(3), PARAMS, jnp.float32(0.3)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_derivatives_are_those_of_optax(n: int) -> None:
    """Forward over reverse, through mini-steps and a step, to a learning rate, too."""
    tangents = gradients(3, 1), gradients(1, 2)[0], jnp.float32(0.7)

    def found(kind: Any) -> Any:
        gradient = jax.grad(functools.partial(outcome, kind, n))
        return exact_jit(functools.partial(jax.jvp, gradient))((POINT,), (tangents,))

    assert_close(found(jaxmem.MultiSteps), found(optax.MultiSteps), 1e-5)


def test_derivatives_outside_of_jit() -> None:
    ours = functools.partial(outcome, jaxmem.MultiSteps, 2)
    assert_close(jax.grad(ours)(POINT), exact_jit(jax.grad(ours))(POINT), 1e-5)


def test_a_derivative_does_not_meet_what_did_not_run() -> None:
    # The derivative of a square root at 0 is infinite, and Adam's state begins there.
    def outcome(kind: Any, grad: jax.Array) -> jax.Array:
        tx = kind(optax.adam(0.1, eps=0.0), 2)
        return jax.jit(tx.update)(grad, tx.init(grad), grad)[0].sum()

    grad = jnp.array([0.0, 1.0])
    assert (jax.grad(functools.partial(outcome, jaxmem.MultiSteps))(grad) == 0).all()
    assert np.isnan(jax.grad(functools.partial(outcome, optax.MultiSteps))(grad)).any()


# ---------------------------------------------------------------- other libraries


def test_an_orbax_round_trip_in_mid_window_goes_on_with_the_same_bits(tmp_path: Any) -> None:
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    tx = jaxmem.MultiSteps(inner, 3, should_skip_update_fn=optax.skip_not_finite)
    update = jax.jit(tx.update)
    grads = [*gradients(3), filled(PARAMS, np.nan), *gradients(4, seed=1)]
    state = tx.init(PARAMS)
    for grad in grads[:4]:
        _, state = update(grad, state, PARAMS, weight=3, value=2.0)
    _, state = update(grads[4], state, PARAMS, weight=3, value=2.0)
    assert (int(state.mini_step), int(state.skipped), float(state.weight)) == (1, 1, 3.0)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, PARAMS))
    assert_same(restored, state)
    for grad in grads[5:]:
        expected, state = update(grad, state, PARAMS, weight=2, value=1.0)
        found, restored = update(grad, restored, PARAMS, weight=2, value=1.0)
        assert_same((found, restored), (expected, state))
    assert bool(tx.has_updated(state)) is False
    assert int(state.gradient_step) == 2


@pytest.mark.parametrize("pair", [False, True], ids=["object", "pair"])
def test_flax_train_state(pair: bool) -> None:
    tx = jaxmem.MultiSteps(optax.adam(1e-2), 2)
    given = tx.gradient_transformation() if pair else tx
    state: Any = TrainState.create(apply_fn=regression, params=WIDE, tx=given)  # pyright: ignore
    for x in X:
        state = state.apply_gradients(grads=jax.grad(regression)(state.params, x))
    assert int(state.opt_state.gradient_step) == 2
    assert_close(state.params, by_hand(optax.adam(1e-2)), 1e-5)


def by_hand(inner: optax.GradientTransformation) -> Any:
    params, state = WIDE, inner.init(WIDE)
    for first, second in (X[:2], X[2:]):
        grads = jax.grad(lambda p, a=first, b=second: (regression(p, a) + regression(p, b)) / 2)(
            params
        )
        updates, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("pair", [False, True], ids=["object", "pair"])
def test_nnx_optimizer(pair: bool) -> None:
    model: Any = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    model.kernel[...], model.bias[...] = WIDE["kernel"], WIDE["bias"]
    tx = jaxmem.MultiSteps(optax.adam(1e-2), 2)
    given = tx.gradient_transformation() if pair else tx
    optimizer = nnx.Optimizer(model, given, wrt=nnx.Param)  # pyright: ignore

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> None:
        grads = nnx.grad(lambda model: (jnp.tanh(model(x)) ** 2).mean())(model)
        optimizer.update(model, grads, weight=2.0)

    for x in X:
        step(model, optimizer, x)
    found = {"kernel": model.kernel[...], "bias": model.bias[...]}
    assert_close(found, by_hand(optax.adam(1e-2)), 1e-5)


def test_inside_chain_partition_and_masked() -> None:
    tx = jaxmem.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
    frozen = optax.set_to_zero()
    labels = {"kernel": "train", "bias": "freeze"}
    for outer in (
        optax.chain(optax.clip_by_global_norm(1e3), tx, optax.scale(1.0)),
        optax.partition({"train": tx, "freeze": frozen}, labels),
        optax.masked(tx, {"kernel": True, "bias": False}),
    ):
        params, state = WIDE, outer.init(WIDE)
        for x in X:
            grads = jax.grad(regression)(params, x)
            updates, state = jax.jit(outer.update)(grads, state, params, weight=5)
            params = {**params, "kernel": params["kernel"] + updates["kernel"]}
        assert int(optax.tree.get(state, "gradient_step")) == 2
        assert int(optax.tree.get(state, "count")) == 2
    plain = optax.partition({"train": optax.adam(1e-2), "freeze": frozen}, labels)
    assert_close(params["kernel"], by_hand(plain)["kernel"], 1e-5)


def test_partition_may_be_inside_too() -> None:
    inner = optax.partition(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1)}, {"kernel": "adam", "bias": "sgd"}
    )
    tx = jaxmem.MultiSteps(inner, 2)
    params, state = WIDE, tx.init(WIDE)
    for x in X:
        updates, state = jax.jit(tx.update)(jax.grad(regression)(params, x), state, params)
        params = optax.apply_updates(params, updates)
    assert_close(params, by_hand(inner), 1e-5)


def test_updates_of_another_structure() -> None:
    # What this optimizer returns has no place in the accumulator.
    def signs(updates: Any, _: Any) -> Any:
        return {"sign": jnp.sign(updates["bias"]).astype(jnp.int8)}

    inner = optax.stateless(signs)
    found = run(jaxmem.MultiSteps(inner, 2), [filled(PARAMS, -1.0)] * 4)
    assert [updates["sign"].tolist() for updates, _ in found] == [[0] * 3, [-1] * 3] * 2
    chex.assert_trees_all_equal(found[1][1].acc_grads, filled(PARAMS, 0.0))


# ---------------------------------------------------------------- memory

# The TPU's compiler takes its time.
WHERE = [
    pytest.param(where, marks=pytest.mark.slow if where == "tpu" else ()) for where in PLATFORMS
]
SIDE, ROWS = 2048, 256


def layers(where: str, form: str) -> int:
    """Each of a loop is compiled for itself; gradients of few find room on a TPU's chip."""
    return 4 if form == "loop" and where != "tpu" else 8


@functools.cache
def needed(where: str, kind: str, form: str) -> float:
    """What a training step needs, all but the batch donated, in sizes of the parameters.

    Args:
      kind: "plain", "ours", or "skip" for ours with a guard.
      form: "scan" over stacked layers, "loop" over separate ones, or the "update" alone.
    """
    adam = optax.adam(1e-3)
    tx = {
        "plain": adam,
        "ours": jaxmem.MultiSteps(adam, 8),
        "skip": jaxmem.MultiSteps(adam, 8, should_skip_update_fn=optax.skip_not_finite),
    }[kind]
    layer = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    count = layers(where, form)
    params: Any = [layer] * count
    if form == "scan":
        params = jax.ShapeDtypeStruct((count, SIDE, SIDE), jnp.float32)
    size = count * SIDE * SIDE * 4

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if form == "scan":
            x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)
        else:
            for w in params:
                x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(tx.init, params)
    donate = range(len(jax.tree.leaves((params, state))))
    if form == "update":
        text = compiled(
            where, lambda grads, state: tx.update(grads, state), params, state, donate=donate
        )
        return text.required / size
    x = jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32)
    return (
        compiled(where, step, params, state, x, donate=donate).required - ROWS * SIDE * 4
    ) / size


@pytest.mark.parametrize("where", WHERE)
def test_memory_one_accumulator_where_layers_are_scanned(where: str) -> None:
    # Plain, the TPU's compiler needs what there is: parameters, two moments and the gradient.
    plain = 4.0 if where == "tpu" else needed(where, "plain", "scan")
    assert needed(where, "ours", "scan") <= plain + 1.005
    # On the CPU a reduction is not fused with what it reduces: `optax.skip_not_finite`
    # counts in int32 there, which for one leaf of all layers is 1 next to gradients, state
    # and accumulator.
    bound = plain + 1 if where != "cpu" else max(plain + 1, 3 + 1 + 1 + 1)
    assert needed(where, "skip", "scan") <= bound + 0.005


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_memory_one_accumulator_where_layers_are_separate(where: str) -> None:
    assert needed(where, "ours", "loop") <= needed(where, "plain", "loop") + 1.005


# Of the parameters' leaves, which layer reads each: the order in which gradients come decides which
# donated accumulator is free for which leaf.
ORDERS = [
    pytest.param("tpu", 4096, (3, 2, 1, 0), marks=pytest.mark.slow),
    pytest.param("tpu", 2048, (0, 1, 2, 3), marks=pytest.mark.slow),
    pytest.param("tpu", 2048, (2, 0, 3, 1), marks=pytest.mark.slow),
    ("gpu", 2048, (2, 4, 0, 7, 5, 1, 6, 3)),
]


@pytest.mark.parametrize(("where", "side", "order"), ORDERS, ids=str)
def test_memory_no_more_than_optax_where_layers_are_separate(
    where: str, side: int, order: tuple[int, ...]
) -> None:
    """To less than half a leaf: a TPU keeps activations on the chip or outside it as it likes."""
    params = [jax.ShapeDtypeStruct((side, side), jnp.float32)] * len(order)
    size = len(order) * side * side * 4

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for leaf in order:
            x = jnp.tanh(x @ params[leaf])
        return (x**2).mean()

    def required(tx: Any) -> float:
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        state = jax.eval_shape(tx.init, params)
        x = jax.ShapeDtypeStruct((ROWS, side), jnp.float32)
        donate = range(len(jax.tree.leaves((params, state))))
        return compiled(where, step, params, state, x, donate=donate).required / size

    adam = optax.adam(1e-3)
    theirs = required(optax.MultiSteps(adam, 8))
    assert required(jaxmem.MultiSteps(adam, 8)) <= theirs + 0.4 / len(order)


@pytest.mark.parametrize("where", WHERE)
def test_memory_a_guard_needs_all_gradients_at_once(where: str) -> None:
    leaf = 1 / layers(where, "loop")
    # Whether to add the first is known after the last: parameters, Adam's state,
    # accumulator and gradients; and on the CPU what is counted of one leaf.
    assert needed(where, "skip", "loop") <= 5.05 + (leaf if where == "cpu" else 0)


@pytest.mark.parametrize("where", WHERE)
def test_memory_of_the_update_alone(where: str) -> None:
    # A TPU's compiler places a few MiB next to what stays in the memory on the chip.
    room = 0.025 if where == "tpu" else 0.005
    assert needed(where, "ours", "update") == pytest.approx(4.0, abs=room)
    if where != "cpu":  # there each count of a leaf has its own int32
        assert needed(where, "skip", "update") == pytest.approx(4.0, abs=room)
