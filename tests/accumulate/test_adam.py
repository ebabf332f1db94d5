"""`jaxmem.AdamA`: how far it is from Adam, and what it saves."""

import functools
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.accumulating import on_each_stack, wide_loss
from helpers.compiled import compiled
from helpers.grads import microbatches_of, normal, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import jaxmem
from jaxmem import AdamA, AdamAState, Weighted

TINY = settings(derandomize=True, max_examples=8)
F = 3
W = {"kernel": jnp.linspace(-0.9, 1.1, 6).reshape(F, 2), "bias": jnp.array([0.5, -0.2])}


BATCH = {"x": normal(0, 13, F), "y": normal(1, 13, 2), "mask": (jnp.arange(13) % 4 > 0) * 1.0}


def errors(w: Any, batch: Any) -> jax.Array:
    return jnp.square(jnp.tanh(batch["x"] @ w["kernel"]) + w["bias"] - batch["y"]).sum(-1)


def mean_loss(w: Any, batch: Any) -> jax.Array:
    return errors(w, batch).mean()


def masked_loss(w: Any, batch: Any) -> Weighted:
    return Weighted((errors(w, batch) * batch["mask"]).sum(), batch["mask"].sum())


def terms_loss(w: Any, batch: Any) -> Weighted:
    squares = jnp.square(batch["x"]).sum(-1)
    return masked_loss(w, batch) + 0.1 * Weighted(squares.sum() * w["bias"][0], squares.size)


def near(actual: Any, expected: Any, tolerance: float = 2e-6) -> None:
    chex.assert_trees_all_close(
        jax.tree.map(np.asarray, actual),
        jax.tree.map(np.asarray, expected),
        rtol=tolerance,
        atol=tolerance,
    )


def moments(state: Any) -> Any:
    """mu, nu and count of an Adam of optax, which may be in a chain."""
    (found,) = [
        leaf
        for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
        if isinstance(leaf, optax.ScaleByAdamState)
    ]
    return found


# ---------------------------------------------------------------- next to Adam

OPTIMIZERS = {
    "adam": (AdamA(0.03), optax.adam(0.03)),
    "adamw": (AdamA(0.03, weight_decay=0.1), optax.adamw(0.03, weight_decay=0.1)),
    "options": (AdamA(0.5, b1=0.0, b2=0.5, eps=1e-3), optax.adam(0.5, b1=0.0, b2=0.5, eps=1e-3)),
    "schedule": (
        AdamA(optax.linear_schedule(0.1, 0.0, 4), weight_decay=0.01),
        optax.adamw(optax.linear_schedule(0.1, 0.0, 4), weight_decay=0.01),
    ),
}


# What a loss is made of and what is done with the moments have nothing to do with one another.
@pytest.mark.parametrize(
    ("name", "fun"),
    [
        *((name, mean_loss) for name in OPTIMIZERS),
        *(("adam", fun) for fun in (masked_loss, terms_loss)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_one_microbatch_is_adam(name: str, fun: Callable[..., Any]) -> None:
    adam, reference = OPTIMIZERS[name]
    step = jax.jit(adam.value_and_update(fun, microbatches=1))
    params, state = W, adam.init(W)
    theirs, their_state = W, reference.init(W)
    for _ in range(5):
        value, updates, state = step(state, params, BATCH)
        expected, gradient = whole(fun)(theirs, BATCH)
        near(value, expected)
        their_updates, their_state = reference.update(gradient, their_state, theirs)
        near(updates, their_updates, 1e-5)
        params = optax.apply_updates(params, updates)
        theirs = optax.apply_updates(theirs, their_updates)
    adam_state = moments(their_state)
    near((state.mu, state.nu), (adam_state.mu, adam_state.nu), 1e-5)
    assert int(state.count) == 5
    assert state.count.dtype == jnp.int32


B1, B2 = 0.8, 0.95


def linear(w: jax.Array, batch: Any) -> Weighted:
    """Its gradient is the weighted mean of the rows, whatever the parameters are."""
    return Weighted((batch["x"] @ w * batch["weight"]).sum(), batch["weight"].sum())


@pytest.mark.slow
@TINY
@given(
    rows=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    agree=st.sampled_from([0.0, 0.3, 1.0]),
    data=st.data(),
)
def test_the_moments_of_any_microbatches(rows: int, seed: int, agree: float, data: Any) -> None:
    """m is Adam's; v is the sum of squares, at least 1/K of Adam's; steps at most √K as long."""
    m = data.draw(st.integers(1, rows))
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((4, rows, F))
    # Of numpy: jax would compile every operation for every shape.
    xs = np.asarray(agree + (1 - agree) * noise, np.float32)
    weights = np.asarray(rng.integers(0, 3, (4, rows)), np.float32)
    adam = AdamA(1.0, b1=B1, b2=B2, eps=0.0)
    step = jax.jit(adam.value_and_update(linear, microbatches=m))
    state = adam.init(jnp.ones(F))
    mu = nu = full = np.zeros(F)
    for number, (x, weight) in enumerate(zip(xs, weights, strict=True), 1):
        _, updates, state = step(state, jnp.ones(F), {"x": x, "weight": weight})
        total = float(weight.sum()) or 1.0
        wide, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
        shares = [wide[part].T @ weight[part] / total for part in microbatches_of(rows, m)]
        gradient = sum(shares)
        mu = B1 * mu + (1 - B1) * gradient
        nu = B2 * nu + (1 - B2) * sum(share**2 for share in shares)
        full = B2 * full + (1 - B2) * gradient**2
        near((state.mu, state.nu), (mu, nu), 1e-5)
        assert (nu * m >= full * (1 - 1e-9)).all()
        # Where v is 0, so is m, and there is no step to compare.
        moved = (full > 1e-6) & (np.abs(mu) > 1e-4)
        theirs = np.abs(mu) / (1 - B1**number) / np.sqrt(full / (1 - B2**number) + ~moved)
        length = np.abs(np.asarray(updates, np.float64))
        assert (length[moved] <= np.sqrt(m) * theirs[moved] * 1.0001).all()
        if agree == 1 and rows % m == 0 and (weight == weight[0]).all() and weight[0]:
            np.testing.assert_allclose(nu * m, full, rtol=1e-5)


def test_microbatches_that_agree_take_steps_sqrt_k_times_as_long() -> None:
    batch = {"x": jnp.ones((12, F)), "weight": jnp.ones(12)}
    for m in (1, 2, 4, 12):
        adam = AdamA(0.1, eps=0.0)
        step = jax.jit(adam.value_and_update(linear, microbatches=m))
        _, updates, _ = step(adam.init(jnp.ones(F)), jnp.ones(F), batch)
        near(updates, -0.1 * np.sqrt(m) * np.ones(F), 1e-5)


def test_noise_around_zero_has_the_second_moment_of_adam() -> None:
    """In expectation: over many coordinates, the mean of v is that of Adam within a few percent."""
    x, width = normal(3, 16, 20_000), 20_000
    batch = {"x": x, "weight": jnp.ones(16)}
    nus = []
    for m in (1, 4, 16):
        adam = AdamA(0.1)
        step = jax.jit(adam.value_and_update(linear, microbatches=m))
        _, _, state = step(adam.init(jnp.zeros(width)), jnp.zeros(width), batch)
        nus.append(float(state.nu.mean()))
    near(np.asarray(nus) / nus[0], np.ones(3), 0.03)


def test_microbatches_that_cancel_out_make_small_steps() -> None:
    batch = {"x": jnp.array([[1.0] * F, [-1.0] * F, [1.0] * F, [-0.99] * F]), "weight": jnp.ones(4)}
    lengths = []
    for m in (1, 4):
        adam = AdamA(0.1, eps=0.0)
        step = jax.jit(adam.value_and_update(linear, microbatches=m))
        _, updates, _ = step(adam.init(jnp.ones(F)), jnp.ones(F), batch)
        lengths.append(float(jnp.abs(updates).max()))
    near(lengths[0], 0.1, 1e-4)
    assert lengths[1] < 0.01 * lengths[0]


@pytest.mark.parametrize("m", [1, 4, 13])
def test_it_fits_a_regression(m: int) -> None:
    x = normal(7, 104, F)
    truth = jnp.array([[1.0, -2.0], [0.5, 0.0], [-1.5, 3.0]])
    batch = {"x": x, "y": jnp.tanh(x @ truth) + 0.25, "mask": jnp.ones(104)}
    adam = AdamA(optax.cosine_decay_schedule(0.1, 300))
    step = adam.value_and_update(mean_loss, microbatches=m)

    def body(carry: Any, _: Any) -> Any:
        params, state = carry
        value, updates, state = step(state, params, batch)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jax.jit(lambda carry: jax.lax.scan(body, carry, None, length=300))(
        (W, adam.init(W))
    )
    assert losses[-1] < 1e-3 * losses[0]
    near(params["kernel"], truth, 0.1)


# ---------------------------------------------------------------- weights, dtypes, outputs


@pytest.mark.parametrize("fun", [masked_loss, terms_loss], ids=lambda f: f.__name__)
def test_the_first_moment_is_exact_for_any_weights(fun: Callable[..., Any]) -> None:
    for m in (4, 13):
        adam = AdamA(0.1)
        step = jax.jit(adam.value_and_update(fun, microbatches=m, return_weight=True))
        (value, aux), _, state = step(adam.init(W), W, BATCH)
        expected, gradient = whole(fun)(W, BATCH)
        near(value, expected)
        near(state.mu, jax.tree.map(lambda g: 0.1 * g, gradient))
        assert not aux.empty


def test_a_total_without_weight_is_in_the_first_moment() -> None:
    """Divided by positives, of which most microbatches have none; one of them only has NaN."""
    positive = jnp.zeros(13).at[jnp.array([0, 1])].set(1.0)

    def loss(w: Any, batch: Any) -> Weighted:
        return Weighted(errors(w, batch).sum(), batch["positive"].sum())

    adam, batch = AdamA(0.1), BATCH | {"positive": positive}
    step = jax.jit(adam.value_and_update(loss, microbatches=4))
    value, _, state = step(adam.init(W), W, batch)
    expected, gradient = whole(loss)(W, batch)
    near((value, state.mu), (expected, jax.tree.map(lambda g: 0.1 * g, gradient)))

    def spoiled(w: Any, batch: Any) -> Weighted:
        weight = batch["mask"].sum()
        return Weighted(errors(w, batch).sum() * (weight / weight), weight)

    masked = BATCH | {"mask": jnp.asarray(np.arange(13) < 5, jnp.float32)}
    step = jax.jit(adam.value_and_update(spoiled, microbatches=13))
    value, _, state = step(adam.init(W), W, masked)
    expected, gradient = whole(masked_loss)(W, masked)
    near((value, state.mu), (expected, jax.tree.map(lambda g: 0.1 * g, gradient)))


def test_a_masked_microbatch_does_no_harm_and_an_empty_batch_moves_nothing() -> None:
    def loss(w: Any, batch: Any) -> Weighted:
        weight = batch["mask"].sum()
        return Weighted((errors(w, batch) * batch["mask"]).sum() / weight * weight, weight)

    adam = AdamA(0.1)
    step = jax.jit(adam.value_and_update(loss, microbatches=13, return_weight=True))
    (value, _), _, state = step(adam.init(W), W, BATCH)
    expected, gradient = whole(loss)(W, BATCH)
    near((value, state.mu), (expected, jax.tree.map(lambda g: 0.1 * g, gradient)))
    (value, aux), updates, after = step(state, W, BATCH | {"mask": jnp.zeros(13)})
    assert (float(value), bool(aux.empty)) == (0, True)
    chex.assert_tree_all_finite((updates, after))
    near(after.mu, jax.tree.map(lambda leaf: 0.9 * leaf, state.mu))
    near(after.nu, jax.tree.map(lambda leaf: 0.999 * leaf, state.nu))


def test_moments_of_low_precision_parameters_are_float32() -> None:
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (W, BATCH))
    adam = AdamA(0.1)
    step = jax.jit(adam.value_and_update(mean_loss, microbatches=4))
    value, updates, state = step(adam.init(low[0]), *low)
    assert value.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state.mu, state.nu))} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"bfloat16"}
    _, _, wide = step(adam.init(W), W, BATCH)
    near(state.mu, wide.mu, 0.01)
    own = AdamA(0.1, moment_dtype=None)
    step = jax.jit(own.value_and_update(mean_loss, microbatches=4))
    _, _, state = step(own.init(low[0]), *low)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state.mu, state.nu))} == {"bfloat16"}
    narrow = AdamA(0.1, moment_dtype=jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow.init(W).mu)} == {"bfloat16"}


def test_shares_of_float64_are_float64() -> None:
    with jax.enable_x64(True):
        w, batch = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (W, BATCH))
        adam = AdamA(0.1)
        step = jax.jit(adam.value_and_update(masked_loss, microbatches=3))
        state = step(adam.init(w), w, batch)[2]
        gradient = jax.tree.map(lambda g: 0.1 * np.asarray(g), whole(masked_loss)(w, batch)[1])
        near(state.mu, gradient, 1e-14)


def test_no_parameters_have_no_moments() -> None:
    adam = AdamA(0.1)
    step = adam.value_and_update(lambda w, batch: batch["x"].mean(), microbatches=4)
    value, updates, state = step(adam.init({}), {}, BATCH)
    assert float(value) == pytest.approx(float(BATCH["x"].mean()), rel=1e-6)
    assert (updates, state.mu, state.nu, int(state.count)) == ({}, {}, {}, 1)


def test_complex_parameters() -> None:
    w = jnp.array([1 + 1j, -2j, 0.5], jnp.complex64)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(jnp.abs(x @ w - 1)).mean()

    adam, reference = AdamA(0.1), optax.adam(0.1)
    state, theirs = adam.init(w), reference.init(w)
    step = jax.jit(adam.value_and_update(loss, microbatches=1))
    for _ in range(3):
        _, updates, state = step(state, w, BATCH["x"])
        expected, theirs = reference.update(jax.grad(loss)(w, BATCH["x"]), theirs, w)
        near(updates, expected, 1e-5)
    near(state.nu.real, moments(theirs).nu.real, 1e-5)
    four = jax.jit(adam.value_and_update(loss, microbatches=4))
    _, _, state = four(adam.init(w), w, BATCH["x"])
    near(state.mu, 0.1 * jax.grad(loss)(w, BATCH["x"]))


def test_keys_carries_outputs_and_names() -> None:
    def loss(w: Any, batch: Any, rng: Any, count: Any, *, scale: float) -> Any:
        mask = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
        rows = errors(w, batch | {"x": batch["x"] * mask})
        return rows.mean() * scale, {"mask": mask, "count": count + 1}

    adam = AdamA(0.1)
    step = adam.value_and_update(
        loss,
        has_aux=True,
        microbatches=4,
        rng_argnums=2,
        carry_argnums=3,
        aux={"mask": "concat", "count": "carry"},
    )
    (value, aux), _, state = step(
        adam.init(W), W, batch=BATCH, rng=jax.random.key(0), count=jnp.int32(5), scale=0.5
    )
    assert int(aux["count"]) == 9
    dropped = BATCH | {"x": BATCH["x"] * aux["mask"]}
    expected, gradient = whole(mean_loss)(W, dropped)
    near((value, state.mu), (expected / 2, jax.tree.map(lambda g: 0.05 * g, gradient)))


def test_the_state_is_a_tree_that_can_be_donated_and_scanned() -> None:
    adam = AdamA(0.1)
    state = adam.init(W)
    assert isinstance(state, AdamAState)
    again = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state))
    assert isinstance(again, AdamAState)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.mu, state.nu))]
    assert len(set(buffers)) == 4
    step = jax.jit(adam.value_and_update(mean_loss, microbatches=4), donate_argnums=0)
    expected = adam.value_and_update(mean_loss, microbatches=4)(state, W, BATCH)
    near(step(state, W, BATCH), expected)
    assert jax.tree.leaves(state.mu)[0].is_deleted()


# ---------------------------------------------------------------- memory

WIDE, ROWS, M = 2048, 2048, 8


@on_each_stack
def test_it_needs_less_than_the_exact_form(where: str, scanned: bool, weighted: bool) -> None:
    loss = wide_loss(scanned, weighted)
    exact = jaxmem.value_and_grad(loss, microbatches=M)
    optimizer, adam = optax.adam(1e-3), AdamA(1e-3)
    approximate = adam.value_and_update(loss, microbatches=M)

    def exact_step(w: Any, state: Any, x: jax.Array) -> Any:
        value, gradient = exact(w, x)
        updates, state = optimizer.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, value

    def step(w: Any, state: Any, x: jax.Array) -> Any:
        value, updates, state = approximate(state, w, x)
        return optax.apply_updates(w, updates), state, value

    depth = 8 if scanned else 4  # each layer that is written out is compiled for itself
    one = jax.ShapeDtypeStruct((WIDE, WIDE), jnp.float32)
    w = jax.ShapeDtypeStruct((depth, WIDE, WIDE), jnp.float32) if scanned else [one] * depth
    x = jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32)

    def required(step: Any, init: Any) -> float:
        state = jax.eval_shape(init, w)
        leaves = len(jax.tree.leaves((w, state)))
        needed = compiled(where, step, w, state, x, donate=range(leaves)).required
        return needed / (depth * WIDE * WIDE * 4)

    assert required(step, adam.init) < required(exact_step, optimizer.init) - 0.1


# ---------------------------------------------------------------- modules


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(F, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.linear(x))


def whole_net(model: Net, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


@functools.cache
def net_by_hand(eps: float, batches: int, m: int) -> tuple[Net, Any, list[float]]:
    """What training of a module must do, microbatch by microbatch, with moments in numpy."""
    model, both = Net(nnx.Rngs(0)), nnx.jit(nnx.value_and_grad(whole_net))
    mu = nu = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    values = []
    for count in range(1, batches + 1):
        mu, nu = (jax.tree.map(lambda x, b=b: x * b, x) for x, b in ((mu, 0.9), (nu, 0.999)))
        value = 0.0
        for rows in microbatches_of(13, m):
            own = jax.tree.map(lambda leaf, rows=rows: leaf[rows], BATCH)
            part = len(rows) / 13
            one, grads = both(model, own)
            value += float(one) * part
            mu = jax.tree.map(lambda a, g, p=part: a + 0.1 * g * p, mu, grads)
            nu = jax.tree.map(lambda a, g, p=part: a + 0.001 * (g * p) ** 2, nu, grads)
        step = jax.tree.map(
            lambda a, b, n=count: -0.1 * a / (1 - 0.9**n) / (jnp.sqrt(b / (1 - 0.999**n)) + eps),
            mu,
            nu,
        )
        nnx.update(model, optax.apply_updates(nnx.state(model, nnx.Param), step))
        values.append(value)
    return model, (mu, nu), values


def test_a_module_is_trained_with_the_state_apart() -> None:
    """Parameters by the updates, batch statistics in place."""
    adam, mine = AdamA(0.1, eps=1e-3), Net(nnx.Rngs(0))
    state, values = adam.init(mine), []
    chex.assert_trees_all_equal_structs(state.mu, nnx.state(mine, nnx.Param))
    step = nnx.jit(adam.value_and_update(whole_net, microbatches=4))
    for _ in range(3):
        before = nnx.state(mine, nnx.Param)
        value, updates, state = step(state, mine, batch=BATCH)
        chex.assert_trees_all_equal(nnx.state(mine, nnx.Param), before)
        nnx.update(mine, optax.apply_updates(before, updates))
        values.append(float(value))
    theirs, expected, losses = net_by_hand(1e-3, 3, 4)
    near(values, losses, 1e-5)
    near((state.mu, state.nu), expected, 1e-5)
    near(nnx.state(mine), nnx.state(theirs), 1e-4)
    assert (theirs.norm.mean.get_value() != 0).all()


@pytest.mark.parametrize("jit", [nnx.jit, lambda fun: fun], ids=["jit", "eager"])
@pytest.mark.parametrize("has_aux", [False, True])
def test_an_nnx_optimizer_and_its_module_are_updated_in_place(has_aux: bool, jit: Any) -> None:
    def loss(model: Net, batch: Any) -> Any:
        value = whole_net(model, batch)
        return (value, batch["x"].sum(-1)) if has_aux else value

    adam: Any = AdamA(0.1, eps=1e-3)
    mine = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(mine, adam, wrt=nnx.Param)
    step = jit(adam.value_and_update(loss, has_aux, microbatches=4, aux="concat"))
    values = []
    for _ in range(3):
        value = step(optimizer, mine, BATCH)
        if has_aux:
            value, rows = value
            near(rows, BATCH["x"].sum(-1))
        values.append(float(value))
    theirs, expected, losses = net_by_hand(1e-3, 3, 4)
    near(values, losses, 1e-5)
    near(nnx.state(mine), nnx.state(theirs), 1e-4)
    state = nnx.as_pure(optimizer.opt_state)
    near(jax.tree.leaves((state.mu, state.nu)), jax.tree.leaves(expected), 1e-5)
    assert (int(optimizer.step[...]), int(state.count)) == (3, 3)


def test_an_nnx_optimizer_says_which_variables() -> None:
    adam: Any = AdamA(optax.linear_schedule(0.1, 0.0, 9), weight_decay=0.1)
    model = Net(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    only = nnx.All(nnx.Param, nnx.PathContains("linear"))
    optimizer = nnx.Optimizer(model, adam, wrt=only)
    nnx.jit(adam.value_and_update(whole_net, microbatches=4))(optimizer, model, BATCH)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(model), before)
    found = nnx.to_pure_dict(same)
    assert found["norm"]["scale"] is found["norm"]["bias"] is True
    assert found["linear"]["kernel"] is found["norm"]["mean"] is False


def test_keys_of_a_module_and_a_module_next_to_the_parameters() -> None:
    """Dropout draws other numbers in each microbatch; what is not trained keeps its state, too."""

    class Noise(nnx.Module):
        def __init__(self) -> None:
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(x)

    def loss(w: Any, batch: Any, noise: Noise) -> Any:
        mask = noise(jnp.ones_like(batch["x"]))
        return mean_loss(w, batch | {"x": batch["x"] * mask}), mask

    adam, noise = AdamA(0.1), Noise()
    step = nnx.jit(adam.value_and_update(loss, has_aux=True, microbatches=13, aux="concat"))
    (value, mask), _, state = step(adam.init(W), W, BATCH, noise)
    assert len({row.tobytes() for row in np.asarray(mask)}) > 3
    expected, gradient = whole(mean_loss)(W, BATCH | {"x": BATCH["x"] * mask})
    near((value, state.mu), (expected, jax.tree.map(lambda g: 0.1 * g, gradient)))
    assert int(noise.dropout.rngs.count[...]) == 13  # pyright: ignore


def test_a_module_taken_apart_works_as_before() -> None:
    model, adam = Net(nnx.Rngs(0)), AdamA(0.1)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, batch: Any, rest: Any) -> Any:
        model = nnx.merge(graph, params, rest)
        return whole_net(model, batch), nnx.split(model, nnx.Param, ...)[2]

    step = adam.value_and_update(
        loss, has_aux=True, microbatches=1, carry_argnums=2, aux="carry"
    )  # fmt: skip
    (value, after), updates, state = step(adam.init(params), params, BATCH, rest)

    expected, gradient = nnx.jit(nnx.value_and_grad(whole_net))(model, BATCH)
    near((value, after), (expected, nnx.split(model, nnx.Param, ...)[2]))
    near(state.mu, jax.tree.map(lambda g: 0.1 * g, gradient))
    chex.assert_trees_all_equal_structs(updates, params)


def test_modules_that_cannot_be() -> None:
    model, adam = Net(nnx.Rngs(0)), AdamA(0.1)
    step: Any = adam.value_and_update(whole_net, microbatches=4)
    inside = "argument 0 has an NNX Net in it, whose changes would be lost"
    with pytest.raises(TypeError, match=inside):
        adam.init({"net": model})
    with pytest.raises(TypeError, match=inside):
        step(adam.init(W), {"net": model}, BATCH)
    with pytest.raises(TypeError, match="model= is an NNX module, Net; pass modules by position"):
        step(adam.init(model), model=model, batch=BATCH)
    with pytest.raises(ValueError, match="the state is not of these parameters"):
        step(adam.init(W), model, BATCH)
    other = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    text = "was made with another optimizer, of type GradientTransformation.*; pass nnx.Optimizer"
    with pytest.raises(ValueError, match=text):
        step(other, model, BATCH)
    mine = nnx.Optimizer(model, step_of(adam), wrt=nnx.Param)
    text = "an nnx.Optimizer is followed by the module that it was made for, got {'bias'"
    with pytest.raises(TypeError, match=text):
        step(mine, {"bias": jnp.ones(2)}, BATCH)


def step_of(adam: Any) -> Any:
    """For pyright: `AdamA` is no `optax.GradientTransformation`."""
    return adam


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: AdamA(0.1, b1=1.0), ValueError, "b1 must be at least 0 and less than 1, got 1.0"),
        (lambda: AdamA(0.1, b2=-0.1), ValueError, "AdamA: b2 must be at least 0 and less than 1"),
        (
            lambda: AdamA(0.1, moment_dtype=jnp.int8),
            ValueError,
            "moment_dtype must be a floating-point dtype, such as jax.numpy.float32, got int8",
        ),
        (
            lambda: AdamA(0.1).value_and_update(mean_loss, microbatches=0),
            ValueError,
            "microbatches must be at least 1, got 0",
        ),
        (
            lambda: AdamA(0.1).value_and_update(mean_loss)(W, W, BATCH),
            TypeError,
            "the first argument must be the state that AdamA.init returned, got {",
        ),
        (
            lambda: AdamA(0.1).value_and_update(mean_loss, microbatches=14)(
                AdamA(0.1).init(W), W, BATCH
            ),
            ValueError,
            "microbatches=14 is more than the 13 rows of the batch",
        ),
        (
            lambda: AdamA(0.1).value_and_update(lambda w, b: errors(w, b), microbatches=2)(
                AdamA(0.1).init(W), W, BATCH
            ),
            TypeError,
            "must return its mean loss as a real floating-point scalar",
        ),
        (
            lambda: AdamA(0.1).value_and_update(
                lambda w, b: Weighted(mean_loss(w, b), b["mask"].sum() - 3), microbatches=2
            )(AdamA(0.1).init(W), W, BATCH | {"mask": jnp.zeros(13)}),
            ValueError,
            "the weight of a microbatch is negative or NaN",
        ),
        (
            lambda: AdamA(0.1).value_and_update(mean_loss, batch_argnums=0)(
                AdamA(0.1).init(W), W, BATCH
            ),
            ValueError,
            "rows in w/bias",
        ),
        (
            lambda: AdamA(0.1).value_and_update(mean_loss, microbatches=2)(
                AdamA(0.1).init({"kernel": W["kernel"]}), W, BATCH
            ),
            ValueError,
            "the state is not of these parameters: its moments are float32[3, 2], and the "
            "parameters float32[2], float32[3, 2]; pass what AdamA.init(parameters) returned",
        ),
        (
            lambda: AdamA(0.1).value_and_update(mean_loss, batch_sharding=3)(  # pyright: ignore
                AdamA(0.1).init(W), W, BATCH
            ),
            TypeError,
            "batch_sharding must be a jax.sharding.NamedSharding or PartitionSpec, got 3",
        ),
        (
            lambda: AdamA(0.1).value_and_update(mean_loss, batch_sharding=PartitionSpec("data"))(
                AdamA(0.1).init(W), W, BATCH
            ),
            ValueError,
            "batch_sharding names the axis 'data', and the mesh has ()",
        ),
    ],
)
def test_errors(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()
