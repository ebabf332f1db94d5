"""Equal layers written out one after the other: found, planned once, run and told of as layers."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.budgeted import plans, problem, question
from helpers.menagerie import assert_close, exact_jit
from helpers.unrolled_code import code_of, normal
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem
from jaxmem.estimate.roofline import Roofline
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.step_problem import StepProblem
from jaxmem.unrolled import Chain, Code
from jaxmem.unrolled.runs import Run, find_runs

TARGET = "h100-80g"
H100 = Roofline(matrix_peak=989e12, bandwidth=3.35e12)


# ---------------------------------------------------------------- models


def attention(x: jax.Array, p: Any, window: int | None = None) -> jax.Array:
    y = x - x.mean(-1, keepdims=True)
    q, k, v = jnp.split(y @ p["qkv"], 3, -1)
    scores = jnp.einsum("bqd,bkd->bqk", q, k, preferred_element_type=jnp.float32)
    if window is not None:
        places = jnp.arange(x.shape[1])
        scores = jnp.where(jnp.abs(places - places[:, None]) < window, scores, -1e9)
    return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores).astype(x.dtype), v)


def feed(x: jax.Array, p: Any, key: jax.Array | None = None) -> jax.Array:
    y = jax.nn.gelu(x @ p["up"])
    if key is not None:
        y = jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0)
    return x + y @ p["down"]


def decoder(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Dropout by keys that are folded in by number, as a module's path does."""
    x = x * params["scale"]
    for number, p in enumerate(params["layers"]):
        x = feed(attention(x, p), p, jax.random.fold_in(key, 17 * number + 3))
    return x @ params["head"]


def local_and_global(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    del key
    for number, p in enumerate(params["layers"]):
        x = feed(attention(x, p, window=None if number % 2 else 4), p)
    return x @ params["head"]


def cross(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """What layers read of an encoder is there for all of them."""
    del key
    memory = jnp.tanh(x @ params["scale"][:, None] * params["layers"][0]["up"][0])
    for p in params["layers"]:
        y = jnp.einsum("bqd,bkd->bqk", x @ p["up"], memory)
        x = x + jax.nn.softmax(y) @ (memory @ p["down"])
        x = feed(x, p)
    return x @ params["head"]


def numbered(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Each layer takes its part of what is stacked, by its number, as BERT does of a mask."""
    del key
    gains = params["scale"].reshape(16, -1)
    for number, p in enumerate(params["layers"]):
        x = feed(attention(x, p) * gains[number].mean(), p)
    return x @ params["head"]


MODELS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (decoder, local_and_global, cross, numbered)
}


def shapes(layers: int, width: int = 16, dtype: Any = jnp.float32) -> Any:
    layer = {"qkv": (width, 3 * width), "up": (width, 4 * width), "down": (4 * width, width)}
    return {
        "scale": jax.ShapeDtypeStruct((width,), dtype),
        "layers": [
            {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in layer.items()}
            for _ in range(layers)
        ],
        "head": jax.ShapeDtypeStruct((width, 8 * width), dtype),
    }


def arrays(layers: int) -> tuple[Any, jax.Array, jax.Array]:
    seeds = itertools.count()
    params = jax.tree.map(lambda s: normal(next(seeds), *s.shape), shapes(layers))
    return params, normal(99, 2, 8, 16), jax.random.key(0)


def code(model: str, layers: int) -> Code:
    return code_of(MODELS[model], *arrays(layers))


def gradient(model: Callable[..., Any], decorate: Callable[..., Any] = jaxmem.remat_auto) -> Any:
    decorated = decorate(model)

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        logits = decorated(params, x, key).astype(jnp.float32)
        labels = jnp.zeros(logits.shape[:-1], int)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return jax.value_and_grad(loss)


# ---------------------------------------------------------------- found


@settings(max_examples=100, derandomize=True)
@given(data=st.data())
def test_what_repeats_is_found_whatever_stands_around_it(data: st.DataObject) -> None:
    size, count = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 9))
    layer = [f"layer {k}" for k in range(size)]
    before, behind = (data.draw(st.integers(0, 7)) for _ in range(2))
    text = [*(f"a{k}" for k in range(before)), *layer * count, *(f"b{k}" for k in range(behind))]
    live = [9] * (len(text) + 1)
    live[before : before + size * count + 1 : size] = [1] * (count + 1)
    assert find_runs(text, live, lambda first, last, _: last - first) == [Run(before, size, count)]


def test_layers_of_unequal_dataflow_are_no_run() -> None:
    text = ["op", "dot"] * 4
    assert find_runs(text, [1] * 9, lambda first, last, _: first) == []


@pytest.mark.parametrize(
    ("model", "period"), [("decoder", 1), ("local_and_global", 2), ("cross", 1), ("numbered", 1)]
)
def test_layers_are_found_though_keys_and_parameters_differ(model: str, period: int) -> None:
    [run] = code(model, 8).runs
    # The first and the last are cut elsewhere, or compute what others have in common.
    assert 6 <= run.count * period <= 8
    [longer] = code(model, 12).runs
    assert (longer.count - run.count) * period == 4


def test_what_layers_share_is_held_once() -> None:
    few, many = code("cross", 4), code("cross", 9)
    for one in (few, many):
        [memory] = (var for var in one.shared if var.aval.shape == (2, 8, 64))
        assert one.shared_bytes() == (memory.aval.size * 4,) * 2  # and its gradient
    assert few.shared_bytes() == many.shared_bytes()


def test_code_that_repeats_nothing_has_no_runs() -> None:
    def growing(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    ws = [normal(k, 8 + k, 9 + k) for k in range(6)]
    assert code_of(growing, ws, normal(9, 4, 8)).runs == ()


# ---------------------------------------------------------------- planned once


def feeds(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """The shortest of layers, for what costs the more the longer they are."""
    del key
    for p in params["layers"]:
        x = feed(x, p)
    return x @ params["head"]


@functools.cache
def with_a_loss(model: Callable[..., Any], layers: int) -> tuple[StepProblem, CompileRequest]:
    """The plans of layers with a loss on top, for an absent GPU."""
    params = shapes(layers, 256, jnp.bfloat16)
    if model is feeds:
        for layer in params["layers"]:
            del layer["qkv"]
    specs = params, jax.ShapeDtypeStruct((16, 256, 256), jnp.bfloat16), jax.random.key(0)
    step = gradient(model)
    return problem(step, *specs, target=TARGET), question(step, *specs, target=TARGET)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_equal_layers_are_planned_once(model: str) -> None:
    few, many = (Chain(code(model, layers), H100, points=0) for layers in (4, 8))

    def different(chain: Chain) -> int:
        return len({id(segment) for segment in chain.segments.values()})

    assert different(many) <= different(few) + 3


def test_plans_name_layers() -> None:
    found, _ = with_a_loss(feeds, 5)
    [region] = found.regions
    least = found.planned(len(found.front) - 1)[0].candidate
    names = {row.stack for row in region.decisions(least)}
    assert any("equal ones" in name for name in names)


# ---------------------------------------------------------------- numbers and bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "decoder",
        "cross",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("local_and_global", "numbered")),
    ],
)
def test_numbers_along_the_front(model: str) -> None:
    args = arrays(4)
    step = gradient(MODELS[model])
    expected = exact_jit(gradient(MODELS[model], lambda f: f))(*args)
    for plan in plans(step, *args, most=2):
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(gradient(MODELS[model]))(*args), expected)


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (feeds, 5),
        pytest.param(decoder, 8, marks=pytest.mark.slow),  # with attention and dropout
    ],
)
def test_layers_with_a_loss_on_top_are_predicted(model: Callable[..., Any], layers: int) -> None:
    """The logits in float32, and their gradient, are live next to all that is kept."""
    found, ask = with_a_loss(model, layers)
    for candidate in (len(found.front) // 2, len(found.front) - 1):
        report = found.report(ask, candidate)
        fixed = report.required_bytes - report.temp_bytes
        off = (found.predicted[candidate] - fixed) / report.temp_bytes - 1
        assert abs(off) < 0.15, (candidate, off)


def jvp_rule(scale: float) -> Callable[[jax.Array], jax.Array]:
    @jax.custom_jvp
    def own(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    @own.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jnp.sin(primals[0]), scale * tangents[0]

    return own


def vjp_rule(scale: float) -> Callable[[jax.Array], jax.Array]:
    @jax.custom_vjp
    def own(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    own.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (scale * g,))
    return own


def package_rule(scale: float) -> Callable[[jax.Array], jax.Array]:
    """Of a package whose name only begins as jax's does."""
    space: dict[str, Any] = {"jax": jax, "jnp": jnp, "scale": scale}
    text = """
@jax.custom_jvp
def own(x):
    return jnp.sin(x)
own.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), scale * tangents[0]))
"""
    exec(compile(text, f"{Path(jax.__file__).parent}opt/rules.py", "exec"), space)
    return space["own"]


def callback(scale: float) -> Callable[[jax.Array], jax.Array]:
    def own(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        host = jax.pure_callback(lambda x: np.float32(scale) * x, shape, jax.lax.stop_gradient(x))
        return x * host

    return own


def inner_constant(scale: float) -> Callable[[jax.Array], jax.Array]:
    table = normal(round(scale), 16)

    def own(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: x * table, lambda x: x - scale, jax.nn.relu(x))

    return own


def bodies(model: Callable[..., Any], *args: Any) -> list[int]:
    """How many layers a run has, and how many of them are traced for themselves."""
    found = code_of(model, *args)
    [run] = found.runs
    own = {id(found.body(first, last)[0]) for first, last in itertools.pairwise(run.places)}
    return [run.count, len(own)]


def test_layers_that_hold_the_same_are_traced_once() -> None:
    def model(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = x + 0.3 * jax.nn.relu(x @ w)
        return jnp.square(x).sum()

    count, own = bodies(model, [normal(k, 16, 16) for k in range(6)], normal(9, 8, 16))
    assert (count >= 5, own) == (True, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "held", [jvp_rule, vjp_rule, package_rule, callback, inner_constant], ids=lambda f: f.__name__
)
def test_what_layers_hold_unseen_is_their_own(
    held: Callable[[float], Callable[[jax.Array], jax.Array]],
) -> None:
    """Rules of derivatives, callbacks, constants of inner functions and numbers differ by layer."""
    owns = [held(1.0 + k) for k in range(6)]

    def model(ws: Any, x: jax.Array) -> jax.Array:
        for w, own in zip(ws, owns, strict=True):
            x = x + 0.3 * own(x @ w)
        return jnp.square(x).sum()

    args = [normal(k, 16, 16) for k in range(6)], normal(9, 8, 16)
    if held is not inner_constant:  # whose numbers are in the text: its layers are no run
        count, traced = bodies(model, *args)
        assert count == traced >= 4
    expected = exact_jit(jax.grad(model))(*args)
    step = jax.grad(jaxmem.remat_auto(model))
    assert_close(exact_jit(jax.grad(jaxmem.remat_sqrt(model)))(*args), expected)
    for plan in plans(step, *args, most=2):
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(jax.grad(jaxmem.remat_auto(model)))(*args), expected)


def test_a_loss_with_a_collective_is_looked_at_where_it_stands() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    spec, whole = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()

    @jaxmem.remat_auto
    def model(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return x

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(-jax.nn.log_softmax(model(ws, x)).mean(), "d")

    def step(ws: Any, x: jax.Array) -> Any:
        run = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(whole, spec), out_specs=whole)
        return run(ws, x)

    args = [normal(k, 16, 16) for k in range(5)], normal(9, 64, 16)
    assert problem(step, *args).front
