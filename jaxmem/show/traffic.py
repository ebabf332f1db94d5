"""A picture of what fusion saves, line by line, and of the roofline of the step."""

import math
import os
from typing import TYPE_CHECKING

from jaxmem._util.text import size
from jaxmem.show.figure import (
    FAINT,
    GREY,
    INK,
    check_path,
    matplotlib_defaults,
    new_figure,
    plain_axes,
    put,
    unit_of,
    width_of,
    write,
)
from jaxmem.show.fusions import ratio
from jaxmem.show.words import clean, cut, cut_source, flops, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxmem.hlo.fusions import Fusions
    from jaxmem.report.report import MemoryReport
    from jaxmem.report.roofline import Roofline

# Colours that colour-blind readers can distinguish (Okabe and Ito).
MOVED, ALONE, COMPUTE, SENT = "#0072B2", "#D9D9D9", "#009E73", "#E69F00"

# ---------------------------------------------------------------- API


def plot_fusions(
    report: "MemoryReport",
    path: str | os.PathLike[str] | None = None,
    *,
    most: int = 12,
    inches: tuple[float, float] = (11.0, 5.6),
    dpi: int = 200,
) -> "Figure":
    """Draw the bytes that each source line moves, with and without fusion, and the roofline.

    Args:
      report: of a program whose compiler gave its text.
      path: where to write it, as PNG or SVG by its suffix; None to not write it.
      most: how many lines to show, the rest of them in one bar.
      inches: width and height; text keeps its size.
      dpi: dots per inch of a PNG.

    Returns:
      The figure, for `savefig` or for a notebook to display.

    Raises:
      ImportError: matplotlib is not installed; the message says how to install it.
      ValueError: the report has no kernels, or the file is neither PNG nor SVG.
    """
    file = check_path(path)
    found = report.fusions
    if found is None or not found.kernels:
        raise ValueError(
            f"the report for {report.target} has no kernels to draw: the compiler gave no text of "
            "the program, or the program moves nothing; a report written by an older jaxmem, or a "
            "row of a sweep, does not hold them either: make it again with jaxmem.memory_report"
        )
    with matplotlib_defaults():
        figure = new_figure(*inches, dpi)
        put(figure, 0.012, 0.975, _title(report, found), 10.5, va="top", weight="bold")
        roofline = report.roofline
        width = 0.33 if roofline else 0.66
        _draw_lines(figure, figure.add_axes((0.215, 0.1, width, 0.74)), found, most)
        if roofline:
            _draw_roof(figure.add_axes((0.665, 0.5, 0.315, 0.34)), roofline, found, report.target)
            _draw_times(figure.add_axes((0.725, 0.1, 0.255, 0.22)), roofline, found)
        write(figure, file)
    return figure


# ---------------------------------------------------------------- lines


def _title(report: "MemoryReport", found: "Fusions") -> str:
    each = " per device" if report.devices > 1 else ""
    text = f"{report.target}: moved in one call{each} {size(found.bytes)}, "
    return f"{text}without fusion {size(found.separate_bytes)}" + (
        f" ({ratio(found.separate_bytes, found.bytes)} times as much)" if found.bytes else ""
    )


def _draw_lines(figure: "Figure", axes: "Axes", found: "Fusions", most: int) -> None:
    """A pair of bars for each line: above without fusion, below with it."""
    lines = found.lines
    bars = [(line.source or "no line", line.bytes, line.separate_bytes) for line in lines[:most]]
    if rest := lines[most:]:
        sums = sum(line.bytes for line in rest), sum(line.separate_bytes for line in rest)
        bars.append((f"{len(rest)} more lines", *sums))
    longest = max(max(moved, alone) for _, moved, alone in bars)
    unit, name = unit_of(longest)
    plain_axes(axes)
    points = 8.0 if len(bars) < 16 else 6.5
    for row, (_, moved, alone) in enumerate(bars):
        for at, count, colour in ((row - 0.2, alone, ALONE), (row + 0.2, moved, MOVED)):
            axes.barh(at, count / unit, height=0.38, color=colour, linewidth=0)
            put(axes, (count + 0.012 * longest) / unit, at, size(count), points - 1.5,
                va="center", color=GREY)  # fmt: skip
    axes.set_xlim(0, 1.22 * longest / unit)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    room = axes.get_position().x0 * figure.get_figwidth() * figure.dpi - 14 * figure.dpi / 72
    labels = [_fitting(figure, clean(source), points, room) for source, *_ in bars]
    axes.set_yticks(range(len(bars)), labels, fontsize=points, parse_math=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"read and written in one call ({name})", fontsize=9, color=INK)
    axes.set_title("by line", loc="left", fontsize=9.5, fontweight="bold", color=INK)
    from matplotlib.patches import Patch

    entries = (("each operation a kernel", ALONE), ("as compiled", MOVED))
    handles = [Patch(color=colour, label=label) for label, colour in entries]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2, frameon=False,
        fontsize=8, handlelength=1.0, borderpad=0.1, columnspacing=1.0,
    )  # fmt: skip


def _fitting(figure: "Figure", text: str, points: float, room: float) -> str:
    """A source line, shortened to so many pixels."""
    for length in range(len(text), 4, -1):
        short = cut_source(text, length)
        if width_of(figure, short, points) <= room:
            return short
    return cut(text, 5)


# ---------------------------------------------------------------- roofline


def _draw_roof(axes: "Axes", roofline: "Roofline", found: "Fusions", target: str) -> None:
    """Reachable speed against arithmetic intensity, and where the program is."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_axes(axes)
    peak, ridge = roofline.peak_flops, roofline.ridge
    places = [(roofline.intensity, "as compiled", MOVED)]
    if found.separate_bytes and roofline.matmul_flops:
        places.append((roofline.matmul_flops / found.separate_bytes, "unfused", GREY))
    known = [(x, words, colour) for x, words, colour in places if x]
    low = min([ridge / 30, *(x / 3 for x, *_ in known)])
    high = max([ridge * 30, *(x * 3 for x, *_ in known)])
    axes.plot([low, ridge, high], [peak * low / ridge, peak, peak], color=INK, lw=1.2)
    axes.axvline(ridge, color=FAINT, lw=0.9, zorder=0)
    axes.set_xlim(low, high)
    axes.set_ylim(peak * low / ridge / 1.5, peak * 5)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    for x, words, colour in known:
        y = min(peak, peak * x / ridge)
        axes.plot([x], [y], "o", ms=6, color=colour, zorder=5)
        # Below and to the right of the roof there is room, at its right end to the left.
        is_right = math.log(x / low) > 0.62 * math.log(high / low)
        step, side = (0.88, "right") if is_right else (1.14, "left")
        how = {"ha": side, "va": "center", "color": colour, "bbox": box}
        put(axes, x * step, y / 1.9, f"{words}: {_number(x)}", 8, **how)
    words = f"{target}: {flops(peak)}/s, from {_number(ridge)} FLOP/B on"
    middle = math.sqrt(low * high)
    put(axes, middle, peak * 2.0, words, 8, ha="center", va="center", color=GREY, bbox=box)
    axes.tick_params(labelsize=8)
    axes.minorticks_off()
    axes.set_xlabel("matmul FLOPs per byte moved", fontsize=8.5, color=INK)
    axes.set_ylabel("FLOP/s at most", fontsize=8.5, color=INK)
    axes.set_title("roofline of the step", loc="left", fontsize=9.5, fontweight="bold", color=INK)


def _draw_times(axes: "Axes", roofline: "Roofline", found: "Fusions") -> None:
    """How long each of the three takes at the target's peaks."""
    rows: list[tuple[str, float, str]] = [
        ("matmuls", roofline.compute_seconds, COMPUTE),
        ("memory", roofline.memory_seconds, MOVED),
        ("memory, unfused", found.separate_bytes / roofline.bandwidth, ALONE),
    ]
    if roofline.communication_seconds:
        rows.insert(2, ("communication", roofline.communication_seconds, SENT))
    longest = max(time for _, time, _ in rows) or 1.0
    plain_axes(axes)
    for row, (_, time, colour) in enumerate(rows):
        axes.barh(row, time, height=0.62, color=colour, linewidth=0)
        put(axes, time + 0.02 * longest, row, seconds(time), 8, va="center")
    axes.set_xlim(0, 1.3 * longest)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=8)
    axes.set_xticks([])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    title = f"time at the target's peaks: bound by {_BOUND[roofline.bound]}"
    axes.set_title(title, loc="right", fontsize=9, fontweight="bold", color=INK)


_BOUND = {"compute": "matmuls", "memory": "memory", "communication": "communication"}


def _number(value: float) -> str:
    return f"{value:.3g}"
