"""The rows: a compiled program of one model, and what the rows say together."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from common.table import Record, Table, markdown
from jaxmem._util.text import size as text

PLAIN: Final = "plain"
SQRT: Final = "remat_sqrt"
OWN: Final = "own checkpointing"
FIT: Final = "fit"
Cost = Literal["roofline", "flops"]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """A program; sizes in bytes.  Where the compiler refused it, only `error` says something.

    Attributes:
      sizes: of the model and its batch.
      kind: `PLAIN`, `SQRT`, `OWN` or `FIT`.
      asked: of `fit`, in how much: a share of the plain temporaries, or `OWN`.
      cost: what `fit` makes least.
      budget_bytes: that `fit` was given.
      fits: whether it is within that; else the figures are those of the least that was reached.
      predicted_bytes: required bytes, as `fit` predicted them; of `PLAIN`, those of everything
        kept, before anything was compiled.
      matmul_flops: of the compiled program; `model_matmul_flops` without recomputation.
      estimated_seconds: of the whole program, by the report's roofline.
      compiler_remat: whether the compiler recomputes by itself as well.
      compiles: how often `fit` asked the compiler.
      planning_seconds: for tracing and planning alone, with `PLAIN`.
      fit_seconds: for all that `fit` did, most of it compilation.
      error: what the compiler said, where it refused the program.
    """

    target: str
    model: str
    sizes: str
    kind: str
    asked: str
    cost: str
    budget_bytes: int | None = None
    fits: bool = False
    required_bytes: int | None = None
    temp_bytes: int | None = None
    predicted_bytes: int | None = None
    matmul_flops: int | None = None
    model_matmul_flops: int | None = None
    estimated_seconds: float | None = None
    compiler_remat: bool = False
    compiles: int | None = None
    planning_seconds: float | None = None
    fit_seconds: float | None = None
    error: str = ""

    def share(self, plain: "Row") -> float | None:
        """Of the plain program's temporaries."""
        if self.temp_bytes is None or not plain.temp_bytes:
            return None
        return self.temp_bytes / plain.temp_bytes

    def extra(self, plain: "Row") -> float | None:
        """Matmul FLOPs over those of the plain program, or, if it was refused, the model's."""
        base = plain.matmul_flops or self.model_matmul_flops
        return None if self.matmul_flops is None or not base else self.matmul_flops / base - 1

    @property
    def name(self) -> str:
        """What it is, in words."""
        if self.kind != FIT:
            return self.kind
        return f"{FIT}, in the memory of {OWN}" if self.asked == OWN else f"{FIT}, {self.asked}"


KEY = ("target", "model", "sizes", "kind", "asked", "cost")

# ---------------------------------------------------------------- API


def table(path: Path) -> Table[Row]:
    """The rows that are there."""
    return Table(path, Row, KEY)


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The own option of each model that compiles with it, and `fit` in its memory."""
    fitted = {row.model: row for row in rows if row.kind == FIT and row.asked == OWN}
    own = [row for row in rows if row.kind == OWN and row.matmul_flops is not None]
    return [(row, fitted[row.model]) for row in own if row.model in fitted]


def is_beaten(own: Row, fitted: Row) -> bool:
    """Whether the model's own option recomputes less than `fit` in the same memory."""
    work = fitted.matmul_flops
    return not fitted.fits or work is None or work > (own.matmul_flops or 0)


def summary(rows: Sequence[Row]) -> str:
    """The rows of one target as Markdown."""
    lines: list[list[str]] = [[*_HEADING]]
    for own in models(rows):
        for row in own:
            lines.append([row.model, *_cells(row, own[0])])
    return markdown(lines)


def answer(rows: Sequence[Row]) -> str:
    """Whether any model's own option beats `fit`, and both overheads."""
    plain = {row.model: row for row in rows if row.kind == PLAIN}
    found = pairs(rows)
    lines = [
        f"{own.model}: {OWN} {_percent(own.extra(plain[own.model]))}, fit in its memory "
        + (_percent(fit.extra(plain[own.model])) if fit.fits else "does not fit")
        for own, fit in found
    ]
    beaten = sum(is_beaten(*pair) for pair in found)
    return "\n".join([*lines, f"beaten: {beaten} of {len(found)}"])


def message(rows: Sequence[Row]) -> str:
    """The same in the fewest words, for a picture."""
    found, names = pairs(rows), {row.model for row in rows}
    words = f"{len(names)} Flax models of transformers, as they stand, {rows[0].target}"
    if not found:
        return words
    better = sum(not is_beaten(*pair) for pair in found)
    more = f"fit recomputes no more than a model's {OWN} in its memory: {better} of {len(found)}"
    return f"{more} ({words})"


def models(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each model, the plain one first."""
    names = dict.fromkeys(row.model for row in rows)
    own = [[row for row in rows if row.model == name] for name in names]
    return [sorted(each, key=lambda row: row.kind != PLAIN) for each in own]


# ---------------------------------------------------------------- implementation


_HEADING = (
    "model", "program", "needs", "temporaries", "of plain", "extra matmul FLOPs", "predicted",
    "compiles", "planning", "fit",
)  # fmt: skip


def _cells(row: Row, plain: Row) -> list[str]:
    if row.error:
        words = f"{row.name}, refused: {row.error[:60]}"
        predicted = [_size(row.predicted_bytes), "", _seconds(row.planning_seconds), ""]
        return [words, *[""] * 4, *predicted]
    share = row.share(plain)
    words = ", does not fit" * (row.kind == FIT and not row.fits)
    return [
        row.name + words + ", the compiler recomputes too" * row.compiler_remat,
        _size(row.required_bytes),
        _size(row.temp_bytes),
        "" if share is None else f"{share:.0%}",
        _percent(row.extra(plain)),
        _size(row.predicted_bytes),
        "" if row.compiles is None else str(row.compiles),
        _seconds(row.planning_seconds),
        _seconds(row.fit_seconds),
    ]


def _size(count: int | None) -> str:
    return "" if count is None else text(count)


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{share:+.1%}"
