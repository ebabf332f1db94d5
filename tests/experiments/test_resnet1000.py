"""`experiments/resnet1000.py`: its smallest form, and that its network is one however it is cut."""

import dataclasses
from pathlib import Path
from typing import Any

import deep_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resnet1000
from resnet1000 import FIT, HAND, KEPT, POLICY, Options, Row, answer, best, draw, main, summary

import jaxmem


@pytest.mark.slow
def test_the_smallest_form_and_that_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(small=True, results=tmp_path)
    rows = main(options)
    assert [row.kind for row in rows] == [KEPT, HAND, POLICY, FIT]
    kept, hand, sqrt, fit = rows
    assert hand.temp_bytes < kept.temp_bytes
    assert sqrt.temp_bytes < kept.temp_bytes
    assert fit.fits
    assert fit.required_bytes <= (fit.budget_bytes or 0) < kept.required_bytes
    assert kept.matmul_flops == kept.model_matmul_flops < hand.matmul_flops
    assert {row.model_matmul_flops for row in rows} == {kept.model_matmul_flops}
    assert (tmp_path / "resnet1000.png").stat().st_size > 10_000
    assert all(row.kind in capsys.readouterr().out for row in rows[:1])

    def measured(*args: Any, **options: Any) -> None:
        raise AssertionError("this row was there")

    monkeypatch.setattr(resnet1000.deep_models, "imagenet_resnet", measured)
    assert main(options) == rows


def row(kind: str, temp: int, extra: float, groups: str = "1 1", fits: bool = True) -> Row:
    return Row(
        target="local", program="stages=2-2", layers=14, kind=kind, name="some", groups=groups,
        budget_bytes=None, fits=fits, required_bytes=temp + 10, temp_bytes=temp,
        predicted_bytes=None, matmul_flops=round(1000 * (1 + extra)), model_matmul_flops=1000,
        compiler_remat=False, compiles=None, versions="1",
    )  # fmt: skip


def test_the_answer_is_the_least_work_that_reaches_the_goal(tmp_path: Path) -> None:
    rows = [
        row(KEPT, 1000, 0.0),
        row(HAND, 90, 0.1),  # not ours
        row(FIT, 101, 0.1),  # not ten times
        row(FIT, 100, 0.2, "1 3"),
        row(FIT, 50, 0.25),
        row(FIT, 20, 0.31),  # too much work
    ]
    assert best(rows) is rows[3]
    text = answer(rows)
    assert text.startswith("temporaries 10.0 times smaller (1000 B to 100 B) for 20.0% extra")
    assert "With parameters and gradient (1010 B)" not in answer(rows[:4])
    assert "gradient (1010 B), 33.7 times less for 31.0%." in answer([rows[0], rows[3], rows[5]])
    assert best(rows[:3]) is None
    assert answer(rows[:3]) == "No plan has 10 times smaller temporaries for 30% extra matmul FLOPs"
    refused = dataclasses.replace(rows[2], fits=False)
    assert "(does not fit; the least)" in summary([*rows, refused])
    assert "fit: some, groups of 1, 3 " in summary(rows)
    twice = dataclasses.replace(rows[1], compiler_remat=True)
    assert "(the compiler recomputes, too)" in summary([rows[0], twice])
    for drawn in (rows, [*rows[:3], refused]):
        draw(drawn, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000


def filled(shapes: Any) -> Any:
    """Arrays of these shapes: variances and scales about 1, all else about 0; labels 0, 1, ..."""
    rng = np.random.default_rng(0)

    def one(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
        if spec.dtype == "int32":
            return jnp.arange(spec.shape[0], dtype=jnp.int32)
        about = {"['scale']", "['variance']"} & set(map(str, path))
        noise = rng.standard_normal(spec.shape) / 4
        return jnp.asarray(noise + len(about), spec.dtype)

    return jax.tree_util.tree_map_with_path(one, shapes)


@pytest.mark.slow
def test_values_and_gradients_are_the_same_however_it_is_cut() -> None:
    sizes = {"batch": 2, "size": 16, "width": 2}
    job = deep_models.imagenet_resnet((3,), (1,), "none", **sizes)
    args = filled(job.args)
    known = jax.jit(job.step)(*args)
    assert np.isfinite(known[0][0])
    for group, remat in ((1, "hand"), (2, "sqrt")):
        other = deep_models.imagenet_resnet((3,), (group,), remat, **sizes)
        # Where blocks are grouped, parameters of the same order have one axis more.
        given = jax.tree.map(lambda a, spec: a.reshape(spec.shape), args, other.args)
        found = jax.jit(other.step)(*given)
        found = jax.tree.map(lambda a, b: a.reshape(b.shape), found, known)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), *(
            found, known
        ))  # fmt: skip


def test_the_network_is_of_a_thousand_layers_and_equal_in_groups() -> None:
    options = Options()
    layers = deep_models.bottleneck_layers(options.stages)
    assert layers == 1004
    jobs = [deep_models.imagenet_resnet(options.stages, g) for g in ((1,) * 4, options.groups)]
    counts = [sum(leaf.size for leaf in jax.tree.leaves(job.args[0])) for job in jobs]
    assert counts[0] == counts[1] > 3e8
    with pytest.raises(ValueError, match="15 layers cannot be scanned over in groups of 2"):
        deep_models.imagenet_resnet(options.stages, (2, 1, 1, 1))
    assert isinstance(jobs[0], jaxmem.Job)
