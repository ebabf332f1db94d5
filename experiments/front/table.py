"""One row for each compiled program of the frontier."""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import jaxmem
from common.table import Record, Table

HAND, POLICY, FIT, FRONTIER = "by hand", "jaxmem policy", "fit", "frontier"
FLAX, HALIAX, EQUINOX = PEERS = ("flax", "haliax", "equinox")
RIVALS = (HAND, POLICY, *PEERS)
KINDS = (*RIVALS, FIT, FRONTIER)
TOO_LARGE = "too large for the target"
DOMINATED = "dominated"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """A compiled program; bytes are of one device.

    Attributes:
      target: what it is compiled for.
      program: its sizes.
      kind: one of `KINDS`.
      name: of the policy, of the question, of the point.
      budget_bytes: what `fit` was given.
      predicted_bytes: the required bytes as `fit` or `frontier` predicted them.
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
        """Matmul FLOPs, of rows where it is known."""
        if self.matmul_flops is None:
            raise ValueError(f"{self.name}: its matmul FLOPs are not known")
        return self.matmul_flops

    @property
    def too_large(self) -> bool:
        """Whether the target has less memory.

        Compilers then recompute by themselves what they can, so that neither its bytes nor its
        matmul FLOPs say anything of the program.
        """
        return TOO_LARGE in self.note

    @property
    def overhead(self) -> float | None:
        """Matmul FLOPs over the model's, less one, in percent."""
        if self.matmul_flops is None or not self.model_matmul_flops:
            return None
        return 100 * (self.matmul_flops / self.model_matmul_flops - 1)

    @property
    def off(self) -> float | None:
        """By how much of the compiled temporaries those predicted are off."""
        if self.predicted_bytes is None:
            return None
        return (self.predicted_bytes - self.required_bytes) / self.temp_bytes


@dataclasses.dataclass(frozen=True)
class Made:
    """What the rows of one run have in common."""

    target: str
    program: str
    versions: str

    def by(self, kind: str) -> str:
        """Versions of all that has a say in the rows of a kind."""
        own = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES.get(kind, ())]
        return ", ".join([self.versions, *own])

    def row(
        self, kind: str, name: str, report: jaxmem.MemoryReport, *notes: str, **rest: Any
    ) -> Row:
        """A row of a report; `rest` is put in the place of what the report says."""
        values: dict[str, Any] = {
            "budget_bytes": None,
            "required_bytes": report.required_bytes,
            "temp_bytes": report.temp_bytes,
            "predicted_bytes": None,
            "matmul_flops": report.matmul_flops,
            "model_matmul_flops": report.model_matmul_flops,
            "extra_seconds": None,
            "compiles": None,
            **rest,
        }
        return Row(
            self.target,
            self.program,
            kind,
            name,
            **values,
            note="; ".join(filter(None, notes)),
            versions=self.by(kind),
        )


# ---------------------------------------------------------------- API


def refused(report: jaxmem.MemoryReport) -> str:
    """A note on a program that is too large."""
    return TOO_LARGE if report.fits is False else ""


def table(path: Path) -> Table[Row]:
    """The rows that are there."""
    return Table(path, Row, ("target", "program", "kind", "name", "budget_bytes"))


def of(rows: Table[Row], made: Made, *kinds: str) -> list[Row]:
    """All rows of a target and program of these kinds, those that need most first."""
    same = {"target": made.target, "program": made.program}
    own = [row for kind in kinds for row in rows.of(made.by(kind), **same, kind=kind)]
    return sorted(own, key=lambda row: (-row.required_bytes, row.name))


# ---------------------------------------------------------------- implementation

# Distributions that determine the rows of a kind, in addition to those of all rows.
_PACKAGES = {FLAX: ("flax",), EQUINOX: ("equinox",)}
