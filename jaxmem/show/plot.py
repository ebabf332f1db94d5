"""A picture of live memory along a program, next to a bar of what is live at the peak.

Both share the axis of bytes: the bar is as high as the peak.
"""

import dataclasses
import os
import re
import textwrap
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
from jaxmem.show.html import SHADES
from jaxmem.show.labels import spread
from jaxmem.show.loops import ROW, draw_loops, rows_needed
from jaxmem.show.peak import draw_peak, pieces
from jaxmem.show.words import clean, cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxmem.hlo.buffers import Timeline
    from jaxmem.report.report import MemoryReport

# ---------------------------------------------------------------- API


def plot_report(
    report: "MemoryReport",
    path: str | os.PathLike[str] | None = None,
    *,
    most: int = 8,
    inches: tuple[float, float] = (10.0, 5.4),
    dpi: int = 200,
) -> "Figure":
    """Draw the live bytes along the program, and name the largest buffers of the peak.

    Args:
      report: of a program whose compiler gave a timeline of live buffers.
      path: where to write it, as PNG or SVG by its suffix; None to not write it.
      most: how many buffers to name.
      inches: width and height; text keeps its size.
      dpi: dots per inch of a PNG.

    Returns:
      The figure, for `savefig` or for a notebook to display.

    Raises:
      ImportError: matplotlib is not installed; the message says how to install it.
      ValueError: the report has no timeline, or the file is neither PNG nor SVG.
    """
    file = check_path(path)
    if report.timeline is None or not report.timeline.steps:
        raise ValueError(
            f"the report for {report.target} has no timeline to draw: the compiler gave no list "
            "of live buffers, as when it refuses a program that is too large, and a row of a sweep "
            "does not hold it; report.required_bytes and str(report) have the sums"
        )
    with matplotlib_defaults():
        figure = new_figure(*inches, dpi)
        left, bottom, width, height = 0.075, 0.115, 0.52, 0.7
        axes = figure.add_axes((left, bottom, width, height))
        side = figure.add_axes((left + width + 0.022, bottom, 0.036, height), sharey=axes)
        _Picture(report, report.timeline, figure, axes, side).draw(most)
        write(figure, file)
    return figure


# ---------------------------------------------------------------- implementation


@dataclasses.dataclass(frozen=True)
class _Picture:
    report: "MemoryReport"
    timeline: "Timeline"
    figure: "Figure"
    axes: "Axes"
    side: "Axes"

    @property
    def peak(self) -> int:
        return max(self.timeline.bytes, default=0)

    def draw(self, most: int) -> None:
        title = _lines_of(clean(self.report.verdict))
        put(self.figure, 0.012, 0.975, "\n".join(title), 10.5, va="top", weight="bold")
        self._make_room(0.925 - 0.035 * len(title))
        parts = pieces(self.report, self.peak, most)
        highest = max(self.peak, sum(item.bytes for item, _ in parts), 1)
        marks = self._marks(highest)
        self.axes.set_ylim(0, 1.2 * max([highest, *(at for at, *_ in marks)]))
        self.axes.set_xlim(0, max(self.timeline.length, 1))
        self._area()
        self._axis()
        self._lines(marks)
        draw_peak(self.figure, self.side, parts, self.peak)
        draw_loops(self.figure, self.axes, self.timeline)

    def _make_room(self, top: float) -> None:
        """Axes up to `top`, less the rows that the names of the loops take."""
        room = ROW * rows_needed(self.figure, self.axes, self.timeline)
        for axes in (self.axes, self.side):
            box = axes.get_position()
            axes.set_position((box.x0, box.y0, box.width, top - room - box.y0))

    def _area(self) -> None:
        t = self.timeline
        steps = np.append(np.asarray(t.steps, float), t.length)
        live = np.asarray([*t.bytes, *t.bytes[-1:]], float)
        always = self.report.argument_bytes + max(
            self.report.output_bytes - self.report.alias_bytes, 0
        )
        base = np.minimum(live, always)
        how: dict[str, Any] = {"step": "post", "linewidth": 0}
        self.axes.fill_between(steps, base, color=SHADES["argument"][3], **how)
        self.axes.fill_between(steps, base, live, color=SHADES["temporary"][4], **how)
        self.axes.plot(steps, live, drawstyle="steps-post", color=SHADES["temporary"][0], lw=1.2)
        high = self.axes.get_ylim()[1]
        if always > 0.07 * high:
            y = min(always, live.min()) / 2
            words = f"arguments and results {size(always)}"
            put(self.axes, 0.015 * t.length, y, words, 8.5, va="center")
        if live[0] - base[0] > 0.09 * high:
            y = base[0] + 0.035 * high
            put(self.axes, 0.015 * t.length, y, "temporaries", 8.5, va="center")

    def _axis(self) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        plain_axes(self.axes)
        high = self.axes.get_ylim()[1]
        unit, name = unit_of(high)
        # Round numbers of the unit, not of bytes.
        ticks = MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]).tick_values(0, high / unit)
        self.axes.set_yticks([tick * unit for tick in ticks if 0 <= tick * unit <= high])
        self.axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y / unit:g}"))
        each = " per device" if self.report.devices > 1 else ""
        self.axes.set_ylabel(f"live memory{each} ({name})", fontsize=9, color=INK)
        self.axes.set_xlabel("position in the compiled program (instructions in order)", fontsize=9)
        self.axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        self.axes.grid(axis="y", color="#ececec", linewidth=0.8, zorder=0)
        self.axes.set_axisbelow(True)

    def _marks(self, highest: int) -> list[tuple[int, str, str]]:
        """Horizontal lines: their height, label and colour."""
        found = []
        if abs(self.report.required_bytes - self.peak) > 0.02 * self.peak:
            required = self.report.required_bytes
            found.append((required, f"required {size(required)}", GREY))
        capacity = self.report.capacity_bytes
        if capacity is not None and capacity <= 1.6 * max(highest, self.report.required_bytes):
            found.append((capacity, f"capacity {size(capacity)}", BAD))
        return sorted(found)

    def _lines(self, marks: list[tuple[int, str, str]]) -> None:
        t, high = self.timeline, self.axes.get_ylim()[1]
        on_right = t.peak_step < 0.5 * t.length
        box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.0}
        x, side = (0.99 * t.length, "right") if on_right else (0.01 * t.length, "left")
        # One row is for the label, one for the air around it.
        row = 0.05 * high
        ends = spread([at + row / 2 for at, *_ in marks], [row] * len(marks), 0, high)
        for (at, words, colour), y in zip(marks, ends, strict=True):
            self.axes.axhline(at, color=colour, lw=1.1, ls="--" if colour == GREY else "-")
            put(self.axes, x, y, words, 8.5, ha=side, va="center", color=colour, bbox=box, zorder=5)
        capacity = self.report.capacity_bytes
        if capacity is not None and not any(at == capacity for at, *_ in marks):
            words = f"↑ capacity {size(capacity)}, {capacity / max(self.peak, 1):.3g} × the peak"
            put(self.axes, x, 0.985 * high, words, 8.5, ha=side, va="top", color=BAD)
        self.axes.plot(
            [t.peak_step + 0.5], [self.peak], "o", ms=5, color=SHADES["temporary"][0], zorder=6
        )
        words = f"peak {size(self.peak)}\n{cut(clean(t.peak_instruction), 32)}"
        text = put(
            self.axes,
            t.peak_step + 0.5,
            self.peak + 0.025 * high,
            words,
            8.5,
            ha="center",
            bbox=box,
            zorder=6,
            linespacing=1.1,
        )
        half = text.get_window_extent(renderer(self.figure)).width / 2
        scale = self.axes.get_window_extent().width / max(t.length, 1)
        text.set_x(min(max(t.peak_step + 0.5, half / scale), t.length - half / scale))


def _lines_of(title: str, width: int = 108) -> list[str]:
    """Wrap into few lines of similar length, with no number split from its unit."""
    whole = re.sub(r"(\d) (?=[KMGT]?i?B\b)", "\\1\N{NO-BREAK SPACE}", title)
    lines = textwrap.wrap(whole, width, max_lines=3, placeholder=" …")
    while width > 1 and len(closer := textwrap.wrap(whole, width - 1)) == len(lines):
        lines, width = closer, width - 1
    return lines
