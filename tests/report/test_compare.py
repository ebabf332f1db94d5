"""Differences and comparisons of reports: the numbers, the texts, the pictures."""

import csv
import dataclasses
import functools
import io
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.pages import all_words, check_png, on_gpu, overlaps, parsed, some_buffer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import jaxmem
from jaxmem.report.compare import Comparison, compare
from jaxmem.report.memory import memory_report
from jaxmem.report.report import Difference, MemoryReport

MIB, GIB = 2**20, 2**30


def train(width: int = 64, batch: int = 256, policy: Any = "none") -> MemoryReport:
    @functools.partial(jaxmem.remat, policy=policy)
    def model(params, h):
        def layer(h, w):
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        return jnp.sum(jax.lax.scan(layer, h, params)[0] ** 2)

    stacked = jax.ShapeDtypeStruct((16, width, width), "float32")
    params = {"up": stacked, "down": stacked}
    h = jax.ShapeDtypeStruct((batch, width), "float32")
    return memory_report(lambda params, batch: jax.grad(model)(params, batch), params, h)


@pytest.fixture(scope="module")
def kept() -> MemoryReport:
    return train()


@pytest.fixture(scope="module")
def again() -> MemoryReport:
    return train(policy="full")


# ---------------------------------------------------------------- difference


def test_less_is_needed_and_why(kept, again):
    less = again - kept
    assert isinstance(less, Difference)
    assert less.required_bytes == again.required_bytes - kept.required_bytes < 0
    assert less.temp_bytes == again.temp_bytes - kept.temp_bytes
    assert less.matmul_flops == again.matmul_flops - kept.matmul_flops > 0
    first, *rest = str(less).splitlines()
    assert re.fullmatch(r"needs [\d.]+ [KM]iB less \([\d.]+( [KM]iB)? → [\d.]+ [KM]iB\)", first)
    text = "\n".join(rest)
    assert re.search(r"-[\d.]+ [KM]iB  temporaries", text)
    assert re.search(r"gone +.*f32\[16,256,64\]", text)
    assert "recomputation" in text
    assert less.arguments == ()
    assert less.warnings == ()
    assert repr(less).startswith("<Difference needs")


def test_the_other_way_round_it_is_more(kept, again):
    more, less = kept - again, again - kept
    assert str(more).splitlines()[0].split("(")[0] == "needs " + str(less).split()[1] + " " + (
        str(less).split()[2] + " more "
    )
    assert sorted(c.bytes for c in more.buffers) == sorted(-c.bytes for c in less.buffers)
    swap = {"appeared": "vanished", "vanished": "appeared", "changed": "changed"}
    assert sorted(c.change for c in more.buffers) == sorted(swap[c.change] for c in less.buffers)


def test_a_report_less_itself_is_nothing(kept):
    nothing = kept - kept
    assert str(nothing).startswith("needs the same (")
    assert len(str(nothing).splitlines()) == 1
    assert nothing.buffers == nothing.arguments == ()


def test_another_batch_changes_shapes_of_the_same_values(kept):
    more = train(batch=512) - kept
    changed = [c for c in more.buffers if c.change == "changed"]
    shapes = {(c.before[0].shape, c.after[0].shape) for c in changed}
    assert ((16, 256, 64), (16, 512, 64)) in shapes
    assert "f32[16,256→512,64]" in str(more)
    assert [(a.name, a.bytes) for a in more.arguments] == [("batch", 256 * 64 * 4)]


def test_what_is_left_of_two_programs_adds_up(kept, again):
    less = again - kept
    everything = sum(b.bytes for b in again.buffers) - sum(b.bytes for b in kept.buffers)
    assert sum(change.bytes for change in less.buffers) == everything


def test_buffers_are_matched_by_what_a_user_knows(kept):
    before = on_gpu(kept, buffers=(some_buffer(name="a"), some_buffer(name="b"), some_buffer()))
    after = on_gpu(
        kept,
        buffers=(
            some_buffer(name="a", instruction="fusion.77"),
            some_buffer(name="b", shape=(24, 8, 1, 4096), bytes=MIB),
            some_buffer(),
            some_buffer(),
            some_buffer(name="new", bytes=5 * GIB),
        ),
    )
    found = {(c.buffer.name, c.change): c.bytes for c in (after - before).buffers}
    assert found == {
        ("new", "appeared"): 5 * GIB,
        ("tanh", "changed"): GIB,
        ("b", "changed"): MIB - GIB,
    }
    assert (after - before).buffers[0].buffer.name == "new"
    assert "1 → 2 × bf16[" in str(after - before)
    assert "bf16[24,8,1024→1,4096]" in str(after - before)


def test_it_warns_of_other_targets_versions_and_flags(kept):
    one = on_gpu(kept)
    two = on_gpu(kept, target="a100-40g", flags={"xla_x": "1"}, versions={"jax": "9"}, devices=2)
    text = str(two - one)
    assert "! the targets differ: h100-80g → a100-40g" in text
    assert "! the flags differ: xla_x not set → 1" in text
    assert f"jax {jax.__version__} → 9" in " ".join(text.split())
    assert "! the numbers of devices differ: 1 → 2" in text
    assert len((two - one).warnings) == 4


def test_it_says_what_now_fits(kept):
    two = on_gpu(kept, capacity_bytes=10, default_capacity_bytes=5)
    assert str(two - on_gpu(kept)).splitlines()[0].endswith(": no longer fits")
    assert str(on_gpu(kept) - two).splitlines()[0].endswith(": now fits")


def test_difference_as_json_html_and_rich(kept, again):
    less = again - kept
    data = json.loads(less.to_json())
    assert data["required_bytes"] == less.required_bytes
    assert data["buffers"][0]["change"] == less.buffers[0].change
    assert data["warnings"] == []
    assert "temporaries" in parsed(less._repr_html_()).text
    console = Console(file=io.StringIO(), record=True, width=90)
    console.print(less)
    assert str(less).splitlines()[0] in console.export_text()


def test_only_reports_are_subtracted(kept):
    with pytest.raises(TypeError, match="unsupported operand"):
        kept - 3  # pyright: ignore


# ---------------------------------------------------------------- comparison


def sized(report: MemoryReport, required: int, matmul: int | None, **changes: Any) -> MemoryReport:
    model = {"matmul_flops": matmul, "model_matmul_flops": 100}
    return on_gpu(report, required_bytes=required, **model, **changes)


def test_policies_side_by_side(kept, again):
    found = compare({"none": kept, "full": again})
    assert found.pareto == ("none", "full")
    text = str(found)
    assert text.splitlines()[0] == "2 on cpu, capacity unknown"
    assert re.search(r"full +[\d.]+ MiB +[\d.]+ [KM]iB +\+\d+ %", text)
    assert repr(found) == "<Comparison of 2 reports for cpu>"
    assert found.reports["none"] is kept


def test_a_table_with_what_fits(kept):
    found = compare(
        {
            "none": sized(kept, 90 * GIB, 100),
            "dots": sized(kept, 40 * GIB, 100),
            "full": sized(kept, 8 * GIB, 133),
            "bad": sized(kept, 9 * GIB, 140),
            "refused": sized(kept, 900 * GIB, None),
        }
    )
    assert found.pareto == ("dots", "full")
    lines = str(found).splitlines()
    assert lines[0] == "3 of 5 fit in the memory of 80.0 GiB on h100-80g"
    rows = {line.split()[0]: line for line in lines[3:8]}
    assert "no, 112 %" in rows["none"]
    assert re.search(r"yes, 10 % +\+33 % +12\.3 ms  \*$", rows["full"])
    assert rows["refused"].rstrip().endswith("?   12.3 ms")
    assert max(map(len, lines)) <= 80


def test_bad_input(kept):
    with pytest.raises(ValueError, match="no reports to compare"):
        compare({})
    with pytest.raises(TypeError, match="got list"):
        compare([kept])  # pyright: ignore
    with pytest.raises(TypeError, match="the value of 'a' is of type int, not a MemoryReport"):
        compare({"a": 3})  # pyright: ignore
    with pytest.raises(ValueError, match=r"some keys are pairs, such as \('none', 8\).*'full'"):
        compare({("none", 8): kept, "full": kept})
    with pytest.raises(ValueError, match=r"a tuple is \(policy, batch\), got \('none', 8, 1\)"):
        compare({("none", 8, 1): kept})
    with pytest.raises(
        ValueError, match=r"several targets: h100-80g \(of 'a'\), v5e-16g \(of 'b'\)"
    ):
        compare({"a": on_gpu(kept), "b": on_gpu(kept, target="v5e-16g")})


SIZES = st.integers(1, 6)


@given(st.lists(st.tuples(SIZES, st.none() | SIZES), min_size=1, max_size=12))
def test_pareto_is_what_brute_force_finds(kept, sizes):
    reports = {str(k): sized(kept, need, work) for k, (need, work) in enumerate(sizes)}
    wanted = []
    for k, (need, work) in enumerate(sizes):
        known = [(n, w) for n, w in sizes if w is not None]
        if work is not None and not any(
            n <= need and w <= work and (n, w) != (need, work) for n, w in known
        ):
            wanted.append(str(k))
    assert compare(reports).pareto == tuple(wanted)


def swept(report: MemoryReport) -> Comparison:
    return compare(
        {
            (policy, batch): sized(report, need * batch * GIB, work * batch)
            for policy, need, work in (("none", 9, 100), ("dots", 4, 100), ("full", 1, 133))
            for batch in (16, 4, 8)
            if (policy, batch) != ("dots", 8)
        }
    )


def test_each_batch_has_its_own_front(kept):
    assert set(swept(kept).pareto) == {
        ("dots", 16),
        ("dots", 4),
        ("none", 8),
        ("full", 16),
        ("full", 4),
        ("full", 8),
    }


def test_policy_by_batch_in_text(kept):
    text = str(swept(kept))
    grid = text[text.index("policy × batch") :].splitlines()
    assert grid[1].split() == ["policy", "batch", "4", "batch", "8", "batch", "16"]
    assert grid[2].split() == ["none", "36.0", "GiB", "✓", "72.0", "GiB", "✓", "144.0", "GiB", "✗"]
    assert grid[3].split() == ["dots", "16.0", "GiB", "✓", "–", "64.0", "GiB", "✓"]


def test_comparison_as_html_and_rich(kept):
    found = swept(kept)
    shown = parsed(found._repr_html_())
    assert "144.0 GiB ✗" in shown.text
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(found)
    assert "144.0 GiB ✗" in console.export_text()


def test_csv(kept, tmp_path):
    swept(kept).to_csv(tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["batch"]) for row in rows[:2]] == [("none", "16"), ("none", "4")]
    assert rows[0]["required_bytes"] == str(144 * GIB)
    assert (rows[0]["fits"], rows[1]["fits"]) == ("False", "True")
    assert {row["pareto"] for row in rows} == {"True", "False"}
    compare({"none": kept}).to_csv(tmp_path / "b.csv")
    assert (tmp_path / "b.csv").read_text().startswith("name,target,required_bytes")


def test_scatter(kept, tmp_path):
    for name, found in (
        ("pairs", swept(kept)),
        ("one", compare({"a": sized(kept, 8 * GIB, 133), "b": sized(kept, 90 * GIB, None)})),
    ):
        figure = found.plot(tmp_path / f"{name}.png")
        found.plot(tmp_path / f"{name}.svg")
        check_png(tmp_path / f"{name}.png", 1600)
        assert overlaps(figure) == []
        assert "required memory (GiB)" in all_words(figure)
    assert "capacity 80.0 GiB" in all_words(swept(kept).plot())
    assert "not drawn, matmul FLOPs unknown: b" in all_words(figure)


def test_scatter_of_points_on_one_another(kept):
    found = compare({f"policy {k}": sized(kept, (5 + k // 3) * GIB, 100) for k in range(9)})
    assert overlaps(found.plot()) == []


def test_scatter_needs_matmul_flops(kept):
    with pytest.raises(ValueError, match="the matmul FLOPs of no compiled program are known"):
        compare({"a": sized(kept, 1, None)}).plot()


def test_heatmap(kept, tmp_path):
    figure = swept(kept).heatmap(tmp_path / "a.png")
    swept(kept).heatmap(tmp_path / "a.svg")
    check_png(tmp_path / "a.png", round(figure.get_size_inches()[0] * 200))
    words = all_words(figure)
    for cell in ("✗ 144.0 GiB", "✓ 36.0 GiB", "✓* 72.0 GiB", "not compiled", "180 %"):
        assert cell in words
    assert "✓* only in more than the 75 % that jax takes by default" in words
    assert overlaps(figure) == []


def test_heatmap_of_one_cell_and_of_unknown_capacity(kept):
    assert overlaps(compare({("none", 1): on_gpu(kept)}).heatmap()) == []
    figure = compare({("none", 1): kept, ("none", "its own"): kept}).heatmap()
    assert "the capacity is unknown" in all_words(figure)
    assert overlaps(figure) == []


def test_heatmap_needs_pairs(kept):
    with pytest.raises(ValueError, match="single names"):
        compare({"none": kept}).heatmap()


def test_long_names_and_many_cells(kept):
    found = compare(
        {
            (f"a policy with quite a long name {p}", b): sized(kept, b * GIB, 100 + p)
            for p in range(5)
            for b in (1, 2, 4, 8)
        }
    )
    assert overlaps(found.heatmap()) == []
    assert max(map(len, str(found).splitlines())) <= 80


def test_values_of_a_comparison_do_not_change(kept):
    reports = {"a": kept}
    found = compare(reports)
    reports["b"] = kept
    assert list(found.reports) == ["a"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.reports = {}  # pyright: ignore
