"""The results, one answer per row: CSV, and tables to read."""

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

from lm import files

REFUSES = "refuses"
NOT_COMPILED = "not compiled"


@dataclasses.dataclass(frozen=True)
class Row:
    """One answer.

    Attributes:
      question: what was asked: "gradient error", "after NaN", "memory", "step time".
      case: of which problem.
      form: of which contestant.
      value: a number (of bytes, a whole one), or a word.
      unit: of the number; empty for a word.
      device: where it was run or what it was compiled for.
      note: what the tool said, or what else must be known.
    """

    question: str
    case: str
    form: str
    value: int | float | str
    unit: str
    device: str
    note: str = ""

    @property
    def text(self) -> str:
        """The value as a table shows it."""
        if isinstance(self.value, str):
            return self.value
        if self.unit == "relative":
            return f"{self.value:.0e}" if self.value < 1e-3 else f"{self.value:.1%}"
        return f"{self.value:.2f}"


def write(path: Path, rows: Sequence[Row], versions: str, date: str) -> None:
    """All rows as CSV, with what they were made by."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, to_csv(rows, versions, date))


def to_csv(rows: Sequence[Row], versions: str, date: str) -> str:
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(Row)]
    writer = csv.DictWriter(out, [*names, "versions", "date"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        value = f"{row.value:.6g}" if isinstance(row.value, float) else str(row.value)
        writer.writerow(
            dataclasses.asdict(row) | {"value": value, "versions": versions, "date": date}
        )
    return out.getvalue()


def to_text(rows: Sequence[Row], columns: Sequence[str], of: str) -> str:
    """A Markdown table: forms downwards, and `columns` of the attribute `of` across."""
    forms = list(dict.fromkeys(row.form for row in rows))
    cells = {(row.form, getattr(row, of)): row.text for row in rows}
    lines = [
        ["", *columns],
        *[[form, *(cells.get((form, c), "") for c in columns)] for form in forms],
    ]
    widths = [max(len(line[k]) for line in lines) for k in range(len(columns) + 1)]

    def line(texts: Sequence[str]) -> str:
        padded = [text.rjust(width) for text, width in zip(texts[1:], widths[1:], strict=True)]
        return f"| {' | '.join([texts[0].ljust(widths[0]), *padded])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(lines[0]), f"|{rule}|", *map(line, lines[1:])])
