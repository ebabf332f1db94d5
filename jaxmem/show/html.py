"""A report in a notebook: one fragment of HTML with a bar in SVG.

Styles are inline, there are no scripts and nothing is fetched, so that it works
in a saved notebook.  Text colours are inherited, so that it is readable on light
and dark pages.
"""

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from jaxmem._util.text import size
from jaxmem.show.blocks import Bar, Block, Column, Kind, Line, Part, Remark, Style, Table
from jaxmem.show.content import page, split_bar
from jaxmem.show.words import cut, share

if TYPE_CHECKING:
    from jaxmem.report.report import MemoryReport

# ---------------------------------------------------------------- API


def html(report: "MemoryReport", most: int = 20) -> str:
    """A report as HTML, with `most` rows of what is live at the peak."""
    finer = split_bar(report)
    blocks = [finer if isinstance(block, Bar) else block for block in page(report, most)]
    return fragment(blocks, opened=("what it is for, at the peak", "live at the peak"))


def fragment(blocks: Iterable[Block], opened: Iterable[str] = ()) -> str:
    """Blocks as one element; tables are collapsed, except those whose titles are in `opened`."""
    parts = []
    for block in blocks:
        match block:
            case Line():
                parts.append(f'<div style="{_LINE}">{_badge(block)}</div>')
            case Bar():
                parts.append(_svg(block) + _legend(block))
            case Table():
                parts.append(_table(block, block.title in opened))
            case Remark():
                parts.append(_remark(block))
    return f'<div style="{_WHOLE}">{"".join(parts)}</div>'


def colours(parts: Iterable[Part]) -> list[str]:
    """A colour for each part: blues for arguments, oranges for temporaries, grey for the rest."""
    seen: dict[Kind, int] = {}
    found = []
    for part in parts:
        shades = SHADES[part.kind]
        k = seen.get(part.kind, 0)
        found.append(shades[k % len(shades)])
        seen[part.kind] = k + 1
    return found


# Distinct for colour-blind readers too: lightness within a hue, and blue against orange.
SHADES: dict[Kind, tuple[str, ...]] = {
    "argument": ("#2f64a8", "#4f83c4", "#769fd6", "#a1bfe6"),
    "output": ("#2a8c82",),
    "temporary": ("#b5500f", "#cf6d22", "#e28c45", "#eeab72", "#f6c9a2"),
    "rest": ("#8f8f8f",),
}

# ---------------------------------------------------------------- implementation

_WHOLE = "max-width:760px;font-family:system-ui,sans-serif;font-size:13px;line-height:1.45"
_LINE = "font-size:14px;margin:4px 0 8px"
_MONO = "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
_TABLE = "border-collapse:collapse;margin:2px 0 6px 16px;border:none;color:inherit"
_CELL = "padding:1px 14px 1px 0;border:none;background:none;white-space:nowrap;vertical-align:top"
_PILLS: dict[Style, tuple[str, str]] = {
    "good": ("#1a7f37", "fits"),
    "bad": ("#c62828", "does not fit"),
    "warn": ("#8a6100", "attention"),
}


def _badge(line: Line) -> str:
    text = f"<strong>{escape(line.text)}</strong>"
    if not line.is_verdict or line.style not in _PILLS:
        return text
    colour, word = _PILLS[line.style]
    sign = {"good": "✓", "bad": "✗", "warn": "!"}[line.style]
    style = (
        f"display:inline-block;min-width:1.2em;margin-right:8px;padding:0 4px;border-radius:4px;"
        f"text-align:center;font-weight:bold;color:#fff;background:{colour}"
    )
    return f'<span style="{style}" role="img" aria-label="{word}">{sign}</span>{text}'


_WIDTH, _HEIGHT = 720, 26
_LETTER = 6.6  # about how wide one is
_DASHES = ' stroke-dasharray="3 2"'


def _svg(bar: Bar) -> str:
    """The bar; widths in units of the view box, which the page scales to pixels."""
    scale = _WIDTH / bar.whole
    top = 20 if bar.marks else 2
    shapes = [
        f'<rect x="0" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="3" fill="currentColor" '
        'fill-opacity="0.1"/>'
    ]
    at = 0
    for part, colour in zip(bar.parts, colours(bar.parts), strict=True):
        x, width = at * scale, part.bytes * scale
        at += part.bytes
        gap = 1 if width > 3 else 0
        tip = f"{part.label}: {size(part.bytes)}, {share(part.bytes, bar.used)} of what is needed"
        shapes.append(
            f'<rect x="{x:.1f}" y="{top}" width="{max(width - gap, 0.6):.1f}" height="{_HEIGHT}" '
            f'fill="{colour}"><title>{escape(tip)}</title></rect>'
        )
        label = cut(part.short or part.label, int((width - 8) / _LETTER))
        end = x + 8 + _LETTER * len(label)
        crossed = any(x < mark.bytes * scale < end for mark in bar.marks)
        if len(label) >= min(len(part.short or part.label), 4) and not crossed:
            shapes.append(
                f'<text x="{x + 5:.1f}" y="{top + 17}" font-size="11" fill="{_ink(colour)}" '
                f'pointer-events="none">{escape(label)}</text>'
            )
    for mark in bar.marks:
        x = mark.bytes * scale
        is_capacity = mark.bytes == bar.capacity
        y = top - 7 if is_capacity else top + _HEIGHT + 15
        start, length = (top - 4, _HEIGHT + 4) if is_capacity else (top, _HEIGHT + 5)
        shapes.append(
            f'<path d="M{min(x, _WIDTH - 1):.1f} {start}v{length}" stroke="currentColor" '
            f'stroke-width="2"{"" if is_capacity else _DASHES}/>'
            f'<text x="{x:.1f}" y="{y}" font-size="11" fill="currentColor" '
            f'text-anchor="{"start" if x < _WIDTH / 2 else "end"}">{escape(mark.label)}</text>'
        )
    height = top + _HEIGHT + (20 if len(bar.marks) > 1 else 4)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" '
        f'style="max-width:100%;height:auto;display:block;font-family:inherit">'
        f"<title>Memory that is needed, against the capacity</title>"
        f"<desc>{escape(_described(bar))}</desc>{''.join(shapes)}</svg>"
    )


def _described(bar: Bar) -> str:
    parts = "; ".join(f"{part.label} {size(part.bytes)}" for part in bar.parts)
    marks = "; ".join(f"{mark.label}: {size(mark.bytes)}" for mark in bar.marks)
    return f"{size(bar.used)} in all: {parts}." + (f" Marks: {marks}." if marks else "")


def _ink(colour: str) -> str:
    """Black or white, whichever is read better on this colour."""
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return "#000" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.18 else "#fff"


def _legend(bar: Bar) -> str:
    entries = []
    for part, colour in zip(bar.parts, colours(bar.parts), strict=True):
        if 1000 * part.bytes < bar.used:
            continue
        swatch = (
            f"display:inline-block;width:10px;height:10px;margin-right:5px;background:{colour};"
            "border-radius:2px"
        )
        entries.append(
            f'<span style="display:inline-block;margin-right:16px;white-space:nowrap">'
            f'<span style="{swatch}"></span>{escape(cut(part.label, 60))} '
            f'<span style="opacity:0.75">{size(part.bytes)}</span></span>'
        )
    return f'<div style="margin:4px 0 8px;font-size:12px">{"".join(entries)}</div>'


def _table(table: Table, opened: bool) -> str:
    lines = []
    if any(column.title for column in table.columns):
        cells = [
            f'<th style="{_CELL};text-align:{_side(c)}">{escape(c.title)}</th>'
            for c in table.columns
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    for k, row in enumerate(table.rows):
        cells = []
        for cell, column in zip(row, table.columns, strict=True):
            style = f"{_CELL};{_MONO};text-align:{_side(column)}"
            style += ";opacity:0.75" if column.style == "dim" else ""
            style += ";font-weight:bold" if k in table.strong else ""
            cells.append(f'<td style="{style}">{escape(cell)}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    after = f'<div style="opacity:0.75">{escape(table.after)}</div>' if table.after else ""
    return (
        f'<details{" open" if opened else ""} style="margin:2px 0">'
        f'<summary style="cursor:pointer">{escape(table.title)}</summary>'
        f'<div style="overflow-x:auto"><table style="{_TABLE}">{"".join(lines)}</table></div>'
        f"{after}</details>"
    )


def _side(column: Column) -> str:
    return "right" if column.right else "left"


def _remark(block: Remark) -> str:
    if block.remedy:
        return (
            f'<div style="margin:6px 0;padding-left:8px;border-left:3px solid #c98a00">'
            f"{escape(block.text)}<br>→ {escape(block.remedy)}</div>"
        )
    dim = ";opacity:0.75" if block.style == "dim" else ""
    return f'<div style="margin:4px 0;font-size:12px{dim}">{escape(block.text)}</div>'
