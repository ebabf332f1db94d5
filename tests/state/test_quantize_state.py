"""`jaxmem.quantize_state`: optimizers whose state is stored in 8 bits."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.menagerie import exact_jit, jit_as_users
from helpers.updating import assert_alike, normal, ordinary, run
from optax import contrib

import jaxmem
from jaxmem.state import rows
from jaxmem.state.codecs import CODECS, Codec

quantize_state: Any = jaxmem.quantize_state
transformation: Any = optax.GradientTransformation
with_extra_args: Any = optax.GradientTransformationExtraArgs

BOTH = pytest.mark.parametrize("codec", sorted(CODECS))

# Arrays that are stored in 8 bits, of two and of one dimension, and some that are not.
PARAMS = {"b": normal(0, 5), "long": normal(1, 5000), "w": normal(2, 24, 300)}


def is_coded(node: Any) -> bool:
    return isinstance(node, jaxmem.Coded)


def noise(seed: int, like: Any = PARAMS, size: float = 0.01) -> Any:
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten(
        [
            size * jax.random.normal(key, leaf.shape, leaf.dtype)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
    )


def steps(optimizer: Any, count: int = 3, params: Any = PARAMS, **extra: Any) -> tuple[Any, Any]:
    """Parameters and state after some updates."""
    state, update = exact_jit(optimizer.init)(params), exact_jit(optimizer.update)
    for seed in range(count):
        updates, state = update(noise(seed, params), state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


def distance(first: Any, second: Any) -> float:
    """The mean over numbers: of one whose gradients are noise about 0, an update may turn round."""
    pairs = zip(*map(jax.tree.leaves, (first, second)), strict=True)
    apart = [np.abs(np.asarray(a) - np.asarray(b)).ravel() for a, b in pairs]
    return float(np.concatenate(apart).mean())


def assert_same_form(first: Any, second: Any) -> None:
    chex.assert_trees_all_equal_structs(first, second)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second)


# ---------------------------------------------------------------- how good it is


@pytest.mark.slow
@BOTH
def test_adam_meets_the_bounds_of_bitsandbytes_tests(codec: str) -> None:
    params = jax.random.normal(jax.random.key(0), (1024, 1024))
    exact, ours = optax.adam(1e-3), quantize_state(optax.adam(1e-3), codec)

    @functools.partial(jit_as_users, donate_argnums=(0, 1, 2, 3))
    def step(p: Any, q: Any, state: Any, coded: Any, seed: Any) -> Any:
        gradient = 0.01 * jax.random.normal(jax.random.key(seed), p.shape)
        one, state = exact.update(gradient, state)
        two, coded = ours.update(gradient, coded)
        return p + one, q + two, state, coded, jnp.abs(one - two).mean()

    held = params, jnp.copy(params), exact.init(params), ours.init(params)
    for seed in range(50):
        *held, error = step(*held, seed)
        assert error < 6e-5
    p, q, *_ = held
    assert (~jnp.isclose(q, p, rtol=1e-3, atol=3e-3)).sum() < 20


@BOTH
def test_a_small_consistent_gradient_beside_huge_noise_is_not_blown_up(codec: str) -> None:
    """A second moment stored as 0 would make an update hundreds of learning rates long."""
    lr, params = 1e-3, jnp.zeros((16, 512))
    optimizer = quantize_state(optax.adam(lr), codec)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    random = np.random.default_rng(0)
    for step in range(200):
        gradient = np.full(params.shape, 1e-6, np.float32)
        gradient[:, ::64] = 100 * random.standard_normal((16, 8))
        updates, state = update(jnp.asarray(gradient), state)
        small = np.delete(np.asarray(updates), np.s_[::64], axis=1)
        assert np.abs(small).max() <= 1.5 * lr, step


def test_a_parabola_is_descended_as_with_the_optimizer_itself() -> None:
    params, goal = jnp.zeros((8, 512)), normal(3, 8, 512)
    for optimizer in (optax.adam(0.02), optax.rmsprop(0.01), optax.sgd(0.1, 0.9)):
        wrapped = quantize_state(optimizer)

        @jax.jit
        def descend(p: Any, optimizer: Any = wrapped) -> Any:
            def body(carry: Any, _: Any) -> Any:
                p, state = carry
                updates, state = optimizer.update(2 * (p - goal), state, p)
                return (p + updates, state), None

            return jax.lax.scan(body, (p, optimizer.init(p)), length=300)[0][0]

        assert jnp.abs(descend(params) - goal).max() < 0.03


def test_averages_of_parameters_are_not_rounded() -> None:
    """In schedule_free's z a step is less than a step of 8 bits: it would never move."""
    params, goal = jnp.ones((8, 512)), 1 + normal(3, 8, 512) / 10
    optimizer = quantize_state(contrib.schedule_free_adamw(1e-3))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(100):
        updates, state = update(params - goal, state, params)
        params = params + updates
    assert jnp.abs(params - goal).mean() < 0.6 * jnp.abs(1 - goal).mean()
    assert state.z.dtype == jnp.float32
    assert is_coded(state.base_optimizer_state[0].nu)


# ---------------------------------------------------------------- row by row

# Of few and of many blocks; such as have a loop, with rest and without, and such as do not.
SHAPES = [(24, 300), (7, 1024), (23, 2, 5, 64), (64, 100)]


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_some_rows_at_a_time_give_what_the_whole_array_does(
    shape: tuple[int, ...], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(0.1, 0.2, 5))
    )
    params = {"b": normal(0, 3), "w": normal(1, *shape)}
    found = []
    for chunk in (2**30, 2048):
        monkeypatch.setattr(rows, "CHUNK", chunk)
        ours = quantize_state(optimizer, codec)
        loops = str(jax.make_jaxpr(ours.update)(params, ours.init(params), params)).count("scan[")
        apart = len(shape) > 1 and np.prod(shape[1:]) >= (256 if codec == "dynamic" else 32)
        assert loops == (chunk == 2048 and apart)
        found.append(steps(ours, 2, params))
    assert_alike(*found, tolerance=0)


# ---------------------------------------------------------------- what is stored how


def test_keeping_everything_is_the_optimizer_itself() -> None:
    optimizer = optax.adamw(1e-2)
    ours = quantize_state(optimizer, min_size=1, keep=lambda path: True)
    chex.assert_trees_all_equal(ours.init(PARAMS), optimizer.init(PARAMS))
    chex.assert_trees_all_equal(steps(ours), steps(optimizer))


def test_arrays_are_kept_by_path_and_by_size() -> None:
    seen = []

    def keep(path: str) -> Any:
        seen.append(path)
        return re.search("nu/w", path)  # true or false, if no bool

    optimizer = quantize_state(optax.adam(1e-3), keep=keep)
    state = jax.eval_shape(optimizer.init, PARAMS)
    assert seen == ["0/mu/long", "0/mu/w", "0/nu/long", "0/nu/w"]
    assert is_coded(state[0].mu["w"])
    assert is_coded(state[0].nu["long"])
    assert state[0].nu["w"].dtype == jnp.float32
    assert not is_coded(state[0].mu["b"])
    assert state[0].count.dtype == jnp.int32

    large, everything = (
        jax.eval_shape(quantize_state(optax.adam(1e-3), min_size=size).init, PARAMS)[0]
        for size in (7200, 1)
    )
    assert is_coded(large.mu["w"])
    assert not is_coded(large.mu["long"])
    assert all(map(is_coded, (*everything.mu.values(), *everything.nu.values())))
    assert everything.count.dtype == jnp.int32


def test_arrays_that_are_no_real_numbers_stay_as_they_are() -> None:
    def init(params: Any) -> Any:
        whole = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int8), params)
        return {"moments": jax.tree.map(jnp.zeros_like, params), "whole": whole}

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
        whole = jax.tree.map(lambda w, g: w + (g.real > 0).astype(w.dtype), state["whole"], moments)
        return moments, {"moments": moments, "whole": whole}

    params = {"c": jnp.ones((8, 512), jnp.complex64), "w": jnp.ones((8, 512))}
    optimizer = transformation(init, update)
    after = steps(quantize_state(optimizer), params=params)[1]
    expected = steps(optimizer, params=params)[1]
    assert is_coded(after["moments"]["w"])
    assert after["moments"]["c"].dtype == jnp.complex64
    chex.assert_trees_all_equal(after["moments"]["c"], expected["moments"]["c"])
    assert [leaf.dtype for leaf in after["whole"].values()] == [jnp.int8] * 2


@BOTH
@pytest.mark.parametrize("mu_dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_of_state_and_updates_are_those_of_the_optimizer(
    dtype: Any, mu_dtype: Any, codec: str
) -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)
    optimizer = optax.adamw(1e-2, mu_dtype=mu_dtype)
    ours = quantize_state(optimizer, codec)
    state, plain = jax.jit(ours.init)(params), optimizer.init(params)
    ours, optimizer = jax.jit(ours.update), jax.jit(optimizer.update)
    for seed in range(3):
        updates, after = ours(noise(seed, params), state, params)
        expected, plain = optimizer(noise(seed, params), plain, params)
        assert_same_form(updates, expected)
        assert_same_form(after, state)
        chex.assert_trees_all_close(updates, expected, atol=2e-3)
        state = after


def test_trees_without_large_arrays_are_updated_as_ever() -> None:
    optimizer = optax.adam(1e-3)
    for params in ({}, {"b": jnp.ones(3)}, [], jnp.ones(())):
        ours = quantize_state(optimizer)
        assert_same_form(ours.init(params), optimizer.init(params))
        assert_alike(steps(ours, params=params), steps(optimizer, params=params), tolerance=0)


# ---------------------------------------------------------------- how it is called

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=10**6),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"b": False, "long": True, "w": True}),
    "multi_transform": lambda: optax.partition(
        {"a": optax.adam(1e-2), "s": optax.sgd(0.1, 0.9)}, {"b": "s", "long": "s", "w": "a"}
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_close_to_the_optimizers_and_states_keep_their_form(name: str) -> None:
    optimizer, ours = OPTIMIZERS[name](), quantize_state(OPTIMIZERS[name]())
    extra = {"value": jnp.float32(1)} if name == "reduce_on_plateau" else {}
    params, state = steps(ours, 4, **extra)
    expected, _ = steps(optimizer, 4, **extra)
    assert_same_form(state, ours.init(PARAMS))
    assert any(map(is_coded, jax.tree.leaves(state, is_leaf=is_coded)))
    assert distance(params, expected) < 2e-4


@pytest.mark.slow
def test_init_and_update_work_under_all_of_jax() -> None:
    optimizer = quantize_state(optax.adam(1e-2))
    state = jax.jit(optimizer.init)(PARAMS)
    assert_same_form(jax.eval_shape(optimizer.init, PARAMS), state)
    chex.assert_trees_all_equal(exact_jit(optimizer.init)(PARAMS), state)

    def step(carry: Any, gradient: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(noise, range(3)))
    scanned, _ = exact_jit(lambda *args: jax.lax.scan(step, args, gradients))(PARAMS, state)
    assert_alike(scanned, steps(optimizer), tolerance=1e-6)

    two = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), PARAMS)
    mapped = exact_jit(jax.vmap(optimizer.init))(two)
    updates, mapped = exact_jit(jax.vmap(optimizer.update))(two, mapped, two)
    one, after = exact_jit(optimizer.update)(PARAMS, state, PARAMS)
    assert_alike(jax.tree.map(lambda leaf: leaf[0], (updates, mapped)), (one, after), 1e-6)

    donated = jax.jit(optimizer.update, donate_argnums=(1,))
    _, after = donated(noise(0), state, PARAMS)
    assert all(leaf.is_deleted() for leaf in (state[0].mu["w"].codes, state[0].nu["w"].scales))
    assert_same_form(after, optimizer.init(PARAMS))


def test_an_update_does_without_parameters() -> None:
    optimizer = quantize_state(optax.adam(1e-2))
    state = jax.jit(optimizer.init)(PARAMS)
    update = exact_jit(optimizer.update)
    with_params, without = (update(noise(0), state, p) for p in (PARAMS, None))
    chex.assert_trees_all_equal(with_params, without)


@pytest.mark.slow
def test_other_arguments_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK", 2048)
    told = []

    def update(gradients: Any, state: Any, params: Any, *, value: Any = 1.0, **more: Any) -> Any:
        told.append((value, more))
        state = jax.tree.map(lambda m, g: 0.9 * m + value * g, state, gradients)
        return state, state

    init = functools.partial(jax.tree.map, jnp.zeros_like)
    optimizer = quantize_state(with_extra_args(init, update))
    state = jax.jit(optimizer.init)(PARAMS)
    updates, _ = optimizer.update(noise(0), state, PARAMS, value=jnp.float32(2), fun=abs, on=True)
    assert told[-1][1] == {"fun": abs, "on": True}
    chex.assert_trees_all_close(updates, jax.tree.map(lambda g: 2 * g, noise(0)))
    # Optimizers that know of none are not given any.
    adam = quantize_state(optax.adam(1e-2))
    adam.update(noise(0), adam.init(PARAMS), PARAMS, value=1.0, more="more")


@pytest.mark.slow
def test_around_and_inside_other_transformations() -> None:
    for around in (
        lambda inner: optax.MultiSteps(inner, 2).gradient_transformation(),
        lambda inner: optax.apply_if_finite(inner, 2),
        lambda inner: optax.masked(inner, {"b": True, "long": False, "w": True}),
    ):
        params, state = steps(around(quantize_state(optax.adam(1e-2))), 4)
        expected, _ = steps(around(optax.adam(1e-2)), 4)
        assert any(map(is_coded, jax.tree.leaves(state, is_leaf=is_coded)))
        assert distance(params, expected) < 2e-4


def test_optax_finds_its_fields_and_maps_them() -> None:
    optimizer = quantize_state(optax.adam(1e-2))
    state = jax.jit(optimizer.init)(PARAMS)
    assert is_coded(optax.tree.get(state, "mu")["w"])
    assert_same_form(optax.tree.map_params(optimizer, lambda leaf: leaf, state), state)


@pytest.mark.slow
def test_a_state_comes_back_from_bytes() -> None:
    optimizer = quantize_state(optax.adam(1e-2))
    _, state = steps(optimizer)
    read = flax.serialization.from_bytes(optimizer.init(PARAMS), flax.serialization.to_bytes(state))
    read = jax.tree.map(jnp.asarray, read)
    assert_same_form(read, state)
    chex.assert_trees_all_equal(read, state)
    chex.assert_trees_all_equal(*(optimizer.update(PARAMS, s, PARAMS) for s in (read, state)))


# ---------------------------------------------------------------- numbers out of the ordinary


@BOTH
def test_gradients_of_zero_change_nothing(codec: str) -> None:
    optimizer = quantize_state(optax.adam(1e-2), codec)
    state = jax.jit(optimizer.init)(PARAMS)
    update = jax.jit(optimizer.update)
    updates, after = update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
    chex.assert_trees_all_equal(after[0].mu, state[0].mu)
    chex.assert_trees_all_equal(after[0].nu, state[0].nu)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(updates))


@BOTH
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_stays_so(bad: Any, codec: str) -> None:
    """As the optimizer's own state would; and all of its block with it."""
    optimizer, ours = optax.adam(1e-2), quantize_state(optax.adam(1e-2), codec)
    gradient = {**noise(0), "w": noise(0)["w"].at[3, 7].set(bad)}
    state, plain = jax.jit(ours.init)(PARAMS), optimizer.init(PARAMS)
    ours, optimizer = jax.jit(ours.update), jax.jit(optimizer.update)
    for each in (gradient, noise(1), noise(2)):
        updates, state = ours(each, state, PARAMS)
        expected, plain = optimizer(each, plain, PARAMS)
        assert not jnp.isfinite(jnp.where(jnp.isfinite(expected["w"]), jnp.nan, updates["w"])).any()
        chex.assert_tree_all_finite((updates["long"], updates["b"], updates["w"][0]))


@BOTH
def test_steps_that_are_not_finite_can_be_left_out(codec: str) -> None:
    optimizer = optax.apply_if_finite(quantize_state(optax.adam(1e-2), codec), 3)
    _, state = steps(optimizer)
    bad = {**noise(0), "w": noise(0)["w"].at[0, 0].set(jnp.nan)}
    updates, after = jax.jit(optimizer.update)(bad, state, PARAMS)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(updates))
    # Inside of it, where what is decoded is encoded again.
    inside = quantize_state(optax.apply_if_finite(optax.adam(1e-2), 3), codec)
    _, state = steps(inside)
    _, after = jax.jit(inside.update)(bad, state, PARAMS)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)


# ---------------------------------------------------------------- inside of a backward pass


@pytest.mark.slow
def test_in_the_backward_pass_it_is_the_ordinary_step() -> None:
    width, depth = 32, 4
    params = {
        "embed": normal(0, 150, width),
        "layers": {"up": normal(1, depth, width, 48), "down": normal(2, depth, 48, width)},
    }
    tokens = jnp.arange(12).reshape(3, 4) * 11

    def loss(params: Any, tokens: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            return h + jnp.tanh(h @ p["up"]) @ p["down"], None

        h, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        logits = h @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    optimizer = quantize_state(optax.adamw(1e-2))
    step = jaxmem.value_and_update(loss, optimizer)
    plan = step.explain(params, optimizer.init(params), tokens)
    assert {leaf.path for leaf in plan.leaves if leaf.in_backward} == {"layers/up", "layers/down"}
    ours = run(step, optimizer, params, tokens)
    theirs = run(ordinary(loss, optimizer), optimizer, params, tokens)
    assert is_coded(ours[2][0].nu["layers"]["up"])
    chex.assert_trees_all_close(ours[:2], theirs[:2], atol=2e-6)
    for one, two in zip(*(jax.tree.leaves(each[2]) for each in (ours, theirs)), strict=True):
        near = 1 if one.dtype.itemsize == 1 else 1e-6
        one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
        assert np.abs(one - two).max() <= near * max(1, np.abs(two).max())


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("target", ["h100-80g", "v5e-16g"])
def test_an_update_of_large_arrays_needs_little_more_than_they_do(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"w": jax.ShapeDtypeStruct((64, 64, 2048), jnp.float32)}
    size = 64 * 64 * 2048 * 4

    def temporaries(chunk: int) -> float:
        monkeypatch.setattr(rows, "CHUNK", chunk)
        optimizer = quantize_state(optax.adamw(1e-3))
        state = jax.eval_shape(optimizer.init, params)

        def step(params: Any, state: Any, gradient: Any) -> Any:
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, updates

        report = jaxmem.memory_report(
            step, params, state, params, target=target, donate_argnums=(0, 1, 2), suggest=False
        )
        return report.temp_bytes / size

    assert temporaries(2**16) < 0.05
    assert temporaries(2**30) > 1


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"codec": "4bit"}, ValueError, "there is no codec '4bit'; pass 'dynamic' or 'companding'"),
        ({"codec": 8}, TypeError, "a codec is given by its name or as a value, got 8 of type int"),
        ({"block": 0}, ValueError, "block must be at least 1, got 0"),
        (
            {"codec": jaxmem.Dynamic(), "block": 64},
            TypeError,
            "block=64 goes with the name of a codec",
        ),
        ({"min_size": 0}, ValueError, "min_size must be at least 1, got 0"),
        ({"min_size": 1.5}, TypeError, "min_size must be a whole number of at least 1, got 1.5"),
        ({"keep": "embed"}, TypeError, "keep takes a function .* got 'embed' of type str"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        quantize_state(optax.adam(1e-3), **options)


@pytest.mark.parametrize("thing", [optax.adam, None, jnp.ones(3), lambda g: g])
def test_what_is_no_optimizer_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="takes an optax transformation, such as optax.adamw"):
        quantize_state(thing)


def test_states_of_something_else_are_refused_and_the_difference_is_told() -> None:
    ours = quantize_state(optax.adam(1e-3))
    few = {name: leaf for name, leaf in PARAMS.items() if name != "b"}
    with pytest.raises(ValueError, match="which the state lacks") as told:
        ours.update(PARAMS, ours.init(few), PARAMS)
    assert "has 0/mu/b" in str(told.value)
    assert len(str(told.value)) < 300
    wide = {**PARAMS, "w": normal(0, 24, 310)}
    with pytest.raises(ValueError, match=r"has 0/mu/w as int8\[24, 310\] .* float32\[24, 300\]"):
        ours.update(PARAMS, ours.init(wide), PARAMS)
    sgd = quantize_state(optax.sgd(0.1, 0.9))
    with pytest.raises(ValueError, match="the state is not of this optimizer and these parameters"):
        ours.update(PARAMS, sgd.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "other", [jaxmem.Companding(), jaxmem.Dynamic(block=64), jaxmem.Dynamic(block=300)], ids=str
)
def test_states_of_another_codec_are_refused(other: Codec) -> None:
    ours, theirs = (quantize_state(optax.adam(1e-3), codec) for codec in ("dynamic", other))
    state = jax.eval_shape(theirs.init, PARAMS)
    with pytest.raises(ValueError, match="decode with the codec and the block of encode"):
        jax.eval_shape(ours.update, PARAMS, state, PARAMS)


def changing(after: Callable[[Any], Any]) -> Any:
    def init(params: Any) -> Any:
        return {"m": jax.tree.map(jnp.zeros_like, params)}

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        return gradients, after(state)

    return transformation(init, update)


@pytest.mark.parametrize(
    ("after", "match"),
    [
        (lambda s: {**s, "more": jnp.ones(3)}, "has more, which that before it lacks"),
        (lambda s: {"m": {"w": s["m"]["w"]}}, "that before it has m/b, which"),
        (lambda s: jax.tree.map(jnp.transpose, s), r"has m/w as float32\[300, 24\]"),
    ],
)
def test_optimizers_that_change_the_form_of_their_state_are_refused(after: Any, match: str) -> None:
    optimizer = quantize_state(changing(after))
    state = jax.jit(optimizer.init)(PARAMS)
    with pytest.raises(ValueError, match=match):
        jax.jit(optimizer.update)(PARAMS, state, PARAMS)


def test_errors_of_the_optimizer_come_through() -> None:
    def fail(params: Any) -> Any:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        quantize_state(transformation(fail, fail)).init(PARAMS)
    decay = quantize_state(optax.adamw(1e-3))
    with pytest.raises(ValueError, match="current value of parameters"):
        decay.update(PARAMS, decay.init(PARAMS))


def test_an_optimizer_that_cannot_be_looked_into_keeps_its_state_and_is_warned_of() -> None:
    with pytest.warns(jaxmem.JaxmemWarning, match=r"its state stays as it is: .*value_fn"):
        state = quantize_state(optax.lbfgs()).init(PARAMS)
    assert not any(map(is_coded, jax.tree.leaves(state, is_leaf=is_coded)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_state(optax.lbfgs(), keep=lambda path: True).init(PARAMS)
