"""`jaxmem.frontier`: which plans are compiled, what is said of them; and `fit` is not beaten."""

import csv
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem
from front import claims, picture, rivals
from front.rivals import hand
from front.table import FIT, Made, Row, of, table
from jaxmem import Frontier
from jaxmem._util import text
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.frontier import spread
from jaxmem.show.frontier import bargain

MIB = 2**20


@jaxmem.remat_auto
def stack(weights, h):
    def layer(h, w):
        return h + jnp.tanh(jnp.sin(h @ w["up"])) @ w["down"], None

    return jax.lax.scan(layer, h, weights)[0]


def loss(weights, h):
    return (stack(weights, h) ** 2).sum()


def shapes(layers: int = 12, width: int = 32, rows: int = 1024):
    spec = jax.ShapeDtypeStruct
    weights = {
        "up": spec((layers, width, 4 * width), "float32"),
        "down": spec((layers, 4 * width, width), "float32"),
    }
    return weights, spec((rows, width), "float32")


@functools.cache
def found() -> Frontier:
    return jaxmem.frontier(jax.grad(loss), *shapes(), points=4, progress=False)


# ---------------------------------------------------------------- which plans


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=70, unique=True), st.integers(2, 12))
def test_points_are_spread_over_the_whole_front(sizes: list[int], points: int):
    sizes.sort(reverse=True)
    places = spread(sizes, points)
    assert places == sorted(set(places))
    assert len(places) == min(points, len(sizes))
    assert places[0] == 0
    assert places[-1] == len(sizes) - 1


def test_points_are_even_in_factors():
    sizes = [2**k for k in range(60, -1, -1)]
    assert spread(sizes, 7) == [0, 10, 20, 30, 40, 50, 60]


@pytest.mark.slow
def test_what_memory_costs():
    points = found().points
    assert len(points) == 4
    most, least = points[0], points[-1]
    assert most.recompute_overhead == pytest.approx(0, abs=1e-6)
    assert most.extra_seconds == 0
    assert least.required_bytes < 0.5 * most.required_bytes
    work = [point.matmul_flops or 0 for point in points]
    assert work == sorted(work)
    assert work[-1] > work[0]
    for point in points:
        assert point.required_bytes == point.report.required_bytes
        assert 0 < point.temp_bytes < point.required_bytes


def test_everything_kept_is_the_bare_step():
    with jaxmem.use_policy("none"):
        bare = jaxmem.memory_report(jax.grad(loss), *shapes(), suggest=False)
    assert found().points[0].matmul_flops == bare.matmul_flops
    assert found().points[0].required_bytes == pytest.approx(bare.required_bytes, rel=0.1)


def test_a_plan_of_a_point_needs_what_the_point_says():
    for point in found().points[1::2]:
        with jaxmem.use_plan(point.plan):
            report = jaxmem.memory_report(jax.grad(loss), *shapes(), suggest=False)
        assert report.required_bytes == point.required_bytes
        assert report.matmul_flops == point.matmul_flops


@pytest.mark.parametrize("failing", ["one", "all"])
def test_plans_for_which_the_compiler_fails_are_missing(failing: str, monkeypatch):
    begin, asked = CompileRequest.begin, []

    class Failed:
        def answered(self, seconds):
            return True

        def result(self):
            raise jaxmem.CompileError("it failed: INTERNAL: why", is_defect=True)

    def begun(self, plan):
        asked.append(plan)
        return Failed() if failing == "all" or len(asked) == 2 else begin(self, plan)

    monkeypatch.setattr(CompileRequest, "begin", begun)
    if failing == "all":
        with pytest.raises(jaxmem.CompileError, match="it failed"):
            jaxmem.frontier(jax.grad(loss), *shapes(), points=3, progress=False)
        return
    with pytest.warns(jaxmem.JaxmemWarning, match="passed over 1 of 3 plans.*INTERNAL: why"):
        front = jaxmem.frontier(jax.grad(loss), *shapes(), points=3, progress=False)
    assert [point.plan for point in front.points] == [asked[0], asked[2]]


def test_a_step_with_few_plans_has_few_points():
    arrays = shapes(layers=1)
    few = jaxmem.frontier(jax.grad(loss), *arrays, points=60, progress=False)
    assert 1 <= len(few.points) < 60
    assert len({point.plan for point in few.points}) == len(few.points)


def test_dominated_points_are_kept_and_marked():
    for one in found().points:
        beaten = any(
            other.required_bytes <= one.required_bytes
            and other.extra_seconds <= one.extra_seconds
            and (other.required_bytes, other.extra_seconds)
            != (one.required_bytes, one.extra_seconds)
            for other in found().points
        )
        assert one.pareto is not beaten
    marked = dataclasses.replace(found().points[1], pareto=False)
    marked = Frontier((found().points[0], marked, *found().points[2:]))
    assert len(marked.pareto) == len(found().pareto) - found().points[1].pareto
    assert "dominated: another plan needs no more memory and no more time" in str(marked)


def test_each_compile_is_spoken_of(capsys: pytest.CaptureFixture[str]):
    jaxmem.frontier(jax.grad(loss), *shapes(layers=3), points=2)
    said = capsys.readouterr()
    assert said.out == ""
    assert [line[:17] for line in said.err.splitlines()] == [
        "frontier: 1 of 2 ",
        "frontier: 2 of 2 ",
    ]
    assert "predicted" in said.err


@pytest.mark.parametrize(
    ("options", "step", "message"),
    [
        ({"points": 1}, loss, "points=1, but its two ends are two points; for a single plan use"),
        ({"points": 0}, loss, "points"),
        ({"cost": "time"}, loss, "cost must be one of"),
        ({}, lambda w, h: stack.__wrapped__(w, h).sum(), "nothing in the step is decorated"),
    ],
    ids=["one", "none", "cost", "undecorated"],
)
def test_what_cannot_be_asked(options: dict, step, message: str):
    with pytest.raises(ValueError, match=message):
        jaxmem.frontier(jax.grad(step), *shapes(), progress=False, **options)


# ---------------------------------------------------------------- what is shown


def test_the_table():
    lines = str(found()).splitlines()
    assert lines[0] == "Memory against recomputation on cpu: 4 plans, compiled"
    assert len(lines) == 6 + (len(found().pareto) < 4)
    for line, point in zip(lines[2:], found().points, strict=False):
        assert f"{point.required_bytes / MIB:.1f} MiB" in line
        assert text.change(point.recompute_overhead or 0.0) in line
    assert repr(found()) == "<Frontier of 4 plans for cpu>"


def test_the_csv_has_every_point(tmp_path: Path):
    file = tmp_path / "frontier.csv"
    found().to_csv(file)
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["required_bytes"]) for row in rows] == [
        point.required_bytes for point in found().points
    ]
    assert [float(row["extra_seconds"]) for row in rows] == [
        point.extra_seconds for point in found().points
    ]
    assert [row["pareto"] == "True" for row in rows] == [p.pareto for p in found().points]
    with pytest.raises(FileNotFoundError):
        found().to_csv(tmp_path / "nowhere" / "frontier.csv")
    assert list(tmp_path.iterdir()) == [file]


def test_the_picture(tmp_path: Path):
    figure = found().plot(tmp_path / "frontier.png", dpi=60)
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    said = [text.get_text() for text in axes.texts]
    assert "everything kept" in said
    most, least = found().points[0], found().points[-1]
    assert f"÷ {most.required_bytes / least.required_bytes:.2g}" in said
    assert axes.get_title(loc="left") == bargain(found())
    # What needs most stands at the right, at the bottom.
    left, right = axes.get_xlim()
    assert left < least.required_bytes / MIB < most.required_bytes / MIB < right
    with pytest.raises(ValueError, match="PNG or SVG"):
        found().plot(tmp_path / "frontier.pdf")


def test_a_step_without_matmul_flops_has_a_table_and_no_picture():
    @jaxmem.remat_auto
    def run(h):
        return jax.lax.scan(lambda h, _: (jnp.sin(jnp.cumsum(h)), None), h, None, length=9)[0].sum()

    x = jax.ShapeDtypeStruct((4096,), "float32")
    without = jaxmem.frontier(jax.grad(run), x, points=2, progress=False)
    assert "?" in str(without)
    with pytest.raises(ValueError, match="the matmul FLOPs of no plan are known"):
        without.plot()


# ---------------------------------------------------------------- against others


def test_rows_come_back_from_their_file_as_they_were(tmp_path: Path):
    first, *_, last = found().points
    made, other = Made("cpu", "small", "jax 1"), Made("cpu", "small", "jax 2")
    rows = table(tmp_path / "new" / "rows.csv")
    rows.add(made.row("by hand", "none", first.report), made.row(FIT, "as none", first.report))
    row = made.row(
        FIT,
        "as save nothing",
        last.report,
        "a note, with a comma",
        budget_bytes=last.required_bytes,
        predicted_bytes=last.predicted_bytes,
        extra_seconds=last.extra_seconds,
        matmul_flops=None,
    )
    rows.add(row)
    again = table(rows.path)
    assert of(again, made, "by hand", FIT) == of(rows, made, "by hand", FIT)
    assert row in of(again, made, FIT)
    assert of(again, other, FIT) == []
    again.drop(of(again, made, FIT))
    assert [one.name for one in of(again, made, "by hand", FIT)] == ["none"]


SIZE: dict[str, Any] = {"batch": 8, "sequence": 256, "width": 256, "layers": 8, "heads": 4}
OTHERS = (
    hand("none", "none"),
    hand("dots_with_no_batch_dims", "dots_with_no_batch_dims_saveable"),
    hand("save nothing", "nothing_saveable"),
)
MADE = Made("h100-80g", "small", "")


@pytest.fixture(scope="module")
def policies() -> list[Row]:
    return [other.row(SIZE, MADE) for other in OTHERS]


@pytest.mark.slow  # of the experiment, for a GPU; its smallest form makes the claim on the CPU
@pytest.mark.parametrize("name", ["as dots_with_no_batch_dims", "as save nothing", "between"])
def test_fit_is_not_beaten_in_the_memory_of_policies_in_use(
    name: str, policies: list[Row], tmp_path: Path
):
    """Each at its own compiled bytes, on an H100; and strictly less in between."""
    bare = max(row.required_bytes for row in policies)
    (one,) = (
        one
        for one in rivals.asked(sorted(policies, key=lambda row: -row.required_bytes))
        if one.name.startswith(name) and one.budget <= 0.5 * bare
    )
    job = programs.transformer(**SIZE)
    options: Any = {"target": MADE.target, "cost": "flops", "max_compiles": 4, "progress": False}
    fitted = jaxmem.fit(job.step, *job.args, budget=one.budget, **options)
    assert fitted.report.required_bytes <= one.budget
    known = table(tmp_path / "rows.csv")
    known.add(*policies, MADE.row(FIT, one.name, fitted.report, budget_bytes=one.budget))
    rows = of(table(known.path), MADE, "by hand", FIT)
    (pair,) = claims.paired(rows)
    assert claims.losses(rows) == []
    assert pair.between is (name == "between")
    if pair.between:
        assert pair.fit.work < pair.rival.work
    assert "fit is beaten at 0 of 1 budgets" in claims.summary(rows)
    picture.draw(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
