"""How reports are displayed: texts in each case, within a width, and pictures."""

import dataclasses
import io
import itertools
import re
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.image
import numpy as np
import pytest
from helpers.pages import GIB, MIB, all_words, check_png, on_gpu, overlaps, parsed, some_buffer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxmem.hlo.buffers import Loop
from jaxmem.hlo.collectives import Collective
from jaxmem.report.memory import memory_report
from jaxmem.report.report import Lint, MemoryReport, Suggestion
from jaxmem.show import labels
from jaxmem.show.blocks import Bar, Part, lengths
from jaxmem.show.content import argument_groups, at_peak, split_bar
from jaxmem.show.html import html
from jaxmem.show.plot import plot_report
from jaxmem.show.text import plain
from jaxmem.show.words import cut, cut_source


def layer(h, w):
    with jax.named_scope("mlp"):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None


def step(params, batch):
    def loss(params):
        return jnp.sum(jax.lax.scan(layer, batch, params)[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - g, params, gradient)


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    """A real one, of a scan over layers with its gradient."""
    stacked = jax.ShapeDtypeStruct((12, 64, 64), "float32")
    params = {"up": stacked, "down": stacked}
    batch = jax.ShapeDtypeStruct((256, 64), "float32")
    found = memory_report(step, params, batch, donate_argnums=0)
    assert found.buffers
    assert found.timeline is not None
    return found


def too_large_for_tpu(report: MemoryReport) -> MemoryReport:
    return dataclasses.replace(
        report,
        target="v5e-16g",
        device="TPU v5 lite",
        platform="tpu",
        required_bytes=104 * GIB,
        argument_bytes=2 * GIB,
        output_bytes=0,
        alias_bytes=0,
        temp_bytes=102 * GIB,
        capacity_bytes=16 * GIB,
        default_capacity_bytes=16 * GIB,
        peak_bytes=None,
        matmul_flops=None,
        estimated_seconds=None,
        arguments={"params/w": 2 * GIB},
        buffers=(),
        timeline=None,
        suggestion=Suggestion("sqrt", 9 * GIB),
        advice="@jaxmem.remat_sqrt would, with 9.0 GiB",
        notes=("the compiler refused the program because it is too large",),
    )


# ---------------------------------------------------------------- text


def test_a_real_report_says_what_there_is(report):
    text = str(report)
    assert text.splitlines()[0] == report.verdict
    for words in ("memory\n", "arguments", "temporaries", "required", "live at the peak"):
        assert words in text
    assert re.search(r"params +[\d.]+ KiB  2 leaves", text)
    assert "f32[12,256,64]" in text
    assert "test_show.py:" in text
    assert "matrix products" in text
    assert text.rpartition("\n\n")[2].startswith("  compiled for cpu in ")
    assert f"jax {jax.__version__}" in text


def test_it_fits(report):
    text = plain(on_gpu(report))
    assert text.splitlines()[0].endswith("on h100-80g: fits")
    assert "| 75 %, jax's default" in text
    assert "at least 12.3 ms (roofline estimate, bf16 peak)" in text
    assert "compiled for h100-80g (NVIDIA H100 80GB HBM3) in" in text


def test_from_the_cache(report):
    text = plain(on_gpu(report, cached=True, flags={"xla_flag": "1"}))
    assert "from the cache" in text
    assert "xla_flag=1" in text


def test_it_does_not_fit(report):
    need = report.required_bytes
    small = on_gpu(report, capacity_bytes=need // 2, default_capacity_bytes=need // 4)
    text = plain(dataclasses.replace(small, advice="@jaxmem.remat_sqrt would, with 1.0 MiB"))
    assert "does not fit" in text.splitlines()[0]
    assert "@jaxmem.remat_sqrt would, with 1.0 MiB" in text.splitlines()[0]
    assert "200 % of" in text
    assert "400 % of the default" in text
    bar = text.splitlines()[2]
    assert re.fullmatch(r"  \[[^.\]]*\|[^.\]]*\][^.\]]*\]", bar), bar


def test_capacity_unknown(report):
    unknown = dataclasses.replace(report, capacity_bytes=None, default_capacity_bytes=None)
    text = plain(unknown)
    assert text.splitlines()[0].endswith("capacity unknown")
    assert "% of" not in text.partition("live at the peak")[0]


def test_too_large_for_a_tpu(report):
    text = plain(too_large_for_tpu(report))
    assert "needs 104.0 GiB of 16.0 GiB on v5e-16g: does not fit, 88.0 GiB too much" in text
    assert "@jaxmem.remat_sqrt would, with 9.0 GiB" in text
    assert "live at the peak" not in text
    assert "note: the compiler refused the program" in text


def test_sharded(report):
    text = plain(on_gpu(report, devices=8))
    assert "memory on each of 8 devices" in text


def sent(**changes: Any) -> Collective:
    fields: dict[str, Any] = {
        "kind": "all-gather",
        "bytes": 4 * MIB,
        "wire_bytes": 3 * MIB,
        "times": 8,
        "group_size": 4,
        "axes": ("fsdp",),
        "dtype": "bf16",
        "shape": (1024, 2048),
        "name": "params/up",
        "source": "model.py:12 (layer)",
        "module": "",
        "parameter": 0,
        "recomputed": False,
        "in_loop": True,
    }
    return Collective(**{**fields, **changes})


def test_collectives_with_sums_by_axis(report):
    others = [
        sent(kind="all-reduce", axes=("data",), times=k, name="dot_general", source="")
        for k in range(6, 0, -1)
    ]
    unknown = sent(kind="all-to-all", axes=(), times=1)
    shown = dataclasses.replace(report, devices=4, collectives=(sent(), *others, unknown))
    words = " ".join(plain(shown).split())
    # 24 MiB, then 18, 15, 12, 9 in the rows; 6, 3 and 3 in the rest.
    assert "sent by each device in one call: 90.0 MiB" in words
    assert "24.0 MiB 8 × all-gather fsdp bf16[1024,2048] params/up model.py:12" in words
    assert "12.0 MiB 3 more" in words
    assert "63.0 MiB over data, 24.0 MiB over fsdp, 3.0 MiB over groups of 4; by" in words
    assert "by each device" not in plain(dataclasses.replace(report, collectives=()))
    assert "sent by each device in one call: 90.0 MiB" in html(shown)
    assert all(len(line) <= 80 for line in plain(shown).splitlines()[1:])


def test_lints_come_with_their_remedies(report):
    lint = Lint("not-donated", "nothing is donated", "donate params with donate_argnums=")
    text = plain(on_gpu(report, lints=(lint,)))
    assert "! nothing is donated\n  -> donate params with donate_argnums=" in text


def test_recompute_and_places(report):
    buffers = (some_buffer(place="host"), some_buffer(place="on-chip", bytes=MIB, name="dot"))
    text = plain(
        on_gpu(
            report,
            matmul_flops=400,
            model_matmul_flops=300,
            host_bytes=GIB,
            on_chip_bytes=MIB,
            buffers=buffers,
        ),
        width=100,
    )
    assert "+33 % matmul FLOPs over the model's" in text
    assert "Encoder/Block_0/tanh (host)" in text
    assert "Encoder/Block_0/dot (on-chip)" in text
    assert "on the host" in text
    assert "not part of the sum" in text


def test_arguments_are_summed_and_what_is_not_read_is_said(report):
    arguments = {"params/a": MIB, "params/b": 2 * MIB, "batch": MIB, "unused": 0, "opt/m": 0}
    arguments["opt/v"] = 5
    found = argument_groups(dataclasses.replace(report, arguments=arguments))
    assert found == [
        ("params", 3 * MIB, "2 leaves"),
        ("batch", MIB, ""),
        ("opt", 5, "2 leaves, 1 of them not read, or not on the device"),
        ("unused", 0, "not read, or not on the device"),
    ]


def test_alike_buffers_are_one_row_and_the_rest_a_sum(report):
    buffers = (*[some_buffer()] * 3, *[some_buffer(name=f"n{k}", bytes=MIB) for k in range(20)])
    changed = on_gpu(report, buffers=buffers)
    assert at_peak(changed)[0].type == "3 × bf16[24,8,1024,4096]"
    assert at_peak(changed)[0].bytes == 3 * GIB
    assert re.search(r"11\.0 MiB +11 more", plain(changed))


@pytest.mark.parametrize("width", [40, 56, 80, 120])
def test_no_line_is_wider_than_the_page(report, width):
    lint = Lint("x", "a long sentence about memory " * 5, "a remedy of many words " * 4)
    long = some_buffer(name="a/very/long/name" * 9, source="a_long_file.py:1234 (function)")
    changed = on_gpu(report, buffers=(long, *report.buffers), lints=(lint,))
    lines = plain(changed, width).splitlines()[1:]
    assert max(map(len, lines)) <= width, [line for line in lines if len(line) > width]
    if width == 80:
        assert any("…" in line for line in lines)
        assert any("a_long_file.py:1234" in line for line in lines)


def test_plain_text_lives_through_a_pipe(report):
    text = plain(on_gpu(report, buffers=(some_buffer(name="a\x1b[31mb\nc\u2028d"),)))
    assert "a?[31mb c d" in text
    assert set(re.sub(r"[ -~\n]", "", text)) <= set("…×µ–→")


NAMES = st.text(max_size=30)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(NAMES, NAMES, st.integers(0, 2**45)), max_size=15),
    width=st.integers(40, 150),
    capacity=st.none() | st.integers(1, 2**45),
)
def test_any_names_and_sizes_can_be_shown(report, rows, width, capacity):
    buffers = tuple(some_buffer(name=n, source=s, bytes=count, shape=()) for n, s, count in rows)
    changed = on_gpu(report, buffers=buffers, capacity_bytes=capacity)
    lines = plain(changed, width).splitlines()
    assert all(len(line) <= width for line in lines[1:])
    assert sum(part.bytes for part in split_bar(changed).parts) == sum(
        max(count, 0)
        for count in (
            changed.argument_bytes,
            changed.output_bytes - changed.alias_bytes,
            changed.temp_bytes,
        )
    )


@given(sizes=st.lists(st.integers(0, 2**40), min_size=1, max_size=9), width=st.integers(10, 200))
def test_a_bar_is_as_long_as_it_says(sizes, width):
    bar = Bar(tuple(Part("", size, "argument") for size in sizes), capacity=2**41)
    found = lengths(bar, width)
    assert min(found) >= 0
    assert abs(sum(found) - width * sum(sizes) / bar.whole) <= 1


@given(text=NAMES, width=st.integers(0, 40))
def test_cut_is_never_longer(text, width):
    for shorter in (cut(text, width), cut_source(f"{text}.py:12 ({text})", width)):
        assert len(shorter) <= width
    assert len(text) > width or cut(text, width) == text


# ---------------------------------------------------------------- rich


def rich_text(shown: Any, width: int = 80, **how: Any) -> str:
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True, **how)
    console.print(shown)
    return console.export_text(styles=how.get("color_system") is not None)


def test_rich_says_the_same_without_reading_names_as_markup(report):
    lint = Lint("x", "a [bold]fact[/bold]", "a [red]remedy")
    changed = on_gpu(report, buffers=(some_buffer(name="[blink]x[/blink]"),), lints=(lint,))
    text = rich_text(changed, width=100)
    assert "[blink]x[/blink]" in text
    assert "a [bold]fact[/bold]" in text
    assert "bf16[24,8,1024,4096]" in text
    wanted = [line.strip() for line in plain(changed, 100).splitlines()[4:] if line.strip()]
    shown = [line.strip() for line in text.splitlines()]
    assert [line for line in wanted if line not in shown] == []


@pytest.mark.parametrize(
    ("capacity", "default", "colour"),
    [(80 * GIB, 60 * GIB, "32m"), (80 * GIB, 1, "33m"), (2, 1, "31m"), (None, None, "33m")],
    ids=["fits", "not by default", "does not fit", "unknown"],
)
def test_the_verdict_has_a_colour(report, capacity, default, colour):
    changed = on_gpu(report, capacity_bytes=capacity, default_capacity_bytes=default)
    assert rich_text(changed, color_system="standard").startswith(f"\x1b[1;{colour}")


@pytest.mark.parametrize("width", [50, 80, 132])
def test_rich_keeps_to_the_terminal(report, width):
    lines = rich_text(on_gpu(report, lints=(Lint("x", "word " * 60, "word " * 60),)), width)
    assert max(map(len, lines.splitlines())) <= width


# ---------------------------------------------------------------- a notebook


def test_html_is_one_closed_fragment_that_fetches_nothing(report):
    unknown = dataclasses.replace(report, capacity_bytes=None, default_capacity_bytes=None)
    small = on_gpu(report, capacity_bytes=10, default_capacity_bytes=8)
    for shown in (report, on_gpu(report), small, unknown, too_large_for_tpu(report)):
        found = parsed(shown._repr_html_())
        tags = {tag for tag, _ in found.seen}
        assert {"svg", "title", "desc", "details", "table"} <= tags
        assert not tags & {"script", "link", "style", "img", "iframe", "object"}
        for _, attributes in found.seen:
            assert not {"src", "href", "xlink:href", "onload", "id", "class"} & set(attributes)
            assert "url(" not in (attributes.get("style") or "")
        assert "http" not in shown._repr_html_()
        assert shown.verdict in found.text


def test_html_escapes_everything(report):
    evil = "<script>alert('x')</script>&\""
    lint = Lint("x", evil, evil)
    changed = on_gpu(
        report,
        buffers=(some_buffer(name=evil, source=evil, bytes=1),),
        arguments={evil: report.argument_bytes},
        lints=(lint,),
        notes=(evil,),
        target=evil,
        advice=evil,
        versions={evil: evil},
    )
    text = changed._repr_html_()
    assert "<script" not in text
    assert evil in parsed(text).text


def test_the_svg_has_the_parts_the_capacity_and_the_mark(report):
    changed = on_gpu(report, capacity_bytes=2 * report.required_bytes)
    changed = dataclasses.replace(changed, default_capacity_bytes=3 * report.required_bytes // 2)
    svg = re.search(r"<svg.*</svg>", html(changed))
    assert svg
    root = ElementTree.fromstring(svg[0].replace("<svg", '<svg xmlns="s"', 1))
    assert [child.tag for child in root][:2] == ["{s}title", "{s}desc"]
    bars = [r for r in root.iter("{s}rect") if r.find("{s}title") is not None]
    assert len(bars) == len(split_bar(changed).parts)
    right = max(float(r.attrib["x"]) + float(r.attrib["width"]) for r in bars)
    assert right == pytest.approx(360, abs=2)
    starts = sorted(float(p.attrib["d"][1:].split()[0]) for p in root.iter("{s}path"))
    assert starts == pytest.approx([540, 719], abs=1)
    assert "75 %, jax's default" in "".join(root.itertext())


# ---------------------------------------------------------------- the picture


def test_plot_writes_png_and_svg(report, tmp_path):
    settings = dict(matplotlib.rcParams)
    figure = report.plot(tmp_path / "a.png")
    report.plot(tmp_path / "a.svg")
    check_png(tmp_path / "a.png", 2000)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.tag.endswith("svg")
    assert dict(matplotlib.rcParams) == settings
    assert overlaps(figure) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.svg"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_plot_names_peak_loops_and_buffers(report):
    timeline = dataclasses.replace(
        report.timeline,
        loops=(
            Loop(5, 60, 12, "outer"),
            Loop(10, 20, None, "inner"),
            Loop(22, 24, 3, "a loop whose name is longer than its place"),
        ),
        length=max(report.timeline.length, 70),
    )
    figure = plot_report(on_gpu(report, timeline=timeline))
    words = all_words(figure)
    assert "outer × 12" in words
    assert "inner × ?" in words
    assert "f32[12,256,64]  test_show.py:" in words
    assert "peak " in words
    assert "↑ capacity 80.0 GiB" in words
    assert overlaps(figure) == []


@pytest.mark.parametrize("share", [0.4, 0.9, 1.02, 1.3])
def test_plot_draws_a_capacity_near_by_without_overlaps(report, share):
    changed = on_gpu(report, capacity_bytes=int(share * report.required_bytes))
    required = int(1.05 * report.required_bytes)
    figure = plot_report(dataclasses.replace(changed, required_bytes=required))
    assert "\ncapacity " in all_words(figure)
    assert overlaps(figure) == []


def test_plot_of_names_with_signs_of_mathematics(report, tmp_path):
    buffers = tuple(some_buffer(name=f"$x_{k}^{{$ \\frac", bytes=MIB) for k in range(12))
    figure = plot_report(on_gpu(report, buffers=buffers, target="a$b$"), tmp_path / "a.svg")
    assert overlaps(figure) == []


def test_plot_does_not_depend_on_a_style_outside(report, tmp_path):
    report.plot(tmp_path / "a.png", dpi=60)
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "text.usetex": True}):
        report.plot(tmp_path / "b.png", dpi=60)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_plot_says_what_is_missing(report, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="the report for v5e-16g has no timeline"):
        too_large_for_tpu(report).plot()
    empty = dataclasses.replace(report.timeline, steps=(), bytes=(), length=0)
    with pytest.raises(ValueError, match="no timeline"):
        dataclasses.replace(report, timeline=empty).plot()
    with pytest.raises(ValueError, match=r"PNG or SVG.*got '.*a\.pdf'"):
        report.plot(tmp_path / "a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxmem\[plot\]'"):
        report.plot()


def test_a_picture_that_cannot_be_written_leaves_the_old_one(report, tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        report.plot(tmp_path / "a.png", dpi=50)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_bytes() == b"old"


@pytest.mark.slow
def test_pyplot_is_never_imported(report, tmp_path):
    (tmp_path / "r.json").write_text(report.to_json())
    code = (
        "import sys, pathlib; from jaxmem.report.report import MemoryReport as R; "
        f"r = R.from_json(pathlib.Path({str(tmp_path / 'r.json')!r}).read_text()); "
        f"r.plot({str(tmp_path / 'a.png')!r}, dpi=50); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "a.png").stat().st_size > 1000


# ---------------------------------------------------------------- where labels go


@given(
    wanted=st.lists(st.floats(0, 100), max_size=12).map(sorted),
    height=st.floats(0.5, 8),
)
def test_spread_labels_stay_in_order_and_apart(wanted, height):
    found = labels.spread(wanted, [height] * len(wanted), 0, 100)
    assert all(b - a >= height - 1e-6 for a, b in itertools.pairwise(found))
    if found:
        assert found[0] >= height / 2 - 1e-6
        assert found[-1] <= 100 - height / 2 + 1e-6
    if all(
        b - a >= height for a, b in itertools.pairwise([-height / 2, *wanted, 100 + height / 2])
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_rows_hold_no_two_that_meet(given):
    spans = [(start, start + length) for start, length in given]
    found = labels.rows(spans, 1)
    for (k, a), (m, b) in itertools.combinations(enumerate(spans), 2):
        if found[k] == found[m]:
            assert a[1] + 1 <= b[0] or b[1] + 1 <= a[0]


def test_around_keeps_off_points_and_other_labels():
    points = [(100.0, 100.0), (104.0, 100.0), (100.0, 108.0), (180.0, 190.0)]
    sizes = [(40.0, 12.0)] * 4
    found = labels.around(points, sizes, (0, 0, 200, 200))
    boxes = [(x - 20, y - 6, x + 20, y + 6) for x, y in found]
    for a, b in itertools.combinations(boxes, 2):
        assert labels._common(a, b) == 0
    for box in boxes:
        assert labels._outside(box, (0, 0, 200, 200)) == 0
        assert not any(box[0] < x < box[2] and box[1] < y < box[3] for x, y in points)
