"""What is live at the peak, as a bar of named parts."""

from typing import TYPE_CHECKING

from jaxmem._util.text import size
from jaxmem.show.blocks import Kind
from jaxmem.show.content import Item, at_peak
from jaxmem.show.figure import FAINT, GREY, line, put, width_of
from jaxmem.show.html import SHADES
from jaxmem.show.labels import spread
from jaxmem.show.words import cut, cut_source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxmem.report.report import MemoryReport

Piece = tuple[Item, str]

# ---------------------------------------------------------------- API


def pieces(report: "MemoryReport", peak: int, most: int) -> list[Piece]:
    """The parts of the bar from the bottom, each with its colour; temporaries are on top.

    Parts that are small, or not among the `most` largest, are joined.
    """
    items = [item for item in at_peak(report) if item.place == "device"]
    large = [item for item in items if item.bytes >= 0.015 * peak][: max(most, 0)]
    large.sort(key=lambda item: _ORDER.index(item.kind))
    seen: dict[Kind, int] = {}
    found = []
    for item in large:
        kind = _KINDS[item.kind]
        found.append((item, SHADES[kind][seen.get(kind, 0) % len(SHADES[kind])]))
        seen[kind] = seen.get(kind, 0) + 1
    rest = peak - sum(item.bytes for item in large)
    if rest > 0.002 * peak:
        many = sum(item.count for item in items) - sum(item.count for item in large)
        name = f"{many} smaller ones" if many > 0 else "not listed"
        found.append((Item(rest, many, "", name, "", "rest", "device"), _REST))
    return found


def draw_peak(figure: "Figure", axes: "Axes", parts: list[Piece], peak: int) -> None:
    """Fill the axes with the bar, and label its parts on the right."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    middles, at = [], 0
    for item, colour in parts:
        axes.bar(0.5, item.bytes, 1, bottom=at, color=colour, edgecolor="white", linewidth=0.7)
        middles.append(at + item.bytes / 2)
        at += item.bytes
    box, point = axes.get_window_extent(), figure.dpi / 72
    scale = box.height / axes.get_ylim()[1]
    wanted = [box.y0 + middle * scale for middle in middles]
    heights = [(25 if item.type or item.source else 14) * point for item, _ in parts]
    centres = spread(wanted, heights, box.y0, figure.bbox.height * 0.9)
    for (item, _), own, centre in zip(parts, wanted, centres, strict=True):
        _label(figure, item, box.x1, own, centre)
    if peak:
        top = max([box.y0 + at * scale + 10 * point, *(c + 20 * point for c in centres[-1:])])
        x, y = box.x0 / figure.bbox.width, top / figure.bbox.height
        put(figure, x, y, f"live at the peak, {size(peak)}", 9, weight="bold")


# ---------------------------------------------------------------- implementation

_ORDER = ("argument", "constant", "output", "temporary")
_KINDS: dict[str, Kind] = {
    "argument": "argument",
    "constant": "output",
    "output": "output",
    "temporary": "temporary",
}
_REST = "#c4c4c4"


def _label(figure: "Figure", item: Item, edge: float, own: float, centre: float) -> None:
    """Two lines of text at `centre`, joined to the part that they name at `own`."""
    width, height, point = figure.bbox.width, figure.bbox.height, figure.dpi / 72
    start = edge + 0.022 * width
    room = 0.992 * width - start
    xs = [edge + point, edge + 0.008 * width, start - 0.004 * width]
    line(figure, [x / width for x in xs], [y / height for y in (own, own, centre)], FAINT)
    first = f"{size(item.bytes)}  {item.name}" + " (argument)" * (item.kind == "argument")
    first = _shortened(figure, [first], room, 8.5)
    second = _shortened(figure, [item.type, item.source], room, 8.0)
    lift = 5.5 * point if second else 0.0
    x = start / width
    put(figure, x, (centre + lift) / height, first, 8.5, va="center_baseline")
    put(figure, x, (centre - lift) / height, second, 8.0, va="center_baseline", color=GREY)


def _shortened(figure: "Figure", parts: list[str], room: float, points: float) -> str:
    """The parts side by side, shortened until they are no wider than `room`."""
    parts = [part for part in parts if part]
    for width in range(max([len(part) for part in parts], default=0), 5, -1):
        cuts = [cut(part, width) for part in parts[:1]]
        cuts += [cut_source(part, width) for part in parts[1:]]
        if width_of(figure, "  ".join(cuts), points) <= room:
            return "  ".join(cuts)
    return ""
