"""The experiment that holds ways to accumulate against each other, in its smallest form."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accumulation
import accumulation_curves as curves
import jax
import numpy as np
import pytest
from matplotlib import image

from acc import exactness, forms, memory, picture, speed, table
from acc.forms import Form
from acc.table import Row
from lm.config import Config

CASES = {case.name: case for case in exactness.CASES}
# What is not right by design: a plain mean knows nothing of tokens, and a moment cannot be taken
# back.  Nothing is said here of optax's, which may mend its own.
WRONG = {
    forms.OURS.name: {"4 to 16 tokens"},
    forms.ADAM_A.name: {exactness.AFTER_NAN},
    forms.BY_HAND.name: {"4 to 16 tokens", "bfloat16", "13 rows in 4"},
}
JUDGED = [form for form in forms.FORMS if not form.name.startswith("optax")]


def small(stack: Any = memory.unrolled) -> memory.Problem:
    return memory.mlp("small", stack, width=32, layers=2, rows=16, microbatches=4)


# ---------------------------------------------------------------- exactness


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], Path]:
    """The rows of the script's small form, and where it wrote them."""
    folder = tmp_path_factory.mktemp("results")
    return accumulation.main(accumulation.Options(small=True, results=folder)), folder


def check_what_is_exact(form: Form, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row.form == form.name]
    assert len(rows) == exactness.count((form,))
    judged = [row for row in rows if row.question == exactness.GRADIENT]
    assert [row.case for row in judged] == [*CASES, exactness.AFTER_NAN]
    wrong = {row.case for row in judged if not picture.can_be_used(row)}
    assert wrong == WRONG.get(form.name, set())


@pytest.mark.slow
def test_a_refusal_is_shown_with_what_was_said(made: tuple[list[Row], Path]) -> None:
    judged = [row for row in made[0] if row.question == exactness.GRADIENT]
    (row,) = [row for row in judged if (row.form, row.case) == (forms.BY_HAND.name, "13 rows in 4")]
    assert row.text == table.REFUSES
    assert "13" in row.note


def test_adam_of_squares_has_another_second_moment_and_the_same_first(
    made: tuple[list[Row], Path],
) -> None:
    (row,) = [row for row in made[0] if row.question == exactness.MOMENT]
    assert row.form == forms.ADAM_A.name
    # Between 1/K of Adam's (where all microbatches agree) and all of it.
    assert 0.1 < float(row.value) < 1 - 1 / CASES["equal"].microbatches


def test_the_gradient_by_hand_is_that_of_the_loss() -> None:
    case = exactness.Case("uneven", (3, 5, 1), 3)
    params, batch = exactness._problem(case)
    found = jax.grad(exactness.LOSSES.mean)(params, batch)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(exactness.exact(case)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- memory


def test_memory_is_in_parameters_and_leaves_the_batch_out() -> None:
    problem = small()
    size, batch = 2 * 32 * 32 * 4, 16 * 32 * 4
    assert memory.size(problem.params) == size
    found = {row.unit: row for row in memory.rows(problem, forms.WEIGHTED, "local")}
    assert found["P"].value == pytest.approx((found["bytes"].value - batch) / size)  # pyright: ignore
    assert float(found["P"].value) > 3  # parameters and both moments
    assert found["P"].device == jax.default_backend()
    (micro,) = [leaf.shape for leaf in jax.tree.leaves(problem.rows(forms.ONE_MICROBATCH))]
    assert micro == (4, 32)


@pytest.mark.slow
def test_every_form_of_every_problem_has_a_step() -> None:
    """Shapes alone; what they need is for the run that makes the table."""
    for problem in memory.problems(width=256, layers=2, microbatches=2):
        for form in problem.forms:
            step = form.make(problem.losses, exactness.recorder(), problem.microbatches)
            state = jax.eval_shape(step.init, problem.params)
            after = jax.eval_shape(step.update, problem.params, state, problem.rows(form))
            assert jax.tree.structure(after[0]) == jax.tree.structure(problem.params)
            assert after[2].shape == ()


def test_what_could_not_be_compiled_is_said() -> None:
    (row,) = memory.rows(small(), forms.OURS, "h100-80g", timeout=1e-3)
    assert (row.text, row.device) == (table.NOT_COMPILED, "h100-80g")
    assert "timeout" in row.note
    assert f"not compiled (MLP, small): {row.note}" in accumulation.report([row])


# ---------------------------------------------------------------- time, tables, pictures


def test_steps_are_timed_next_to_the_loop_by_hand() -> None:
    rows = speed.rows(small(memory.scanned), 3, (forms.OURS, forms.BY_HAND, forms.MULTI_STEPS))
    assert [row.form for row in rows] == [forms.OURS.name, forms.BY_HAND.name]
    assert rows[1].value == 1
    assert float(rows[0].value) > 0
    assert "of 3" in rows[0].note


def test_a_timed_step_goes_on_where_the_last_one_stopped() -> None:
    once = speed.runner(small(), forms.OURS)
    losses = [float(once()[1]) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_tables_are_written_and_read() -> None:
    rows = [
        Row("memory", "MLP", "a form", 4.3, "P", "h100-80g"),
        Row("memory", "MLP", "a form", 577_000_000, "bytes", "h100-80g"),
        Row("memory", "MLP", "another", table.NOT_COMPILED, "", "v5e-16g", "a, b"),
    ]
    read = list(csv.DictReader(io.StringIO(table.to_csv(rows, "jax 1", "2026-01-01"))))
    assert [row["value"] for row in read] == ["4.3", "577000000", "not compiled"]
    assert read[2]["note"] == "a, b"
    assert {row["versions"] for row in read} == {"jax 1"}
    text = table.to_text([rows[0], rows[2]], ["h100-80g", "v5e-16g"], "device").splitlines()
    assert len({len(line) for line in text}) == 1
    assert text[2].split() == ["|", "a", "form", "|", "4.30", "|", "|"]


def test_the_script_says_what_is_exact_and_writes_its_table_and_its_picture(
    made: tuple[list[Row], Path],
) -> None:
    rows, folder = made
    with (folder / "accumulation.csv").open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(rows)
    assert {row["question"] for row in read} == {
        exactness.GRADIENT, exactness.MOMENT, memory.MEMORY, speed.STEP_TIME,
    }  # fmt: skip
    assert {row["form"] for row in read} == {
        form.name for form in (forms.ONE_MICROBATCH, *forms.FORMS)
    }
    exact = [row for row in rows if row.question in (exactness.GRADIENT, exactness.MOMENT)]
    for form in JUDGED:
        check_what_is_exact(form, exact)
    assert image.imread(folder / "accumulation.png").shape[2] >= 3


# ---------------------------------------------------------------- curves


@pytest.mark.slow  # trained for many steps
def test_curves_are_compared_with_the_whole_batch(tmp_path: Path) -> None:
    model = Config(
        layers=1, width=8, heads=1, sequence=8, batch=4, ragged=True, dropout=0.0, steps=2
    )
    curves.main(
        curves.Options(model=model, learning_rates=(1e-3,), microbatches=(2,), results=tmp_path)
    )
    with (tmp_path / "accumulation_curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["form"], row["step"]) for row in rows] == [
        (form, step)
        for form in (curves.WHOLE, curves.NUDGED, "2 inside", "2 across")
        for step in "12"
    ]
    assert all(float(row["relative_difference"]) < 1e-5 for row in rows)
    assert image.imread(tmp_path / "accumulation_curves.png").shape[2] >= 3


def test_a_curve_that_goes_its_own_way_is_said() -> None:
    whole = curves.Curve(1e-3, curves.WHOLE, (4.0, 2.0))
    other = curves.Curve(1e-3, "2 inside", (4.0, 2.5))
    assert "2 inside" in curves.report([whole, other])
    assert "2.5e-01, of 2 steps" in curves.report([whole, other])
