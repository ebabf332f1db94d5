"""Several reports as a table, and policy × batch as a grid."""

from typing import TYPE_CHECKING, Any

from jaxmem._util.text import size
from jaxmem.show.blocks import Block, Column, Line, Table
from jaxmem.show.words import clean, flops, seconds, share, signed_share

if TYPE_CHECKING:
    from jaxmem.report.compare import Comparison
    from jaxmem.report.report import MemoryReport

# ---------------------------------------------------------------- API


def page(comparison: "Comparison") -> list[Block]:
    """How many fit, one row per report, and the grid where keys are pairs."""
    blocks: list[Block] = [Line(clean(_head(comparison)), "strong"), _rows(comparison)]
    if comparison.pairs:
        blocks.append(grid(comparison))
    return blocks


def axes_of(comparison: "Comparison") -> tuple[list[Any], list[Any]]:
    """Policies and batches in the order given; numeric batches sorted."""
    policies = list(dict.fromkeys(key[0] for key in comparison.reports))
    batches = list(dict.fromkeys(key[1] for key in comparison.reports))
    if all(isinstance(batch, int | float) for batch in batches):
        batches.sort()
    return policies, batches


def grid(comparison: "Comparison") -> Table:
    """The memory of each policy at each batch size, and whether it fits."""
    policies, batches = axes_of(comparison)
    rows = [
        (clean(str(policy)), *(_cell(comparison.reports.get((policy, batch))) for batch in batches))
        for policy in policies
    ]
    columns = (
        Column("policy", least=8),
        *(Column(f"batch {batch}", right=True) for batch in batches),
    )
    signs = "✓ fits, ✗ does not fit" if comparison.capacity_bytes is not None else ""
    return Table("policy × batch", columns, tuple(rows), after=signs)


def name_of(key: Any) -> str:
    """A key as text: itself, or "sqrt, batch 8"."""
    return clean(f"{key[0]}, batch {key[1]}" if isinstance(key, tuple) else str(key))


# ---------------------------------------------------------------- implementation


def _head(comparison: "Comparison") -> str:
    reports = comparison.reports.values()
    of = "" if comparison.capacity_bytes is None else f" of {size(comparison.capacity_bytes)}"
    if comparison.capacity_bytes is None:
        return f"{len(reports)} on {comparison.target}, capacity unknown"
    fit = sum(report.fits is True for report in reports)
    return f"{fit} of {len(reports)} fit in the memory{of} on {comparison.target}"


def _cell(report: "MemoryReport | None") -> str:
    if report is None:
        return "–"
    sign = {True: " ✓", False: " ✗", None: ""}[report.fits]
    return size(report.required_bytes) + sign


def _rows(comparison: "Comparison") -> Table:
    front = comparison.pareto
    names = ("policy", "batch") if comparison.pairs else ("name",)
    known = comparison.capacity_bytes is not None
    rows = []
    for key, report in comparison.reports.items():
        own = [clean(str(part)) for part in (key if comparison.pairs else (key,))]
        rows.append(
            (
                *own,
                size(report.required_bytes),
                size(report.temp_bytes),
                _fits(report),
                _recompute(report),
                "" if report.estimated_seconds is None else seconds(report.estimated_seconds),
                "*" if key in front else "",
            )
        )
    columns = (
        *(Column(name, least=8, right=k == 1) for k, name in enumerate(names)),
        Column("required", right=True),
        Column("temporaries", right=True),
        Column("fits" if known else ""),
        Column("recompute", right=True),
        Column("at least", right=True),
        Column("front"),
    )
    each = ", separately for each batch" if comparison.pairs else ""
    after = f"* on the Pareto front of required memory and matmul FLOPs{each}; times are estimates"
    best = tuple(k for k, key in enumerate(comparison.reports) if key in front)
    return Table("", columns, tuple(rows), strong=best, after=after)


def _fits(report: "MemoryReport") -> str:
    if report.capacity_bytes is None:
        return ""
    part = share(report.required_bytes, report.capacity_bytes)
    return f"{'yes' if report.fits else 'no'}, {part}"


def _recompute(report: "MemoryReport") -> str:
    if report.recompute_overhead is not None:
        return signed_share(report.recompute_overhead)
    return "?" if report.matmul_flops is None else flops(report.matmul_flops)
