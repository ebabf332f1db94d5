"""`fit` over a mesh: every figure is of one device, as the partitioner splits the program."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem.estimate.values import LayerValue
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.regions import StackRegion
from jaxmem.fitting.step_problem import StepProblem, build_problem

LAYERS, WIDTH, WIDE, ROWS, LENGTH = 6, 512, 2048, 16, 256
TARGET = jaxmem.target("h100-80g", devices=8)

# ---------------------------------------------------------------- steps


def spec(mesh: Any, shape: tuple[int, ...], *parts: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*parts))
    )


def arguments(mesh: Any) -> tuple[Any, Any]:
    params = {
        "up": spec(mesh, (LAYERS, WIDTH, WIDE), None, None, "model"),
        "down": spec(mesh, (LAYERS, WIDE, WIDTH), None, "model"),
    }
    return params, spec(mesh, (ROWS, LENGTH, WIDTH), "data")


def auto(mesh: Any, x: jax.Array, p: Any) -> jax.Array:
    return x + checkpoint_name(jnp.tanh(x @ p["up"]) @ p["down"], "down")


def explicit(mesh: Any, x: jax.Array, p: Any) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec("data", None, None))
    down = jnp.einsum("btf,fd->btd", jnp.tanh(x @ p["up"]), p["down"], out_sharding=sharding)
    return x + checkpoint_name(down, "down")


def manual(mesh: Any, x: jax.Array, p: Any) -> jax.Array:
    return x + jax.lax.psum(jnp.tanh(x @ p["up"]) @ p["down"], "model")


def gradient(kind: str, mesh: Any, policy: Any = "auto", unrolled: bool = False) -> Any:
    one = {"auto": auto, "explicit": explicit, "manual": manual}[kind]

    def stack(params: Any, x: jax.Array) -> jax.Array:
        if unrolled:
            for k in range(LAYERS):
                x = one(mesh, x, jax.tree.map(lambda leaf: leaf[k], params))  # noqa: B023
            return x
        return jax.lax.scan(lambda x, p: (one(mesh, x, p), None), x, params)[0]

    planned = jaxmem.remat(stack, policy)
    if kind == "manual":
        weights = {
            "up": PartitionSpec(None, None, "model"),
            "down": PartitionSpec(None, "model"),
        }
        rows = PartitionSpec("data")
        planned = jax.shard_map(planned, mesh=mesh, in_specs=(weights, rows), out_specs=rows)
    return jax.grad(lambda params, x: (planned(params, x) ** 2).mean())


def mesh_of(kind: str) -> Any:
    types = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return AbstractMesh((2, 4), ("data", "model"), axis_types=(types,) * 2)


def problem(kind: str, **options: Any) -> tuple[StepProblem, CompileRequest]:
    mesh = mesh_of(kind)
    step = gradient(kind, mesh, **options)
    ask = CompileRequest(step, arguments(mesh), {}, TARGET, (), (), None, 900.0, True)
    return build_problem(ask, False, "roofline"), ask


def values_of(found: StepProblem) -> Sequence[LayerValue]:
    (region,) = found.regions
    assert isinstance(region, StackRegion)
    return region.values


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
def test_a_region_is_of_one_device_whatever_the_kind_of_axes(kind: str) -> None:
    found, _ = problem(kind)
    (region,) = found.regions
    assert region.is_local
    assert region.param_bytes == LAYERS * 2 * WIDTH * WIDE * 4 // 4
    shapes = {value.shape for value in values_of(found)}
    assert f"float32[{ROWS // 2},{LENGTH},{WIDTH}]" in shapes
    assert f"float32[{ROWS // 2},{LENGTH},{WIDE // 4}]" in shapes


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_predictions_are_near_what_the_compiler_says(kind: str) -> None:
    found, ask = problem(kind)
    for candidate in (0, len(found.front) // 2):
        seen = found.report(ask, candidate).required_bytes
        assert found.predicted[candidate] == pytest.approx(seen, rel=0.12)


def test_unrolled_code_is_of_one_device_too() -> None:
    found, ask = problem("auto", unrolled=True)
    assert found.regions[0].is_local
    middle = len(found.front) // 2
    seen = found.report(ask, middle).required_bytes
    assert found.predicted[middle] == pytest.approx(seen, rel=0.2)


def test_a_value_costs_what_one_device_holds_of_it() -> None:
    """Both take the same FLOPs on one device, and the same bytes over all devices together."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        split = jnp.sin(checkpoint_name(x @ p["split"], "split"))
        return x + jnp.sin(checkpoint_name(split @ p["reduced"], "reduced")), None

    @jaxmem.remat_auto
    def stack(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x, params)[0]

    mesh = mesh_of("auto")
    square = LAYERS, WIDTH, WIDTH
    params = {
        "split": spec(mesh, square, None, None, "model"),
        "reduced": spec(mesh, square, None, "model"),
    }
    x = spec(mesh, (ROWS, LENGTH, WIDTH), "data")
    step = jax.grad(lambda params, x: (stack(params, x) ** 2).mean())
    ask = CompileRequest(step, (params, x), {}, TARGET, (), (), None, 900.0, True)
    found = build_problem(ask, False, "flops")
    values = values_of(found)
    sizes = {value.name: value.bytes for value in values}
    assert sizes["reduced"] == 4 * sizes["split"]
    (region,) = found.regions
    assert isinstance(region, StackRegion)
    bytes_of = {
        frozenset(values[place].name for place in keep.kept): choice.bytes
        for keep, choice in zip(region.keeps, region.choices, strict=True)
        if keep is not None
    }
    least = bytes_of[frozenset(["input"])]
    for name in ("split", "reduced"):
        assert bytes_of[frozenset(["input", name])] == least + sizes[name]


def test_what_is_reduced_over_devices_is_dearer_to_recompute() -> None:
    """Both products have the same FLOPs and the same bytes on one device."""
    up, down = (one for one in values_of(problem("auto")[0]) if one.name == "dot_general")
    assert up.shape == down.shape
    assert down.seconds > 1.5 * up.seconds


def test_fit_keeps_a_budget_of_one_device_and_tells_of_its_shapes() -> None:
    mesh = mesh_of("auto")
    step, args = gradient("auto", mesh), arguments(mesh)
    full = jaxmem.memory_report(gradient("auto", mesh, "full"), *args, target=TARGET)
    budget = full.required_bytes + LAYERS * ROWS * LENGTH * WIDTH * 4 // 8
    fitted = jaxmem.fit(step, *args, budget=budget, target=TARGET, cost="flops", progress=False)
    assert fitted.report.required_bytes <= budget
    assert (fitted.report.matmul_flops or 0) < (full.matmul_flops or 0)
    assert f"[{ROWS // 2},{LENGTH}" in str(fitted.explain())
    assert f"[{ROWS},{LENGTH}" not in str(fitted.explain())
