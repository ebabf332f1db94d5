"""The page for the difference of two reports: one line, and the changes that explain it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxmem._util.text import arrow, size
from jaxmem.report.report import Places
from jaxmem.show.blocks import Block, Column, Line, Remark, Style, Table
from jaxmem.show.content import full_name
from jaxmem.show.parts import PLACES, is_training, label
from jaxmem.show.words import (
    clean,
    cut_arrow,
    cut_source,
    flops,
    seconds,
    signed_share,
    typed,
    typed_change,
)

if TYPE_CHECKING:
    from jaxmem.hlo.buffers import Buffer
    from jaxmem.report.changes import BufferChange
    from jaxmem.report.report import Difference

_MOST = 10

# ---------------------------------------------------------------- API


def page(difference: "Difference") -> list[Block]:
    """The headline, then the changes that explain it, largest first, then warnings."""
    less = difference.required_bytes
    style: Style = "good" if less < 0 else "bad" if less > 0 else ""
    blocks: list[Block] = [Line(difference.headline, style)]
    for table in (
        _terms(difference),
        _parts(difference),
        _arguments(difference),
        _buffers(difference),
        _work(difference),
    ):
        if table.rows:
            blocks.append(table)
    blocks += [Remark(clean(text), style="warn") for text in difference.warnings]
    return blocks


# ---------------------------------------------------------------- implementation


def signed(count: int) -> str:
    """A change in bytes as text, with its sign."""
    return f"+{size(count)}" if count > 0 else size(count)


def _terms(d: "Difference") -> Table:
    rows = []
    for what, name, sign, extra in (
        ("temporaries", "temp_bytes", 1, False),
        ("arguments", "argument_bytes", 1, False),
        ("outputs", "output_bytes", 1, False),
        ("aliased", "alias_bytes", -1, False),
        ("on the host", "host_bytes", 1, True),
        ("on-chip", "on_chip_bytes", 1, True),
    ):
        change = sign * getattr(d, name)
        # A few bytes of bookkeeping on a chip explain nothing.
        if change and not (extra and abs(change) < 1024):
            was, now = sign * getattr(d.before, name), sign * getattr(d.after, name)
            words = arrow(was, now) + ", not part of the sum" * extra
            rows.append((extra, -abs(change), (signed(change), what, words)))
    cells = tuple(row for *_, row in sorted(rows))
    return Table("from", (Column(right=True), Column(), Column(least=12, style="dim")), cells)


def _parts(d: "Difference") -> Table:
    """The parts that both reports tell apart, in each place."""
    rows = []
    if is_training(d.before) and is_training(d.after):
        for kind, change in d.parts.items():
            before, after = (r.parts.get(kind, Places()) for r in (d.before, d.after))
            for place, name in PLACES:
                count = getattr(change, name)
                if abs(count) >= 1024:
                    what = label(kind) + f" ({place})" * (name != "device")
                    sizes = arrow(getattr(before, name), getattr(after, name))
                    rows.append((name != "device", -abs(count), (signed(count), what, sizes)))
    cells = tuple(row for *_, row in sorted(rows))
    columns = (Column(right=True), Column(least=8), Column(least=12, style="dim"))
    return Table("what it is for, at the peak", columns, cells)


def _arguments(d: "Difference") -> Table:
    groups: dict[str, list[int]] = {}
    for change in d.arguments:
        root = clean(change.name.partition("/")[0])
        counts = groups.setdefault(root, [0, 0, 0])
        counts[0] += change.before
        counts[1] += change.after
        counts[2] += 1
    rows = [
        (signed(now - was), name, arrow(was, now), f"in {many} leaves" if many > 1 else "")
        for name, (was, now, many) in sorted(
            groups.items(), key=lambda group: -abs(group[1][1] - group[1][0])
        )
    ]
    columns = (Column(right=True), Column(least=8), Column(least=12), Column(least=8, style="dim"))
    return Table("arguments", columns, tuple(rows))


def _buffers(d: "Difference") -> Table:
    # Arguments are in a separate table.
    found = [change for change in d.buffers if change.buffer.kind != "argument"]
    rows = [
        (
            signed(change.bytes),
            {"appeared": "new", "vanished": "gone", "changed": ""}[change.change],
            clean(_types(change)),
            clean(_named(change)),
            clean(change.buffer.source),
        )
        for change in found[:_MOST]
    ]
    if rest := found[_MOST:]:
        rows.append((signed(sum(c.bytes for c in rest)), "", f"{len(rest)} more", "", ""))
    columns = (
        Column(right=True),
        Column(),
        Column(least=24, cut=cut_arrow),
        Column(least=12),
        Column(least=8, cut=cut_source, style="dim"),
    )
    return Table("live at the peak", columns, tuple(rows), optional=4)


def _named(change: "BufferChange") -> str:
    places = {"host": " (host)", "on-chip": " (on-chip)"}
    return full_name(change.buffer) + places.get(change.buffer.place, "")


def _types(change: "BufferChange") -> str:
    """The type of the buffers, which each report has in one shape, and how it changed."""
    counts = len(change.before), len(change.after)
    before, after = (_type_of(side) for side in (change.before, change.after))
    if before == after:
        return f"{counts[0]} → {counts[1]} × {after}"
    if change.before and change.after and counts[0] == counts[1]:
        old, new = change.before[0], change.after[0]
        return _many(counts[0]) + typed_change(new.dtype, old.shape, new.shape)
    sides = zip(counts, (before, after), strict=True)
    return " → ".join(_many(count) + words for count, words in sides if words)


def _many(count: int) -> str:
    return f"{count} × " if count > 1 else ""


def _type_of(side: "Sequence[Buffer]") -> str:
    return typed(side[0].dtype, side[0].shape) if side else ""


def _work(d: "Difference") -> Table:
    rows = []
    for what, name, word in (
        ("operations", "flops", flops),
        ("matrix products", "matmul_flops", flops),
        ("recomputation", "recompute_overhead", signed_share),
        ("memory traffic", "bytes_moved", size),
        ("sent to other devices", "collective_bytes", size),
        ("time, at least", "estimated_seconds", seconds),
        ("communication", "communication_seconds", seconds),
    ):
        if getattr(d, name):
            was, now = getattr(d.before, name), getattr(d.after, name)
            relative = signed_share((now - was) / was) if was and what != "recomputation" else ""
            if word(was) != word(now):
                rows.append((relative, what, f"{word(was)} → {word(now)}"))
    columns = (Column(right=True), Column(), Column(least=12, style="dim"))
    return Table("operations of one call", columns, tuple(rows))
