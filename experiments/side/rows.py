"""One row for each net and method, and what the rows say of each claim."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from common.table import Record, Table, markdown
from side.children import OK, OUT_OF_MEMORY
from side.methods import OURS

# What is within these factors of one another counts as equal.
SAME_TIME, SAME_MEMORY = 1.02, 1.01
# Of the loss of the first step, and of the second, which has the gradient in it; relative.
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 3e-2)}

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """What became of training a net one way.

    Attributes:
      hardware: the kind of device.
      net, size: which, and how large.
      dtype: of its layers.
      family, method: of `side.methods`.
      status: of `side.children`; what follows is None unless it is `OK`.
      budget_bytes: what `fit` was given.
      compiled_bytes: what the compiler says that the step needs; of jax.
      peak_bytes: of the allocator.
      seconds, fastest, slowest: of a step; the first is the median.
      steps: how many were timed.
      loss, second_loss: of the first two steps.
    """

    hardware: str
    net: str
    size: str
    dtype: str
    family: str
    method: str
    status: str
    budget_bytes: int | None
    compiled_bytes: int | None
    peak_bytes: int | None
    seconds: float | None
    fastest: float | None
    slowest: float | None
    steps: int
    loss: float | None
    second_loss: float | None
    note: str

    @property
    def label(self) -> str:
        return f"{self.family}: {self.method}"

    @property
    def place(self) -> tuple[int, float] | None:
        """Peak and time, where both were measured."""
        if self.status != OK or self.peak_bytes is None or self.seconds is None:
            return None
        return self.peak_bytes, self.seconds


@dataclasses.dataclass(frozen=True)
class Pair:
    """A rival and the best of ours.

    Attributes:
      lean: of ours that are at most as slow, the one with the lowest peak; None if there is none.
      quick: of ours that need at most as much, the fastest.
    """

    rival: Row
    lean: Row | None
    quick: Row | None

    @property
    def saves(self) -> float | None:
        """The rival's peak over ours at equal time; above 1 ours is less."""
        return _ratio(self.rival.peak_bytes, self.lean and self.lean.peak_bytes)

    @property
    def speeds(self) -> float | None:
        """The rival's time over ours at equal memory; above 1 ours is faster."""
        return _ratio(self.rival.seconds, self.quick and self.quick.seconds)


# ---------------------------------------------------------------- API


def table(path: Path) -> Table[Row]:
    """The rows that are there."""
    return Table(path, Row, ("hardware", "net", "size", "family", "method"))


def paired(rows: Sequence[Row]) -> list[Pair]:
    """Each measured rival with the best of ours; rows are of one net."""
    wrong = {row.label for row in astray(rows)}
    good = [row for row in rows if row.place is not None and row.label not in wrong]
    found = []
    for rival in good:
        if rival.family == OURS:
            continue
        peak, seconds = rival.place or (0, 0.0)
        mine = [(row, *(row.place or (0, 0.0))) for row in good if row.family == OURS]
        lean = [(p, s, row) for row, p, s in mine if s <= SAME_TIME * seconds]
        quick = [(s, p, row) for row, p, s in mine if p <= SAME_MEMORY * peak]
        found.append(
            Pair(
                rival,
                min(lean, key=lambda one: one[:2])[2] if lean else None,
                min(quick, key=lambda one: one[:2])[2] if quick else None,
            )
        )
    return found


def won(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Than how many rivals ours needs less at equal time, and is faster at equal memory."""
    less = sum((pair.saves or 0) > SAME_MEMORY for pair in pairs)
    return less, sum((pair.speeds or 0) > SAME_TIME for pair in pairs)


def astray(rows: Sequence[Row]) -> list[Row]:
    """Rows of one net whose losses are not those of the others: it is not the same net."""
    done = [row for row in rows if row.loss is not None and row.second_loss is not None]
    if not done:
        return []
    first, second = TOLERANCE[done[0].dtype]
    middle = statistics.median(row.loss or 0.0 for row in done)
    after = statistics.median(row.second_loss or 0.0 for row in done)
    return [
        row
        for row in done
        if abs((row.loss or 0.0) / middle - 1) > first
        or abs((row.second_loss or 0.0) / after - 1) > second
    ]


def message(rows: Sequence[Row]) -> str:
    """What came of it, in a line; rows are of one net."""
    pairs = paired(rows)
    name = rows[0].net if rows else "nothing"
    if not pairs:
        return f"{name}: no peaks were measured, so nothing is claimed"
    less, faster = won(pairs)
    text = (
        f"{name}: jaxmem needs less at equal time than {less} of {len(pairs)} others, "
        f"and is faster at equal memory than {faster}"
    )
    full = [row for row in rows if row.family != OURS and row.status == OUT_OF_MEMORY]
    return text + (f"; {len(full)} more ran out of memory" if full else "")


def summary(rows: Sequence[Row]) -> str:
    """The tables, and what is wrong; rows are of one net."""
    lines = [["method", "status", "peak", "by the compiler", "step", "loss"]]
    ordered = sorted(rows, key=lambda row: (row.family, -(row.peak_bytes or 0)))
    for row in ordered:
        cells = [_gib(row.peak_bytes), _gib(row.compiled_bytes), _ms(row.seconds)]
        loss = "" if row.loss is None else f"{row.loss:.5g}"
        lines.append([row.label, row.status, *cells, loss])
    parts = [markdown(lines)]
    if pairs := paired(rows):
        lines = [["other", "peak", "ours at equal time", "step", "ours at equal memory"]]
        for pair in pairs:
            lean, quick = pair.lean, pair.quick
            lines.append(
                [
                    pair.rival.label,
                    _gib(pair.rival.peak_bytes),
                    f"{_gib(lean.peak_bytes)} ({lean.method})" if lean else "none as fast",
                    _ms(pair.rival.seconds),
                    f"{_ms(quick.seconds)} ({quick.method})" if quick else "none as small",
                ]
            )
        parts.append(markdown(lines))
    parts += [f"{row.label}: {row.status}: {row.note}" for row in ordered if row.note]
    wrong = astray(rows)
    compared = sum(row.loss is not None for row in rows)
    if compared:
        first, second = TOLERANCE[rows[0].dtype]
        parts.append(
            f"losses of {compared} methods agree within {first:g} at the first step and {second:g} "
            f"at the second, but for {len(wrong)}: {', '.join(row.label for row in wrong)}"
            if wrong
            else f"losses of all {compared} methods agree within {first:g} at the first step and "
            f"{second:g} at the second"
        )
    return "\n\n".join(parts)


# ---------------------------------------------------------------- implementation


def _ratio(theirs: float | None, mine: float | None) -> float | None:
    return theirs / mine if theirs and mine else None


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.4g} ms"
