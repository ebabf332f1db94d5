"""One row for each compiled program of the frontier."""

import dataclasses
from pathlib import Path
from typing import Any

import jaxmem
from common.table import Record, Table

HAND, POLICY, FIT, FRONTIER = "by hand", "jaxmem policy", "fit", "frontier"
TOO_LARGE = "too large for the target"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Row(Record):
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

    @property
    def work(self) -> int:
        """Matrix work, of rows where it is known."""
        if self.matmul_flops is None:
            raise ValueError(f"{self.name}: its matrix work is not known")
        return self.matmul_flops

    @property
    def too_large(self) -> bool:
        """Whether the target has less memory.

        Compilers then compute again by themselves what they can, so that neither its bytes nor its
        matrix work say anything of the program.
        """
        return TOO_LARGE in self.note

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


# ---------------------------------------------------------------- API


def table(path: Path) -> Table[Row]:
    """The rows that are there."""
    return Table(path, Row, ("target", "program", "kind", "name", "budget_bytes"))


def of(rows: Table[Row], made: Made, *kinds: str) -> list[Row]:
    """All rows of a target and program of these kinds, those that need most first."""
    found = rows.of(made.versions, target=made.target, program=made.program)
    own = [row for row in found if row.kind in kinds]
    return sorted(own, key=lambda row: (-row.required_bytes, row.name))
