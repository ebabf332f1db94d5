"""Plans for pipelined steps: what a stage keeps, how many microbatches, and which schedule."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem.accumulate.split import Split
from jaxmem.pipeline.auto import possible

STAGES, LAYERS, WIDTH, ROWS = 4, 8, 128, 2008  # which 4 and 8 divide, and not 16


def loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()


def step_on(mesh: Any, **options: Any) -> Any:
    pipelined = jaxmem.pipeline(loss, mesh=mesh, **options)

    def step(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(pipelined)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def types(mesh: Any) -> tuple[Any, Any]:
    """Of parameters and batch, spread over the mesh."""
    own, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("stage",), ()))
    shapes = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    params = {
        name: jax.ShapeDtypeStruct(shape, "float32", sharding=own) for name, shape in shapes.items()
    }
    return params, jax.ShapeDtypeStruct((ROWS, WIDTH), "float32", sharding=whole)


def here() -> Mesh:
    return jax.make_mesh((STAGES,), ("stage",), devices=jax.devices()[:STAGES])


AUTO: dict[str, Any] = {"microbatches": "auto", "schedule": "auto"}


@pytest.mark.slow  # it plans four ways to run the step, three times
def test_larger_budgets_have_faster_steps_and_all_are_kept() -> None:
    target = jaxmem.target("h100-80g", devices=STAGES)
    mesh = target.mesh({"stage": STAGES})
    step = step_on(mesh, **AUTO)

    def needed(**options: Any) -> int:
        report = jaxmem.memory_report(
            step_on(mesh, **options), *types(mesh), target=target, donate_argnums=(0,),
            suggest=False,
        )  # fmt: skip
        return report.required_bytes

    most = needed(microbatches=4, schedule="gpipe", policy="none")
    least = needed(microbatches=8, schedule="1f1b")
    seconds = []
    for share in (0.0, 0.5, 1.0):
        budget = round(least + share * (most - least))
        fitted = jaxmem.fit(
            step, *types(mesh), budget=budget, target=target, donate_argnums=(0,), cost="flops",
            progress=False,
        )  # fmt: skip
        assert fitted.report.required_bytes <= budget
        assert fitted.plan.microbatches in (4, 8, 16, 32)
        assert fitted.plan.schedule in ("eager-1f1b", "1f1b")
        assert f"{fitted.plan.microbatches} microbatches in the pipeline" in str(fitted.explain())
        seconds.append(fitted.explain().extra_seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


@pytest.mark.slow
def test_the_step_under_its_plan_has_the_same_numbers(tmp_path: Path) -> None:
    mesh = here()
    step, of = step_on(mesh, **AUTO), types(mesh)
    fitted = jaxmem.fit(step, *of, budget="1GiB", progress=False)
    keys = jax.random.split(jax.random.key(0), 3)
    params, x = jax.tree.map(
        lambda one, key: jax.device_put(jax.random.normal(key, one.shape) / 16, one.sharding),
        of, jax.tree.unflatten(jax.tree.structure(of), list(keys)),
    )  # fmt: skip
    value, new = jax.jit(step_on(mesh, microbatches=4))(params, x)
    chex.assert_trees_all_close(fitted.step(params, x), (value, new), rtol=1e-5, atol=1e-6)
    fitted.plan.save(tmp_path / "plan.json")
    assert jaxmem.StepPlan.load(tmp_path / "plan.json") == fitted.plan
    with jaxmem.use_plan(tmp_path / "plan.json"):
        again = jax.jit(step)(params, x)
    chex.assert_trees_all_close(again, (value, new), rtol=1e-5, atol=1e-6)


def test_stages_of_a_pipeline_that_says_itself_how_it_runs_are_planned() -> None:
    mesh = here()
    step = step_on(mesh, microbatches=8, schedule="gpipe")
    fitted = jaxmem.fit(step, *types(mesh), budget="1GiB", progress=False)
    assert (fitted.plan.microbatches, fitted.plan.schedule) == (0, "")
    (region,) = fitted.plan.regions
    assert region.plan.length == LAYERS // STAGES


def test_layers_of_a_stage_keep_the_same() -> None:
    """Layers that keep other values would be another loop, with copies of their parameters."""
    mesh = here()
    step = step_on(mesh, microbatches=8)
    found = jaxmem.frontier(step, *types(mesh), progress=False)
    plans: list[Any] = [point.plan.regions[0].plan for point in found.points]
    assert {len(plan.runs) for plan in plans if plan.kind == "keep"} == {1}


def test_without_a_plan_there_are_about_four_microbatches_for_each_stage() -> None:
    explained = jaxmem.pipeline(loss, mesh=here(), **AUTO).explain(*types(here()))
    (schedule,) = explained.schedules
    assert (schedule.microbatches, schedule.name) == (8, "eager-1f1b")  # 16 do not divide the rows
    chunks = jaxmem.pipeline(loss, mesh=here(), chunks=2, **AUTO).explain(*types(here()))
    assert chunks.schedules[0].name == "interleaved"


@pytest.mark.slow
def test_plans_of_other_steps_are_refused() -> None:
    mesh = here()
    step, of = step_on(mesh, **AUTO), types(mesh)
    other = jaxmem.fit(step_on(mesh, microbatches=8), *of, budget="1GiB", progress=False)
    with jaxmem.use_plan(other.plan), pytest.raises(ValueError) as error:
        jax.eval_shape(step, *of)
    assert 'one here has microbatches or schedule "auto"; fit this step anew' in str(error.value)
    fitted = jaxmem.fit(step, *of, budget="1GiB", progress=False)
    small = jax.ShapeDtypeStruct((3, WIDTH), "float32")
    with jaxmem.use_plan(fitted.plan), pytest.raises(ValueError) as error:
        jax.eval_shape(step, of[0], small)
    assert "and this batch and mesh allow 3 (eager-1f1b), 3 (1f1b)" in str(error.value)


@pytest.mark.parametrize(
    ("rows", "others", "chunks", "expected"),
    [
        (2008, 1, 1, [8, 4, 16, 32]),  # which 16 and 32 do not divide
        (13, 1, 1, [8, 4]),  # which nothing divides
        (36, 1, 1, [18, 9, 4, 36]),
        (36, 2, 1, [18, 9, 4]),  # with rows for two devices in each microbatch
        (35, 2, 1, [7, 5, 35, 16]),
        (35, 64, 1, [7, 5, 35]),
        (3, 1, 1, [3]),
        (40, 1, 2, [20, 8, 4, 40]),  # in groups of four
        (44, 1, 2, [4, 44, 16, 8]),
    ],
    ids=str,
)
def test_numbers_of_microbatches_that_are_tried(
    rows: int, others: int, chunks: int, expected: list[int]
) -> None:
    """Four stages; what is done without a plan first."""
    options = checked_options(chunks=chunks)
    found = [one.microbatches for one in possible(options, 4, rows, others)]
    assert list(dict.fromkeys(found)) == expected
    for count in expected:
        groups = Split.of(rows, count).groups
        assert chunks == 1 or all(group.count % 4 == 0 for group in groups)


def checked_options(**options: Any) -> Any:
    return jaxmem.pipeline(loss, **AUTO, **options)._options


def test_rows_that_interleaved_stages_cannot_take() -> None:
    with pytest.raises(ValueError) as error:
        possible(checked_options(chunks=2), 4, 13, 1)
    assert str(error.value) == (
        "interleaved stages take microbatches in groups of 4, and the 13 rows of the batch are in "
        "no such groups; pass a batch of 12 rows or 16, or leave chunks= out"
    )


@pytest.mark.slow
def test_a_batch_that_no_number_divides_is_planned() -> None:
    """Microbatches of two sizes are two loops over ticks, each with a region of its own."""
    mesh = here()
    params, _ = types(mesh)
    x = jax.ShapeDtypeStruct((13, WIDTH), "float32")
    fitted = jaxmem.fit(step_on(mesh, **AUTO), params, x, budget="1GiB", progress=False)
    assert fitted.plan.microbatches in (4, 8)
    assert len(fitted.plan.regions) == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [True, False])
def test_what_helps_a_pipelined_step_that_does_not_fit(is_open: bool) -> None:
    mesh = here()
    options = AUTO if is_open else {"microbatches": 4}
    of = types(mesh)

    def said(budget: str) -> str:
        with pytest.raises(jaxmem.BudgetError) as error:
            jaxmem.fit(
                step_on(mesh, **options), *of, budget=budget, donate_argnums=(0,), max_compiles=1,
                progress=False,
            )  # fmt: skip
        return str(error.value)

    if not is_open:
        assert "more stages than 4: a mesh" in said("1.5MiB")  # less than the arguments need
    text = said("2.5MiB")
    assert "jaxmem.value_and_grad(" not in text
    assert "more stages than 4: a mesh with more devices along their axis" in text
    most, also = (32, ", of which 32 at most were tried") if is_open else (4, "")
    assert f"{also} (jaxmem.pipeline(loss, microbatches={2 * most})): the inputs of stages" in text
    assert "more microbatches in the pipeline than " in text
    assert ('schedule="1f1b", which holds the inputs of 4 microbatches' in text) != is_open
