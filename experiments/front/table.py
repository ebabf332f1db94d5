"""One row for each compiled program, in a CSV that a later run goes on with."""

import csv
import dataclasses
import io
import types
import typing
from pathlib import Path
from typing import Any

import jaxmem
from lm import files

HAND, POLICY, FIT, FRONTIER = "by hand", "jaxmem policy", "fit", "frontier"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Row:
    """A compiled program; bytes are of one device.

    Attributes:
      target: what it is compiled for.
      program: its sizes.
      kind: `HAND`, `POLICY`, `FIT` or `FRONTIER`.
      name: of the policy, of the question, of the point.
      budget_bytes: what `fit` was given.
      predicted_bytes: the required bytes as `fit` or `frontier` foretold them.
      matmul_flops: of the compiled program; None where it is not known.
      model_matmul_flops: without recomputation.
      extra_seconds: of `fit` and `frontier`, by the roofline.
      compiles: how often `fit` asked the compiler.
      note: what else must be known.
      versions, date: what made it, and when.
    """

    target: str
    program: str
    kind: str
    name: str
    budget_bytes: int | None
    required_bytes: int
    temp_bytes: int
    predicted_bytes: int | None
    matmul_flops: int | None
    model_matmul_flops: int | None
    extra_seconds: float | None
    compiles: int | None
    note: str
    versions: str
    date: str

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from the others."""
        return self.target, self.program, self.kind, self.name, str(self.budget_bytes or "")

    @property
    def work(self) -> int:
        """Matrix work, of rows where it is known."""
        if self.matmul_flops is None:
            raise ValueError(f"{self.name}: its matrix work is not known")
        return self.matmul_flops

    @property
    def overhead(self) -> float | None:
        """Matrix work over the model's, less one, in percent."""
        if self.matmul_flops is None or not self.model_matmul_flops:
            return None
        return 100 * (self.matmul_flops / self.model_matmul_flops - 1)

    @property
    def off(self) -> float | None:
        """By how much of the compiled temporaries those foretold are off."""
        if self.predicted_bytes is None:
            return None
        return (self.predicted_bytes - self.required_bytes) / self.temp_bytes


@dataclasses.dataclass(frozen=True)
class Made:
    """What the rows of one run have in common."""

    target: str
    program: str
    versions: str
    date: str

    def row(self, kind: str, name: str, report: jaxmem.MemoryReport, **rest: Any) -> Row:
        """A row of a report."""
        empty = {"budget_bytes": None, "predicted_bytes": None, "extra_seconds": None}
        values = {**empty, "compiles": None, "note": "", **rest}
        return Row(
            **dataclasses.asdict(self),
            kind=kind,
            name=name,
            required_bytes=report.required_bytes,
            temp_bytes=report.temp_bytes,
            matmul_flops=values.pop("matmul_flops", report.matmul_flops),
            model_matmul_flops=report.model_matmul_flops,
            **values,
        )


class Table:
    """The rows that are there; each new one is on disk before the next is begun."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
          ValueError: the file has other columns.
        """
        self.path = path
        self._rows = {row.key: row for row in _read(path)}

    def find(self, made: Made, kind: str, name: str, budget: int | None = None) -> Row | None:
        """The row of this program by these versions, if it has been made."""
        key = made.target, made.program, kind, name, str(budget or "")
        row = self._rows.get(key)
        return row if row is not None and row.versions == made.versions else None

    def of(self, made: Made, *kinds: str) -> list[Row]:
        """All rows of a target and program of these kinds, those that need most first."""
        found = [
            row
            for row in self._rows.values()
            if (row.target, row.program, row.versions) == (made.target, made.program, made.versions)
            and row.kind in kinds
        ]
        return sorted(found, key=lambda row: (-row.required_bytes, row.name))

    def add(self, *rows: Row) -> None:
        """Put rows in, in the place of earlier ones of the same key, and write all."""
        self._rows |= {row.key: row for row in rows}
        out = io.StringIO()
        names = [field.name for field in dataclasses.fields(Row)]
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        for row in self._rows.values():
            cells = dataclasses.asdict(row)
            writer.writerow({key: "" if cell is None else cell for key, cell in cells.items()})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write(self.path, out.getvalue())

    def drop(self, made: Made, *kinds: str) -> None:
        """Forget the rows of a target and program of these kinds."""
        gone = {row.key for row in self.of(made, *kinds)}
        self._rows = {key: row for key, row in self._rows.items() if key not in gone}


# ---------------------------------------------------------------- implementation


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    names = [field.name for field in dataclasses.fields(Row)]
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or ()) != names:
            raise ValueError(f"{path} has other columns than this experiment writes; remove it")
        return [_row(cells) for cells in reader]


def _row(cells: dict[str, str]) -> Row:
    hints = typing.get_type_hints(Row)
    return Row(**{name: _value(text, hints[name]) for name, text in cells.items()})


def _value(text: str, kind: Any) -> Any:
    optional = isinstance(kind, types.UnionType)
    if optional and not text:
        return None
    return (typing.get_args(kind)[0] if optional else kind)(text)
