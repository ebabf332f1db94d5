"""`jaxmem.state.intervals`: between which numbers an optimizer's state stays."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxmem
from jaxmem.state import intervals
from jaxmem.state.update import traced

PARAMS = {"b": jnp.ones(3), "w": jnp.ones((64, 128))}
LABELS = {"b": "b", "w": "w"}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
INF = math.inf


def signs(optimizer: Any) -> dict[str, str]:
    """Of each coded array of the state its name and whether its codes have signs."""
    state = jax.eval_shape(jaxmem.quantize_state(optimizer).init, PARAMS)
    leaves = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda node: isinstance(node, jaxmem.Coded)
    )
    return {
        jax.tree_util.keystr(path[:-1], simple=True, separator="/"): (
            "±" if leaf.codes.dtype == jnp.int8 else "+"
        )
        for path, leaf in leaves
        if isinstance(leaf, jaxmem.Coded)
    }


def half_adam(update: Callable[[Any, Any], Any]) -> optax.GradientTransformation:
    """An optimizer with one moment, as a user writes it."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def step(updates: Any, state: Any, params: Any = None) -> Any:
        state = jax.tree.map(update, state, updates)
        return jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + 1e-8), updates, state), state

    return optax.GradientTransformation(init, step)


ADAM = {"0/mu": "±", "0/nu": "+"}


def test_bounds_of_a_clamp_may_vary() -> None:
    def update(v: Any, g: Any) -> Any:
        return jax.lax.clamp(-jnp.abs(g), 0.9 * v + jnp.square(g), -0.5 * jnp.abs(g))

    def positive(v: Any, g: Any) -> Any:
        return jax.lax.clamp(jnp.abs(g), v, 2 * jnp.abs(g))

    assert set(signs(half_adam(update)).values()) == {"±"}
    assert set(signs(half_adam(positive)).values()) == {"+"}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        pytest.param(optimizer, expected, id=name)
        for name, optimizer, expected in [
            ("adam", optax.adam(0.1), ADAM),
            ("adamw", optax.adamw(SCHEDULE), ADAM),
            ("nadam", optax.nadam(0.1), ADAM),
            ("lion", optax.lion(0.1), {"0/mu": "±"}),
            ("rmsprop", optax.rmsprop(0.1), {"0/nu": "+"}),
            (
                "rmsprop, centered",
                optax.rmsprop(0.1, centered=True, momentum=0.9),
                {**ADAM, "2/trace": "±"},
            ),
            ("momentum", optax.sgd(0.1, 0.9, nesterov=True), {"0/trace": "±"}),
            ("sgd", optax.sgd(0.1), {}),
            ("adafactor", optax.adafactor(0.1), {"0/v": "+"}),
            ("adan", optax.adan(0.1), {"0/m": "±", "0/v": "±", "0/n": "+", "0/g": "±"}),
            ("yogi", optax.yogi(0.1), ADAM),
            ("amsgrad", optax.amsgrad(0.1), {**ADAM, "0/nu_max": "+"}),
            ("novograd", optax.novograd(0.1), {"0/mu": "±"}),
            ("lamb", optax.lamb(0.1), ADAM),
            ("lars", optax.lars(0.1), {"3/trace": "±"}),
            ("adagrad", optax.adagrad(0.1), {"0/sum_of_squares": "+"}),
            ("adadelta", optax.adadelta(0.1), {"1/e_g": "+", "1/e_x": "+"}),
            ("adabelief", optax.adabelief(0.1), ADAM),
            ("adamax", optax.adamax(0.1), ADAM),
            ("sm3", optax.sm3(0.1), {"0/nu": "±"}),
            ("rprop", optax.rprop(0.1), {"0/step_sizes": "+", "0/prev_updates": "±"}),
            ("ademamix", contrib.ademamix(0.1), {"0/m1": "±", "0/m2": "±", "0/nu": "+"}),
            ("simplified_ademamix", contrib.simplified_ademamix(0.1), {"0/m": "±", "0/n": "+"}),
            # A copy of the parameters stays as it is, and so does the average z.
            (
                "prodigy",
                contrib.prodigy(),
                {"exp_avg": "±", "exp_avg_sq": "+", "grad_sum": "±"},
            ),
            ("schedule_free", contrib.schedule_free(optax.sgd(0.1), 0.1), {}),
            (
                "schedule_free_adamw",
                contrib.schedule_free_adamw(0.1),
                {"base_optimizer_state/0/nu": "+"},
            ),
            (
                "inject_hyperparams",
                optax.inject_hyperparams(optax.adamw)(SCHEDULE),
                {"inner_state/0/mu": "±", "inner_state/0/nu": "+"},
            ),
            (
                "masked",
                optax.masked(optax.adam(0.1), {"b": False, "w": True}),
                {"inner_state/0/mu": "±", "inner_state/0/nu": "+"},
            ),
            (
                "multi_transform",
                optax.partition({"b": optax.sgd(0.1, 0.9), "w": optax.adam(0.1)}, LABELS),
                {
                    "inner_states/w/inner_state/0/mu": "±",
                    "inner_states/w/inner_state/0/nu": "+",
                },
            ),
            (
                "chain",
                optax.chain(optax.clip_by_global_norm(1.0), optax.clip(1.0), optax.adamw(SCHEDULE)),
                {"2/0/mu": "±", "2/0/nu": "+"},
            ),
            (
                "MultiSteps",
                optax.MultiSteps(optax.adam(0.1), 4),
                {"inner_opt_state/0/mu": "±", "inner_opt_state/0/nu": "+", "acc_grads": "±"},
            ),
            (
                "apply_if_finite",
                optax.apply_if_finite(optax.adam(0.1), 3),
                {"inner_state/0/mu": "±", "inner_state/0/nu": "+"},
            ),
            ("(1 − b) g g", half_adam(lambda v, g: 0.9 * v + 0.1 * g * g), {"": "+"}),
            ("v + b (g² − v)", half_adam(lambda v, g: v + (g**2 - v) * 0.1), {"": "+"}),
            ("v + 2 (g² − v)", half_adam(lambda v, g: v + (g**2 - v) * 2), {"": "±"}),
            ("v − g²", half_adam(lambda v, g: v - g**2), {"": "±"}),
            ("in a branch", half_adam(lambda v, g: jnp.where(g > 0, v, abs(g))), {"": "+"}),
            ("(g · 2)³ / g", half_adam(lambda v, g: v + (g * 2) ** 3 / g), {"": "±"}),
        ]
    ],
)
def test_arrays_that_are_never_negative_have_codes_without_signs(
    optimizer: Any, expected: dict[str, str]
) -> None:
    assert signs(optimizer) == expected


@pytest.mark.parametrize(
    ("fun", "given", "expected"),
    [
        (lambda x, y: x + y, [(0, 1), (-2, 3)], (-2, 4)),
        (lambda x, y: x - y, [(0, 1), (-2, 3)], (-3, 3)),
        (lambda x, y: x * y, [(-1, 2), (-3, 1)], (-6, 3)),
        (lambda x, y: x * y, [(0, INF), (0, 1)], (0, INF)),
        (lambda x, y: x / y, [(1, 2), (4, 8)], (0.125, 0.5)),
        (lambda x, y: x / y, [(1, 2), (-1, 1)], (-INF, INF)),
        (lambda x, y: x / y, [(0, 2), (0, INF)], (0, INF)),
        (lambda x, y: x * x + y, [(-3, 2), (1, 1)], (1, 10)),
        (lambda x, y: (-2 * x * y) * x, [(-3, 2), (0, 1)], (-18, 0)),
        (lambda x, y: x + 0.5 * (y - x), [(0, 1), (2, 3)], (0, 3)),
        (lambda x, y: jnp.maximum(x, y), [(-1, 2), (0, 1)], (0, 2)),
        (lambda x, y: jnp.minimum(x, y), [(-1, 2), (0, 1)], (-1, 1)),
        (lambda x, y: x**y, [(1, INF), (-0.5, -0.5)], (0, 1)),
        (lambda x, y: x**y, [(0, 4), (0.5, 2)], (0, 16)),
        (lambda x, y: x**3 + 0 * y, [(2, 3), (0, 0)], (8, 27)),
        (lambda x, y: x**4 + 0 * y, [(-INF, INF), (0, 0)], (0, INF)),
        (lambda x, y: jnp.clip(x, -1, 1) * y, [(-INF, INF), (1, 1)], (-1, 1)),
        (lambda x, y: jnp.sqrt(x) + abs(y), [(4, 9), (-1, 2)], (2, 5)),
        (lambda x, y: jnp.where(x > 0, x, y), [(-INF, 3), (0, 1)], (-INF, 3)),
        (lambda x, y: jnp.inf - jnp.abs(x) + y * 0, [(-1, 1), (0, 0)], (INF, INF)),
        # Inf less inf is no number.
        (lambda x, y: x - y, [(INF, INF), (INF, INF)], (-INF, INF)),
        (lambda x, y: jnp.sin(x) * y, [(-1, 1), (1, 1)], (-INF, INF)),
    ],
)
def test_the_interval_of_a_result_follows_from_those_of_operands(
    fun: Callable[..., Any], given: Any, expected: Any
) -> None:
    closed = traced(lambda x, y, *_: ((), fun(x, y)), jnp.ones(3), jnp.ones(3), (), ())
    ((low, high),) = intervals.results(closed, [(float(low), float(high)) for low, high in given])
    assert (low, high) == expected


def test_intervals_hold_what_is_computed() -> None:
    """Of programs made of the operations that have rules, on random numbers within intervals."""
    random = np.random.default_rng(0)
    two = [jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.minimum]
    one = [jnp.square, jnp.abs, jnp.negative, jnp.sign, jnp.tanh, lambda x: x**3, lambda x: x**4]
    for _ in range(30):
        steps = [
            (two[random.integers(6)], *random.integers(0, 2 + k, 2))
            if random.random() < 0.6
            else (one[random.integers(7)], random.integers(0, 2 + k))
            for k in range(6)
        ]

        def run(x: Any, y: Any, *_: Any, steps: Any = steps) -> Any:
            values = [x, y]
            for fun, *numbers in steps:
                values.append(fun(*(values[number] for number in numbers)))
            return (), values[2:]

        ends = np.sort(random.normal(size=(2, 2)), axis=1)
        x, y = (random.uniform(*pair, size=1000).astype(np.float32) for pair in ends)
        closed = traced(run, x, y, (), ())
        found = intervals.results(closed, [(float(low), float(high)) for low, high in ends])
        for (low, high), values in zip(found, run(x, y)[1], strict=True):
            values = np.asarray(values, np.float64)
            values = values[np.isfinite(values)]
            slack = 1e-5 * np.abs(values).max(initial=1)
            assert low - slack <= values.min(initial=INF)
            assert values.max(initial=-INF) <= high + slack


def test_what_grows_with_each_step_is_followed_to_its_end() -> None:
    """Two states, of which one becomes negative only when the other has."""

    def init(x: Any, *_: Any) -> Any:
        return (), [jnp.zeros(3), jnp.ones(3), jnp.zeros(3)]

    def update(gradient: Any, state: Any, x: Any, value: Any) -> Any:
        a, b, c = state
        return (), [a + jnp.minimum(b, 0), b + c, c - 1]

    closed = traced(init, jnp.ones(3), (), (), ())
    program = traced(update, jnp.ones(3), [jnp.ones(3)] * 3, jnp.ones(3), jnp.ones(()))
    found = intervals.kept(closed, program, 1, 3)
    assert [low for low, _ in found] == [-INF, -INF, -INF]


def test_results_that_read_operands_are_told_from_others() -> None:
    def init(x: Any, *_: Any) -> Any:
        return (), [x, jnp.zeros_like(x), x + 1, jnp.full_like(x, 2), jnp.ones(())]

    closed = traced(init, jnp.ones(3), (), (), ())
    assert intervals.reads_operands(closed) == [True, False, True, False, False]
