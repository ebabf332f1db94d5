"""The rows of the long sequence, and what they say."""

import dataclasses
from collections.abc import Sequence

from common.table import Record, markdown
from jaxmem._util.text import size
from sequence.loops import Way

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """What one way to run the loop needs and evaluates.

    Attributes:
      target, program: what it is compiled for, and its sizes.
      steps: of the sequence.
      kind, number: which way; see `sequence.loops.Way`.
      required_bytes, temp_bytes: of the compiled program.
      own_bytes: required, without the inputs, the parameters and the results.
      formula_bytes: carries and residuals by the plan; of equinox, its carries.
      evaluations: of the cell in one value_and_grad, counted as it ran on the attached backend,
        as many steps in the same plan but a small cell.
      formula_evaluations: by the plan; of equinox, the fewest with so many carries.
      gradient_off: largest difference of that run's gradient from that of "none", relative to
        the largest entry of the same parameter.
    """

    target: str
    program: str
    steps: int
    kind: str
    number: int
    required_bytes: int
    temp_bytes: int
    own_bytes: int
    formula_bytes: int
    evaluations: int
    formula_evaluations: int
    gradient_off: float

    @property
    def name(self) -> str:
        """As a reader knows it."""
        return str(Way(self.kind, self.number))

    @property
    def passes(self) -> float:
        """Evaluations in units of one forward pass."""
        return self.evaluations / self.steps


# ---------------------------------------------------------------- API


def of(rows: Sequence[Row], kind: str) -> dict[int, Row]:
    """The rows of a kind, by number."""
    return {row.number: row for row in rows if row.kind == kind}


def summary(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = ["", "memory", "by the formula", "evaluations", "by the formula", "Δ gradient"]
    lines = [head] + [
        [
            row.name,
            size(row.own_bytes),
            size(row.formula_bytes),
            f"{row.evaluations:,}",
            f"{row.formula_evaluations:,}",
            f"{row.gradient_off:.0e}" if row.gradient_off else "0",
        ]
        for row in rows
    ]
    return markdown(lines)


def answer(rows: Sequence[Row]) -> str:
    """What the rows say."""
    none = of(rows, "none")[0]
    ours = [row for row in rows if row.kind != "equinox"]
    theirs = [row for row in rows if row.kind == "equinox"]
    exact = sum(row.evaluations == row.formula_evaluations for row in ours)
    more = max(row.own_bytes - row.formula_bytes for row in ours)
    least = min(ours, key=lambda row: row.own_bytes)
    beaten = sum(any(_beats(row, one) for row in ours) for one in theirs)
    off = max(row.gradient_off for row in rows)
    return (
        f"{none.steps:,} steps need {size(none.own_bytes)} with everything kept and "
        f"{size(least.own_bytes)} under {least.name}. {exact} of {len(ours)} plans evaluate just "
        f"what their formula says, in at most {size(more)} more than it.\n{against_equinox(rows)}; "
        f"{beaten} of its {len(theirs)} points need more and evaluate more than one of ours. "
        f"Gradients {f'are up to {off:.0e} apart' if off else 'are equal bit for bit'}."
    )


def against_equinox(rows: Sequence[Row]) -> str:
    """equinox's loop compared with revolve with as many carries."""
    found = of(rows, "equinox")
    pairs = [(row, found[number]) for number, row in of(rows, "revolve").items()]
    memory = [theirs.own_bytes / row.own_bytes for row, theirs in pairs]
    work = [theirs.evaluations / row.evaluations for row, theirs in pairs]
    needs, runs = _range(memory), _range(work)
    return f"equinox's loop takes {needs} × revolve's memory, {runs} × its evaluations"


# ---------------------------------------------------------------- implementation


def _beats(row: Row, other: Row) -> bool:
    return row.own_bytes < other.own_bytes and row.evaluations < other.evaluations


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low}–{high}"
