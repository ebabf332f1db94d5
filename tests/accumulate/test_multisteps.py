"""`MultiSteps` next to that of optax: the same where that is right, and right where not.

Shapes: n microbatches, k of them in a window.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers.accumulating import PARAMS, filled, gradients, near, weighted_mean
from helpers.compiled import PLATFORMS, compiled
from helpers.menagerie import assert_close, assert_same, exact_jit
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.core import Tracer

import jaxmem

TINY = settings(derandomize=True, max_examples=12)


def run(tx: Any, grads: Iterable[Any], params: Any = PARAMS, **given: Any) -> list[Any]:
    """Each call's updates, and the state after it."""
    state, found = tx.init(params), []
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params, **given)
        found.append((updates, state))
    return found


class Recorded(NamedTuple):
    runs: jax.Array
    value: jax.Array


def recorder(value: float = -1.0) -> optax.GradientTransformationExtraArgs:
    """−(times run so far) × the gradient; keeps the `value` that it got."""

    def update(updates: Any, state: Any, _: Any = None, *, value: Any = value, **__: Any) -> Any:
        runs = state.runs + 1
        changes = jax.tree.map(lambda leaf: -runs.astype(leaf.dtype) * leaf, updates)
        return changes, Recorded(runs, jnp.asarray(value, jnp.float32))

    def init(_: Any) -> Any:
        return Recorded(jnp.zeros((), jnp.int32), jnp.zeros(()))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


# ---------------------------------------------------------------- the same as optax's

INNER: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 9), weight_decay=0.1),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 1e-3, 5)),
    "masked": lambda: optax.masked(
        optax.adam(1e-2), lambda tree: jax.tree.map(lambda leaf: jnp.ndim(leaf) != 1, tree)
    ),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(1e-2),
}
SHAPES = st.lists(st.integers(1, 4), max_size=2).map(tuple)
TREES = st.recursive(
    SHAPES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=2),
    ),
    max_leaves=4,
)


def zeros(shapes: Any) -> Any:
    return jax.tree.map(jnp.zeros, shapes, is_leaf=lambda node: isinstance(node, tuple))


# `exact_jit`, because LLVM chooses the order in which a reduction adds, by what
# stands around it: with its optimisations on, the root mean square in adafactor is
# one unit in the last place apart in the two programs.  Without them every
# operation is the same in both.
@pytest.mark.slow
@TINY
@given(
    params=TREES.map(zeros),
    inner=st.sampled_from(sorted(INNER)),
    k=st.integers(1, 5),
    use_grad_mean=st.booleans(),
    guard=st.sampled_from([None, "finite", "large"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_updates_and_state_are_optax_own_bits(
    params: Any, inner: str, k: int, use_grad_mean: bool, guard: str | None, seed: int
) -> None:
    skip = {
        None: None,
        "finite": optax.skip_not_finite,
        "large": functools.partial(optax.skip_large_updates, max_squared_norm=20.0),
    }[guard]
    params, *grads = gradients(2 * k + 2, seed, params)
    if guard:  # both guards refuse these; without a guard optax is not right about them
        for index in np.random.default_rng(seed).integers(0, len(grads), 2):
            grads[index] = filled(grads[index], [np.nan, np.inf, -np.inf][seed % 3])
    ours, theirs = (
        kind(INNER[inner](), k, use_grad_mean=use_grad_mean, should_skip_update_fn=skip)
        for kind in (jaxmem.MultiSteps, optax.MultiSteps)
    )
    state, other = ours.init(params), theirs.init(params)
    steps = exact_jit(ours.update), exact_jit(theirs.update)
    for grad in grads:
        updates, state = steps[0](grad, state, params)
        expected, other = steps[1](grad, other, params)
        # Zeros compare equal whatever their sign: off step optax's are 0 × update, ours 0.
        assert_same(updates, expected)
        assert_same([getattr(state, name) for name in other._fields], list(other))
        params = optax.apply_updates(params, updates)


def test_constructor_takes_optax_arguments_by_place_and_by_name() -> None:
    by_place = [optax.adam(0.1), 2, False, optax.skip_not_finite, jnp.bfloat16]
    state = jaxmem.MultiSteps(*by_place).init(PARAMS)
    assert state.acc_grads["bias"].dtype == jnp.bfloat16
    assert set(state.skip_state) == {"should_skip", "num_not_finite"}
    assert set(optax.MultiStepsState._fields) < set(state._fields)
    tx = jaxmem.MultiSteps(optax.adam(0.1), every_k_schedule=2)
    assert tx.inner_opt.update is optax.with_extra_args_support(tx.inner_opt).update
    assert isinstance(tx.gradient_transformation(), optax.GradientTransformationExtraArgs)


# ---------------------------------------------------------------- optax's own cases


class Quadratic(nn.Module):
    """A loss that has its minimum where all weights are zero."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.Dense(5, dtype=x.dtype, param_dtype=x.dtype)
        return (dense(x) ** 2).sum()


@pytest.mark.parametrize("k", [1, 4])
def test_case_params_and_loss_change_only_where_a_window_ends(k: int) -> None:
    x = jnp.ones((8, 3))
    loss = Quadratic()
    params = loss.init(jax.random.key(0), x)
    inner = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-2), optax.scale(-1e-3))
    tx = jaxmem.MultiSteps(inner, k)
    init, update = tx.gradient_transformation()

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(loss.apply)(params, x)
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, before = init(params), jnp.inf
    for index in range(4 * k):
        new, state, value = step(params, state)
        if index % k == 0:
            assert value < before
            before = value
        assert value == before
        ends = index % k == k - 1
        assert bool(tx.has_updated(state)) == ends
        for old, leaf in zip(jax.tree.leaves(params), jax.tree.leaves(new), strict=True):
            assert bool((old == leaf).all()) != ends
        params = new


def test_case_schedule_that_lengthens_the_window() -> None:
    tx = jaxmem.MultiSteps(optax.sgd(1e-4), lambda step: jnp.where(step < 2, 1, 3))
    found = [bool(tx.has_updated(state)) for _, state in run(tx, gradients(11))]
    assert found == [True, True] + 3 * [False, False, True]
    assert not tx.has_updated(tx.init(PARAMS))


def test_case_dtypes_are_stable_in_a_scan() -> None:
    params = {"a": jnp.zeros((), jnp.bfloat16)}
    tx = jaxmem.MultiSteps(optax.sgd(1e-4), 2)

    def step(state: Any, grad: Any) -> Any:
        updates, state = tx.update({"a": grad}, state, params, weight=2.0, value=grad)
        return state, updates

    state, updates = jax.lax.scan(step, tx.init(params), jnp.ones(4, jnp.bfloat16))
    assert state.acc_grads["a"].dtype == jnp.float32
    assert updates["a"].dtype == jnp.bfloat16
    assert int(state.gradient_step) == 2


def test_case_zero_nans_has_a_state_of_bools() -> None:
    tx = jaxmem.MultiSteps(optax.chain(optax.zero_nans(), optax.sgd(1.0)), 2)
    found = run(tx, [filled(PARAMS, np.nan), filled(PARAMS, 1.0)])
    assert all(bool(leaf.all()) for leaf in jax.tree.leaves(found[1][1].inner_opt_state[0]))
    chex.assert_trees_all_equal(found[1][0], filled(PARAMS, 0.0))


@pytest.mark.parametrize(("use_grad_mean", "expected"), [(True, 2.5), (False, 10.0)])
def test_case_mean_and_sum(use_grad_mean: bool, expected: float) -> None:
    tx = jaxmem.MultiSteps(optax.scale(1.0), 4, use_grad_mean)
    found = run(tx, [filled(PARAMS, value) for value in (1.0, 2.0, 3.0, 4.0)])
    assert [bool(tx.has_updated(state)) for _, state in found] == [False] * 3 + [True]
    chex.assert_trees_all_equal(
        [updates for updates, _ in found], [filled(PARAMS, 0.0)] * 3 + [filled(PARAMS, expected)]
    )


def test_case_skip_not_finite() -> None:
    tx = jaxmem.MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite)
    values = [1.0, 1.0, np.inf, np.nan, 1.0, -np.inf, 1.0]
    found = run(tx, [filled(PARAMS, value) for value in values])
    assert [int(state.mini_step) for _, state in found] == [1, 0, 0, 0, 1, 1, 0]
    assert [int(state.skipped) for _, state in found] == [0, 0, 1, 2, 2, 3, 3]
    assert [bool(state.skip_state["should_skip"]) for _, state in found] == [
        not np.isfinite(value) for value in values
    ]
    assert [float(updates["bias"][0]) for updates, _ in found] == [0, -1, 0, 0, 0, 0, -1]


HALVES = [jnp.float32, jnp.float16, jnp.bfloat16]


@pytest.mark.parametrize("param_dtype", HALVES)
@pytest.mark.parametrize("grad_dtype", HALVES)
@pytest.mark.parametrize("mu_dtype", [None, jnp.float32, jnp.bfloat16])
def test_case_dtypes_are_those_of_the_wrapped_optimizer(
    param_dtype: Any, grad_dtype: Any, mu_dtype: Any
) -> None:
    params = jax.tree.map(lambda leaf: leaf.astype(param_dtype), PARAMS)
    grads = jax.tree.map(lambda leaf: leaf.astype(grad_dtype), gradients(3))
    inner = optax.adam(0.1, mu_dtype=mu_dtype)
    tx = jaxmem.MultiSteps(inner, 2)
    plain, state = inner.init(params), tx.init(params)
    for grad in grads:
        expected, plain_next = inner.update(grad, plain, params)
        updates, state = tx.update(grad, state, params)
        chex.assert_trees_all_equal_dtypes(updates, expected)
        # A scan wants the state as init made it, even where the optimizer's own changes.
        chex.assert_trees_all_equal_dtypes(state.inner_opt_state, plain)
        del plain_next
        new = optax.apply_updates(params, updates)
        chex.assert_trees_all_equal_dtypes(new, params)
        params = new


# ---------------------------------------------------------------- the numbered defects


def test_defect_1_a_nan_does_not_poison_the_accumulator() -> None:
    def windows(kind: Any) -> list[Any]:
        tx = kind(optax.apply_if_finite(optax.sgd(1.0), 3), 2)
        good = filled(PARAMS, 1.0)
        return [state for _, state in run(tx, [filled(PARAMS, np.nan), good, good, good])]

    found = windows(jaxmem.MultiSteps)
    assert np.isnan(found[0].acc_grads["bias"]).all()
    chex.assert_trees_all_equal(found[1].acc_grads, filled(PARAMS, 0.0))
    assert [int(state.inner_opt_state.total_notfinite) for state in found] == [0, 1, 1, 1]
    assert bool(found[3].inner_opt_state.last_finite)
    assert np.isnan(windows(optax.MultiSteps)[3].acc_grads["bias"]).all()


def test_defect_2_a_nan_of_the_wrapped_optimizer_stays_inside() -> None:
    def direction(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf / jnp.abs(leaf).sum(), updates)

    def first(kind: Any) -> Any:
        return run(kind(optax.stateless(direction), 2), [filled(PARAMS, 0.0)])[0][0]

    chex.assert_trees_all_equal(first(jaxmem.MultiSteps), filled(PARAMS, 0.0))
    assert np.isnan(first(optax.MultiSteps)["bias"]).all()


def test_defect_3_has_updated_is_false_after_a_skipped_one() -> None:
    def flags(kind: Any) -> list[bool]:
        tx = kind(optax.sgd(1.0), 1, should_skip_update_fn=optax.skip_not_finite)
        grads = [filled(PARAMS, value) for value in (np.nan, 1.0, np.nan, 1.0)]
        return [bool(tx.has_updated(state)) for _, state in run(tx, grads)]

    assert flags(jaxmem.MultiSteps) == [False, True, False, True]
    assert flags(optax.MultiSteps) == [False, True, True, True]


def test_defect_4_the_wrapped_optimizer_gets_the_mean_in_float32() -> None:
    # The mean of 1 and 1 + 2⁻⁷ lies halfway between two numbers of bfloat16.
    grads = [jnp.bfloat16(1), jnp.bfloat16(1 + 2**-7)]
    seen = []

    def inner() -> optax.GradientTransformation:
        def update(updates: Any, _: Any) -> Any:
            seen.append(updates.dtype)
            return updates.astype(jnp.float32)

        return optax.stateless(update)

    params = jnp.bfloat16(0)
    assert run(jaxmem.MultiSteps(inner(), 2), grads, params)[1][0] == 1 + 2**-8
    assert seen[0] == jnp.float32
    assert run(optax.MultiSteps(inner(), 2), grads, params)[1][0] != 1 + 2**-8


@TINY
@given(
    weights=st.lists(
        st.one_of(st.integers(0, 4096), st.floats(2**-10, 2**10, width=32)), min_size=1, max_size=12
    ),
    use_grad_mean=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_defect_5_the_mean_is_weighted(
    weights: list[float], use_grad_mean: bool, dtype: Any, seed: int
) -> None:
    total = float(np.sum(np.asarray(weights, np.float64)))
    grads = jax.tree.map(lambda leaf: leaf.astype(dtype), gradients(len(weights), seed))
    state, update = flushing(use_grad_mean, dtype)
    updates: Any = None
    for index, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        last = index == len(weights) - 1
        updates, state = update(grad, state, weight=weight, emit=last)
    if not total:
        chex.assert_trees_all_equal(updates, filled(updates, 0.0))
        assert not state.updated
        return
    expected = weighted_mean(grads, weights)
    scale = 1.0
    if not use_grad_mean:
        expected = jax.tree.map(lambda leaf: leaf * total, expected)
        scale = total
    # Each microbatch rounds three times, by half a unit in the last place of what is added up.
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) * scale
    near(
        jax.tree.map(lambda leaf: leaf / size, updates),
        _over(expected, size),
        3 * len(weights) * 2.0**-24,
    )


def _over(tree: Any, size: float) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf / size, np.float32), tree)


@functools.cache
def flushing(use_grad_mean: bool, dtype: Any) -> tuple[Any, Any]:
    """A state and an update whose updates are the mean, in float32."""

    def update(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), updates)

    tx = jaxmem.MultiSteps(optax.stateless(update), 1000, use_grad_mean)
    return tx.init(jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)), jax.jit(tx.update)


def test_defect_5_weights_4_and_16_of_a_real_loss() -> None:
    x = jax.random.normal(jax.random.key(0), (20, 2))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ params["kernel"] + params["bias"]) ** 2).mean()

    def found(kind: Any, **weights: Any) -> Any:
        tx = kind(optax.scale(1.0), 2)
        state = tx.init(PARAMS)
        for part, weight in ((x[:4], 4), (x[4:], 16)):
            given = dict.fromkeys(weights, weight)
            updates, state = tx.update(jax.grad(loss)(PARAMS, part), state, PARAMS, **given)
        return updates

    whole = jax.grad(loss)(PARAMS, x)
    assert_close(found(jaxmem.MultiSteps, weight=True), whole, 1e-6)
    with pytest.raises(AssertionError, match="apart"):
        assert_close(found(optax.MultiSteps), whole, 0.05)


def test_defect_6_value_is_the_mean_over_the_window() -> None:
    def values(kind: Any, **weight: Any) -> list[float]:
        tx = kind(recorder(), 2)
        state, found = tx.init(PARAMS), []
        for value, grad in zip((1.0, 2.0, 3.0, 6.0), gradients(4), strict=True):
            given = dict.fromkeys(weight, value)
            _, state = tx.update(grad, state, PARAMS, value=value, **given)
            found.append(float(state.inner_opt_state.value))
        return found[1::2]

    assert values(jaxmem.MultiSteps) == [1.5, 4.5]
    assert values(jaxmem.MultiSteps, weight=True) == [np.float32(5 / 3), 5.0]
    assert values(optax.MultiSteps) == [2.0, 6.0]


@pytest.mark.parametrize("last", [True, np.True_, jnp.array(True)], ids=["bool", "numpy", "jax"])
def test_defect_7_a_partial_window_can_be_flushed(last: Any) -> None:
    grads = gradients(3)
    tx = jaxmem.MultiSteps(recorder(), 8)
    state = tx.init(PARAMS)
    for grad in grads[:2]:
        _, state = tx.update(grad, state, PARAMS, emit=~last if hasattr(last, "dtype") else False)
    updates, state = tx.update(grads[2], state, PARAMS, emit=last)
    near(updates, jax.tree.map(np.negative, weighted_mean(grads, [1, 1, 1])))
    assert bool(tx.has_updated(state))
    assert (int(state.mini_step), int(state.gradient_step), float(state.weight)) == (0, 1, 0.0)
    # The next window begins with nothing.
    _, after = tx.update(grads[0], state, PARAMS)
    chex.assert_trees_all_equal(after.acc_grads, grads[0])

    other: Any = optax.MultiSteps(recorder(), 8)
    _, theirs = other.update(grads[0], other.init(PARAMS), PARAMS, emit=True)
    assert int(theirs.mini_step) == 1


@pytest.mark.parametrize(
    "k",
    [
        2,
        np.int32(2),
        np.int64(2),
        np.array(2, np.uint8),
        jnp.int32(2),
        2.0,
        lambda step: 2,
        lambda step: np.int64(2),
        lambda step: jnp.int16(2) + 0 * step.astype(jnp.int16),
        lambda step: jnp.float32(2) + 0 * step.astype(jnp.float32),
        optax.constant_schedule(2),
        optax.piecewise_constant_schedule(2.0, {5: 2.0}),
    ],
    ids=lambda k: type(k).__name__ if not callable(k) else "function",
)
def test_defect_8_the_length_of_a_window_is_any_whole_number(k: Any) -> None:
    tx = jaxmem.MultiSteps(optax.sgd(1.0), k)
    assert [bool(state.updated) for _, state in run(tx, gradients(4))] == [False, True] * 2
    state = tx.init(PARAMS)
    for _ in range(2):  # outside of jit, too
        _, state = tx.update(PARAMS, state)
    assert bool(state.updated)


def test_defect_8_is_one_of_optax() -> None:
    with pytest.raises(TypeError):
        run(optax.MultiSteps(optax.sgd(1.0), np.int32(2)), gradients(1))  # pyright: ignore


@pytest.mark.parametrize("mode", ["jit", "eager", "scan"])
def test_defect_9_the_wrapped_optimizer_runs_once_in_a_window(mode: str) -> None:
    runs = []

    def inner() -> optax.GradientTransformation:
        def update(updates: Any, _: Any) -> Any:
            jax.debug.callback(lambda: runs.append(1))
            return updates

        return optax.stateless(update)

    def count(kind: Any) -> int:
        tx, grads = kind(inner(), 3), gradients(7)
        runs.clear()
        state = tx.init(PARAMS)
        if mode == "scan":
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
            jax.lax.scan(lambda s, grad: (tx.update(grad, s, PARAMS)[1], None), state, stacked)
        else:
            update = jax.jit(tx.update) if mode == "jit" else tx.update
            for grad in grads:
                _, state = update(grad, state, PARAMS)
        jax.effects_barrier()
        return len(runs)

    assert count(jaxmem.MultiSteps) == 2
    assert count(optax.MultiSteps) == 7


def outside_of_loops(hlo: str) -> str:
    """The computations that run whether or not a loop has a round."""
    found = {
        match[2]: match[0]
        for match in re.finditer(r"^(ENTRY )?%?([\w.-]+) \(.*?^}", hlo, re.M | re.S)
    }
    (entry,) = re.findall(r"^ENTRY %?([\w.-]+)", hlo, re.M)
    reached, queue = set(), [entry]
    while queue:
        name = queue.pop()
        if name in reached:
            continue
        reached.add(name)
        queue += re.findall(r"(?:calls|to_apply|condition)=%?([\w.-]+)", found[name])
        assert "branch_computations" not in found[name]
    return "\n".join(found[name] for name in reached)


@pytest.mark.parametrize("where", PLATFORMS)
def test_defect_9_nothing_of_it_is_compiled_outside_of_its_branch(where: str) -> None:
    # Parts that depend on the parameters alone are tempting to move in front of a loop.
    def decay(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda leaf, param: leaf + jnp.tanh(param @ param), updates, params)

    inner = optax.chain(optax.adam(1e-3), optax.stateless(decay), optax.scale_by_trust_ratio())
    params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    costly = re.compile(r"\b(r?sqrt|power|tanh|dot|convolution|custom-call)\(")

    def hlo(kind: Any) -> str:
        tx = kind(inner, 4)
        state = jax.eval_shape(tx.init, params)
        return compiled(where, tx.update, params, state, params).hlo

    ours, theirs = hlo(jaxmem.MultiSteps), hlo(optax.MultiSteps)
    assert len(costly.findall(ours)) >= 3
    assert not [line for line in outside_of_loops(ours).splitlines() if costly.search(line)]
    assert costly.search(outside_of_loops(theirs))


# ---------------------------------------------------------------- weights, skips and flushes


class Microbatch(NamedTuple):
    weight: Any
    finite: Any
    emit: Any
    value: Any


MICROBATCHES = st.builds(
    Microbatch,
    st.sampled_from([0.0, 1.0, 3.0, 0.25, 1000.0]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([False, False, False, True]),
    st.floats(-8, 8, width=16),
)


def longer(step: Any) -> Any:
    """Windows of two, then of three."""
    return jnp.where(step < 2, 2, 3)


@functools.cache
def counted(guard: bool) -> tuple[Any, Any, Any]:
    tx = jaxmem.MultiSteps(
        recorder(), longer, should_skip_update_fn=optax.skip_not_finite if guard else None
    )

    def update(grad: Any, state: Any, microbatch: Microbatch) -> Any:
        weight, _, emit, value = microbatch
        return tx.update(grad, state, weight=weight, emit=emit, value=value)

    def scanned(grads: Any, microbatches: Microbatch, state: Any) -> Any:
        def step(state: Any, given: Any) -> Any:
            updates, state = update(given[0], state, given[1])
            return state, (updates, state)

        return jax.lax.scan(step, state, (grads, microbatches))[1]

    return tx.init(PARAMS), jax.jit(scanned), jax.jit(update)


@TINY
@given(
    microbatches=st.lists(MICROBATCHES, min_size=14, max_size=14),
    guard=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sequence_is_what_a_list_of_gradients_says(
    microbatches: list[Microbatch], guard: bool, seed: int
) -> None:
    if not guard:  # then only those of no weight may be anything
        microbatches = [each._replace(finite=not each.weight) for each in microbatches]
        microbatches = [each._replace(finite=bool(each.weight)) for each in microbatches]
    grads = gradients(len(microbatches), seed)
    bad = [
        grad if each.finite else filled(grad, np.nan)
        for grad, each in zip(grads, microbatches, strict=True)
    ]
    state, scanned, _ = counted(guard)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *bad)
    columns = Microbatch(*(jnp.asarray(column) for column in zip(*microbatches, strict=True)))
    found_updates, found_states = scanned(stacked, columns, state)

    window: list[tuple[Any, Microbatch]] = []
    filled_places = steps = skipped = 0
    for index, (grad, each) in enumerate(zip(grads, microbatches, strict=True)):
        updates, state = jax.tree.map(lambda leaf, i=index: leaf[i], (found_updates, found_states))
        refused = guard and not each.finite
        skipped += refused
        filled_places += not refused
        if each.weight and not refused:
            window.append((grad, each))
        ends = each.emit or filled_places >= (2 if steps < 2 else 3)
        if ends and window:
            steps += 1
            weights = [other.weight for _, other in window]
            mean = weighted_mean([one for one, _ in window], weights)
            near(updates, jax.tree.map(lambda leaf, n=steps: -n * leaf, mean), 1e-5)
            value = np.average([other.value for _, other in window], weights=weights)
            assert float(state.inner_opt_state.value) == pytest.approx(value, rel=1e-5, abs=1e-5)
            assert bool(state.updated)
        else:
            chex.assert_trees_all_equal(updates, filled(updates, 0.0))
            assert not state.updated
        if ends:
            window, filled_places = [], 0
            chex.assert_trees_all_equal(state.acc_grads, filled(PARAMS, 0.0))
        assert (int(state.mini_step), int(state.gradient_step)) == (filled_places, steps)
        assert (int(state.skipped), int(state.inner_opt_state.runs)) == (skipped, steps)
        assert float(state.weight) == sum(other.weight for _, other in window)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.acc_grads))


def test_scan_jit_vmap_and_a_plain_loop_do_the_same() -> None:
    microbatches = [
        Microbatch(2.0, True, False, 1.0), Microbatch(0.0, True, False, 2.0),
        Microbatch(1.0, False, False, 3.0), Microbatch(5.0, True, False, 4.0),
        Microbatch(3.0, True, True, 5.0),
    ]  # fmt: skip
    grads = [
        grad if each.finite else filled(grad, np.inf)
        for grad, each in zip(gradients(5), microbatches, strict=True)
    ]
    tx = jaxmem.MultiSteps(recorder(), longer, should_skip_update_fn=optax.skip_not_finite)
    start, scanned, jitted = counted(True)
    columns = Microbatch(*(jnp.asarray(column) for column in zip(*microbatches, strict=True)))
    by_scan = scanned(jax.tree.map(lambda *x: jnp.stack(x), *grads), columns, start)

    state = plain = start
    # Two lanes whose windows end at different times.
    other = Microbatch(1.0, True, True, 0.0)
    lanes = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), start)
    vmapped = jax.jit(jax.vmap(jitted))
    for index, (grad, each) in enumerate(zip(grads, microbatches, strict=True)):
        updates, state = jitted(grad, state, each)
        weight, _, emit, value = each
        eager, plain = tx.update(grad, plain, weight=weight, emit=emit, value=value)
        both = jax.tree.map(lambda a, b: jnp.stack([jnp.asarray(a), jnp.asarray(b)]), each, other)
        both_grads = jax.tree.map(lambda a, b: jnp.stack([a, b]), grad, filled(grad, 1.0))
        lane_updates, lanes = vmapped(both_grads, lanes, both)
        for found in (
            (eager, plain),
            jax.tree.map(lambda leaf, i=index: leaf[i], by_scan),
            jax.tree.map(lambda leaf: leaf[0], (lane_updates, lanes)),
        ):
            assert_close(found, (updates, state))
        assert bool(lanes.updated[1])
        assert float(lane_updates["bias"][1, 0]) == -(index + 1)


def test_a_window_of_no_weight_ends_without_a_step() -> None:
    tx = jaxmem.MultiSteps(optax.adam(1e-2), 2)
    found = run(tx, [filled(PARAMS, np.nan)] * 3, weight=0)
    assert [int(state.mini_step) for _, state in found] == [1, 0, 1]
    for updates, state in found:
        chex.assert_trees_all_equal(updates, filled(PARAMS, 0.0))
        chex.assert_trees_all_equal(state.inner_opt_state, tx.init(PARAMS).inner_opt_state)
        assert not tx.has_updated(state)
        assert int(state.gradient_step) == 0


def test_a_flush_of_nothing_is_nothing() -> None:
    tx = jaxmem.MultiSteps(optax.adam(1e-2), 2)
    state = run(tx, gradients(2))[-1][1]
    updates, after = tx.update(gradients(1)[0], state, PARAMS, weight=0, emit=True)
    chex.assert_trees_all_equal(updates, filled(PARAMS, 0.0))
    assert_same(after, state._replace(updated=jnp.array(False)))


def test_a_negative_weight_that_is_not_known_is_nan() -> None:
    tx = jaxmem.MultiSteps(optax.sgd(1.0), 1)
    updates, _ = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), weight=jnp.float32(-1))
    assert np.isnan(updates["bias"]).all()


def test_weights_with_float64_are_summed_in_float64() -> None:
    """In float32 2²⁴ + 1 is 2²⁴."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), PARAMS)
        grads, weights = gradients(3, params=params), [2.0**24, 1.0, 1 / 3]
        tx = jaxmem.MultiSteps(optax.sgd(-1.0), 3)
        updates, states = None, [tx.init(params)]
        for g, weight in zip(grads, weights, strict=True):
            updates, state = tx.update(g, states[-1], weight=weight, value=weight)
            states.append(state)
        assert states[2].weight.dtype == jnp.float64
        assert float(states[2].weight) == 2.0**24 + 1
        near(updates, weighted_mean(grads, weights), 1e-14)
        # Parameters of float32 keep their weights in it, so that nothing else changes there.
        state = tx.init(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), PARAMS))
        assert state.weight.dtype == jnp.float32


def test_weights_may_be_left_out_of_some_calls() -> None:
    grads = gradients(3)
    tx = jaxmem.MultiSteps(optax.scale(1.0), 3)
    updates, state = None, tx.init(PARAMS)
    for grad, weight in zip(grads, (2, None, 5.0), strict=True):
        updates, state = tx.update(grad, state, weight=weight)
    near(updates, weighted_mean(grads, [2, 1, 5]))


# ---------------------------------------------------------------- extra arguments


def test_reduce_on_plateau_sees_the_mean_loss_of_each_window() -> None:
    losses = [3.0, 1.0, 4.0, 0.0, 2.0, 2.0, 1.0, 3.0]
    inner = optax.chain(
        optax.scale(-1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    )
    tx = jaxmem.MultiSteps(inner, 2)
    state = tx.init(PARAMS)
    plain: Any = inner.init(PARAMS)
    update = jax.jit(tx.update)
    for index, loss in enumerate(losses):
        updates, state = update(PARAMS, state, PARAMS, value=loss)
        if index % 2:  # every mean is 2: a plateau, though no two windows are alike
            expected, plain = inner.update(PARAMS, plain, PARAMS, value=2.0)
            chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    scale = state.inner_opt_state[1].scale
    assert scale == plain[1].scale
    assert scale < 1


def test_arguments_of_any_shape_are_accumulated_by_example() -> None:
    got = []

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        got.append(given)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = jaxmem.MultiSteps(
        inner,
        2,
        accumulated_args={
            "value": 0.0,
            "losses": {"a": jax.ShapeDtypeStruct((2,), jnp.bfloat16), "b": 1},
            "temperature": None,
        },
    )
    state = tx.init(PARAMS)
    key = jax.random.key(3)
    for weight, base in ((1, 1.0), (3, 5.0)):
        _, state = tx.update(
            PARAMS,
            state,
            weight=weight,
            value=base,
            losses={"a": jnp.array([base, 2 * base], jnp.bfloat16), "b": jnp.int32(base)},
            temperature=base,
            key=key,
            step=7,
            train=True,
            name="x",
            note=None,
            value_fn=jnp.sum,
        )
    (found,) = [given for given in got if not isinstance(given["value"], Tracer)]
    assert float(found["value"]) == 4.0
    assert found["losses"]["a"].dtype == jnp.float32
    chex.assert_trees_all_equal(
        found["losses"], {"a": jnp.array([4.0, 8.0]), "b": jnp.float32(4.0)}
    )
    rest = {name: found[name] for name in ("temperature", "step", "train", "name", "note")}
    assert rest == {"temperature": 5.0, "step": 7, "train": True, "name": "x", "note": None}
    assert found["key"] == key
    assert found["value_fn"] is jnp.sum


def test_an_argument_given_with_some_microbatches_only_has_its_own_weights() -> None:
    tx = jaxmem.MultiSteps(recorder(), 3)
    state = tx.init(PARAMS)
    for value in ({"value": 1.0}, {}, {"value": 4.0}):
        _, state = tx.update(PARAMS, state, **value)
    assert float(state.inner_opt_state.value) == 2.5


# ---------------------------------------------------------------- what a user is told


def update(updates: Any = PARAMS, **options: Any) -> Any:
    tx = jaxmem.MultiSteps(optax.adam(0.1), 2)
    return tx.update(updates, tx.init(PARAMS), PARAMS, **options)


def multisteps(opt: Any = None, k: Any = 2, **options: Any) -> Any:
    return jaxmem.MultiSteps(opt or optax.adam(0.1), k, **options)


def asking(skip: Any) -> Any:
    return multisteps(should_skip_update_fn=lambda *_: skip).init(PARAMS)


def test_the_state_of_optax_is_refused_and_what_is_said_instead_works() -> None:
    """A run is taken up in the middle of a window."""
    inner, grads = optax.adam(0.1), gradients(4)
    theirs, ours = optax.MultiSteps(inner, 4), jaxmem.MultiSteps(inner, 4)
    state: Any = theirs.init(PARAMS)
    for g in grads[:3]:
        _, state = theirs.update(g, state, PARAMS)
    said = re.escape(
        "the state is optax's own MultiStepsState, in which the weights of the window are missing; "
        "go on from it with tx.init(params)._replace(**state._asdict(), "
        "weight=jax.numpy.float32(state.mini_step)), or begin anew with tx.init(params)"
    )
    with pytest.raises(TypeError, match=f"^MultiSteps.update: {said}$"):
        ours.update(grads[3], state, PARAMS)
    with pytest.raises(TypeError, match=f"^MultiSteps.has_updated: {said}$"):
        ours.has_updated(state)

    mine = ours.init(PARAMS)._replace(**state._asdict(), weight=jnp.float32(state.mini_step))
    updates, mine = ours.update(grads[3], mine, PARAMS)
    expected, _ = theirs.update(grads[3], state, PARAMS)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    assert bool(ours.has_updated(mine))


MATRIX = PARAMS["kernel"]
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "no optimizer": (
        lambda: multisteps(optax.adam),
        TypeError,
        ["wraps an optax optimizer, such as optax.adam(1e-3)", "of type function"],
    ),
    "k = 0": (lambda: multisteps(k=0), ValueError, ["every_k_schedule", "at least 1, got 0"]),
    "k = True": (lambda: multisteps(k=True), TypeError, ["got True of type bool"]),
    "k = 2.5": (lambda: multisteps(k=2.5), ValueError, ["a whole number", "got 2.5"]),
    "k = inf": (lambda: multisteps(k=np.inf), ValueError, ["a whole number", "got inf"]),
    "k = nan": (lambda: multisteps(k=np.nan), ValueError, ["a whole number", "got nan"]),
    "k = text": (lambda: multisteps(k="8"), TypeError, ["got '8' of type str"]),
    "k has axes": (lambda: multisteps(k=np.array([2])), TypeError, ["got int64[1]"]),
    "k of a schedule": (
        lambda: run(multisteps(k=lambda _: 0), [PARAMS]),
        ValueError,
        ["every_k_schedule(gradient_step) must be a whole number of at least 1, got 0"],
    ),
    "accumulator of integers": (
        lambda: multisteps(accumulator_dtype=jnp.int32),
        ValueError,
        ["accumulator_dtype must be a floating-point dtype, such as jax.numpy.float32, got int32"],
    ),
    "accumulator of nothing known": (
        lambda: multisteps(accumulator_dtype="float99"),
        TypeError,
        ["accumulator_dtype must be", "got 'float99'"],
    ),
    "state of another optimizer": (
        lambda: multisteps().update(PARAMS, optax.adam(0.1).init(PARAMS)),
        TypeError,
        ["the state must be what MultiSteps.init or the last update returned, got a tuple"],
    ),
    "a gradient is missing": (
        lambda: update({"kernel": MATRIX}),
        ValueError,
        ["the state has bias, which the gradient lacks", "gradients of the parameters"],
    ),
    "a gradient too many": (
        lambda: update({**PARAMS, "scale": {"x": MATRIX}}),
        ValueError,
        ["the gradient has scale/x, which the state lacks"],
    ),
    "a gradient of another shape": (
        lambda: update({**PARAMS, "kernel": MATRIX.T}),
        ValueError,
        ["the gradient has kernel as float32[3, 2] and the state as float32[2, 3]"],
    ),
    "negative weight": (
        lambda: update(weight=-2),
        ValueError,
        ["MultiSteps.update: weight must be at least 0 and finite, got -2.0", "number of tokens"],
    ),
    "weight that is not finite": (lambda: update(weight=np.nan), ValueError, ["got nan"]),
    "weight with axes": (
        lambda: update(weight=jnp.ones(3)),
        ValueError,
        ["weight must be a scalar, got float32[3]", "number of tokens"],
    ),
    "complex weight": (lambda: update(weight=1j), TypeError, ["must be a real number, got 1j"]),
    "weight as text": (lambda: update(weight="4"), TypeError, ["got '4' of type str"]),
    "emit as a number": (
        lambda: update(emit=1),
        TypeError,
        ["MultiSteps.update: emit must be a bool without axes, or None, got 1 of type int"],
    ),
    "emit with axes": (lambda: update(emit=jnp.ones(2, bool)), TypeError, ["got bool[2]"]),
    "emit as text": (lambda: update(emit="yes"), TypeError, ["emit must be", "got 'yes'"]),
    "verdict with axes": (
        lambda: asking((jnp.ones(2, bool), ())),
        ValueError,
        ["should_skip_update_fn must return a bool without axes", "got bool[2] for the bool"],
    ),
    "verdict as a number": (lambda: asking((1, ())), ValueError, ["got 1 of type int"]),
    "verdict alone": (lambda: asking(True), ValueError, ["got True of type bool"]),
    "argument that is not declared": (
        lambda: update(loss=0.5),
        ValueError,
        [
            "loss= is 0.5 of type float of one microbatch",
            "accumulated_args={'loss': an example}) for their mean, or {'loss': None} for the last",
        ],
    ),
    "value of another shape": (
        lambda: update(value=jnp.ones(3)),
        ValueError,
        ["value= has the value itself as float32[3]", "accumulated_args={'value': an example}"],
    ),
    "value as text": (
        lambda: update(value="low"),
        TypeError,
        ["the mean of value=", "got 'low' of type str", "accumulated_args={'value': None}"],
    ),
    "names in a text": (
        lambda: multisteps(accumulated_args="value"),
        TypeError,
        ["accumulated_args must be names", '("value",)', "got 'value'"],
    ),
    "names that are none": (lambda: multisteps(accumulated_args=3), TypeError, ["got 3"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    wrong, kind, parts = ERRORS[case]
    with pytest.raises(kind) as error:
        wrong()
    for part in parts:
        assert part in str(error.value)
