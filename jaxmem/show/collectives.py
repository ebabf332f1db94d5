"""What devices send to each other, as a table: the heaviest collectives, and sums by axis."""

from typing import TYPE_CHECKING

from jaxmem._util.text import size
from jaxmem.show.blocks import Column, Table
from jaxmem.show.words import clean, cut_source, typed

if TYPE_CHECKING:
    from jaxmem.report.report import MemoryReport

# ---------------------------------------------------------------- API


def collectives_table(report: "MemoryReport", most: int) -> Table:
    """The collectives that send most, and the sum of the rest; below it what goes over each axis.

    Args:
      most: how many rows.
    """
    found = report.collectives
    rows = [
        (
            size(one.total_bytes),
            f"{one.times} × {one.kind}",
            clean(one.over),
            typed(one.dtype, one.shape),
            clean(_full_name(one.module, one.name)),
            clean(one.source),
        )
        for one in found[:most]
    ]
    if rest := found[most:]:
        rows.append(
            (size(sum(one.total_bytes for one in rest)), f"{len(rest)} more", "", "", "", "")
        )
    columns = (
        Column(right=True),
        Column(least=20),
        Column(least=4),
        Column(least=12),
        Column(least=8),
        Column(least=8, cut=cut_source, style="dim"),
    )
    title = f"sent by each device in one call: {size(report.collective_bytes)}"
    return Table(title, columns, tuple(rows), optional=5, after=_by_axis(report))


# ---------------------------------------------------------------- implementation


def _by_axis(report: "MemoryReport") -> str:
    sums: dict[str, int] = {}
    for one in report.collectives:
        sums[one.over] = sums.get(one.over, 0) + one.total_bytes
    parts = [
        f"{size(count)} over {clean(over)}"
        for over, count in sorted(sums.items(), key=lambda item: -item[1])
    ]
    return f"{', '.join(parts)}; by the formulas of rings"


def _full_name(module: str, name: str) -> str:
    return f"{module}/{name}" if module and not name.startswith(module) else name
