"""What compiled pipelines hold: the inputs of stages that the schedule bounds, and little else."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.releases import SINCE_0_11
from helpers.xla_flags import quick
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem

STAGES, LAYERS, WIDTH, ROWS = 4, 8, 256, 1024
TARGET = "h100-80g"


def report(microbatches: int, target: str = TARGET, **options: Any) -> jaxmem.MemoryReport:
    known = jaxmem.target(target, devices=STAGES)
    mesh = known.mesh({"stage": STAGES})

    def spec(shape: tuple[int, ...], *parts: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*parts))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> Any:
            return h + jnp.tanh(h @ p["up"]) @ p["down"], None

        return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()

    params = {
        "up": spec((LAYERS, WIDTH, 4 * WIDTH), "stage"),
        "down": spec((LAYERS, 4 * WIDTH, WIDTH), "stage"),
    }
    pipelined = jaxmem.pipeline(loss, microbatches=microbatches, mesh=mesh, **options)
    return jaxmem.memory_report(
        jax.value_and_grad(pipelined), params, spec((microbatches * ROWS, WIDTH)),
        target=known, suggest=False, compiler_options=quick(target),
    )  # fmt: skip


MESSAGE = ROWS * WIDTH * 4  # bytes


@pytest.mark.parametrize("target", [TARGET, pytest.param("v5e-16g", marks=pytest.mark.slow)])
def test_what_is_held_is_bounded_by_the_stages(target: str) -> None:
    """Of 1F1B; GPipe holds the input of each microbatch."""

    def temporaries(schedule: str, m: int) -> float:
        return report(m, target, schedule=schedule).temp_bytes / MESSAGE

    few, many = temporaries("1f1b", 8), temporaries("1f1b", 32)
    assert abs(many - few) <= 1
    gpipe = temporaries("gpipe", 32)
    assert 32 - STAGES - (0.1 if SINCE_0_11 else 0) <= gpipe - many <= 2 * 32


def test_what_is_kept_of_each_tick_where_nothing_is_recomputed() -> None:
    """Layers' residuals of every tick: no parameters among them."""
    few, many = (
        report(m, schedule="gpipe", recompute=False, policy="none").temp_bytes for m in (4, 8)
    )
    each = (many - few) / 4
    layers = LAYERS // STAGES
    # tanh's result, four times as wide, and the input of each layer; twice the input of the stage.
    assert each <= (layers * (4 + 4 + 1) + 2) * MESSAGE


def test_collectives_are_messages_to_neighbours() -> None:
    """And the sum of the loss: layers' gradients stay where they are."""
    found = report(8, schedule="eager-1f1b").collectives
    kinds = {collective.kind for collective in found}
    assert "collective-permute" in kinds
    assert sum(c.bytes for c in found if c.kind != "collective-permute") <= 1024
