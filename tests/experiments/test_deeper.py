"""`experiments/deeper.py`: its smallest form, its search, and that groups change no value."""

import dataclasses
from pathlib import Path
from typing import Any

import deeper
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deep_models import MODELS
from deeper import FIT, HAND, KEPT, Options, Row, answer, deepest, draw, main, summary, times
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.slow
def test_the_smallest_form_and_that_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(small=True, results=tmp_path)
    rows = main(options)
    assert [row.kind for row in rows] == [KEPT, HAND, FIT]
    kept, hand, fit = rows
    assert kept.layers < hand.layers
    assert times(fit, rows) == 4
    assert all(row.fits and row.required_bytes <= row.budget_bytes for row in rows)
    assert kept.matmul_flops == kept.model_matmul_flops
    assert fit.model_matmul_flops == 4 * kept.model_matmul_flops
    assert (tmp_path / "deeper.png").stat().st_size > 10_000
    # One layer more than the deepest is there as well, and does not fit.
    every = deeper.Table(tmp_path / "deeper.csv", Row, deeper._KEY).of(kept.versions)
    for deep in (kept, hand):
        (more,) = (r for r in every if (r.kind, r.depth) == (deep.kind, deep.depth + 1))
        assert not more.fits
    assert "feed-forward, fit" in capsys.readouterr().out

    def measured(*args: Any) -> None:
        raise AssertionError("this row was there")

    monkeypatch.setattr(deeper._Asking, "_measured", measured)
    assert main(options) == rows


@settings(derandomize=True)
@given(
    st.integers(0, 50), st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 40)
)
def test_the_deepest_is_found(fixed: int, layers: list[int], start: int) -> None:
    """Of needs that grow with each layer, however unevenly."""
    asked = []

    def need(depth: int) -> int:
        asked.append(depth)
        return fixed + sum(layers[:depth]) + 20 * max(0, depth - len(layers))

    budget = fixed + sum(layers) // 2
    found = deepest(need, budget, start)
    assert found == 0 or need(found) <= budget
    assert need(found + 1) > budget


def test_needs_along_a_line_are_asked_for_a_few_times() -> None:
    asked = []

    def need(depth: int) -> int:
        asked.append(depth)
        return 1000 + 37 * depth

    assert deepest(need, 1000 + 37 * 512, start=4) == 512
    assert len(asked) <= 5


def row(kind: str, layers: int, extra: float, fits: bool = True) -> Row:
    return Row(
        target="local", model="ResNet", sizes="", budget_bytes=2**30, kind=kind, depth=layers,
        layers=layers, group=1, fits=fits, required_bytes=2**29, argument_bytes=2**20,
        temp_bytes=2**28, predicted_bytes=2**28, matmul_flops=round(1000 * (1 + extra)),
        model_matmul_flops=1000, compiler_remat=False, seconds=layers * (1.0 + extra),
        compiles=None, versions="1",
    )  # fmt: skip


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    rows = [row(KEPT, 10, 0), row(HAND, 50, 0.25), row(FIT, 100, 0.125), row(FIT, 1000, 0.4)]
    assert "10 times deeper: ResNet 12.5%; 100 times deeper: ResNet 40.0%." in answer(rows)
    assert " +12% " in summary(rows)  # the roofline's
    refused = [*rows[:3], dataclasses.replace(rows[3], fits=False)]
    assert "100 times deeper: ResNet does not fit." in answer(refused)
    assert "fit: no plan fits, the least" in summary(refused)
    twice = dataclasses.replace(rows[1], compiler_remat=True)
    assert "(the compiler recomputes, too)" in summary([rows[0], twice])
    for drawn in (rows, refused, rows[:2]):
        draw(drawn, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_where_a_multiple_does_not_fit_the_deepest_that_does_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against needs that are a formula: 4 layers with everything kept, 33 at most by `fit`."""

    def measured(self: Any, kind: str, depth: int, group: int, budget: int) -> dict[str, Any]:
        unit = {KEPT: 1000, HAND: 500, FIT: 121}[kind]
        made = dataclasses.asdict(row(kind, depth, 0.1, fits=unit * depth <= budget))
        names = ("target", "model", "sizes", "budget_bytes", "kind", "depth", "group")
        made = {key: value for key, value in made.items() if key not in (*names, "versions")}
        return made | {"required_bytes": unit * depth}

    monkeypatch.setattr(deeper._Asking, "_measured", measured)
    options = Options(
        target="local", models=("transformer",), budget="4kB", times=(4, 20, 100), results=tmp_path
    )
    rows = main(options)
    assert [(r.kind, r.layers, r.fits) for r in rows[:2]] == [(KEPT, 4, True), (HAND, 8, True)]
    fits = [(r.layers, r.fits) for r in rows if r.kind == FIT]
    assert fits[:2] == [(16, True), (80, False)]
    assert fits[2][1]
    assert 33 / 1.1 <= fits[2][0] <= 33
    assert len(fits) == 3  # 100 times is not asked for


@pytest.mark.parametrize("name", ["feed-forward", "transformer"])
def test_steps_are_the_same_in_groups_and_by_hand(name: str) -> None:
    """In float32, which layers take as they take bfloat16."""
    sizes = {"batch": 4, "width": 8} | ({"sequence": 4} if name == "transformer" else {})
    job = MODELS[name].job(2, 1, "none", **sizes)
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape) / 2), job.args)
    known = jax.jit(job.step)(*args)
    for group, remat in ((1, "hand"), (2, "none")):
        other = MODELS[name].job(2, group, remat, **sizes)
        shaped = jax.tree.map(lambda a, spec: a.reshape(spec.shape), args, other.args)
        found = jax.jit(other.step)(*shaped)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
            np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-4, atol=1e-5)


def test_layers_of_a_resnet_are_counted_as_usual() -> None:
    assert MODELS["ResNet"].layers(17) == 164  # He et al. 2016 have one of 164 layers
    assert MODELS["transformer"].layers(17) == 17
    job = MODELS["ResNet"].job(17)
    # And that one has 1.7 million parameters.
    assert 1.6e6 < sum(leaf.size for leaf in jax.tree.leaves(job.args[0])) < 1.8e6
