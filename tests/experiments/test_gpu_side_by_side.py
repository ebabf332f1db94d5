"""Time and memory on a GPU, as far as it goes without one: the same path on a CPU, no peaks."""

import dataclasses
import importlib.util
from pathlib import Path

import gpu_side_by_side
import jax
import numpy as np
import pytest
from gpu_side_by_side import Options

import jaxmem
from common.table import read
from side import children, jax_nets, methods, rows, run_jax, scatter, shapes
from side.children import FAILED, NO_PLAN, OK, OUT_OF_MEMORY, TIMED_OUT
from side.methods import COMPILED, EAGER, HAND, OURS
from side.rows import Row

TINY = shapes.SMALL["transformer"]

# ---------------------------------------------------------------- the nets


@pytest.mark.parametrize("name", shapes.SMALL)
def test_weights_and_batches_are_what_the_shapes_say(name: shapes.Name):
    net = shapes.SMALL[name]
    weights = shapes.weights(net.shapes)
    specs = jax_nets.specs(net.shapes)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), weights) == jax.tree.map(
        lambda spec: (spec.shape, spec.dtype), specs
    )
    assert net.count == sum(leaf.size for leaf in jax.tree.leaves(weights))
    same = shapes.weights(net.shapes)
    jax.tree.map(np.testing.assert_array_equal, weights, same)
    out = jax.eval_shape(jax_nets.loss(net), specs, *net.data())
    assert (out.shape, out.dtype) == ((), "float32")


def test_a_guess_costs_about_as_much_as_one_at_random():
    """Else the initial weights are of the wrong size, and losses would not tell nets apart."""
    loss = jax_nets.loss(TINY)(shapes.weights(TINY.shapes), *TINY.data())
    assert isinstance(TINY, shapes.Gpt)
    assert float(loss) == pytest.approx(np.log(TINY.vocabulary), rel=0.1)


# ---------------------------------------------------------------- the methods, in this process


@pytest.mark.slow  # what test_fit.py claims, of a greater net
def test_fit_trains_the_same_net_within_its_budget(tmp_path: Path):
    plan = tmp_path / "plan.json"
    most = run_jax.prepare(TINY, OURS, "none", plan)["compiled_bytes"]
    before = run_jax.prepare(TINY, OURS, "fit", plan, 2 * most // 3)
    assert before["compiled_bytes"] <= 2 * most // 3
    found = run_jax.run(TINY, OURS, "fit", plan, warmup=0, steps=1)
    expected = float(jax_nets.loss(TINY)(shapes.weights(TINY.shapes), *TINY.data()))
    assert found["losses"] == [pytest.approx(expected, rel=1e-5)]
    with pytest.raises(jaxmem.BudgetError):
        run_jax.prepare(TINY, OURS, "fit", plan, most // 50)


def test_policies_train_the_same_net_in_less(tmp_path: Path):
    found = {}
    for how in ("none", "full"):
        plan = tmp_path / "plan.json"
        before = run_jax.prepare(TINY, OURS, how, plan)
        found[how] = before | run_jax.run(TINY, OURS, how, plan, warmup=0, steps=2)
    none, full = found["none"], found["full"]
    assert none["losses"][0] == full["losses"][0]
    assert none["losses"][1] == pytest.approx(full["losses"][1], rel=1e-6)
    assert none["losses"][1] < none["losses"][0]
    assert full["compiled_bytes"] < none["compiled_bytes"]
    assert len(none["seconds"]) == 2
    assert none["peak_bytes"] is None


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", shapes.SMALL)
def test_pytorch_trains_the_same_net(name: shapes.Name):
    from side import run_torch

    net = shapes.SMALL[name]
    weights, batch = shapes.weights(net.shapes), net.data()
    expected = float(jax.jit(jax_nets.loss(net))(weights, *batch))
    for method in methods.torch((2, 4), ()):
        if method.family == EAGER:
            found = run_torch.run(net, method.family, method.how, "cpu", warmup=0, steps=2)
            assert found["losses"][0] == pytest.approx(expected, rel=1e-5)
            assert found["losses"][1] < found["losses"][0]


# ---------------------------------------------------------------- a process of its own


def test_however_a_process_ends_there_is_an_answer(tmp_path: Path):
    question = {"what": "run", "net": "Cnn", "size": {"no such": 1}}
    failed = children.ask(question, tmp_path, "cpu", 300)
    assert failed.status == FAILED
    assert failed.note.startswith("TypeError: ")
    late = children.ask(question, tmp_path, "cpu", 0.01)
    assert late == children.Answer(TIMED_OUT, {}, "stopped after 0.01 s")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("JaxRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 9.1GiB", "memory"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "memory"),
        ("BudgetError: no plan is within 2 GiB", "plan"),
        ("ModuleNotFoundError: No module named 'torch'", "failed"),
    ],
)
def test_what_errors_mean(error: str, status: str):
    assert status in children.judged(error)


@pytest.mark.slow
def test_the_small_form_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = Options(
        nets=("transformer",),
        families=(HAND,),
        only="full",
        device="cpu",
        small=True,
        workers=2,
        results=tmp_path,
    )
    (row,) = gpu_side_by_side.main(options)
    assert (row.status, row.steps, row.peak_bytes) == (OK, 3, None)
    assert row.seconds is not None
    assert row.fastest is not None
    assert 0 < row.fastest <= row.seconds
    assert row.second_loss is not None
    assert row.loss is not None
    assert row.second_loss < row.loss
    expected = float(jax_nets.loss(TINY)(shapes.weights(TINY.shapes), *TINY.data()))
    assert row.loss == pytest.approx(expected, rel=1e-5)
    said = capsys.readouterr().out
    assert "no peaks were measured, so nothing is claimed" in said
    assert not (tmp_path / "gpu_side_by_side.png").exists()
    before = (tmp_path / "gpu_side_by_side.csv").stat().st_mtime_ns
    assert gpu_side_by_side.main(options) == [row] == read(tmp_path / "gpu_side_by_side.csv", Row)
    assert (tmp_path / "gpu_side_by_side.csv").stat().st_mtime_ns == before


def test_without_a_gpu_it_says_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu_side_by_side.main(Options(results=tmp_path / "results")) == []
    assert 'pip install "jax[cuda13]"' in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


# ---------------------------------------------------------------- what is said of the rows


def row(family: str, method: str, peak: int | None, ms: float | None, **other: object) -> Row:
    made = Row(
        "a GPU", "CNN", "batch=1", "bfloat16", family, method, OK, None, peak, peak,
        ms and ms / 1e3, ms and ms / 1e3, ms and ms / 1e3, 20, 7.0, 6.9, "", versions="1",
    )  # fmt: skip
    return dataclasses.replace(made, **other)


GIB = 2**30
OURS_ROWS = [row(OURS, "none", 10 * GIB, 100), row(OURS, "fit", 4 * GIB, 110)]


def test_a_rival_is_held_against_ours_at_its_own_time_and_memory():
    slow = row(EAGER, "plain", 8 * GIB, 120)
    (pair,) = rows.paired([*OURS_ROWS, slow])
    assert (pair.saves, pair.speeds) == (2.0, pytest.approx(120 / 110))
    fast = row(COMPILED, "plain", 9 * GIB, 100)
    (pair,) = rows.paired([*OURS_ROWS, fast])
    assert pair.saves == pytest.approx(0.9)
    assert pair.speeds == pytest.approx(100 / 110)
    small = row(HAND, "full", 3 * GIB, 90)
    (pair,) = rows.paired([*OURS_ROWS, small])
    assert pair.lean is pair.quick is pair.saves is pair.speeds is None
    text = rows.message([*OURS_ROWS, slow, fast, small])
    assert text == (
        "CNN: jaxmem needs less at equal time than 1 of 3 others, and is faster at equal memory "
        "than 1"
    )


def test_what_ran_out_of_memory_is_told_and_claims_nothing():
    gone = row(EAGER, "plain", None, None, status=OUT_OF_MEMORY, loss=None, second_loss=None)
    given = [*OURS_ROWS, gone, row(HAND, "full", 5 * GIB, 130)]
    assert len(rows.paired(given)) == 1
    assert rows.message(given).endswith("than 1; 1 more ran out of memory")
    assert "| PyTorch: plain " in rows.summary(given)
    assert "losses of all 3 methods agree within 0.01" in rows.summary(given)


def test_another_loss_is_another_net():
    other = row(EAGER, "plain", 8 * GIB, 120, loss=7.2)
    assert rows.astray([*OURS_ROWS, other]) == [other]
    assert rows.paired([*OURS_ROWS, other]) == []
    assert "but for 1: PyTorch: plain" in rows.summary([*OURS_ROWS, other])
    after = row(EAGER, "plain", 8 * GIB, 120, second_loss=6.5)
    assert rows.astray([*OURS_ROWS, after]) == [after]


def test_fit_is_asked_in_the_memory_of_rivals_that_no_other_beats():
    given = [
        *OURS_ROWS,
        row(EAGER, "plain", 8 * GIB, 120),
        row(EAGER, "each", 3 * GIB, 150),
        row(EAGER, "worse", 9 * GIB, 130),
        row(COMPILED, "plain", None, None, status=NO_PLAN),
    ]
    asked = gpu_side_by_side.fits(Options(budgets=(0.5,)), given)
    assert [(one.name, one.budget) for one in asked] == [
        ("fit, 0.5 of plain", 5 * GIB),
        ("fit, as PyTorch: plain", int(0.99 * 8 * GIB)),
        ("fit, as PyTorch: each", int(0.99 * 3 * GIB)),
    ]
    assert gpu_side_by_side.fits(Options(families=(HAND,)), given) == []


def test_the_picture(tmp_path: Path):
    given = [*OURS_ROWS, row(EAGER, "plain", 8 * GIB, 120), row(HAND, "full", 5 * GIB, 130)]
    more = [dataclasses.replace(one, net="transformer") for one in given]
    assert scatter.draw([*given, *more], tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert not scatter.draw([row(OURS, "none", None, 5.0)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
