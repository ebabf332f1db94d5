"""The comparison over meshes: what counts as beaten, the table, the picture, a real row."""

import dataclasses
from pathlib import Path

import frontier_mesh
import jax
import pytest
from frontier_mesh import FLOPS, NAMES, PLAN, SECONDS, Row

import jaxmem
from mesh import llama

SMALL = frontier_mesh.Options(small=True).sizes


def row(kind: str, name: str, size: int, flops: float, seconds: float = 1.0) -> Row:
    return Row(
        versions="", mesh="h100-80g 2x4", sizes="", kind=kind, name=name,
        required_bytes=size * 2**30, matmul_flops=flops, seconds=seconds, compiles=3,
    )  # fmt: skip


RIVALS = [
    row(NAMES, "", 20, 4e12),
    row(NAMES, "out", 25, 3.5e12),
    row(NAMES, "gate", 24, 3e12),
    row(NAMES, "gate up", 30, 2e12),
]


def test_only_subsets_that_no_other_one_beats_are_compared() -> None:
    assert [one.name for one in frontier_mesh.unbeaten(RIVALS)] == ["", "gate", "gate up"]


def test_fit_is_beaten_where_it_has_more_of_what_it_is_asked_to_have_the_least_of() -> None:
    better = [row(kind, one.name, 19, 1e12, 0.5) for one in RIVALS for kind in (FLOPS, SECONDS)]
    assert frontier_mesh.beaten([*RIVALS, *better]) == []
    worse = [
        dataclasses.replace(one, matmul_flops=9e12) if one.name == "gate" else one for one in better
    ]
    assert frontier_mesh.beaten([*RIVALS, *worse]) == ["gate (matmul_flops)"]
    refused = [dataclasses.replace(one, seconds=None) for one in better if one.kind == SECONDS]
    assert frontier_mesh.beaten([*RIVALS, *refused])[0] == "nothing (seconds)"


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    plan = dataclasses.replace(row(PLAN, "0", 20, 3e12), predicted_bytes=21 * 2**30)
    rows = [*RIVALS, row(FLOPS, "gate", 24, 2.9e12), row(SECONDS, "gate", 24, 3.1e12), plan]
    text = frontier_mesh.summary(rows)
    assert "no subset is better" in text
    assert "before any compilation: 5.0% off in the median" in text
    frontier_mesh.draw(rows, tmp_path / "mesh.png")
    assert (tmp_path / "mesh.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 4}])
def test_the_model_is_split_as_it_says(axes: dict[str, int]) -> None:
    target = jaxmem.target("h100-80g", devices=8)
    job = llama.train(target.mesh(axes), SMALL, jaxmem.policies.names(["gate"]))
    report = jaxmem.memory_report(job.step, *job.args, target=target, donate_argnums=(0, 1))
    assert {axis for one in report.collectives for axis in one.axes} == {"fsdp", "tensor"}
    assert not [one for one in report.lints if one.kind == "stack-gathered"]
    # Parameters and two moments, an eighth of each but for the norms.
    whole = sum(arg.size * arg.dtype.itemsize for arg in jax.tree.leaves(job.args[:2]))
    assert report.argument_bytes == pytest.approx(whole / 8, rel=0.05)
