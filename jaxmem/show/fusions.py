"""What fusion does, as a page: sums by kind of work, the heaviest kernels, what is not fused."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxmem._util.text import size
from jaxmem.show.blocks import Block, Column, Line, Remark, Table
from jaxmem.show.words import clean, cut, cut_source, share, typed

if TYPE_CHECKING:
    from jaxmem.hlo.fusions import Fusions, Kernel
    from jaxmem.hlo.unfused import Unfused

# ---------------------------------------------------------------- API


def page(found: "Fusions", most: int = 15) -> list[Block]:
    """The kernels of a program as blocks; `most` rows of the heaviest."""
    blocks: list[Block] = [Line(headline(found), is_verdict=True)]
    if found.kernels:
        blocks += [_by_work(found), _heaviest(found, most), _by_line(found, (2 * most + 2) // 3)]
    if found.unfused:
        blocks.append(_apart(found, (most + 2) // 3))
    if found.unknown_loops:
        blocks.append(
            Remark(
                f"note: {found.unknown_loops} loops have no known trip count; their kernels "
                "are counted once"
            )
        )
    blocks.append(Remark(_COUNTED, style="dim"))
    return blocks


def headline(found: "Fusions") -> str:
    """What fusion saves, in one line.

    >>> from jaxmem.hlo.fusions import Fusions
    >>> headline(Fusions(()))
    'the program has no kernels that move anything'
    """
    if not found.kernels:
        return "the program has no kernels that move anything"
    runs = sum(kernel.times for kernel in found.kernels)
    text = (
        f"{runs} kernel{'s' * (runs > 1)} move{'s' * (runs == 1)} {size(found.bytes)} in one call "
        f"(read {size(found.read_bytes)}, written {size(found.written_bytes)})"
    )
    return f"{text}; one by one their operations would move {size(found.separate_bytes)}" + (
        f", {ratio(found.separate_bytes, found.bytes)} times as much" if found.bytes else ""
    )


def ratio(more: int, less: int) -> str:
    """How many times as much, in two or three digits.

    >>> ratio(7, 2), ratio(2123, 10)
    ('3.5', '212')
    """
    times = more / less
    return f"{times:.1f}" if times < 9.95 else f"{times:.0f}"


def cut_list(text: str, width: int) -> str:
    """Names in at most `width` characters: the last ones are omitted, a remark stays.

    >>> cut_list("dot_general, mul, tanh (backward)", 28)
    'dot_general, … (backward)'
    """
    if len(text) <= width:
        return text
    names, space, remark = text.partition(" (")
    room = width - len(space + remark) - 1
    if room < 8:
        return cut(text, width)
    kept = names[:room].rpartition(", ")[0]
    return f"{kept + ', ' if kept else names[: room - 1]}…{space}{remark}"


# ---------------------------------------------------------------- implementation

_COUNTED = (
    "from and to device memory, without padding; what two kernels read counts twice. One by one: "
    "each operation reads its operands and writes its result; what only the compiler adds (copies, "
    "conversions, broadcasts) is no operation, and what it repeats in several kernels counts once"
)
_DIM = Column(least=8, cut=cut_source, style="dim")


def _by_work(found: "Fusions") -> Table:
    sums: dict[str, list[int]] = {}
    for kernel in found.kernels:
        row = sums.setdefault(kernel.work, [0, 0, 0, 0])
        for k, count in enumerate(
            (kernel.times, kernel.total_bytes, *_rest(kernel)),
        ):
            row[k] += count
    on_chip = found.on_chip_bytes > 0
    rows = []
    for work, (times, moved, alone, chip) in sorted(sums.items(), key=lambda item: -item[1][1]):
        cells = [size(chip)] if on_chip else []
        rows.append(
            (work, str(times), size(moved), _share(moved, found.bytes), size(alone), *cells)
        )
    columns = (
        Column("work"),
        Column("kernels run", right=True),
        Column("moved", right=True),
        Column("", right=True, style="dim"),
        Column("one by one", right=True),
        *([Column("on-chip", right=True)] if on_chip else []),
    )
    return Table("by kind of work", columns, tuple(rows))


def _share(part: int, whole: int) -> str:
    return share(part, whole) if part > 0.0005 * whole else ""


def _rest(kernel: "Kernel") -> tuple[int, int]:
    return kernel.separate_bytes * kernel.times, kernel.on_chip_bytes * kernel.times


def _heaviest(found: "Fusions", most: int) -> Table:
    rows = [
        (
            size(kernel.total_bytes),
            size(kernel.separate_bytes * kernel.times),
            f"{kernel.times} ×",
            clean(_operations(kernel)),
            clean(kernel.module),
            clean(kernel.source),
        )
        for kernel in found.kernels[:most]
    ]
    if rest := found.kernels[most:]:
        moved = sum(kernel.total_bytes for kernel in rest)
        alone = sum(kernel.separate_bytes * kernel.times for kernel in rest)
        rows.append((size(moved), size(alone), "", f"{len(rest)} more", "", ""))
    columns = (
        Column("moved", right=True),
        Column("one by one", right=True),
        Column("runs", right=True),
        Column("operations", least=36, cut=cut_list),
        Column("in", least=6),
        _DIM,
    )
    return Table("kernels that move most", columns, tuple(rows), optional=4)


def _operations(kernel: "Kernel") -> str:
    """What is in a kernel: "dot_general, 2 × mul, tanh (backward)"."""
    names: dict[str, int] = {}
    words = [one.name.partition(" ") for one in kernel.operations]
    for (name, _, _), one in zip(words, kernel.operations, strict=True):
        names[name] = names.get(name, 0) + one.count
    phases = dict.fromkeys(phase for _, _, phase in words)
    listed = ", ".join(
        name if n == 1 else f"{n} × {name}" for name, n in _named_first(kernel, names)
    )
    return f"{listed} {next(iter(phases))}".rstrip() if len(phases) == 1 else listed


def _named_first(kernel: "Kernel", names: dict[str, int]) -> Iterable[tuple[str, int]]:
    """A product or a reduction, after which the kernel is named, before what is fused with it."""
    first = kernel.name.partition(" ")[0]
    if kernel.work not in ("matmul", "reduction") or first not in names:
        return names.items()
    return [(first, names[first]), *((n, c) for n, c in names.items() if n != first)]


def _by_line(found: "Fusions", most: int) -> Table:
    lines = found.lines
    rows = [
        (clean(line.source) or "no line", size(line.bytes), size(line.separate_bytes))
        for line in lines[:most]
    ]
    if rest := lines[most:]:
        moved, alone = sum(r.bytes for r in rest), sum(r.separate_bytes for r in rest)
        rows.append((f"{len(rest)} more", size(moved), size(alone)))
    columns = (
        Column("line", least=12, cut=cut_source),
        Column("moved", right=True),
        Column("one by one", right=True),
    )
    return Table("by line", columns, tuple(rows))


def _apart(found: "Fusions", most: int) -> Table:
    rows = [
        (
            size(one.total_bytes),
            f"{one.times} × {one.kind}",
            clean(_what(one)),
            typed(one.dtype, one.shape),
            clean(one.source),
        )
        for one in found.unfused[:most]
    ]
    if rest := found.unfused[most:]:
        rows.append((size(sum(one.total_bytes for one in rest)), f"{len(rest)} more", "", "", ""))
    columns = (
        Column(right=True),
        Column(least=14),
        Column(least=10),
        Column(least=10),
        _DIM,
    )
    return Table("not fused: conversions, layout copies, calls", columns, tuple(rows), optional=3)


def _what(one: "Unfused") -> str:
    if one.kind == "custom call":
        return f"{one.before} → {one.name} → {one.after}"
    others = f" and {one.others} more" if one.others else ""
    return f"{one.name} of {one.value}{others}" if one.value else one.name
