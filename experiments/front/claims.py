"""The claims about one target, from its rows: is `fit` ever beaten, and are predictions good?"""

import dataclasses
import statistics
from collections.abc import Sequence

from front.rivals import SHRUNK, shrunk
from front.table import FIT, FRONTIER, PEERS, RIVALS, Row
from jaxmem._util.text import columns, size

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Pair:
    """`fit` at a budget, and the rival with the least matmul FLOPs that is within it."""

    fit: Row
    rival: Row

    @property
    def lost(self) -> bool:
        """Whether `fit` found no plan, or one that computes more."""
        return self.fit.matmul_flops is None or self.fit.work > self.rival.work

    @property
    def between(self) -> bool:
        """Whether the budget is more than what any rival needs that computes as little."""
        return self.fit.name.startswith("between")


# ---------------------------------------------------------------- API


def paired(rows: Sequence[Row]) -> list[Pair]:
    """Each answer of `fit` with the best that a rival can do in the same memory."""
    rows = [row for row in rows if not row.too_large]
    rivals = [row for row in rows if row.kind in RIVALS and row.matmul_flops is not None]
    found = []
    for row in rows:
        if row.kind != FIT:
            continue
        within = [rival for rival in rivals if rival.required_bytes <= (row.budget_bytes or 0)]
        if within:
            found.append(Pair(row, min(within, key=lambda rival: rival.work)))
    return found


def losses(rows: Sequence[Row]) -> list[Pair]:
    """Where a rival computes less in the same memory, or as much where `fit` has room to spare."""
    return [
        pair
        for pair in paired(rows)
        if pair.lost or (pair.between and pair.rival.overhead and pair.fit.work >= pair.rival.work)
    ]


def below(rows: Sequence[Row]) -> list[Row]:
    """Rivals of which no plan of ours needs as little memory and computes as little."""
    known = [row for row in rows if not row.too_large and row.matmul_flops is not None]
    ours = [row for row in known if row.kind in (FIT, FRONTIER)]
    return [
        row
        for row in known
        if row.kind in RIVALS
        and not any(
            own.required_bytes <= row.required_bytes and own.work <= row.work for own in ours
        )
    ]


def errors(rows: Sequence[Row]) -> dict[str, float]:
    """By how much predicted temporaries are off, by row."""
    found = {
        f"{row.kind} {row.name}": row.off
        for row in rows
        if row.kind in (FIT, FRONTIER) and not row.too_large
    }
    return {name: off for name, off in found.items() if off is not None}


def summary(rows: Sequence[Row]) -> str:
    """All of it as text."""
    lines = [
        ["budget", "", "rival", "its matmul FLOPs", "fit needs", "fit's matmul FLOPs", "off", ""]
    ]
    for pair in sorted(paired(rows), key=lambda pair: -(pair.fit.budget_bytes or 0)):
        fit, rival = pair.fit, pair.rival
        lines.append(
            [
                size(fit.budget_bytes or 0),
                _short(fit.name),
                rival.name,
                _percent(rival.overhead),
                size(fit.required_bytes),
                _percent(fit.overhead),
                "" if fit.off is None else f"{100 * fit.off:+.1f} %",
                "LOST" if pair in losses(rows) else "",
            ]
        )
    parts = [columns(lines, right=(0, 3, 4, 5, 6))]
    lost = losses(rows)
    parts.append(f"fit is beaten at {len(lost)} of {len(lines) - 1} budgets")
    others = [row for row in rows if row.kind in PEERS and not row.too_large]
    if others:
        lower = [row.name for row in below(rows) if row.kind in PEERS]
        parts.append(
            f"points of other libraries that lie below ours: {len(lower)} of {len(others)}"
            + (f" ({', '.join(lower)})" if lower else "")
        )
    for times, goal in SHRUNK.items():
        for row in rows:
            if row.kind == FIT and row.name == shrunk(times):
                parts.append(
                    f"temporaries {times} times smaller than undecorated: {_percent(row.overhead)} "
                    f"extra matmul FLOPs (goal {goal} %)"
                )
    if off := errors(rows):
        worst = max(off, key=lambda name: abs(off[name]))
        median = statistics.median(abs(value) for value in off.values())
        parts.append(
            f"predicted temporaries: median error {median:.1%}, largest {off[worst]:+.1%} ({worst})"
        )
    if large := [row.name for row in rows if row.kind in RIVALS and row.too_large]:
        parts.append(f"larger than the target's memory, and left out: {', '.join(large)}")
    return "\n".join(parts)


# ---------------------------------------------------------------- implementation


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:+.1f} %"


def _short(name: str) -> str:
    return "between" if name.startswith("between") else name
