"""A report in a terminal, with rich, and the same in plain text."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from jaxmem._util.text import size
from jaxmem.show.blocks import (
    Bar,
    Block,
    Kind,
    Line,
    Remark,
    Style,
    Table,
    fitted,
    flowed,
    lengths,
    position,
    remark,
)
from jaxmem.show.blocks import plain as plain_blocks
from jaxmem.show.content import page

if TYPE_CHECKING:
    from jaxmem.report.report import MemoryReport

# ---------------------------------------------------------------- API


def plain(report: "MemoryReport", width: int = 80) -> str:
    """A report in plain text, the verdict in its first line.

    Args:
      report: what to show.
      width: columns; the verdict alone may be longer.
    """
    return plain_blocks(page(report), width)


def renderable(report: "MemoryReport") -> "Rendered":
    """A report for `rich.print`, as wide as the terminal."""
    return Rendered(page(report))


class Rendered:
    """Blocks for rich, laid out when the width of the terminal is known."""

    def __init__(self, blocks: Sequence[Block]):
        self.blocks = tuple(blocks)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        for k, block in enumerate(self.blocks):
            if k:
                yield Text("")
            match block:
                case Line():
                    yield Text(block.text, _STYLES[block.style])
                case Table():
                    yield from _table(block, options.max_width)
                case Bar():
                    yield from _bar(block, options.max_width, options.ascii_only)
                case Remark():
                    yield from _remark(block, options.max_width)


# ---------------------------------------------------------------- implementation

_STYLES: dict[Style, str] = {
    "": "",
    "good": "bold green",
    "bad": "bold red",
    "warn": "bold yellow",
    "dim": "dim",
    "strong": "bold",
}
_COLOURS: dict[Kind, str] = {
    "argument": "blue",
    "output": "cyan",
    "temporary": "magenta",
    "rest": "white",
}


def _table(table: Table, width: int) -> Any:
    from rich.text import Text

    columns, rows, widths = fitted(table, width)
    if table.title:
        yield Text(table.title, "bold")
    titles = [tuple(c.title for c in columns)] if any(c.title for c in columns) else []
    for k, row in enumerate([*titles, *rows], start=-len(titles)):
        line = Text(no_wrap=True, overflow="crop")
        for cell, column, w in zip(row, columns, widths, strict=True):
            style = "dim" if k < 0 else "bold" if k in table.strong else _STYLES[column.style]
            line.append("  ").append(cell.rjust(w) if column.right else cell.ljust(w), style)
        line.rstrip()
        yield line
    if table.after:
        yield Text(remark(Remark(table.after), width), "dim")


def _bar(bar: Bar, width: int, ascii_only: bool) -> Any:
    from rich.text import Text

    full, free, mark = ("#", ".", "|") if ascii_only else ("█", "░", "│")
    room = max(width - 4, 10)
    taken = lengths(bar, room)
    cells = [
        (full, _COLOURS[p.kind]) for p, n in zip(bar.parts, taken, strict=True) for _ in range(n)
    ]
    cells += [(free, "dim")] * (room - len(cells))
    legend = [
        (full, f"{part.label} {size(part.bytes)}", _COLOURS[part.kind])
        for part, n in zip(bar.parts, taken, strict=True)
        if n
    ]
    for place in bar.marks:
        if place.bytes < bar.whole:
            cells[position(place.bytes, bar, room)] = (mark, "bold")
            legend.append((mark, place.label, "bold"))
    runs = [
        ("".join(sign for sign, _ in run), style) for style, run in groupby(cells, itemgetter(1))
    ]
    yield Text.assemble("  ", *runs, no_wrap=True, overflow="crop")
    entries = iter(legend)
    for line in flowed([f"{sign} {label}" for sign, label, _ in legend], width):
        text, at = Text(line, no_wrap=True, overflow="crop"), 2
        while at < len(line):
            sign, label, style = next(entries)
            text.stylize(style, at, at + 1)
            at += len(f"{sign} {label}   ")
        yield text


def _remark(block: Remark, width: int) -> Any:
    from rich.text import Text

    text = Text(remark(block, width), _STYLES["dim"] if block.style == "dim" else "")
    if block.remedy:
        text.stylize("yellow", 0, 2)
        text.stylize("green", text.plain.index("\n  -> "), text.plain.index("\n  -> ") + 6)
    yield text
