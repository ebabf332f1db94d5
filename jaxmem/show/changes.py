"""How the difference of two reports reads: one line, and below it what explains the line."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxmem.show.blocks import Block, Column, Line, Remark, Style, Table
from jaxmem.show.content import full_name
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
from jaxmem.text import size

if TYPE_CHECKING:
    from jaxmem.difference import BufferChange, Difference
    from jaxmem.hlo.buffers import Buffer
    from jaxmem.report import MemoryReport

NUMBERS = (
    "required_bytes",
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "host_bytes",
    "on_chip_bytes",
    "peak_bytes",
    "flops",
    "bytes_moved",
    "matmul_flops",
    "recompute_overhead",
    "estimated_seconds",
)

_MOST = 10

# ---------------------------------------------------------------- API


def headline(after: "MemoryReport", before: "MemoryReport") -> str:
    """What it comes to, in one line: "needs 3.2 GiB less (41.0 → 37.8 GiB)"."""
    less = after.required_bytes - before.required_bytes
    text = f"needs the same ({size(after.required_bytes)})"
    if less:
        sizes = arrow(before.required_bytes, after.required_bytes)
        text = f"needs {size(abs(less))} {'less' if less < 0 else 'more'} ({sizes})"
    if before.fits != after.fits and after.fits is not None and before.fits is not None:
        text += ": now fits" if after.fits else ": no longer fits"
    return text


def arrow(before: int, after: int) -> str:
    """Two sizes, the unit once where it is one, and one size where they read alike.

    >>> arrow(41 * 2**30, 38 * 2**30), arrow(2**20, 2**30), arrow(2**30, 2**30 + 1)
    ('41.0 → 38.0 GiB', '1.0 MiB → 1.0 GiB', '1.0 GiB')
    """
    first, second = size(before), size(after)
    if first == second:
        return first
    number, _, unit = first.partition(" ")
    return f"{number if second.endswith(f' {unit}') else first} → {second}"


def warnings(after: "MemoryReport", before: "MemoryReport") -> Iterator[str]:
    """Why the two may not be compared."""
    if after.target != before.target:
        yield f"the targets differ: {before.target} → {after.target}"
    if after.devices != before.devices:
        yield f"the numbers of devices differ: {before.devices} → {after.devices}"
    if after.source != before.source:
        yield f"the sources differ: {before.source} → {after.source}"
    for what, new, old in (
        ("versions", after.versions, before.versions),
        ("flags", after.flags, before.flags),
    ):
        names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
        if names:
            changed = ", ".join(
                f"{name} {old.get(name, 'not set')} → {new.get(name, 'not set')}" for name in names
            )
            yield f"the {what} differ: {changed}"


def page(difference: "Difference") -> list[Block]:
    """The headline, then what explains it, largest first, then what makes it doubtful."""
    less = difference.required_bytes
    style: Style = "good" if less < 0 else "bad" if less > 0 else ""
    blocks: list[Block] = [Line(headline(difference.after, difference.before), style)]
    for table in (
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
    """A change in bytes, for a reader: more has a plus."""
    return f"+{size(count)}" if count > 0 else size(count)


def _parts(d: "Difference") -> Table:
    rows = []
    for what, name, sign, beside in (
        ("temporaries", "temp_bytes", 1, False),
        ("arguments", "argument_bytes", 1, False),
        ("outputs", "output_bytes", 1, False),
        ("aliased", "alias_bytes", -1, False),
        ("on the host", "host_bytes", 1, True),
        ("on-chip", "on_chip_bytes", 1, True),
    ):
        change = sign * getattr(d, name)
        # A word of bookkeeping more or less on a chip explains nothing.
        if change and not (beside and abs(change) < 1024):
            was, now = sign * getattr(d.before, name), sign * getattr(d.after, name)
            words = arrow(was, now) + ", not part of the sum" * beside
            rows.append((beside, -abs(change), (signed(change), what, words)))
    cells = tuple(row for *_, row in sorted(rows))
    return Table("from", (Column(right=True), Column(), Column(least=12, style="dim")), cells)


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
    # Arguments have a table of their own.
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
    return Table("alive at the peak", columns, tuple(rows), optional=4)


def _named(change: "BufferChange") -> str:
    places = {"host": " (host)", "on-chip": " (on-chip)"}
    return full_name(change.buffer) + places.get(change.buffer.place, "")


def _types(change: "BufferChange") -> str:
    """The type of the buffers, all alike on either side, and how it changed."""
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
        ("time, at least", "estimated_seconds", seconds),
    ):
        if getattr(d, name):
            was, now = getattr(d.before, name), getattr(d.after, name)
            relative = signed_share((now - was) / was) if was and what != "recomputation" else ""
            if word(was) != word(now):
                rows.append((relative, what, f"{word(was)} → {word(now)}"))
    columns = (Column(right=True), Column(), Column(least=12, style="dim"))
    return Table("work of one call", columns, tuple(rows))
