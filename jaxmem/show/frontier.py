"""A picture of a frontier: recomputed matmul FLOPs against required memory."""

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
    put,
    renderer,
    unit_of,
    write,
)
from jaxmem.show.labels import Box, around

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxmem.fitting.frontier import Frontier, FrontierPoint

# ---------------------------------------------------------------- API


def plot_frontier(
    frontier: "Frontier",
    path: str | os.PathLike[str] | None = None,
    *,
    title: str = "",
    inches: tuple[float, float] = (8.0, 5.0),
    dpi: int = 200,
) -> "Figure":
    """Draw required memory on the x axis, recomputed matmul FLOPs on the y axis.

    The line joins the plans on the Pareto front; between them `jaxmem.fit` reaches the line or
    better.  Dominated plans are small and grey; plans that are too large for the device are
    hollow.

        Args:
          frontier: of at least one plan whose matmul FLOPs are known.
          path: where to write it, as PNG or SVG by its suffix; None to not write it.
          title: above the picture; by default the memory saved for little recomputation.
          inches: width and height; text keeps its size.
          dpi: dots per inch of a PNG.

        Raises:
          ImportError: matplotlib is not installed; the message says how to install it.
          ValueError: the matmul FLOPs of no plan are known, or the file is neither PNG nor SVG.
    """
    file = check_path(path)
    known = [point for point in frontier.points if point.recompute_overhead is not None]
    if not known:
        raise ValueError(
            "the matmul FLOPs of no plan are known (the step has no matrix products, or its "
            "compiler gave no text of the program), so there is nothing to draw against memory; "
            "str(frontier) lists what is known"
        )
    with matplotlib_defaults():
        figure = new_figure(*inches, dpi)
        left_out = len(frontier.points) - len(known)
        axes = figure.add_axes((0.09, 0.125 + 0.03 * (left_out > 0), 0.88, 0.765))
        words = title or bargain(frontier)
        axes.set_title(words, loc="left", fontsize=10.5, fontweight="bold", parse_math=False)
        _draw(frontier, known, axes)
        if left_out:
            words = f"not drawn: {left_out} plans too large to compile, matmul FLOPs unknown"
            put(figure, 0.015, 0.02, words, 8, color=GREY)
        write(figure, file)
    return figure


def bargain(frontier: "Frontier") -> str:
    """One line: the memory saved for at most a twentieth extra matmul FLOPs."""
    most = max(frontier.points, key=lambda point: point.required_bytes)
    cheap = [p for p in frontier.points if (p.recompute_overhead or 0) <= 0.05]
    best = min(cheap or [most], key=lambda point: point.required_bytes)
    if best is most:
        return f"memory against recomputation on {frontier.target}"
    share = 100 * (best.recompute_overhead or 0)
    work = f"for {share:.1f} % extra matmul FLOPs" if share >= 0.05 else "for no extra matmul FLOPs"
    return (
        f"{frontier.target}: {size(most.required_bytes)} become {size(best.required_bytes)} {work}"
    )


# ---------------------------------------------------------------- implementation

_OURS = "#0072B2"


def memory_axes(
    axes: "Axes", memory: Any, work: Any, capacity: int | None, each: str = ""
) -> float:
    """Axes for bytes (x) and percent (y), with room for labels; and the bytes of the unit.

    Args:
      memory: bytes.
      work: percents.
      capacity: of the device; drawn as a line unless it is far beyond the data.
      each: " per device", where there are several.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    plain_axes(axes)
    axes.grid(color="#efefef", linewidth=0.8)
    axes.set_axisbelow(True)
    near = capacity is not None and capacity <= 1.3 * max(memory)
    unit, name = unit_of(max(memory))
    low, high = min(memory) / unit, max(*memory, capacity if near and capacity else 0) / unit
    if high > 4 * low > 0:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.25, high * 1.3)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, 1.12 * high)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    top = max(*work, 5.0)
    axes.set_ylim(-0.05 * top, 1.12 * top)
    axes.set_xlabel(f"required memory{each} ({name})", fontsize=9.5)
    axes.set_ylabel("recomputed matmul FLOPs, % of the model's", fontsize=9.5)
    if near and capacity:
        axes.axvspan(capacity / unit, axes.get_xlim()[1], color=BAD, alpha=0.05, lw=0)
        axes.axvline(capacity / unit, color=BAD, lw=1.2)
        words = f"capacity {size(capacity)}"
        at: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "rotation": 90}
        put(axes, capacity / unit, 0.98, words + " ", 8.5, color=BAD, ha="right", va="top", **at)
    return unit


def stairs(axes: "Axes", front: list[tuple[float, float]]) -> list[Box]:
    """Draw the line of a front; return the boxes that labels must avoid, in pixels.

    Args:
      front: memory, in the axes' unit, and work; in any order.
    """
    front = sorted(front)
    xs, ys = [x for x, _ in front], [y for _, y in front]
    axes.plot(xs, ys, drawstyle="steps-post", color=_OURS, lw=1.6, alpha=0.6, zorder=2)
    taken: list[Box] = []
    for (x, y), (x2, y2) in itertools.pairwise(front):
        for start, end in (((x, y), (x2, y)), ((x2, y), (x2, y2))):
            (ax, ay), (bx, by) = axes.transData.transform(start), axes.transData.transform(end)
            taken.append((min(ax, bx) - 2, min(ay, by) - 2, max(ax, bx) + 2, max(ay, by) + 2))
    return taken


def label(
    axes: "Axes",
    points: list[tuple[float, float]],
    words: list[str],
    taken: list[Box],
    colours: list[str] | None = None,
) -> None:
    """Label points without overlaps; a thin line joins a distant label to its point."""
    figure: Any = axes.figure
    draw, pixel = renderer(figure), figure.dpi / 72
    places = [tuple(place) for place in axes.transData.transform(np.array(points))]
    texts, sizes = [], []
    for text, colour in zip(words, colours or [INK] * len(words), strict=True):
        drawn = put(axes, 0, 0, text, 8.5, color=colour, zorder=5, ha="center", va="center")
        box = drawn.get_window_extent(draw)
        texts.append(drawn)
        sizes.append((box.width + 3 * pixel, box.height + 2 * pixel))
    box = axes.get_window_extent()
    inside = (box.x0 + 2, box.y0 + 2, box.x1, box.y1)
    centres = around(places, sizes, inside, taken, radius=5.5 * pixel, pixel=pixel)
    back = axes.transData.inverted()
    for text, (x, y), place, (width, height) in zip(texts, centres, places, sizes, strict=True):
        text.set_position(back.transform((x, y)))
        end = (
            np.clip(place[0], x - width / 2, x + width / 2),
            np.clip(place[1], y - height / 2, y + height / 2),
        )
        if np.hypot(end[0] - place[0], end[1] - place[1]) > 8 * pixel:
            (ax, ay), (bx, by) = back.transform(place), back.transform(end)
            axes.plot([ax, bx], [ay, by], color="#aaaaaa", lw=0.8, zorder=1)


def _draw(frontier: "Frontier", known: list["FrontierPoint"], axes: "Axes") -> None:
    memory = [point.required_bytes for point in known]
    work = [100 * (point.recompute_overhead or 0) for point in known]
    each = " per device" if known[0].report.devices > 1 else ""
    unit = memory_axes(axes, memory, work, frontier.capacity_bytes, each)
    places = [(need / unit, more) for need, more in zip(memory, work, strict=True)]
    on = [place for point, place in zip(known, places, strict=True) if point.pareto]
    taken = stairs(axes, on)
    for point, (x, y) in zip(known, places, strict=True):
        colour = _OURS if point.pareto else "#999999"
        face = "white" if point.report.fits is False else colour
        axes.plot(
            [x], [y], "o", ms=7 if point.pareto else 5, color=colour, mfc=face, mew=1.4, zorder=3
        )
    most = max(memory)
    words = [
        "everything kept" if point is frontier.points[0] else f"÷ {most / point.required_bytes:.2g}"
        for point in known
    ]
    label(axes, places, words, taken)
