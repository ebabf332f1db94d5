"""Plans that keep single values of a layer: numbers, transformations, what is recomputed.

Every plan here comes from the front that `jaxmem.fit` searches, and runs by `use_plan`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.budgeted import kinds, plans, problem, question
from helpers.grads import microbatches_of
from helpers.menagerie import MODELS, NOT_EXACT, assert_close, assert_same, differentiate, exact_jit
from helpers.transformed import DERIVATIVES, dot
from helpers.transformed import loss as stacked_loss
from helpers.transformed import make as stacked_arrays
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import Plan, policies

pytestmark = pytest.mark.usefixtures("strict")

N = 7

# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("model", MODELS)
def test_numbers_are_those_of_the_plain_scan(model: str) -> None:
    at = MODELS[model].make(N)
    same = assert_close if model in NOT_EXACT else assert_same
    step = differentiate(jaxmem.remat_auto(at.loss))
    expected = exact_jit(differentiate(at.loss))(at.params, at.inputs)
    for plan in plans(step, at.params, at.inputs, most=2):
        same(under(plan, step)(at.params, at.inputs), expected)


def under(plan: jaxmem.StepPlan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled under a plan; an error says which."""

    def run(*args: Any) -> Any:
        try:
            with jaxmem.use_plan(plan):
                return exact_jit(fn)(*args)
        except Exception as error:
            error.add_note(f"under\n{plan}")
            raise

    return run


def agree(
    build: Callable[[Any], Any], fn: Any, *args: Any, most: int = 2, tolerance: float = 1e-6
) -> None:
    """What `build` makes of a function is the same along the Pareto front of its plans."""
    expected = exact_jit(build(fn))(*args)
    marked = build(jaxmem.remat_auto(fn))
    found = plans(marked, *args, most=most)
    assert any(kind != "none" for plan in found for kind in kinds(plan))
    for plan in found:
        assert_close(under(plan, marked)(*args), expected, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, 16])
def test_lengths(n: int) -> None:
    at = MODELS["tuple_carry"].make(n)
    step = differentiate(jaxmem.remat_auto(at.loss))
    expected = exact_jit(differentiate(at.loss))(at.params, at.inputs)
    for plan in plans(step, at.params, at.inputs, most=3):
        assert_same(under(plan, step)(at.params, at.inputs), expected)


def kept_in(step: Any, *args: Any) -> tuple[jaxmem.RegionPlan, policies.Keep]:
    """A plan of a step's one stack in which layers keep some values, and what one of them keeps."""
    found = problem(step, *args)
    last = [found.plan(k) for k in range(len(found.front))]
    (region,) = next(p.regions for p in reversed(last) if [*kinds(p)] == ["keep"])
    assert isinstance(region.plan, Plan)
    return region, next(keep for _, keep in region.plan.runs if keep is not None)


def instead(region: jaxmem.RegionPlan, plan: Plan) -> jaxmem.StepPlan:
    """The step's plan with that of its one stack written by hand."""
    return jaxmem.StepPlan((dataclasses.replace(region, plan=plan),))


RUNS: dict[str, Callable[[policies.Keep], Any]] = {
    "one run": lambda k: [(7, k)],
    "first of all": lambda k: [(1, k), (6, None)],
    "last of all": lambda k: [(6, None), (1, k)],
    "single layers": lambda k: [(1, k), (1, None), (1, k), (1, None), (1, k), (1, None), (1, k)],
    "three runs": lambda k: [(2, None), (3, k), (2, None)],
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sown", "backwards"])
def test_runs_of_layers(model: str) -> None:
    """Each layer meets its own parameters and ys, whatever runs the plan has."""
    at = MODELS[model].make(N)
    step = differentiate(jaxmem.remat_auto(at.loss))
    region, keep = kept_in(step, at.params, at.inputs)
    expected = exact_jit(differentiate(at.loss))(at.params, at.inputs)
    for runs in RUNS.values():
        plan = instead(region, Plan.keep(runs(keep)))
        assert_same(under(plan, step)(at.params, at.inputs), expected)


@pytest.mark.slow
def test_a_segment_whose_layers_keep_some_values() -> None:
    at = MODELS["tuple_carry"].make(N)
    step = differentiate(jaxmem.remat_auto(at.loss))
    region, keep = kept_in(step, at.params, at.inputs)
    expected = exact_jit(differentiate(at.loss))(at.params, at.inputs)
    for lengths in [(3,), (4, 2), (7,)]:
        plan = instead(region, Plan.cut(7, lengths, keep))
        assert_same(under(plan, step)(at.params, at.inputs), expected)


# ---------------------------------------------------------------- transformations


@pytest.mark.filterwarnings("ignore:.*is differentiated twice:jaxmem.NoEffectWarning")
@pytest.mark.parametrize("derivative", [d for d in DERIVATIVES if d != "value"])
def test_derivatives(derivative: str) -> None:
    agree(DERIVATIVES[derivative], stacked_loss, *stacked_arrays())


BUILDS: dict[str, Callable[[Any], Any]] = {
    "vmap of grad": lambda f: jax.vmap(jax.value_and_grad(f, (0, 1)), (0, None)),
    "grad of vmap": lambda f: jax.grad(
        lambda p, x: dot(jnp.arange(1.0, 4.0), jax.vmap(f, (0, None))(p, x)), (0, 1)
    ),
}


@pytest.mark.parametrize("build", BUILDS)
def test_vmap(build: str) -> None:
    params, x = stacked_arrays(lead=(3,))
    agree(BUILDS[build], stacked_loss, params, x[0])


@pytest.mark.parametrize("grad", ["inside", "outside"])
def test_shard_map(grad: str) -> None:
    """Data parallel in one axis, tensor parallel in the other, a sum over devices in the layer."""
    rng = np.random.default_rng(0)
    up = jnp.asarray(0.5 * rng.standard_normal((N, 6, 8)), jnp.float32)
    down = jnp.asarray(0.5 * rng.standard_normal((N, 8, 6)), jnp.float32)
    specs = {"up": P(None, None, "model"), "down": P(None, "model", None)}

    def local(params: Any, x: Any) -> Any:
        def layer(h: Any, p: Any) -> Any:
            h = h + lax.psum(jnp.sin(h @ p["up"]) @ p["down"], "model")
            return h, h.mean()

        h, means = lax.scan(layer, x, params)
        return lax.psum((h**2).sum() + means.sum(), "data")

    def build(f: Any) -> Any:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("data")))
        if grad == "outside":
            return jax.value_and_grad(mapped(f, out_specs=P()), (0, 1))
        return mapped(jax.grad(f, (0, 1)), out_specs=(specs, P("data")))

    x = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
    agree(build, local, {"up": up, "down": down}, x)


def test_unused_ys_do_not_reach_the_gradient() -> None:
    """Zeros pulled through an infinite derivative would be NaN."""

    def sown(w: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w), (jnp.log(jnp.abs(h) * 0), 2 * h)

        h, (_, used) = lax.scan(layer, x, w)
        return h.sum() + used.sum()

    w, x = stacked_arrays()[0]["w"], stacked_arrays()[1]
    expected = exact_jit(jax.grad(sown, (0, 1)))(w, x)
    chex.assert_tree_all_finite(expected)
    agree(lambda f: jax.grad(f, (0, 1)), sown, w, x, most=3)


@pytest.mark.parametrize("microbatches", [3, 4])
def test_accumulated(microbatches: int) -> None:
    """Gradients of stacked parameters are added to their sum as they come."""
    params, x = stacked_arrays()
    x = jnp.concatenate([x, 2 * x])
    marked = jaxmem.remat_auto(stacked_loss)

    def step(params: Any, x: Any) -> Any:
        return jaxmem.value_and_grad(marked, microbatches=microbatches)(params, x)

    parts = [x[rows] for rows in microbatches_of(len(x), microbatches)]
    plain = jax.jit(jax.value_and_grad(stacked_loss))
    each = [plain(params, part) for part in parts]
    weights = [len(part) / len(x) for part in parts]
    expected = jax.tree.map(lambda *a: sum(map(jnp.multiply, weights, a)), *each)
    for plan in plans(step, params, x, most=2):
        assert_close(under(plan, step)(params, x), expected, 3e-6)


# ---------------------------------------------------------------- Flax


class Layer(nn.Module):
    """What a dropout mask and batch statistics add to a layer."""

    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        h = nn.BatchNorm(use_running_average=False)(nn.Dense(6)(x))
        h = nn.Dropout(0.3, deterministic=False)(nn.tanh(h))
        return x + nn.Dense(x.shape[-1])(nn.silu(h)), None


class Encoder(nn.Module):
    """A stack between two other layers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        scan = nn.scan(
            Layer,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=N,
        )
        return nn.Dense(3)(scan()(nn.Dense(5)(x), None)[0])


@pytest.mark.slow
def test_linen() -> None:
    x = jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)
    # Of each operation for itself, most of the time would be compiling.
    init = jax.jit(Encoder().init)
    variables = init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def step_of(module: Any) -> Any:
        def loss(params: Any, stats: Any, x: Any) -> Any:
            out, new = module.apply(
                {"params": params, "batch_stats": stats},
                x,
                rngs={"dropout": jax.random.key(2)},
                mutable=["batch_stats"],
            )
            return jnp.square(out).mean(), (out, new)

        return jax.value_and_grad(loss, has_aux=True)

    args = variables["params"], variables["batch_stats"], x
    step = step_of(jaxmem.remat_auto(Encoder)())
    expected = exact_jit(step_of(Encoder()))(*args)
    for plan in plans(step, *args, most=2):
        assert_same(under(plan, step)(*args), expected)


class Block(nnx.Module):
    """A layer with state."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.norm(jnp.tanh(self.dense(x)))


class Model(nnx.Module):
    """A stack made by nnx.vmap."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=N)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> Block:
            return Block(rngs=rngs)

        self.blocks = create(rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: Any, block: Block) -> Any:
            return block(x)

        return forward(x, self.blocks)


def test_nnx() -> None:
    graph, params, rest = nnx.split(Model(rngs=nnx.Rngs(0)), nnx.Param, ...)
    x = jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)

    def step_of(call: Any) -> Any:
        def loss(params: Any, rest: Any, x: Any) -> Any:
            model = nnx.merge(graph, params, rest, copy=True)
            value = jnp.square(call(model, x)).mean()
            return value, nnx.state(model, nnx.BatchStat)

        return jax.value_and_grad(loss, has_aux=True)

    step = step_of(jaxmem.remat_auto(lambda model, x: model(x)))
    expected = exact_jit(step_of(lambda model, x: model(x)))(params, rest, x)
    for plan in plans(step, params, rest, x, most=2):
        value, gradient = under(plan, step)(params, rest, x)
        assert_same(value, expected[0])
        # A layer outside of loops is fused with what is around it.
        assert_close(gradient, expected[1])


# ---------------------------------------------------------------- what is recomputed


# 2 × rows × columns × what is summed over, by the shape of the result.
ROWS, WIDTH, INNER = 64, 32, 96
FLOPS = {
    f"float32[{ROWS},{WIDTH}]": {2 * ROWS * WIDTH * WIDTH, 2 * ROWS * WIDTH * ROWS},
    f"float32[{ROWS},{INNER}]": {2 * ROWS * WIDTH * INNER},
    f"float32[{ROWS},{ROWS}]": {2 * ROWS * WIDTH * ROWS},
}


def attention(h: Any, p: Any) -> Any:
    """Six matrix products of different sizes."""
    q, k, v = (h @ p[name] for name in "qkv")
    scores = jax.nn.softmax(q @ k.T)
    h = h + scores @ v @ p["o"]
    return h + jnp.tanh(h @ p["up"]) @ p["down"], None


def attention_step() -> tuple[Any, Any]:
    shapes = dict.fromkeys("qkvo", (6, WIDTH, WIDTH))
    shapes |= {"up": (6, WIDTH, INNER), "down": (6, INNER, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}

    @jaxmem.remat_auto
    def loss(params: Any, h: Any) -> Any:
        return jnp.square(lax.scan(attention, h, params)[0]).sum()

    # Of both: where the gradient of h is not asked for, a first layer that stands alone lacks it.
    return jax.grad(loss, (0, 1)), (params, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"))


def test_what_is_recomputed_and_kept_is_what_the_plan_says() -> None:
    """Matrix products in the compiled program: those of everything kept, and the plan's more."""
    step, args = attention_step()
    found, ask = problem(step, *args), question(step, *args)
    (region,) = found.regions

    def in_loops(candidate: int) -> bool:
        """Whether nothing is recomputed outside of loops: the CPU's compiler undoes that."""
        (planned,) = found.planned(candidate)
        runs = planned.candidate.runs
        return bool(runs) and all(count > 1 or not choice for count, choice in runs)

    candidates = [candidate for candidate in range(1, len(found.front)) if in_loops(candidate)]
    candidates = [candidates[k] for k in np.linspace(0, len(candidates) - 1, 3).round().astype(int)]
    everything = found.report(ask, 0)
    sizes, bare, extra = [everything.temp_bytes], everything.matmul_flops, 0
    assert bare is not None
    for candidate in candidates:
        report = found.report(ask, candidate)
        sizes.append(report.temp_bytes)
        again = [
            decision
            for decision in region.decisions(found.planned(candidate)[0].candidate)
            if decision.decision == "recompute" and decision.name == "dot_general"
        ]
        assert report.matmul_flops is not None
        extra = report.matmul_flops - bare
        least = sum(decision.layers * min(FLOPS[decision.shape]) for decision in again)
        most = sum(decision.layers * max(FLOPS[decision.shape]) for decision in again)
        assert least <= extra <= most
    assert extra > 0
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2
