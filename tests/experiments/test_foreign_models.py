"""Models that others wrote: they trace as they stand, and what is said of the rows."""

import dataclasses
from pathlib import Path

import foreign_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from foreign_models import Options

from common.table import read
from foreign import picture, study, table
from foreign.nets import NETS, SMALL
from foreign.table import FIT, OWN, PLAIN, SQRT, Row
from foreign.training import job, mean_cross_entropy

# ---------------------------------------------------------------- the models


@pytest.mark.parametrize("model", NETS)
def test_a_step_gives_back_what_it_is_given(model: str):
    """Traced, with the model's own option where there is one, which changes no parameter."""
    net = NETS[model](**SMALL[model])
    assert {leaf.dtype for leaf in jax.tree.leaves(net.weights)} == {jnp.dtype("float32")}
    assert bool(net.statistics) == (model == "ResNet-50")
    assert net.has_option == (model in ("BERT", "T5", "Whisper"))
    traced = [net, net.checkpointed()] if net.has_option else [net]
    for one in traced:
        step = job(one)
        jaxpr, (state, loss) = jax.make_jaxpr(step.step, return_shape=True)(*step.args)
        assert jax.tree.map(_type, state) == jax.tree.map(_type, step.args[0])
        assert _type(loss) == ((), jnp.dtype("float32"))
        assert ("remat" in str(jaxpr)) == (one is not net)


def _type(array: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], np.dtype]:
    return array.shape, array.dtype


def test_labels_below_zero_are_not_counted():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5), jnp.bfloat16)
    labels = jnp.array([[1, -1, 4], [-1, 0, 2]])
    each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    found = mean_cross_entropy(logits, labels)
    assert found == pytest.approx(each[labels >= 0].mean())
    assert found.dtype == jnp.float32


# ---------------------------------------------------------------- what is said


def row(kind: str, asked: str = "", temporaries: int = 100, work: int = 1000) -> Row:
    return Row(
        "h100-80g",
        "BERT",
        "2 layers of width 8, 2 x 8 tokens",
        kind,
        asked,
        "roofline" if kind == FIT else "",
        fits=True,
        required_bytes=temporaries + 50,
        temp_bytes=temporaries,
        matmul_flops=work,
        model_matmul_flops=1000,
        versions="1",
    )


ROWS = [
    row(PLAIN),
    row(SQRT, "", 50, 1200),
    row(FIT, "0.5", 48, 1050),
    row(OWN, "", 40, 1300),
    row(FIT, OWN, 39, 1100),
]
REFUSED = Row("h100-80g", "ViT", "2 layers", PLAIN, "", "", error="no tile sizes", versions="1")


def test_an_own_option_that_recomputes_less_beats_fit(tmp_path: Path):
    assert table.answer(ROWS) == (
        "BERT: own checkpointing +30.0%, fit in its memory +10.0%\nbeaten: 0 of 1"
    )
    assert "in its memory: 1 of 1 (1 Flax models" in table.message(ROWS)
    more = [*ROWS[:-1], row(FIT, OWN, 39, 1301)]
    assert "beaten: 1 of 1" in table.answer(more)
    without = [*ROWS[:-1], dataclasses.replace(ROWS[-1], fits=False, temp_bytes=45)]
    assert "fit in its memory does not fit\nbeaten: 1 of 1" in table.answer(without)
    assert "fit, in the memory of own checkpointing, does not fit |" in table.summary(without)
    other = dataclasses.replace(row(SQRT, "", 50, 1100), model="ViT")
    for rows in (ROWS, ROWS[:1], without, [REFUSED], [*ROWS, REFUSED, other]):
        picture.draw(rows, tmp_path / "rows.png")
        assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_refused_is_said_and_counted_from_the_model():
    other = dataclasses.replace(row(SQRT, "", 50, 1100), model="ViT")
    text = table.summary([REFUSED, other])
    assert "plain, refused: no tile sizes" in text
    assert other.extra(REFUSED) == pytest.approx(0.1)
    assert other.share(REFUSED) is None
    assert "+10.0%" in text
    assert "beaten: 0 of 0" in table.answer([REFUSED, other])


# ---------------------------------------------------------------- the script


@pytest.mark.slow
def test_the_smallest_form_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = Options(small=True, models=("GPT-2",), results=tmp_path)
    rows = foreign_models.main(options)
    plain, sqrt, fit = rows
    assert [one.kind for one in rows] == [PLAIN, SQRT, FIT]
    assert table.summary(rows) in capsys.readouterr().out
    assert plain.matmul_flops
    assert plain.planning_seconds
    assert plain.predicted_bytes
    assert plain.extra(plain) == 0
    assert 0 < (sqrt.share(plain) or 1) < 1
    assert fit.fits
    assert fit.budget_bytes
    assert (fit.required_bytes or 0) <= fit.budget_bytes < (plain.required_bytes or 0)
    assert fit.compiles
    path = tmp_path / "foreign_models.csv"
    assert read(path, Row) == rows
    assert (tmp_path / "foreign_models.png").read_bytes().startswith(b"\x89PNG")
    before = path.stat().st_mtime_ns
    assert foreign_models.main(options) == rows
    assert path.stat().st_mtime_ns == before


def test_a_refused_program_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of every kind; the run goes on, with budgets from what was predicted."""

    def refuse(*_: object, **__: object) -> None:
        raise study.jaxmem.CompileError("INTERNAL: Couldn't find\noutput tile sizes")

    class Problem:
        predicted = (1_000_000, 500_000)

    monkeypatch.setattr(study, "planned", refuse)
    monkeypatch.setattr(study.jaxmem.Job, "report", refuse)
    monkeypatch.setattr(study, "build_problem", lambda *_: Problem())
    rows = foreign_models.main(Options(small=True, models=("BERT",), results=tmp_path))
    assert [one.kind for one in rows] == [PLAIN, SQRT, FIT, OWN]
    assert {one.error for one in rows} == {"INTERNAL: Couldn't find output tile sizes"}
    assert not any(one.fits for one in rows)
    assert 0 < (rows[2].budget_bytes or 0) < 1_000_000
    assert foreign_models.main(Options(small=True, models=("BERT",), results=tmp_path)) == rows


@pytest.mark.slow  # a second model, with an option of its own
def test_fit_is_asked_for_the_memory_of_the_own_option(tmp_path: Path):
    rows = foreign_models.main(Options(small=True, models=("BERT",), results=tmp_path))
    own, fit = rows[-2:]
    assert (own.kind, fit.kind, fit.asked) == (OWN, FIT, OWN)
    assert fit.budget_bytes == own.required_bytes
    assert "beaten: 0 of 1" in table.answer(rows)
