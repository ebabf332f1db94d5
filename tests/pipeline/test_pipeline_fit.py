"""Plans for pipelined steps: what a stage keeps, how many microbatches, and which schedule."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmem

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
            step, *types(mesh), budget=budget, target=target, donate_argnums=(0,), progress=False
        )
        assert fitted.report.required_bytes <= budget
        assert fitted.plan.microbatches in (4, 8, 16, 32)
        assert fitted.plan.schedule in ("eager-1f1b", "1f1b")
        assert f"{fitted.plan.microbatches} microbatches in the pipeline" in str(fitted.explain())
        seconds.append(fitted.explain().extra_seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


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
