"""The experiment on a long sequence: what it counts, what it claims, and that it resumes."""

import dataclasses
from pathlib import Path

import long_sequence
import pytest
from long_sequence import Options

import jaxmem
from sequence import loops
from sequence.loops import Way
from sequence.table import Row, against_equinox, answer, of, summary


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], Path]:
    folder = tmp_path_factory.mktemp("results")
    return long_sequence.main(Options(small=True, results=folder)), folder


@pytest.mark.slow
def test_plans_evaluate_what_their_formulas_say(made: tuple[list[Row], Path]):
    rows, _ = made
    assert {row.kind for row in rows} == {"none", "sqrt", "levels", "revolve", "equinox"}
    for row in rows:
        if row.kind == "equinox":
            assert row.evaluations >= row.formula_evaluations
        else:
            assert row.evaluations == row.formula_evaluations
    assert of(rows, "none")[0].passes == 1
    assert of(rows, "sqrt")[0].passes == 2


def test_each_needs_less_than_the_one_before(made: tuple[list[Row], Path]):
    rows, _ = made
    none, sqrt, levels, revolve, equinox = rows
    assert none.own_bytes > sqrt.own_bytes > levels.own_bytes > revolve.own_bytes
    assert equinox.number == revolve.number
    assert equinox.own_bytes > revolve.own_bytes
    for row in rows:
        assert row.formula_bytes <= row.own_bytes <= row.required_bytes


def test_gradients_are_the_same(made: tuple[list[Row], Path]):
    rows, _ = made
    assert rows[0].gradient_off == 0
    assert all(row.gradient_off < 1e-5 for row in rows)


def test_a_second_call_measures_nothing_anew(
    made: tuple[list[Row], Path], monkeypatch: pytest.MonkeyPatch
):
    rows, folder = made
    assert (folder / "long_sequence.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.delattr(long_sequence, "_measured")
    assert long_sequence.main(Options(small=True, results=folder)) == rows


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 16, 32, 64])
def test_the_closed_form_is_the_plan(slots: int):
    for steps in (2, 10, 64, 100, 10_000):
        plan = jaxmem.Plan.revolve(steps, slots)
        extra = long_sequence._formula_extra(Way("revolve", slots), plan, steps)
        if slots <= steps:
            assert extra == plan.extra_forwards()


def test_the_first_step_has_a_say_in_the_last_state():
    params, inputs = loops.arrays(loops.shapes(10_000, 2, 3, 4))
    run = loops.Way("none").run(loops.lstm)
    assert abs(run(params, inputs) - run(params, inputs.at[0].add(1))).max() > 1e-4


def test_what_is_said_follows_the_rows(made: tuple[list[Row], Path]):
    rows, _ = made
    said = answer(rows)
    assert "4 of 4 plans evaluate just what their formula says" in said
    assert "1 of its 1 points need more and evaluate more than one of ours" in said
    *ours, theirs = rows
    revolve = of(rows, "revolve")[4]
    better = dataclasses.replace(
        theirs, own_bytes=revolve.own_bytes // 2, evaluations=2 * revolve.evaluations
    )
    worse = dataclasses.replace(ours[1], evaluations=ours[1].evaluations + 1)
    other = [ours[0], worse, *ours[2:], better]
    assert (
        against_equinox(other) == "equinox's loop takes 0.5 × revolve's memory, 2 × its evaluations"
    )
    assert "3 of 4 plans evaluate just what" in answer(other)
    assert "0 of its 1 points need more" in answer(other)
    assert len(summary(rows).splitlines()) == len(rows) + 2
