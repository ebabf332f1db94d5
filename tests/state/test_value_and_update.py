"""`jaxmem.value_and_update` computes what the ordinary step does."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.menagerie import MODELS as MENAGERIE
from helpers.menagerie import exact_jit
from helpers.updating import (
    PARAMS,
    TOKENS,
    D,
    N,
    assert_alike,
    body,
    language_loss,
    layer,
    normal,
    ordinary,
    run,
)
from jax import lax

import jaxmem

slow = pytest.mark.slow
nothing_inside = pytest.mark.filterwarnings(
    "ignore:value_and_update. no parameter is updated:jaxmem.JaxmemWarning"
)


def inside(plan: jaxmem.UpdatePlan) -> dict[str, bool]:
    return {leaf.path: leaf.in_backward for leaf in plan.leaves}


def plan_of(fun: Any, optimizer: Any, params: Any, *args: Any, **options: Any) -> Any:
    step = jaxmem.value_and_update(fun, optimizer, **options)
    return step.explain(params, optimizer.init(params), *args)


def check(
    fun: Callable[..., Any],
    optimizer: Any,
    params: Any,
    *args: Any,
    tolerance: float = 0.0,
    reference: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """That both steps compute the same, five times."""
    has_aux = options.get("has_aux", False)
    ours = run(jaxmem.value_and_update(fun, optimizer, **options), optimizer, params, *args)
    theirs = run(ordinary(reference or fun, optimizer, has_aux), optimizer, params, *args)
    assert_alike(ours, theirs, tolerance)


# ---------------------------------------------------------------- optimizers

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
MASK = {"embed": False, "layers": {"b": False, "w": True}}
LABELS = {"embed": "table", "layers": {"b": "none", "w": "matrix"}}


def by_label() -> Any:
    each: dict[Any, Any] = {
        "table": optax.adam(0.01),
        "matrix": optax.sgd(0.1, 0.9),
        "none": optax.set_to_zero(),
    }
    return optax.partition(each, LABELS)


def clipped(optimizer: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(0.1), optimizer)


# Optimizer, passes that are allowed, passes that it takes, whether sums come in another order.
OPTIMIZERS: dict[str, tuple[Callable[[], Any], int, int, bool]] = {
    "sgd": (lambda: optax.sgd(0.1), 1, 1, False),
    "momentum": (lambda: optax.sgd(0.1, 0.9), 1, 1, False),
    "adam": (lambda: optax.adam(0.01), 1, 1, False),
    "adamw with a schedule": (lambda: optax.adamw(SCHEDULE, weight_decay=0.1), 1, 1, False),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.adamw)(SCHEDULE, weight_decay=0.1),
        1,
        1,
        False,
    ),
    "partition": (by_label, 1, 1, False),
    "clip_by_global_norm": (lambda: clipped(optax.adamw(0.01)), 2, 2, True),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adam(0.01), 3), 2, 2, False),
    "zero_nans": (lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)), 1, 1, False),
    "adafactor": (lambda: optax.adafactor(0.01, min_dim_size_to_factor=4), 3, 3, True),
    "a norm of what is clipped": (
        lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.snapshot("n", optax.tree.norm)),
        2,
        2,
        True,
    ),
}
RARE: dict[str, tuple[Callable[[], Any], int, int, bool]] = {
    "lion": (lambda: optax.lion(0.01), 1, 1, False),
    "masked": (
        lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), MASK), optax.adam(0.01)),
        1,
        1,
        False,
    ),
    "MultiSteps": (lambda: optax.MultiSteps(optax.adam(0.01), 2), 1, 1, False),
    "nesterov": (lambda: optax.sgd(0.1, 0.9, nesterov=True), 1, 1, False),
    "rmsprop": (lambda: optax.rmsprop(0.01, momentum=0.9, centered=True), 1, 1, False),
    "schedule_free": (lambda: optax.contrib.schedule_free_adamw(0.01), 1, 1, False),
    "lamb": (lambda: optax.lamb(0.01), 4, 3, True),
    "reduce_on_plateau": (
        lambda: optax.chain(optax.adam(0.01), optax.contrib.reduce_on_plateau(patience=1)),
        1,
        1,
        False,
    ),
    "lars": (lambda: optax.lars(0.1), 3, 3, True),
    "adan": (lambda: optax.adan(0.01), 1, 1, False),
    "adabelief": (lambda: optax.adabelief(0.01), 1, 1, False),
    "yogi": (lambda: optax.yogi(0.01), 1, 1, False),
    "radam": (lambda: optax.radam(0.01), 1, 1, False),
    "amsgrad": (lambda: optax.amsgrad(0.01), 1, 1, False),
    "novograd": (lambda: optax.novograd(0.01), 2, 2, True),
    "adaptive_grad_clip": (
        lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
        2,
        2,
        True,
    ),
    "centralize": (lambda: optax.chain(optax.centralize(), optax.sgd(0.1)), 1, 1, False),
    "polyak_sgd": (lambda: optax.polyak_sgd(1.0), 2, 2, True),
    "dog": (lambda: optax.contrib.dog(1.0), 2, 2, True),
    "ademamix": (lambda: optax.contrib.ademamix(0.01), 1, 1, False),
    "freeze": (
        lambda: optax.chain(optax.adam(0.01), optax.transforms.freeze(MASK)),
        1,
        1,
        False,
    ),
}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *(pytest.param(name, marks=slow) for name in RARE)])
def test_stacks_are_updated_in_the_backward_pass_as_after_it(name: str) -> None:
    make, passes, taken, other_order = (OPTIMIZERS | RARE)[name]
    optimizer = make()
    plan = plan_of(language_loss, optimizer, PARAMS, TOKENS, passes=passes)
    assert inside(plan) == {"embed": False, "layers/b": True, "layers/w": True}
    assert plan.passes == taken
    tolerance = 1e-6 if other_order else 0.0
    check(language_loss, optimizer, PARAMS, TOKENS, tolerance=tolerance, passes=passes)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lamb", "pass passes=3"),
        ("lars", "pass passes=3"),
        pytest.param("adafactor", "pass passes=3", marks=slow),
    ],
)
def test_norms_of_whole_stacks_wait_for_more_passes(name: str, reason: str) -> None:
    optimizer = (OPTIMIZERS | RARE)[name][0]()
    step = jaxmem.value_and_update(language_loss, optimizer)
    with pytest.warns(jaxmem.JaxmemWarning, match="no parameter is updated in the backward pass"):
        plan = step.explain(PARAMS, optimizer.init(PARAMS), TOKENS)
    assert plan.passes == 1
    assert reason in plan.leaves[1].reason
    with pytest.warns(jaxmem.JaxmemWarning, match=reason):
        check(language_loss, optimizer, PARAMS, TOKENS)


@pytest.mark.slow
@nothing_inside
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)), "random_bits makes whole"),
        pytest.param(lambda: optax.contrib.muon(0.01), "scan is not known", marks=slow),
        pytest.param(lambda: optax.contrib.prodigy(0.1), "joins or splits rows", marks=slow),
    ],
    ids=["noisy_sgd", "muon", "prodigy"],
)
def test_what_does_not_go_row_by_row_is_done_in_the_ordinary_way(make: Any, reason: str) -> None:
    optimizer = make()
    plan = plan_of(language_loss, optimizer, PARAMS, TOKENS)
    assert any(reason in leaf.reason for leaf in plan.leaves)
    check(language_loss, optimizer, PARAMS, TOKENS, tolerance=1e-6)


def test_gradients_that_are_not_finite_are_left_out_by_apply_if_finite() -> None:
    def loss(params: Any, tokens: jax.Array, scale: jax.Array) -> jax.Array:
        return language_loss(params, tokens) * scale

    optimizer = optax.apply_if_finite(optax.adam(0.01), 2)
    steps = [
        exact_jit(jaxmem.value_and_update(loss, optimizer)),
        exact_jit(ordinary(loss, optimizer)),
    ]
    found = []
    for step in steps:
        params, state = PARAMS, optimizer.init(PARAMS)
        for scale in (1.0, np.nan, np.inf, 1.0, np.nan):
            before = params
            _, params, state = step(params, state, TOKENS, jnp.float32(scale))
            same = np.array_equal(before["layers"]["w"], params["layers"]["w"])
            assert same == (not np.isfinite(scale))
        found.append((params, state))
    assert_alike(*found, tolerance=0.0)
    assert int(found[0][1].total_notfinite) == 3


# ---------------------------------------------------------------- optax's own tests


def rosenbrock() -> tuple[jax.Array, Callable[..., Any]]:
    """Each number is a layer that adds its error, and the second one's depends on the first."""

    def loss(params: jax.Array) -> jax.Array:
        def one(carry: Any, x: jax.Array) -> Any:
            before, is_first, total = carry
            error = jnp.where(is_first, jnp.square(1 - x), 100 * jnp.square(x - before**2))
            return (x, jnp.zeros_like(is_first), total + error), None

        start = jnp.float32(0), jnp.ones((), bool), jnp.float32(0)
        return lax.scan(one, start, params)[0][2]

    return jnp.zeros(2), loss


@slow
@nothing_inside
@pytest.mark.filterwarnings("ignore:.optimistic_adam. is deprecated:DeprecationWarning")
def test_a_problem_of_optax_for_all_its_optimizers() -> None:
    """All go in the backward pass but the one that draws noise for a whole array."""
    cases = pytest.importorskip("optax._src.alias_test")._OPTIMIZERS_UNDER_TEST
    params, loss = rosenbrock()
    for case in cases:
        options = dict(case["opt_kwargs"])
        if case["opt_name"] == "noisy_sgd":
            options["key"] = jax.random.key(0)
        optimizer = getattr(optax, case["opt_name"])(**options)
        step = jaxmem.value_and_update(loss, optimizer, passes=3)
        (leaf,) = step.explain(params, optimizer.init(params)).leaves
        assert leaf.in_backward == (case["opt_name"] != "noisy_sgd")
        ours, theirs = (
            run(fun, optimizer, params, steps=20) for fun in (step, ordinary(loss, optimizer))
        )
        assert_alike(ours, theirs, 1e-4)


# ---------------------------------------------------------------- models


def two_stacks(params: Any, tokens: jax.Array) -> jax.Array:
    """An encoder, and a decoder whose layers read what it made."""
    memory = body(params, tokens)

    def cross(h: jax.Array, p: Any) -> Any:
        return h + jnp.tanh(h @ p["own"] + memory @ p["other"]), None

    h, _ = lax.scan(cross, jnp.ones_like(memory), params["decoder"])
    return jnp.square(h).mean()


def with_ys(params: Any, tokens: jax.Array) -> jax.Array:
    """Layers that read a constant, whole numbers, and give something to be added up."""
    scale = params["scale"]

    def one(carry: Any, xs: Any) -> Any:
        h, count = carry
        p, number = xs
        h, _ = layer(h * jnp.broadcast_to(scale, h.shape), p)
        return (h, count + 1), jnp.square(h).mean() * (number + count).astype(h.dtype)

    start = params["embed"][tokens], jnp.int32(0)
    (h, _), extra = lax.scan(one, start, (params["layers"], jnp.arange(N)))
    return jnp.square(h).mean() + 0.1 * extra.sum()


def only_ys(params: Any, tokens: jax.Array) -> jax.Array:
    def one(h: jax.Array, p: Any) -> Any:
        h, _ = layer(h, p)
        return h, jnp.square(h).mean()

    return lax.scan(one, params["embed"][tokens], params["layers"])[1].sum()


def backwards(params: Any, tokens: jax.Array) -> jax.Array:
    h, _ = lax.scan(layer, params["embed"][tokens], params["layers"], reverse=True)
    return jnp.square(h).mean()


def from_data(params: Any, tokens: jax.Array) -> jax.Array:
    """Nothing but the stack is differentiated."""
    h, _ = lax.scan(layer, jax.nn.one_hot(tokens, D), params["layers"])
    return jnp.square(h).mean()


def jitted(params: Any, tokens: jax.Array) -> jax.Array:
    h = jax.jit(lambda params, tokens: jax.jit(body)(params, tokens))(params, tokens)
    return jnp.square(h).mean()


def unused(params: Any, tokens: jax.Array) -> jax.Array:
    """The stack runs, and the loss does not depend on it."""
    h = body(params, tokens)
    return jnp.square(params["embed"]).mean() + 0 * lax.stop_gradient(h).mean()


def cut(params: Any, tokens: jax.Array) -> jax.Array:
    """One of the stack's parameters has no gradient inside of it."""

    def one(h: jax.Array, p: Any) -> Any:
        return layer(h, p | {"b": lax.stop_gradient(p["b"])})

    return jnp.square(lax.scan(one, params["embed"][tokens], params["layers"])[0]).mean()


def unrolled(params: Any, tokens: jax.Array) -> jax.Array:
    return jnp.square(
        lax.scan(layer, params["embed"][tokens], params["layers"], unroll=3)[0]
    ).mean()


DECODER = {"own": normal(4, 3, D, D), "other": normal(5, 3, D, D)}
MODELS: dict[str, tuple[Callable[..., Any], Any, tuple[str, ...]]] = {
    "two stacks": (
        two_stacks,
        PARAMS | {"decoder": DECODER},
        ("decoder/other", "decoder/own", "layers/b", "layers/w"),
    ),
    "constants and ys": (with_ys, PARAMS | {"scale": jnp.ones(D)}, ("layers/b", "layers/w")),
    "only ys": (only_ys, PARAMS, ("layers/b", "layers/w")),
    "backwards": (backwards, PARAMS, ("layers/b", "layers/w")),
    "from data": (from_data, {"layers": PARAMS["layers"]}, ("layers/b", "layers/w")),
    "jitted": (jitted, PARAMS, ("layers/b", "layers/w")),
    "unused": (unused, PARAMS, ("layers/b", "layers/w")),
    "cut": (cut, PARAMS, ("layers/b", "layers/w")),
    "unrolled": (unrolled, PARAMS, ("layers/b", "layers/w")),
}


SLOW = ("unrolled", "jitted", "from data", "only ys", "cut")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow) if name in SLOW else name for name in MODELS]
)
def test_models(name: str) -> None:
    """With a decay of weights and momentum, which act where the gradient is zero as well."""
    fun, params, expected = MODELS[name]
    optimizer = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9))
    plan = plan_of(fun, optimizer, params, TOKENS)
    assert {path for path, flag in inside(plan).items() if flag} == set(expected)
    check(fun, optimizer, params, TOKENS)


KINDS = [
    "transformer",
    "conv_batch_norm",
    "tuple_carry",
    "int_carry",
    "sown",
    "custom_vjp",
    "stack_in_stack",
    "equinox",
    "key_carry",
    "tied",
    "closed_over",
    "cond_inside",
    "handed_through",
]


@slow
@nothing_inside
@pytest.mark.parametrize("name", KINDS)
def test_stacks_of_any_kind(name: str) -> None:
    """Attention, convolutions, keys, counters, stacks in stacks: all that a layer may hold."""
    problem = MENAGERIE[name].make(N)
    loss = jaxmem.remat_revolve(problem.loss, slots=2)
    args = problem.params, problem.inputs
    optimizer = optax.adam(0.01)
    check(loss, optimizer, *args, reference=problem.loss, has_aux=True, tolerance=1e-5)


@pytest.mark.parametrize(
    "name",
    ["two stacks", "unused", *(pytest.param(name, marks=slow) for name in ("only ys", "cut"))],
)
def test_models_in_two_passes(name: str) -> None:
    fun, params, expected = MODELS[name]
    optimizer = clipped(optax.adamw(0.01))
    plan = plan_of(fun, optimizer, params, TOKENS)
    assert {path for path, flag in inside(plan).items() if flag} == set(expected)
    check(fun, optimizer, params, TOKENS, tolerance=3e-6)


@nothing_inside
@pytest.mark.parametrize(
    "kind", ["checkpoint", "read twice", *(pytest.param(k, marks=slow) for k in ("cast", "shared"))]
)
def test_stacks_that_are_no_parameters_as_they_are_wait(kind: str) -> None:
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        layers = params["layers"]
        if kind == "checkpoint":
            return jnp.square(jax.checkpoint(body)(params, tokens)).mean()
        if kind == "cast":
            layers = jax.tree.map(lambda leaf: 2 * leaf, layers)
        h = body(params | {"layers": layers}, tokens)
        if kind == "read twice":
            return jnp.square(h).mean() + sum(map(jnp.mean, jax.tree.leaves(layers)))
        if kind == "shared":
            h = lax.scan(layer, h, layers)[0]
        return jnp.square(h).mean()

    optimizer = optax.sgd(0.1)
    plan = plan_of(loss, optimizer, PARAMS, TOKENS)
    assert not any(inside(plan).values())
    expected = "not stacked over the layers of"
    if kind == "checkpoint":
        expected = "it is read inside another call (jax.checkpoint at test_value_and_update.py:"
    assert expected in plan.leaves[1].reason
    check(loss, optimizer, PARAMS, TOKENS)


@pytest.mark.parametrize("name", ["adam", pytest.param("clip_by_global_norm", marks=slow)])
def test_bfloat16(name: str) -> None:
    make, _, _, other_order = OPTIMIZERS[name]
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    check(language_loss, make(), params, TOKENS, tolerance=0.01 if other_order else 0.0)


def test_norms_of_bfloat16_are_summed_in_float32() -> None:
    """Of 400 rows that have the same norm, those after the 256th would be rounded away."""
    params = jnp.ones((400, 2), jnp.bfloat16)

    def loss(params: Any) -> jax.Array:
        h, _ = lax.scan(lambda h, w: (h + w, None), jnp.zeros(2, jnp.bfloat16), params)
        return h.astype(jnp.float32).sum()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    step = jax.jit(jaxmem.value_and_update(loss, optimizer))
    _, after, _ = step(params, optimizer.init(params))
    expected = 1 - 1 / np.sqrt(800)
    np.testing.assert_allclose(np.asarray(after, np.float32), expected, rtol=2**-8)


@slow
def test_float64_and_complex_parameters() -> None:
    def loss(params: Any) -> jax.Array:
        h, _ = lax.scan(lambda h, w: (jnp.tanh(w @ h), None), jnp.ones(D, params.dtype), params)
        return jnp.abs(h).sum()

    wide = PARAMS["layers"]["w"] * (1 + 0.5j)
    check(loss, clipped(optax.adam(0.01)), wide, tolerance=1e-6)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(wide.real), jnp.float64)
        check(loss, optax.adam(0.01), wide, tolerance=1e-13)


# ---------------------------------------------------------------- policies

POLICIES: dict[str, Any] = {
    "full": jaxmem.remat_full,
    "dots": jaxmem.remat_dots,
    "sqrt": jaxmem.remat_sqrt,
    "revolve": jaxmem.remat_revolve(slots=2),
}


@functools.cache
def expected_of(name: str) -> Any:
    optimizer = OPTIMIZERS[name][0]()
    return run(ordinary(language_loss, optimizer), optimizer, PARAMS, TOKENS)


@pytest.mark.parametrize(
    "policy", ["full", "revolve", *(pytest.param(name, marks=slow) for name in ("dots", "sqrt"))]
)
@pytest.mark.parametrize("name", ["adam", pytest.param("clip_by_global_norm", marks=slow)])
def test_policies(policy: str, name: str) -> None:
    make, _, _, other_order = OPTIMIZERS[name]
    optimizer = make()
    loss = POLICIES[policy](language_loss)
    ours = run(jaxmem.value_and_update(loss, optimizer), optimizer, PARAMS, TOKENS)
    assert_alike(ours, expected_of(name), 1e-6 if other_order else 0.0)
    assert inside(plan_of(loss, optimizer, PARAMS, TOKENS))["layers/w"]


def test_offload() -> None:
    optimizer = optax.adam(0.01)
    loss = jaxmem.remat_offload(language_loss)
    with pytest.warns(jaxmem.OffloadWarning):
        ours = run(jaxmem.value_and_update(loss, optimizer), optimizer, PARAMS, TOKENS)
    assert_alike(ours, expected_of("adam"), 0.0)
