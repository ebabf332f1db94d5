"""The largest sizes that fit: one row for each compiled program, and what the rows say."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from common import picture
from common.table import Record, Table, markdown
from jaxmem._util.text import size as text

Question = Literal["batch", "model"]
BATCH: Final = "batch"
MODEL: Final = "model"
Way = Literal["plain", "remat", "accumulation", "all together"]
PLAIN: Final = "plain"
REMAT: Final = "remat"
PARTS: Final = "accumulation"
ALL: Final = "all together"
FIT = "fit"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """One compiled program; sizes in bytes.

    Attributes:
      question: `BATCH` or `MODEL`.
      program: width and length.
      policy: of the layers, "none", "full" or `FIT`.
      capacity: what the step may take.
      matmul_flops: of the compiled program; `model_matmul_flops` without recomputation.
    """

    target: str
    question: str
    way: str
    program: str
    layers: int
    sequences: int
    microbatches: int
    policy: str
    capacity: int
    required_bytes: int
    temp_bytes: int
    parameters: int
    matmul_flops: int | None
    model_matmul_flops: int | None

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.capacity

    @property
    def asked(self) -> int:
        """What the question is about: sequences or layers."""
        return self.sequences if self.question == BATCH else self.layers

    @property
    def largest(self) -> int:
        """The same as an answer: 0 where not even this fits."""
        return self.asked if self.fits else 0

    @property
    def at_once(self) -> int:
        """Sequences whose activations are there at the same time."""
        return -(-self.sequences // self.microbatches)

    @property
    def unbounded(self) -> bool:
        """Whether any other batch would do as well, cut into more microbatches."""
        return self.question == BATCH and self.microbatches > 1

    @property
    def work(self) -> float | None:
        """Matmul FLOPs beyond the model's, in percent of that."""
        if self.matmul_flops is None or not self.model_matmul_flops:
            return None
        return 100 * (self.matmul_flops / self.model_matmul_flops - 1)


UNIT = {BATCH: "sequences", MODEL: "layers"}
KEY = (
    "target", "question", "way", "program", "layers", "sequences", "microbatches", "policy",
    "capacity",
)  # fmt: skip


# ---------------------------------------------------------------- API


def table(path: Path) -> Table[Row]:
    """The rows that are there."""
    return Table(path, Row, KEY)


def summary(rows: Sequence[Row]) -> str:
    """The answers as Markdown."""
    lines = [["target and question", "way", "largest", "at a time", "needs", "extra FLOPs"]]
    for row in rows:
        largest = f"{row.asked} {UNIT[row.question]}"
        if not row.fits:
            largest = f"nothing fits, not even {row.asked}"
        elif row.question == MODEL:
            largest += f", {_count(row.parameters)} parameters"
        elif row.unbounded:
            largest = f"any ({row.sequences} compiled)"
        lines.append(
            [
                f"{row.target}, {row.question}",
                row.way,
                largest,
                f"{row.at_once} sequences",
                text(row.required_bytes),
                "?" if row.work is None else f"{row.work:+.1f} %",
            ]
        )
    return markdown(lines)


def message(rows: Sequence[Row]) -> str:
    """What came of it, in a line, for the first target."""
    target = rows[0].target if rows else "no target"
    found = {(row.question, row.way): row for row in rows if row.target == target}
    parts = []
    for question, way in ((BATCH, REMAT), (MODEL, ALL)):
        before, after = found.get((question, PLAIN)), found.get((question, way))
        if before and after and before.fits and after.fits:
            work = "" if after.work is None else f" ({after.work:+.0f} % FLOPs)"
            times = after.asked / before.asked
            parts.append(f"{times:.0f} × as many {UNIT[question]} by {way}{work}")
    return f"{target}: {', '.join(parts) or 'too little fits to compare'}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """A bar for each answer; the batch on the left, the model on the right."""
    targets = list(dict.fromkeys(row.target for row in rows))
    places = {
        (target, way): -k - 0.7 * (k // len(_COLOURS))
        for k, (target, way) in enumerate((t, w) for t in targets for w in _COLOURS)
    }
    height = 1.2 + 0.36 * (len(places) + 0.7 * len(targets))
    with picture.drawn(path, message(rows), 10.0, height, across=2) as (left, right):
        for axes, question in ((left, BATCH), (right, MODEL)):
            own = {(row.target, row.way): row for row in rows if row.question == question}
            ends = [row.largest for row in own.values() if not row.unbounded]
            most = 8 * max([1, *ends])
            for place, y in places.items():
                _bar(axes, y, own.get(place), place[1], most)
            axes.set_xscale("log")
            axes.set_xlim(0.8, most)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_title(_title(question, rows), loc="left", fontsize=9.5)
            axes.set_xlabel(f"{UNIT[question]}; FLOPs: extra matmul FLOPs over the model's")
            axes.grid(False, axis="y")
            axes.set_yticks(list(places.values()), [way for _, way in places])
            axes.tick_params(axis="y", length=0)
        right.set_yticklabels([])
        for target in targets if len(targets) > 1 else []:
            left.text(0.8, 0.62 + places[target, PLAIN], f" {target}", fontsize=9, weight="bold")


# ---------------------------------------------------------------- implementation

_COLOURS = {PLAIN: picture.PLAIN, REMAT: picture.HAND, PARTS: picture.PEER, ALL: picture.OURS}


def _title(question: str, rows: Sequence[Row]) -> str:
    own = [row for row in rows if row.question == question]
    if not own:
        return f"the largest {question}: nothing was asked"
    if question == BATCH:
        return f"largest batch of the model of {own[0].layers} layers"
    return f"deepest model with {own[0].sequences} sequences a step"


def _bar(axes: Any, y: float, row: Row | None, way: str, most: float) -> None:
    """A bar with its figure, inside if there is room."""
    if row is None:
        return
    if not row.fits:
        needs = f"nothing fits: {row.asked} would need {text(row.required_bytes)}"
        axes.text(0.9, y, needs, va="center", fontsize=8.5)
        return
    size = most if row.unbounded else row.asked
    axes.barh(y, size - 0.8, 0.8, left=0.8, color=_COLOURS[way], alpha=0.5 if row.unbounded else 1)
    inside = row.unbounded or row.asked**2 > most
    axes.text(
        0.9 if inside else row.asked * 1.1,
        y,
        _words(row),
        va="center",
        fontsize=8.5,
        color="white" if inside and not row.unbounded else "black",
        parse_math=False,
    )


def _words(row: Row) -> str:
    work = "" if row.work is None else f", {row.work:+.0f} % FLOPs"
    if row.unbounded:
        return f"any number, {row.at_once} at a time{work}"
    if row.question == BATCH:
        return f"{row.sequences}{work}"
    return f"{row.layers}: {_count(row.parameters)} parameters{work}"


def _count(number: int) -> str:
    """A number of parameters, in the manner of model names.

    >>> _count(4_600_000_000), _count(431_600_000), _count(12_000)
    ('4.6 B', '432 M', '12 k')
    """
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 10 * scale:
            return f"{number / scale:.0f} {letter}"
        if number >= scale:
            return f"{number / scale:.1f} {letter}"
    return str(number)
