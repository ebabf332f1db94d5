"""Code without a scan: where it is cut, its plans, its numbers, and what `remat_sqrt` does to it.

The CPU's compiler undoes checkpoints outside of loops, so that memory is looked at for an
absent GPU; numbers are computed here.
"""

import functools
import importlib
import itertools
import re
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from budgeted_models import MODELS
from helpers.budgeted import kinds, plans, problem, question
from helpers.menagerie import assert_close, assert_same, exact_jit
from helpers.releases import SINCE_0_11
from helpers.unrolled_code import (
    SHAPES,
    B,
    D,
    arrays,
    chain,
    code_of,
    normal,
    residual,
    tied,
)
from helpers.xla_flags import QUICK_GPU
from jax import lax

import jaxmem
from foreign import training
from foreign.nets import NETS
from jaxmem import NoStackWarning, StepPlan
from jaxmem.estimate.roofline import Roofline
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.step_problem import StepProblem
from jaxmem.unrolled import Chain, Piece, UnrolledPlan

unrolled_run = importlib.import_module("jaxmem.unrolled.run")  # its function has its name


# ---------------------------------------------------------------- shapes of code


def several_results(params: Any, h: jax.Array) -> Any:
    seen = []
    for k, w in enumerate(params["ws"]):
        h = h + jnp.sin(h @ w)
        if k % 3 == 0:
            seen.append(h.mean(-1))
    return jnp.square(h).mean() + jnp.stack(seen).sum(), {"h": h, "seen": seen, "n": len(seen)}


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize("shape", [*SHAPES, "several_results"])
def test_what_is_live_is_what_is_made_before_and_read_after(shape: str) -> None:
    code = code_of({**SHAPES, "several_results": several_results}[shape], *arrays())
    outs = {id(var) for var in code.closed.jaxpr.outvars}
    for at in range(len(code) + 1):
        made = {id(var) for eqn in code.eqns[:at] for var in eqn.outvars}
        read = {id(var) for eqn in code.eqns[at:] for var in eqn.invars} | outs
        assert {id(var) for var in code.live[at]} == made & read
    cuts = code.cuts()
    assert cuts == sorted(set(cuts))
    assert (cuts[0], cuts[-1]) == (0, len(code))


def crossing(shape: str) -> list[int]:
    """How many arrays of the size of `h` are live at each cut."""
    code = code_of(SHAPES[shape], *arrays())
    size = B * D * 4
    return [code.live_bytes(at) // size for at in code.cuts()[1:-1]]


def test_chains_are_cut_where_one_value_is_live() -> None:
    for shape in ("chain", "residual", "tied"):
        found = crossing(shape)
        assert len(found) >= 7
        assert set(found) == {1}


def test_towers_are_cut_where_they_meet() -> None:
    assert crossing("towers").count(1) >= 2


def test_skip_connections_are_live_at_the_cuts_that_they_cross() -> None:
    found = crossing("unet")
    assert 4 <= max(found) <= 5  # four of them, and what they are joined to
    assert found[0] == 1


def test_what_follows_from_parameters_alone_is_not_live() -> None:
    """A cast of all weights up front is done where each is used."""

    def low(params: Any, h: jax.Array) -> jax.Array:
        cast = [w.astype(jnp.bfloat16) for w in params["ws"]]
        for w in cast:
            h = jnp.tanh(h.astype(jnp.bfloat16) @ w).astype(jnp.float32)
        return h.sum()

    code = code_of(low, *arrays())
    inner = [code.live_bytes(at) for at in code.cuts()[1:-1]]
    assert inner
    assert max(inner) <= B * D * 4


def test_a_stretch_runs_from_what_it_reads_to_what_it_gives() -> None:
    params, h = arrays()
    code = code_of(tied, params, h)
    jaxpr = code.closed.jaxpr
    values = dict(zip(jaxpr.invars, jax.tree.leaves((params, h)), strict=True))
    values.update(zip(jaxpr.constvars, code.closed.consts, strict=True))
    cuts = code.cuts()
    for first, last in itertools.pairwise(cuts):
        given = [values[var] for var in code.reads(first, last)]
        values.update(zip(code.gives(first, last), code.run(first, last, given), strict=True))
    (out,) = jaxpr.outvars
    assert_close(values[out], tied(params, h))


# ---------------------------------------------------------------- numbers


@functools.cache
def plain(shape: str) -> Any:
    """What jax computes of a shape of code."""
    return exact_jit(jax.value_and_grad(SHAPES[shape], (0, 1)))(*arrays())


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_along_the_front(shape: str) -> None:
    args = arrays()
    marked = jaxmem.remat_auto(SHAPES[shape])
    step = jax.value_and_grad(marked, (0, 1))
    expected = plain(shape)
    found = plans(step, *args, most=3)
    assert {kind for plan in found for kind in kinds(plan)} == {"unrolled"}
    for plan in found:
        with jaxmem.use_plan(plan):
            value, gradient = exact_jit(step)(*args)
        assert_same(value, expected[0])
        assert_close(gradient, expected[1])
        assert jaxmem.StepPlan.from_json(plan.to_json()) == plan


def test_results_that_are_no_arrays_and_results_of_the_middle() -> None:
    args = arrays()
    marked = jaxmem.remat_auto(several_results)
    step = jax.value_and_grad(marked, has_aux=True)
    (value, aux), gradient = jax.value_and_grad(several_results, has_aux=True)(*args)

    def as_arrays(params: Any, h: jax.Array) -> Any:
        (value, aux), gradient = step(params, h)
        assert aux.pop("n") == 3
        return (value, aux), gradient

    del aux["n"]
    for plan in plans(as_arrays, *args, most=2):
        with jaxmem.use_plan(plan):
            assert_close(jax.jit(as_arrays)(*args), ((value, aux), gradient), 3e-6)


@pytest.mark.filterwarnings("ignore:.*is differentiated twice:jaxmem.NoEffectWarning")
def test_derivatives_of_derivatives_and_vmap() -> None:
    params, h = arrays()
    params = {"ws": params["ws"][:4]}

    def hessian_product(f: Any) -> Any:
        def run(params: Any, h: jax.Array) -> Any:
            return jax.jvp(jax.grad(f, 1), (params, h), (params, jnp.cos(h)))[1]

        return run

    def mapped(f: Any) -> Any:
        return jax.vmap(jax.grad(f), (None, 0))

    for build, at in [(hessian_product, h), (mapped, h.reshape(4, B // 4, D))]:
        step = build(jaxmem.remat_auto(residual))
        expected = jax.jit(build(residual))(params, at)
        for plan in plans(step, params, at, most=2):
            with jaxmem.use_plan(plan):
                assert_close(jax.jit(step)(params, at), expected)


def test_a_block_called_in_a_loop_is_one_plan() -> None:
    @jaxmem.remat_auto
    def block(w: Any, h: jax.Array) -> jax.Array:
        for _ in range(2):
            h = h + jnp.tanh(jnp.sin(h @ w) @ w)
        return h

    def loss(params: Any, h: jax.Array) -> jax.Array:
        for w in params["ws"][:3]:
            h = block(w, h)
        return jnp.square(h).mean()

    args = arrays()
    step = jax.value_and_grad(loss)
    found = problem(step, *args)
    (region,) = found.regions
    assert region.uses.times == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxmem.JaxmemWarning)  # no plan is in force
        expected = exact_jit(step)(*args)
    for plan in plans(step, *args, most=2):
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(step)(*args), expected)


def test_a_region_in_a_region_is_part_of_it() -> None:
    inner = jaxmem.remat_auto(lambda w, h: jnp.sin(jnp.tanh(h @ w) @ w))

    @jaxmem.remat_auto
    def outer(params: Any, h: jax.Array) -> jax.Array:
        for w in params["ws"]:
            h = h + inner(w, h)
        return jnp.square(h).mean()

    def bare(params: Any, h: jax.Array) -> jax.Array:
        for w in params["ws"]:
            h = h + jnp.sin(jnp.tanh(h @ w) @ w)
        return jnp.square(h).mean()

    args = arrays(5)
    step = jax.value_and_grad(outer)
    expected = exact_jit(jax.value_and_grad(bare))(*args)
    for plan in plans(step, *args, most=2):
        (region,) = plan.regions
        assert "outer" in region.where
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(step)(*args), expected)


def test_a_region_in_the_layer_of_a_stack_is_part_of_it() -> None:
    block = jaxmem.remat_auto(lambda w, h: jnp.sin(jnp.tanh(h @ w) @ w))

    @jaxmem.remat_auto
    def outer(ws: Any, h: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (h + block(w, h), None), h, ws)[0].sum()

    def bare(ws: Any, h: jax.Array) -> jax.Array:
        layer = lambda h, w: (h + jnp.sin(jnp.tanh(h @ w) @ w), None)  # noqa: E731
        return lax.scan(layer, h, ws)[0].sum()

    args = normal(0, 5, D, D), normal(1, B, D)
    step = jax.value_and_grad(outer)
    expected = exact_jit(jax.value_and_grad(bare))(*args)
    for plan in plans(step, *args, most=2):
        assert len(plan.regions) == 1
        with jaxmem.use_plan(plan):
            assert_same(exact_jit(step)(*args), expected)


def test_regions_in_one_that_has_no_stack_of_its_own() -> None:
    """A decorated model made of a decorated stack and a decorated head: two plans."""
    head = jaxmem.remat_auto(chain)
    body = jaxmem.remat_auto(lambda ws, h: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0])

    @jaxmem.remat_auto
    def whole(params: Any, h: jax.Array) -> jax.Array:
        return head(params, body(jnp.stack(params["ws"]), h))

    args = arrays(5)
    step = jax.value_and_grad(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxmem.JaxmemWarning)  # no plan is in force
        expected = exact_jit(step)(*args)
    for plan in plans(step, *args, most=2):
        assert len(plan.regions) == 2
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(step)(*args), expected)


def test_a_region_that_takes_gradients_leaves_the_plan_to_the_stack_in_it() -> None:
    def model(ws: Any, h: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0].sum()

    args = normal(0, 5, D, D), normal(1, B, D)
    step = jaxmem.remat_auto(jax.grad(jaxmem.remat_sqrt(model)))
    with pytest.warns(jaxmem.NoEffectWarning, match="takes gradients itself"):
        found = plans(step, *args, most=2)
    for plan in found:
        (region,) = plan.regions
        assert region.where.startswith("stack 0: 5 layers")
        with (
            jaxmem.use_plan(plan),
            pytest.warns(jaxmem.NoEffectWarning, match="takes gradients itself"),
        ):
            assert_same(exact_jit(step)(*args), exact_jit(jax.grad(model))(*args))


def test_a_region_around_gradients_is_no_region() -> None:
    with (
        pytest.warns(jaxmem.NoEffectWarning, match="takes gradients itself"),
        pytest.raises(ValueError, match="a decorator around jax.grad comes too late"),
    ):
        problem(jaxmem.remat_auto(jax.grad(chain)), *arrays())


def test_one_layer_of_a_scan_is_no_stack() -> None:
    block = jaxmem.remat_auto(lambda w, h: jnp.sin(jnp.tanh(h @ w) @ w))

    def model(ws: Any, h: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (h + block(w, h), None), h, ws)[0].sum()

    def microbatched(w: Any, hs: jax.Array) -> jax.Array:
        """Gradients are taken within the scan."""
        of_one = jax.grad(lambda w, h: block(w, h).sum())
        return lax.scan(lambda total, h: (total + of_one(w, h), None), w, hs)[0]

    ws, h = normal(0, 5, D, D), normal(1, B, D)
    with pytest.warns(jaxmem.NoStackWarning, match=r"<lambda>.* is one layer of a scan of 5: all"):
        (region,) = problem(jax.jit(jax.grad(model)), ws, h).regions
    assert (region.uses.times, region.uses.iterations) == (5, 5)
    (region,) = problem(microbatched, ws[0], jnp.stack([h, h])).regions
    assert (region.uses.times, region.uses.iterations) == (1, 0)


def block(w: Any, h: jax.Array) -> jax.Array:
    first, second = w
    for _ in range(2):
        h = h + jax.nn.gelu(h @ first) @ second
    return h


def in_a_loop(block: Any) -> Any:
    def loss(ws: Any, h: jax.Array) -> jax.Array:
        for k in range(len(ws[0])):
            h = block([w[k] for w in ws], h)
        return jnp.square(h).mean()

    return loss


def traced_once(block: Any) -> Any:
    return in_a_loop(jax.jit(block))


def in_a_scan(block: Any) -> Any:
    def loss(ws: Any, h: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(lambda h, w: (block(w, h), None), h, ws)[0]).mean()

    return loss


def in_a_scan_in_a_scan(block: Any) -> Any:
    def loss(ws: Any, h: jax.Array) -> jax.Array:
        inner = lambda h, ws: (lax.scan(lambda h, w: (block(w, h), None), h, ws)[0], None)  # noqa: E731
        return jnp.square(
            lax.scan(inner, h, [w.reshape(2, -1, *w.shape[1:]) for w in ws])[0]
        ).mean()

    return loss


ALIKE = [in_a_loop, traced_once, in_a_scan, in_a_scan_in_a_scan]
SIX = [jax.ShapeDtypeStruct((6, *shape), "f4") for shape in ((64, 256), (256, 64))]
ROWS = jax.ShapeDtypeStruct((8192, 64), "f4")


@functools.cache
def alike(calls: Any) -> tuple[StepProblem, CompileRequest]:
    """The plans of a step with six calls of one block, for an absent GPU."""
    step = jax.grad(calls(jaxmem.remat_auto(block)))
    return (
        problem(step, SIX, ROWS, target="h100-80g"),
        question(step, SIX, ROWS, target="h100-80g"),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxmem.NoStackWarning")
@pytest.mark.parametrize(
    "calls",
    [
        in_a_loop,
        in_a_scan,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (traced_once, in_a_scan_in_a_scan)),
    ],
)
def test_of_several_alike_each_can_be_recomputed_whole(calls: Any) -> None:
    """As `remat_full` does, around each; what all of them keep is predicted."""
    found, ask = alike(calls)
    (region,) = found.regions
    assert region.uses.times == 6
    full = jax.grad(calls(jaxmem.remat_full(block)))
    most = jaxmem.memory_report(full, *ask.args, target="h100-80g", suggest=False).required_bytes
    needed = [found.report(ask, candidate).required_bytes for candidate in (0, -1)]
    assert needed[1] <= 1.02 * most < needed[0] / 3
    # Of what is recomputed in a scan, jax 0.11's XLA has a gradient more live than is predicted.
    below = 0.9 if calls is in_a_loop or not SINCE_0_11 else 0.75
    for predicted, size in zip((found.predicted[0], found.predicted[-1]), needed, strict=True):
        assert below * size < predicted < 1.1 * size


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxmem.NoStackWarning")
def test_of_several_that_differ_each_can_be_recomputed_whole() -> None:
    widths = 64, 80, 96, 80, 64
    ws = [
        [jax.ShapeDtypeStruct(shape, "f4") for shape in ((a, 4 * b), (4 * b, 4 * b), (4 * b, b))]
        for a, b in itertools.pairwise(widths)
    ]
    args = ws, jax.ShapeDtypeStruct((8192, 64), "f4")

    def stages(decorator: Any) -> Any:
        @decorator
        def stage(ws: Any, h: jax.Array) -> jax.Array:
            first, second, third = ws
            return jax.nn.gelu(jax.nn.gelu(h @ first) @ second) @ third

        def loss(ws: Any, h: jax.Array) -> jax.Array:
            for own in ws:
                h = stage(own, h)
            return jnp.square(h).mean()

        return jax.grad(loss)

    step = stages(jaxmem.remat_auto)
    ask = question(step, *args, target="h100-80g")
    found = problem(step, *args, target="h100-80g")
    assert [region.uses.times for region in found.regions] == [1] * 4
    full = stages(jaxmem.remat_full)
    most = jaxmem.memory_report(full, *args, target="h100-80g", suggest=False).required_bytes
    needed = [found.report(ask, candidate).required_bytes for candidate in (0, -1)]
    assert needed[1] <= 1.02 * most < needed[0] / 2
    for predicted, size in zip((found.predicted[0], found.predicted[-1]), needed, strict=True):
        assert 0.9 * size < predicted < 1.1 * size
    options: Any = {"target": "h100-80g", "max_compiles": 1, "progress": False}
    with pytest.raises(jaxmem.BudgetError, match=r"what calls .*stage \(.* and the others in"):
        jaxmem.fit(step, *args, budget="6MiB", **options)


@pytest.mark.filterwarnings("ignore::jaxmem.NoStackWarning")
@pytest.mark.parametrize("calls", ALIKE)
def test_numbers_of_several_alike_under_each_plan(calls: Any) -> None:
    args = (normal(0, 4, D, 4 * D), normal(1, 4, 4 * D, D)), normal(2, B, D)
    expected = exact_jit(jax.value_and_grad(calls(block)))(*args)
    step = jax.value_and_grad(calls(jaxmem.remat_auto(block)))
    again = False
    for plan in plans(step, *args, most=2):
        again |= "recomputed whole" in str(plan)
        with jaxmem.use_plan(StepPlan.from_json(plan.to_json())):
            assert_close(exact_jit(step)(*args), expected)
    assert again


def mapped(block: Any) -> Any:
    """Written for one row, as equinox's models are."""
    loss = in_a_loop(block)
    return lambda ws, hs: jax.vmap(loss, in_axes=(None, 0))(ws, hs).mean()


@pytest.mark.slow
def test_code_that_is_mapped_is_planned_for_all_its_rows() -> None:
    found, _ = alike(mapped)
    assert found.predicted == alike(in_a_loop)[0].predicted

    args = (normal(0, 4, D, 4 * D), normal(1, 4, 4 * D, D)), normal(2, B, D)
    expected = exact_jit(jax.value_and_grad(mapped(block)))(*args)
    step = jax.value_and_grad(mapped(jaxmem.remat_auto(block)))
    several = plans(step, *args, most=2)
    for plan in several:
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(step)(*args), expected)
    per_row = jax.vmap(jax.grad(in_a_loop(jaxmem.remat_auto(block))), in_axes=(None, 0))
    with pytest.raises(ValueError, match="is not in the plan"), jaxmem.use_plan(several[0]):
        jax.jit(per_row)(args[0], args[1][:3])


@pytest.mark.slow
def test_explain_tells_of_calls_that_share_a_plan() -> None:
    _, ask = alike(in_a_loop)
    options: Any = {"target": "h100-80g", "max_compiles": 1, "progress": False}
    fitted = jaxmem.fit(ask.step, *ask.args, budget="48MiB", **options)
    assert "1 of them recomputed whole, each of 6 times; to plan each by" in str(fitted.explain())
    with pytest.raises(jaxmem.BudgetError, match=r"what calls block \(.*: now its 6 calls have"):
        jaxmem.fit(ask.step, *ask.args, budget="6MiB", **options)


def test_explain_tells_regions_of_one_name_apart() -> None:
    """One block at two shapes: each row stands under its own region alone."""
    shapes = [jax.ShapeDtypeStruct(shape, "f4") for shape in ((64, 256), (256, 64))]
    decorated = jaxmem.remat_auto(block)

    def loss(ws: Any, h: jax.Array) -> jax.Array:
        return jnp.square(decorated(ws, h)).mean() + jnp.square(decorated(ws, h[:4096])).mean()

    options: Any = {"target": "h100-80g", "max_compiles": 1, "progress": False}
    args = shapes, jax.ShapeDtypeStruct((8192, 64), "f4")
    why = jaxmem.fit(jax.grad(loss), *args, budget="60MiB", **options).explain()
    heads = re.split(r"(?m)^block \(.*\n", str(why))[1:]
    assert len(heads) == 2
    assert sum(head.count("float32[4096,") > 0 for head in heads) <= 1
    assert sum(head.count("float32[8192,") > 0 for head in heads) == 1


def test_stacks_are_counted_as_often_as_they_run() -> None:
    ws, h = normal(0, 2, 3, D, D), normal(1, B, D)
    stack = jaxmem.remat_auto(
        lambda ws, h: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0]
    )
    jitted = jax.jit(stack)

    def scanned(ws: Any, h: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (stack(w, h), None), h, ws)[0].sum()

    def called(ws: Any, h: jax.Array) -> jax.Array:
        return jitted(ws[1], jitted(ws[0], h)).sum()

    def apart(ws: Any, h: jax.Array) -> jax.Array:
        return stack(ws[1], stack(ws[0], h)).sum()

    kept = []
    for loss in (scanned, called, apart):
        found = problem(jax.grad(loss), ws, h)
        (region,) = found.regions
        assert region.uses.times == 2
        kept.append(found.front[0].kept_bytes)
    assert kept[1] == kept[2] <= kept[0]


@pytest.mark.slow
def test_what_is_evaluated_only_is_no_region() -> None:
    """A step that is told its loss on other data, too: there is nothing to keep for that."""
    model = jaxmem.remat_auto(chain)

    def step(params: Any, h: jax.Array, other: jax.Array) -> Any:
        return jax.value_and_grad(model)(params, h), model(params, other)

    params, h = arrays(5)
    args = params, h, h[:3]
    (region,) = problem(step, *args).regions
    assert region.uses.times == 1
    for plan in plans(step, *args, most=2):
        with jaxmem.use_plan(plan):
            jax.jit(step)(*args)
            other = jax.jit(jax.grad(model))
            for _ in range(2):
                with pytest.raises(ValueError, match="is not in the plan"):
                    other(params, h[:3])


@pytest.mark.slow
def test_a_stack_between_unrolled_code() -> None:
    """A region with a stack is planned as the stack; what stands next to it as code."""
    head = jaxmem.remat_auto(chain)
    body = jaxmem.remat_auto(lambda ws, h: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0])

    def loss(params: Any, h: jax.Array) -> jax.Array:
        return head(params, body(jnp.stack(params["ws"]), h))

    def bare(params: Any, h: jax.Array) -> jax.Array:
        h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, jnp.stack(params["ws"]))[0]
        return chain(params, h)

    args = arrays(5)
    step = jax.value_and_grad(loss)
    expected = exact_jit(jax.value_and_grad(bare))(*args)
    for plan in plans(step, *args, most=2):
        assert sorted(set(kinds(plan)) - {"none", "keep", "periodic", "revolve"}) == ["unrolled"]
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(step)(*args), expected)


# ---------------------------------------------------------------- remat_sqrt


@pytest.mark.parametrize("shape", SHAPES)
def test_remat_sqrt_cuts_code_without_a_warning(shape: str) -> None:
    expected = plain(shape)
    step = jax.value_and_grad(jaxmem.remat_sqrt(SHAPES[shape]), (0, 1))
    value, gradient = exact_jit(step)(*arrays())  # warnings are errors
    assert_same(value, expected[0])
    assert_close(gradient, expected[1])


def test_remat_sqrt_still_warns_where_there_is_no_place_to_cut() -> None:
    single = jaxmem.remat_sqrt(lambda w, h: h @ w)
    with pytest.warns(NoStackWarning, match="no layer stack"):
        jax.grad(lambda w, h: single(w, h).sum())(normal(0, D, D), normal(1, B, D))


def test_the_other_policies_still_say_that_there_is_no_stack() -> None:
    for policy in ("full", "dots"):
        with pytest.warns(NoStackWarning, match="no layer stack"):
            jax.grad(jaxmem.remat(chain, policy))(*arrays())


def evaluations(jaxpr: Any, name: str) -> int:
    """How often an operation stands in a jaxpr, wherever in it."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == name
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    count += evaluations(inner, name)
    return count


@pytest.mark.slow
def test_remat_sqrt_computes_nothing_more_than_its_levels_say() -> None:
    """Forward products, one more for each in the backward at most, and two for the gradients."""
    args = {"ws": [normal(k, D, D) for k in range(16)]}, normal(99, B, D)
    counts = [
        evaluations(
            jax.make_jaxpr(jax.grad(jaxmem.remat(residual, "sqrt", levels=levels)))(*args).jaxpr,
            "dot_general",
        )
        for levels in (1, 2)
    ]
    bare = evaluations(jax.make_jaxpr(jax.grad(residual))(*args).jaxpr, "dot_general")
    assert bare < counts[0] <= bare + 16
    assert counts[0] <= counts[1] <= bare + 2 * 16


# ---------------------------------------------------------------- the published test

MB = 10**6
SPEC = jax.ShapeDtypeStruct((500, 500), "float32")  # 1 MB


def deep(h: jax.Array, last: bool = False) -> jax.Array:
    for _ in range(100):
        h = jnp.tanh(h)
    return h.sum()


def deep_residual(h: jax.Array) -> jax.Array:
    for _ in range(100):
        h = h + jnp.tanh(h)
    return h.sum()


@pytest.mark.slow  # a published test at its own size
@pytest.mark.parametrize("fn", [deep, deep_residual])
def test_a_hundred_megabytes_of_values_fit_twenty(fn: Any) -> None:
    """The test of gradient-checkpointing (2018), for an absent GPU."""
    fitted = jaxmem.fit(
        jax.grad(jaxmem.remat_auto(fn)),
        SPEC,
        budget=20 * MB,
        target="h100-80g",
        max_compiles=2,
        progress=False,
    )
    assert fitted.report.required_bytes <= 20 * MB
    by_root, bare = (
        jaxmem.memory_report(jax.grad(one), SPEC, target="h100-80g", suggest=False)
        for one in (jaxmem.remat_sqrt(fn), fn)
    )
    assert by_root.temp_bytes <= max(22 * MB, bare.temp_bytes / 4)


@pytest.mark.slow
def test_gradients_of_what_passes_by_are_cut_out_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all of a concatenation's gradient waits for its part to be wanted."""
    job = MODELS["unet"](levels=2)
    found = problem(job.step, *job.args, target="h100-80g", donate=(0,))
    ask = question(job.step, *job.args, target="h100-80g", donate=(0,))
    place = len(found.front) - 1
    apart = found.report(ask, place).temp_bytes
    monkeypatch.setattr(
        unrolled_run,
        "_together",
        lambda code, reads, shared, values, *_: [values[v] for v in reads],
    )
    function = unrolled_run._function

    def past_what_is_inside(code, plan, piece, through, waits):
        given = code.reads(piece.first, piece.last)
        run = function(code, plan, piece, [], waits)
        places = [given.index(var) for var in through]
        return lambda *values: [*run(*values), *(values[at] for at in places)]

    monkeypatch.setattr(unrolled_run, "_function", past_what_is_inside)
    waiting = found.report(ask, place).temp_bytes
    assert apart < 0.97 * waiting


@pytest.mark.slow  # the TPU's compiler takes its time
def test_gradients_of_shared_parameters_are_made_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The TPU's compiler would else make one where it adds the other to it."""
    job = MODELS["tied"]()
    found = problem(job.step, *job.args, target="v5e-16g", donate=(0,))
    ask = question(job.step, *job.args, target="v5e-16g", donate=(0,))
    place = len(found.front) - 1
    apart = found.report(ask, place).temp_bytes
    together = unrolled_run._together
    monkeypatch.setattr(
        unrolled_run,
        "_together",
        lambda code, reads, shared, *others: together(code, reads, (), *others),
    )
    assert apart < 0.8 * found.report(ask, place).temp_bytes


@pytest.mark.slow  # two steps of a foreign model for an absent GPU
def test_gradients_of_biases_are_summed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's compiler would else hold what each is a sum of till the optimizer reads it."""
    net = NETS["BERT"](layers=2, width=512, batch=16, length=256, words=8000)
    job = training.job(net, jaxmem.remat_auto)
    found = problem(job.step, *job.args, target="h100-80g", donate=job.donate_argnums, cost="flops")
    ask = question(
        job.step,
        *job.args,
        target="h100-80g",
        donate=job.donate_argnums,
        options=QUICK_GPU,
    )
    place = len(found.front) - 1
    early = found.report(ask, place)
    monkeypatch.setattr(unrolled_run, "_SUMS", float("inf"))
    late = found.report(ask, place)
    assert early.temp_bytes < 0.9 * late.temp_bytes
    assert early.matmul_flops == late.matmul_flops


@pytest.mark.slow
def test_small_parameters_that_are_not_trained_get_no_gradient() -> None:
    """Though those that are trained have theirs made with that of the stream."""

    def net(ws: list[jax.Array], bs: list[jax.Array], h: jax.Array) -> jax.Array:
        for w, b in zip(ws, bs, strict=True):
            h = h + jnp.tanh(h @ w + b) @ w.T
        return h

    args = [jnp.ones((64, 64))] * 16, [jnp.ones(64)] * 16, jnp.ones((256, 64))
    policy = jaxmem.remat_sqrt(net)

    def sums(*trained: int) -> int:
        step = jax.grad(lambda *args: policy(*args).sum(), trained)
        return jax.jit(step).lower(*args).as_text().count("stablehlo.reduce(")

    assert sums(0) == 0
    assert sums(0, 1) >= 16


def test_what_is_given_to_the_function_is_kept_for_nothing_what_a_stage_gives_is_not() -> None:
    code = code_of(lambda params, h: jnp.tanh(jnp.tanh(h)), [], normal(1, 32, 16))
    found = Chain(code, Roofline(matrix_peak=1e15, bandwidth=1e12)).segments
    both = [found[k, k + 1] for k in range(2)]
    assert both[0].layer.digest != both[1].layer.digest  # by their inputs' roles alone
    tapes = [[option.tape_bytes for option in segment.stage.options] for segment in both]
    assert tapes[0] != tapes[1]


# ---------------------------------------------------------------- plans as data


def test_plans_of_code_are_values() -> None:
    inner = (Piece(0, 2, keep=(1,), offload=(0,)), Piece(2, 4))
    plan = UnrolledPlan(9, (Piece(0, 4, inner=inner), Piece(4, 9, keep=(5, 7))))
    assert UnrolledPlan.from_data(plan.to_data()) == plan
    assert hash(UnrolledPlan.from_data(plan.to_data())) == hash(plan)
    assert str(plan) == ("Plan of 9 operations: 2 pieces, 1 of them recomputed whole, 1 in part")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "length and pieces"),
        ({"length": 4}, "length and pieces"),
        ({"length": True, "pieces": []}, "length"),
        ({"length": 4, "pieces": {}}, "expected a list"),
        ({"length": 4, "pieces": [{"first": 0}]}, "first and last"),
        ({"length": 4, "pieces": [{"first": 0, "last": 2}]}, "end at operation 2"),
        ({"length": 4, "pieces": [{"first": 1, "last": 4}]}, "do not follow"),
        ({"length": 4, "pieces": [{"first": 0, "last": 4, "kept": []}]}, "unknown key"),
        ({"length": 4, "pieces": [{"first": 0, "last": 4, "keep": [4]}]}, "its operations"),
        ({"length": 4, "pieces": [{"first": 0, "last": 4, "keep": 3}]}, "its operations"),
        ({"length": 4, "pieces": [{"first": 0, "last": 4, "offload": [3]}]}, "goes with keep"),
        ({"length": 4, "pieces": [{"first": 0.0, "last": 4}]}, "place of an operation"),
        ({"length": 4, "pieces": [{"first": 0, "last": 4, "inner": []}]}, "inner"),
    ],
)
def test_what_is_no_plan_of_code(data: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        UnrolledPlan.from_data(data)


def test_a_plan_for_other_code_is_refused() -> None:
    args = arrays()
    (plan,) = plans(jax.grad(jaxmem.remat_auto(chain)), *args, most=1)
    fewer = {"ws": args[0]["ws"][:5]}, args[1]
    with (
        jaxmem.use_plan(plan),
        pytest.raises(ValueError, match="operations, and there are") as caught,
    ):
        jax.grad(jaxmem.remat_auto(chain))(*fewer)
    assert "chain" in str(caught.value)
    assert str(caught.value).endswith("Fit this step anew")
    chex.assert_tree_all_finite(jax.grad(chain)(*fewer))


def test_code_that_has_forward_mode_only() -> None:
    def halved(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda y: y.max() > 0.1, lambda y: y / 2, x)

    def code(params: Any, h: jax.Array) -> jax.Array:
        for w in params["ws"]:
            h = halved(jnp.tanh(h @ w))
        return (h**2).sum()

    args = arrays()

    def along(f: Any) -> Any:
        return jax.jit(lambda *at: jax.jvp(f, at, jax.tree.map(jnp.cos, at)))

    cut = jaxmem.remat_sqrt(code)
    with pytest.warns(NoStackWarning, match="not cut, as part of it has no reverse mode"):
        value = cut(*args)
    assert_close(value, code(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoStackWarning)
        assert_close(along(cut)(*args), along(code)(*args))
        with pytest.raises(ValueError, match="Reverse-mode differentiation"):
            jax.grad(cut)(*args)


@pytest.mark.parametrize("scanned", [False, True])
def test_a_step_in_which_some_code_has_forward_mode_only(scanned: bool) -> None:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        h = jnp.tanh(h @ w)
        return lax.while_loop(lambda y: y.max() > 0.1, lambda y: y / 2, h), None

    @jaxmem.remat_auto
    def forward(ws: jax.Array, h: jax.Array) -> jax.Array:
        if scanned:
            return lax.scan(layer, h, ws)[0].sum()
        for w in ws:
            h, _ = layer(h, w)
        return h.sum()

    @jaxmem.remat_auto
    def reverse(ws: jax.Array, h: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0].sum()

    def step(ws: jax.Array, h: jax.Array) -> Any:
        return jax.jvp(forward, (ws, h), (ws, h)), jax.grad(reverse)(ws, h)

    args = normal(0, 8, D, D), normal(1, B, D)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = jaxmem.fit(step, *args, budget="1GiB", progress=False)
    told = [str(one.message) for one in said if "has no reverse mode" in str(one.message)]
    assert bool(told) == (not scanned)  # of a stack all that is differentiated is known
    with jaxmem.use_policy("none"):
        assert_close(found.step(*args), jax.jit(step)(*args))
