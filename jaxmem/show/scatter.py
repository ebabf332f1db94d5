"""A picture of a comparison: required memory against recomputation, with the Pareto front."""

import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmem._util.text import size
from jaxmem.show.figure import (
    BAD,
    GREY,
    INK,
    check_path,
    matplotlib_defaults,
    new_figure,
    plain_axes,
    renderer,
    unit_of,
    write,
)
from jaxmem.show.labels import Box, around
from jaxmem.show.table import name_of
from jaxmem.show.words import clean, cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxmem.report.compare import Comparison

# ---------------------------------------------------------------- API


def plot_comparison(
    comparison: "Comparison",
    path: str | os.PathLike[str] | None = None,
    *,
    inches: tuple[float, float] = (8.0, 5.0),
    dpi: int = 200,
) -> "Figure":
    """Draw each report as a point: memory on the x axis, recomputed matmul FLOPs on the y axis.

    Filled points fit, hollow ones do not; a line joins those on the Pareto front,
    separately for each batch where keys are pairs.

        Args:
          comparison: of reports, at least one of them with known matmul FLOPs.
          path: where to write it, as PNG or SVG by its suffix; None to not write it.
          inches: width and height; text keeps its size.
          dpi: dots per inch of a PNG.

        Raises:
          ImportError: matplotlib is not installed; the message says how to install it.
          ValueError: the matmul FLOPs of no report are known, or the file is neither PNG nor SVG.
    """
    file = check_path(path)
    keys = [key for key, report in comparison.reports.items() if report.matmul_flops is not None]
    if not keys:
        raise ValueError(
            "the matmul FLOPs of no compiled program are known, so there is nothing to draw "
            "against memory (a program that the compiler refuses has none); str(comparison) lists "
            "what is known"
        )
    with matplotlib_defaults():
        figure = new_figure(*inches, dpi)
        left_out = len(comparison.reports) - len(keys)
        axes = figure.add_axes((0.1, 0.13 + 0.03 * (left_out > 0), 0.87, 0.72))
        _draw(comparison, keys, axes)
        if left_out:
            names = ", ".join(name_of(k) for k in comparison.reports if k not in keys)
            words = cut(f"not drawn, matmul FLOPs unknown: {names}", 120)
            figure.text(0.015, 0.02, words, fontsize=8, color=GREY, parse_math=False)
        write(figure, file)
    return figure


# ---------------------------------------------------------------- implementation

_SERIES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#8C6D00", "v"),
    ("#56B4E9", "P"),
)


def _draw(comparison: "Comparison", keys: list[Any], axes: "Axes") -> None:
    reports = comparison.reports
    memory = np.array([reports[key].required_bytes for key in keys], float)
    overheads = [reports[key].recompute_overhead for key in keys]
    relative = all(overhead is not None for overhead in overheads)
    work = np.array(
        [100 * (o or 0) for o in overheads]
        if relative
        else [(reports[key].matmul_flops or 0) / 1e12 for key in keys]
    )
    unit, name = unit_of(memory.max())
    memory = memory / unit
    capacity = comparison.capacity_bytes and comparison.capacity_bytes / unit
    near = capacity is not None and capacity <= 1.6 * memory.max()
    _scale(axes, memory, work, capacity if near else None)
    each = " per device" if any(report.devices > 1 for report in reports.values()) else ""
    axes.set_xlabel(f"required memory{each} ({name})", fontsize=9.5)
    axes.set_ylabel(
        "recomputed matmul FLOPs, % of the model's" if relative else "matmul FLOPs (TFLOP)",
        fontsize=9.5,
    )
    taken = _capacity(comparison, axes, capacity, near)
    batches = list(dict.fromkeys(key[1] for key in keys)) if comparison.pairs else [None]
    front = comparison.pareto
    for series, batch in enumerate(batches):
        mine = [k for k, key in enumerate(keys) if batch is None or key[1] == batch]
        colour, marker = _SERIES[series % len(_SERIES)]
        best = sorted((memory[k], work[k]) for k in mine if keys[k] in front)
        xs, ys = [x for x, _ in best], [y for _, y in best]
        axes.plot(xs, ys, drawstyle="steps-post", color=colour, lw=1.4, alpha=0.55, zorder=2)
        taken += _stairs(axes, best)
        for k in mine:
            fits, on = reports[keys[k]].fits is not False, keys[k] in front
            face = colour if fits else "white"
            axes.plot(
                [memory[k]],
                [work[k]],
                marker,
                ms=8 if on else 6.5,
                color=colour,
                mfc=face,
                mew=1.4,
                alpha=1 if on else 0.55,
                zorder=3,
            )
    _legend(comparison, axes, batches)
    _names(keys, comparison, axes, memory, work, taken)


def _scale(axes: "Axes", memory: Any, work: Any, capacity: float | None) -> None:
    """Set limits with room for labels; a logarithmic memory axis where the range is wide."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    plain_axes(axes)
    axes.grid(color="#efefef", linewidth=0.8)
    axes.set_axisbelow(True)
    low, high = memory.min(), max(memory.max(), capacity or 0)
    if high > 12 * low > 0:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.45, high * 1.35)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, 1.14 * high)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    span = max(work.max() - min(work.min(), 0), 0.02 * abs(work.max()), 1e-9)
    span = max(span, 10.0) if work.max() < 10 and work.min() >= 0 else span
    axes.set_ylim(
        min(work.min(), 0) - 0.09 * span, max(work.max(), work.min() + span) + 0.13 * span
    )


def _capacity(
    comparison: "Comparison", axes: "Axes", capacity: float | None, near: bool
) -> list[Box]:
    """Draw the capacity, or a note that it lies beyond; return the boxes covered, in pixels."""
    title = f"memory against recomputation on {comparison.target}"
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", parse_math=False, pad=22)
    if capacity is None or comparison.capacity_bytes is None:
        return []
    words = f"capacity {size(comparison.capacity_bytes)}"
    how: dict[str, Any] = {"fontsize": 8.5, "color": BAD, "textcoords": "offset points"}
    if not near:
        beyond = f"{words} lies beyond →"
        axes.annotate(beyond, (1, 1), xycoords="axes fraction", xytext=(0, 24), ha="right", **how)
        return []
    axes.axvspan(capacity, axes.get_xlim()[1], color=BAD, alpha=0.05, lw=0)
    axes.axvline(capacity, color=BAD, lw=1.2)
    at = {"xycoords": ("data", "axes fraction"), "xytext": (-3, -4), "rotation": 90}
    text = axes.annotate(words, (capacity, 1), ha="right", va="top", **at, **how)
    x, box = axes.transData.transform((capacity, 0))[0], axes.get_window_extent()
    figure: Any = axes.figure
    own = text.get_window_extent(renderer(figure))
    return [(x - 3, box.y0, x + 3, box.y1), (own.x0, own.y0, own.x1, own.y1)]


def _stairs(axes: "Axes", best: list[tuple[float, float]]) -> list[Box]:
    """Draw the line of a front; return the boxes that labels must avoid, in pixels."""
    corners = []
    for (x, y), (x2, _) in itertools.pairwise(best):
        corners += [((x, y), (x2, y))]
    for (_, y), (x2, y2) in itertools.pairwise(best):
        corners += [((x2, y), (x2, y2))]
    found: list[Box] = []
    for start, end in corners:
        (ax, ay), (bx, by) = axes.transData.transform(start), axes.transData.transform(end)
        found.append((min(ax, bx) - 2, min(ay, by) - 2, max(ax, bx) + 2, max(ay, by) + 2))
    return found


def _legend(comparison: "Comparison", axes: "Axes", batches: list[Any]) -> None:
    from matplotlib.lines import Line2D

    def sign(colour: str, label: str, **how: Any) -> Line2D:
        return Line2D([], [], color=colour, ms=7, label=label, **how)

    handles = [
        sign(colour, cut(clean(f"batch {batch}"), 16), marker=marker, ls="none")
        for batch, (colour, marker) in zip(batches, itertools.cycle(_SERIES), strict=False)
        if batch is not None
    ]
    grey = "#555555" if len(batches) > 1 else _SERIES[0][0]
    fits = {report.fits for report in comparison.reports.values()}
    if True in fits and False in fits:
        handles.append(sign(grey, "fits", marker="o", ls="none"))
        handles.append(sign(grey, "does not fit", marker="o", ls="none", mfc="white"))
    handles.append(sign(grey, "Pareto front", lw=1.4, alpha=0.7))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.995),
        ncols=9,
        frameon=False,
        fontsize=8.5,
        handletextpad=0.4,
        columnspacing=1.2,
        borderaxespad=0.2,
        labelcolor=INK,
    )


def _names(
    keys: list[Any],
    comparison: "Comparison",
    axes: "Axes",
    memory: Any,
    work: Any,
    taken: list[Box],
) -> None:
    """Label each point; a thin line joins a distant label to its point."""
    figure: Any = axes.figure
    draw, pixel = renderer(figure), figure.dpi / 72
    points = [tuple(p) for p in axes.transData.transform(np.column_stack([memory, work]))]
    texts, sizes = [], []
    for key in keys:
        words = clean(str(key[0] if comparison.pairs else key))
        text = axes.text(0, 0, cut(words, 28), fontsize=9, color=INK, parse_math=False, zorder=4)
        box = text.get_window_extent(draw)
        texts.append(text)
        sizes.append((box.width + 3 * pixel, box.height + 2 * pixel))
    box = axes.get_window_extent()
    inside = (box.x0 + 2, box.y0 + 2, box.x1, box.y1)
    centres = around(points, sizes, inside, taken, radius=5.5 * pixel, pixel=pixel)
    back = axes.transData.inverted()
    for text, (x, y), point, (width, height) in zip(texts, centres, points, sizes, strict=True):
        at = back.transform((x, y))
        text.set_position(at)
        text.set_ha("center")
        text.set_va("center")
        gap_x = max(abs(x - point[0]) - width / 2, 0)
        gap_y = max(abs(y - point[1]) - height / 2, 0)
        if np.hypot(gap_x, gap_y) > 7 * pixel:
            end = back.transform(
                (
                    np.clip(point[0], x - width / 2, x + width / 2),
                    np.clip(point[1], y - height / 2, y + height / 2),
                )
            )
            start = back.transform(point)
            axes.plot([start[0], end[0]], [start[1], end[1]], color="#aaaaaa", lw=0.8, zorder=1)
