"""The blocks of a page, independent of the medium; and their rendering as plain text.

Plain text has no colours and no box characters, so that it survives pipes, logs and mail.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal

from jaxmem._util.text import size
from jaxmem.show.words import cut, share

Style = Literal["", "good", "bad", "warn", "dim", "strong"]
Kind = Literal["argument", "output", "temporary", "rest", "free"]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of any length; its style may mark that something fits or does not."""

    text: str
    style: Style = ""
    is_verdict: bool = False


@dataclasses.dataclass(frozen=True)
class Column:
    """The layout of one column of a table.

    Attributes:
      title: above it; the row of titles is omitted where no column has one.
      right: whether its cells are right-aligned.
      least: the least width in characters to which it may shrink; 0 for a fixed width.
      cut: the function that shortens its cells.
      style: of its cells.
    """

    title: str = ""
    right: bool = False
    least: int = 0
    cut: Callable[[str, int], str] = cut
    style: Style = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under a title.

    Attributes:
      title: one word or a few.
      columns: one for each cell of a row.
      rows: cells of text.
      strong: indices of the rows to emphasise.
      after: a remark below.
      optional: index of the column that is dropped first where there is no room, or None.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: tuple[int, ...] = ()
    after: str = ""
    optional: int | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a bar: its label and bytes; `short` is the label for little room."""

    label: str
    bytes: int
    kind: Kind
    short: str = ""


@dataclasses.dataclass(frozen=True)
class Mark:
    """A place on a bar."""

    label: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Bar:
    """Adjacent parts, compared with a capacity.

    Attributes:
      parts: from the left.
      capacity: in bytes; None where it is unknown.
      default: what jax takes of it by default, in bytes; None where it is unknown.
    """

    parts: tuple[Part, ...]
    capacity: int | None = None
    default: int | None = None

    @property
    def marks(self) -> tuple["Mark", ...]:
        """Default and capacity, where they are known and differ."""
        if self.capacity is None:
            return ()
        capacity = Mark(f"capacity {size(self.capacity)}", self.capacity)
        if self.default is None or self.default == self.capacity:
            return (capacity,)
        label = f"{share(self.default, self.capacity)}, jax's default"
        return (Mark(label, self.default), capacity)

    @property
    def used(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def whole(self) -> int:
        """The bytes that the full length represents."""
        return max(self.used, self.capacity or 0, 1)


@dataclasses.dataclass(frozen=True)
class Remark:
    """A fact, with its remedy below."""

    text: str
    remedy: str = ""
    style: Style = ""


Block = Line | Table | Bar | Remark

# ---------------------------------------------------------------- API


def plain(blocks: Iterable[Block], width: int = 80) -> str:
    """The page as text of at most `width` columns, except for lone lines.

    >>> print(plain([Line("needs 3 GiB"), Remark("nothing is donated", "donate params")]))
    needs 3 GiB
    <BLANKLINE>
    ! nothing is donated
      -> donate params
    """
    parts = []
    for block in blocks:
        match block:
            case Line():
                parts.append(block.text)
            case Table():
                parts.append(_table(block, width))
            case Bar():
                parts.append(_bar(block, width))
            case Remark():
                parts.append(remark(block, width))
    return "\n\n".join(parts)


def remark(block: Remark, width: int) -> str:
    """A remark, broken into lines."""
    lines = _wrapped(block.text, width, "! " if block.remedy or block.style == "warn" else "  ")
    if block.remedy:
        lines += _wrapped(block.remedy, width, "  -> ")
    return "\n".join(lines)


def fitted(table: Table, width: int) -> tuple[tuple[Column, ...], list[tuple[str, ...]], list[int]]:
    """The columns that fit, their cells shortened, and the width of each column.

    Two spaces precede each column.
    """
    columns, rows = table.columns, list(table.rows)
    k = table.optional
    if k is not None and sum(_least(columns, rows)) + 2 * len(columns) > width:
        columns = columns[:k] + columns[k + 1 :]
        rows = [row[:k] + row[k + 1 :] for row in rows]
    widths = _widths(columns, rows, width)
    cells = [
        tuple(c.cut(cell, w) for c, cell, w in zip(columns, row, widths, strict=True))
        for row in rows
    ]
    return columns, cells, widths


def lengths(bar: Bar, width: int) -> list[int]:
    """Characters for each part of a bar; at least one where it has more than a tenth of one."""
    ends, total = [0], 0
    for part in bar.parts:
        total += part.bytes
        ends.append(round(width * total / bar.whole))
    found = [b - a for a, b in pairwise(ends)]
    if total and not any(found):
        found[max(range(len(found)), key=lambda k: bar.parts[k].bytes)] = 1
    for k, part in enumerate(bar.parts):
        longest = max(range(len(found)), key=found.__getitem__)
        seen = 10 * width * part.bytes > bar.whole
        if seen and not found[k] and found[longest] > 1:
            found[k], found[longest] = 1, found[longest] - 1
    return found


def position(mark: int, bar: Bar, width: int) -> int:
    """The character position of a mark, given in bytes."""
    return min(round(width * mark / bar.whole), width - 1)


# ---------------------------------------------------------------- implementation

_SIGNS: dict[Kind, str] = {"argument": "=", "output": "+", "temporary": "#", "rest": "%"}


def _wrapped(text: str, width: int, start: str) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    )


def _natural(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    return [
        max([len(column.title), *(len(row[k]) for row in rows)]) for k, column in enumerate(columns)
    ]


def _least(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    return [
        min(column.least, natural) if column.least else natural
        for column, natural in zip(columns, _natural(columns, rows), strict=True)
    ]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the cells; if too wide in all, the widest column that may shrinks first."""
    widths, least = _natural(columns, rows), _least(columns, rows)
    while sum(widths) + 2 * len(widths) > width:
        able = [k for k in range(len(widths)) if widths[k] > least[k]]
        if not able:
            break
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _table(table: Table, width: int) -> str:
    columns, rows, widths = fitted(table, width)
    lines = [table.title] if table.title else []
    titles = [tuple(c.title for c in columns)] if any(c.title for c in columns) else []
    for row in [*titles, *rows]:
        cells = [
            cell.rjust(w) if column.right else cell.ljust(w)
            for cell, column, w in zip(row, columns, widths, strict=True)
        ]
        lines.append("".join(f"  {cell}" for cell in cells).rstrip())
    if table.after:
        lines += _wrapped(table.after, width, "  ")
    return "\n".join(lines)


def _bar(bar: Bar, width: int) -> str:
    room = max(width - 6, 10)
    taken = lengths(bar, room)
    cells = "".join(_SIGNS[p.kind] * n for p, n in zip(bar.parts, taken, strict=True))
    cells = cells.ljust(room, ".")
    legend = [f"{_SIGNS[p.kind]} {p.label}" for p, n in zip(bar.parts, taken, strict=True) if n]
    for mark in bar.marks:
        if mark.bytes < bar.whole:
            sign, k = "]" if mark.bytes == bar.capacity else "|", position(mark.bytes, bar, room)
            cells = cells[:k] + sign + cells[k + 1 :]
            legend.append(f"{sign} {mark.label}")
    return "\n".join([f"  [{cells}]", *flowed(legend, width)])


def flowed(items: Sequence[str], width: int) -> list[str]:
    """The items side by side, wrapped into lines."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += f"   {item}"
        else:
            lines.append(f"  {item}")
    return lines
