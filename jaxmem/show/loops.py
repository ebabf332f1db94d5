"""The loops of a program above the plot of its memory: brackets with names, in rows."""

from typing import TYPE_CHECKING

from jaxmem.show.figure import line, put, width_of
from jaxmem.show.labels import rows
from jaxmem.show.words import clean, cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxmem.hlo.buffers import Loop, Timeline

# Fractions of the height of a figure.
ROW = 0.045

_MOST_LOOPS, _MOST_ROWS = 12, 3

# ---------------------------------------------------------------- API


def rows_needed(figure: "Figure", axes: "Axes", timeline: "Timeline") -> int:
    """How many rows the names will take above these axes."""
    return 1 + max((row for *_, row in _placed(figure, axes, timeline)), default=-1)


def draw_loops(figure: "Figure", axes: "Axes", timeline: "Timeline") -> None:
    """Shade each loop, and write its name and trip count above the axes."""
    box = axes.get_window_extent()
    scale = box.width / max(timeline.length, 1)
    width, height = figure.bbox.width, figure.bbox.height
    for loop, words, middle, row in _placed(figure, axes, timeline):
        axes.axvspan(loop.start, loop.end, color="#000000", alpha=0.045, lw=0)
        y = box.y1 / height + 0.018 + ROW * row
        put(figure, middle / width, y + 0.008, words, 8.0, ha="center")
        start, end = ((box.x0 + at * scale) / width for at in (loop.start, loop.end))
        tip = y - 0.008
        line(figure, [start, start, end, end], [tip, y, y, tip], "#999999")


# ---------------------------------------------------------------- implementation


def _placed(
    figure: "Figure", axes: "Axes", timeline: "Timeline"
) -> "list[tuple[Loop, str, float, int]]":
    """The loops with their labels, the labels' positions along x in pixels, and their rows.

    Inner loops have the lower rows; labels for which no row has room are omitted.
    """
    loops = sorted(timeline.loops, key=lambda loop: loop.start - loop.end)[:_MOST_LOOPS]
    loops.sort(key=lambda loop: (loop.end - loop.start, loop.start))
    box = axes.get_window_extent()
    scale = box.width / max(timeline.length, 1)
    found, spans = [], []
    for loop in loops:
        start, end = box.x0 + loop.start * scale, box.x0 + loop.end * scale
        words = _words(loop, (end - start) * 72 / figure.dpi)
        half = width_of(figure, words, 8.0) / 2
        middle = min(max((start + end) / 2, box.x0 + half), box.x1 - half)
        spans.append((min(start, middle - half), max(end, middle + half)))
        found.append((loop, words, middle))
    placed = zip(found, rows(spans, 4 * figure.dpi / 72), strict=True)
    return [(*one, row) for one, row in placed if row < _MOST_ROWS]


def _words(loop: "Loop", points: float) -> str:
    """Name and trip count, shortened to a width in points."""
    times = "?" if loop.trip_count is None else loop.trip_count
    name = clean(loop.name)
    return f"{cut(name, max(int(points / 5) - 4, 8))} × {times}" if name else f"× {times}"
