"""How much deeper can a network be in the same memory, and what does that cost?

    python experiments/deeper.py            # minutes of compilation on two idle cores
    python experiments/deeper.py --small    # one small network, on the attached backend

gradient-checkpointing (2018) claims feed-forward models ten times larger for 20 % more time.  Here
a feed-forward net, a bottleneck ResNet and a transformer are as deep as a budget allows with
everything kept; then `jaxmem.fit` is asked for 10, 20, 50 and 100 times that depth within the same
budget.  The budget is for the whole step, including parameters, momentum and gradient, which grow
with depth too.  Batches are large and layers narrow, so that activations dominate as in the
claim; the table gives the share of the budget that arguments take.

For comparison: the deepest net with a hand-written `jax.checkpoint` around each layer.

Extra matmul FLOPs are those of the compiled program, loops times their trip counts, beyond a
forward and a backward pass of the same depth.  Elementwise operations are not counted, though they
read and write nearly all of the memory; the roofline time, which counts bytes moved, is in the
table for comparison.

It prints a table and writes `results/deeper.csv`, one row per program, and `.png`; the same command
resumes after an interruption.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro
from deep_models import MODELS
from tqdm import tqdm

from common import picture
from common.compiling import Planned, compiling, is_recomputed_by_compiler, planned
from common.table import Record, Table, markdown, versions
from jaxmem._util.text import parse_size, size

RESULTS = Path(__file__).parent / "results"
KEPT, HAND, FIT = "everything kept", "by hand", "fit"

# Published (README of gradient-checkpointing): so many times larger, for so much more time.
PUBLISHED = (10.0, 0.20)

# How many layers make a round of each scan when `fit` plans it.
GROUPS = {"feed-forward": 5, "ResNet": 5, "transformer": 1}

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Make networks deeper in the same memory."""

    target: str = "h100-80g"
    """What to compile for; "local" is the attached backend."""
    models: tuple[str, ...] = tuple(MODELS)
    """Which of deep_models.py."""
    budget: str = "59GiB"
    """What a whole step may need; from about 60 GiB XLA itself rematerialises on an 80 GB GPU."""
    times: tuple[float, ...] = (10.0, 20.0, 50.0, 100.0)
    """How many times deeper than with everything kept."""
    timeout: float = 1800.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where deeper.csv and .png are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: one small network on the attached backend."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self, target="local", models=("feed-forward",), budget="12MiB", times=(4.0,)
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Keywords of the models."""
        return {"batch": 2048, "width": 32} if self.small else {}

    @property
    def compiling(self) -> dict[str, Any]:
        """Keywords for whatever compiles."""
        return compiling(self.target, self.timeout, self.small)


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """A compiled program; sizes in bytes.

    Attributes:
      sizes: of the model, where they are not those of `deep_models`.
      kind: `KEPT`, `HAND` or `FIT`.
      depth: as the model takes it; `layers` as one would count them.
      group: how many layers make a round of the scan.
      fits: whether it is within the budget; of a `FIT` that does not the figures are the least's.
      argument_bytes: parameters, momentum and batch.
      predicted_bytes: required bytes, as `fit` predicted them.
      matmul_flops: of the compiled program; `model_matmul_flops` without recomputation.
      compiler_remat: whether the compiler recomputes by itself as well.
      seconds: by the roofline of the target, None where it is unknown.
      compiles: how often `fit` asked the compiler.
    """

    target: str
    model: str
    sizes: str
    budget_bytes: int
    kind: str
    depth: int
    layers: int
    group: int
    fits: bool
    required_bytes: int
    argument_bytes: int
    temp_bytes: int
    predicted_bytes: int | None
    matmul_flops: int
    model_matmul_flops: int
    compiler_remat: bool
    seconds: float | None
    compiles: int | None

    @property
    def extra(self) -> float:
        """Matmul FLOPs over that of the model, less one."""
        return self.matmul_flops / self.model_matmul_flops - 1


_KEY = ("target", "model", "sizes", "budget_bytes", "kind", "depth", "group")

# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows that count: the deepest of each kind, and all of `fit`; printed and drawn."""
    options = options.sized()
    table = Table(options.results / "deeper.csv", Row, _KEY)
    if options.again:
        table.drop(table.of(versions(options.target), target=options.target))
    rows: list[Row] = []
    with tqdm(unit="program", disable=None) as bar:
        for model in options.models:
            rows += _Asking(options, model, table, bar).rows()
    drawing = options.results / "deeper.png"
    draw(rows, drawing)
    print(f"{summary(rows)}\n\n{answer(rows)}\nwritten: {table.path}, {drawing}")
    return rows


def deepest(need: Callable[[int], int], budget: int, start: int) -> int:
    """The largest depth that needs no more than the budget, of needs that grow with depth.

    0 if there is none.

    >>> deepest(lambda depth: 7 + 3 * depth, 100, start=4)
    31
    >>> deepest(lambda depth: 7 + 3 * depth, 9, start=4)
    0
    """
    known: dict[int, int] = {}
    low, high, guess = 0, None, start
    while high is None or high - low > 1:
        known[guess] = need(guess)
        if known[guess] <= budget:
            low = guess
        else:
            high = guess
        # Where the line through the last two would meet the budget.
        (at, bytes), *rest = reversed(known.items())
        slope = bytes / at if not rest else (bytes - rest[0][1]) / (at - rest[0][0])
        guess = at + int((budget - bytes) // max(slope, 1))
        guess = max(low + 1, guess if high is None else min(guess, high - 1))
    return low


def times(row: Row, rows: Sequence[Row]) -> float:
    """How many times as many layers as with everything kept."""
    kept = next(one for one in rows if one.kind == KEPT and one.model == row.model)
    return row.layers / kept.layers


def answer(rows: Sequence[Row]) -> str:
    """What came of it, from the rows alone."""
    lines = []
    for asked in sorted({round(times(row, rows)) for row in rows if row.kind == FIT}):
        found = [row for row in rows if row.kind == FIT and round(times(row, rows)) == asked]
        text = ", ".join(
            f"{row.model} {f'{row.extra:.1%}' if row.fits else 'does not fit'}" for row in found
        )
        lines.append(f"{asked} times deeper: {text}")
    return (
        f"Extra matmul FLOPs within {size(rows[0].budget_bytes)}. {'; '.join(lines)}. Published: "
        f"{PUBLISHED[0]:g} times larger for {PUBLISHED[1]:.0%} more time."
    )


def summary(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = ["", "layers", "deeper", "in all", "arguments", "extra FLOPs", "roofline", "predicted"]
    lines = [head]
    for row in rows:
        kept = next(one for one in rows if one.kind == KEPT and one.model == row.model)
        longer = ""
        if row.seconds is not None and kept.seconds:
            longer = f"{row.seconds / row.layers / (kept.seconds / kept.layers) - 1:+.0%}"
        off = row.predicted_bytes and row.predicted_bytes / row.required_bytes - 1
        name = f"{row.model}, {row.kind}" + ": no plan fits, the least" * (not row.fits)
        lines.append(
            [
                name + " (the compiler recomputes, too)" * row.compiler_remat,
                str(row.layers),
                f"{times(row, rows):.1f} ×",
                size(row.required_bytes),
                f"{row.argument_bytes / row.budget_bytes:.1%}",
                f"{row.extra:+.1%}",
                longer,
                "" if off is None else f"{off:+.1%}",
            ]
        )
    return markdown(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Extra matmul FLOPs against depth, in multiples of the depth with everything kept."""
    fitting = [row for row in rows if row.fits]
    goal = [row for row in fitting if row.kind == FIT and round(times(row, rows)) == PUBLISHED[0]]
    message = f"No plan of {PUBLISHED[0]:g} times the depth was asked for, or none fits"
    if goal:
        message = (
            f"{PUBLISHED[0]:g} × deeper in {size(rows[0].budget_bytes)} for "
            f"{max(0.0, min(row.extra for row in goal)):.0%} to "
            f"{max(row.extra for row in goal):.0%} extra matmul FLOPs"
        )
    with picture.drawn(path, message, width=7.4, height=4.4) as (axes,):
        for colour, model in zip(picture.COLOURS, MODELS, strict=False):
            own = [row for row in fitting if row.model == model]
            ours = sorted((r for r in own if r.kind in (KEPT, FIT)), key=lambda r: r.layers)
            if ours:
                axes.plot(*_points(ours, rows), "o-", color=colour, ms=5, label=model)
            if hand := [row for row in own if row.kind == HAND]:
                axes.plot(*_points(hand, rows), "x", color=colour, ms=8, mew=2)
        axes.plot([], [], "x", color=picture.PLAIN, mew=2, label="jax.checkpoint by hand")
        axes.plot(
            [PUBLISHED[0]], [100 * PUBLISHED[1]], "*", color="black", ms=12,
            label="published (more time)",
        )  # fmt: skip
        ticks = sorted({1, *(round(times(row, rows)) for row in fitting if row.kind == FIT)})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick} ×" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("layers, as multiples of those that fit with everything kept")
        axes.set_ylabel("extra matmul FLOPs, %")
        axes.legend(loc="upper left", frameon=False)


# ---------------------------------------------------------------- implementation


def _points(own: Sequence[Row], rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [times(row, rows) for row in own], [100 * row.extra for row in own]


@dataclasses.dataclass(frozen=True)
class _Asking:
    """The rows of one model: those that are there, and others made."""

    options: Options
    model: str
    table: Table[Row]
    bar: Any

    def rows(self) -> list[Row]:
        budget = parse_size(self.options.budget)
        kept = deepest(lambda n: self.row(KEPT, n).required_bytes, budget, start=4)
        if not kept:
            raise ValueError(
                f"not one layer of the {self.model} fits {self.options.budget} with everything "
                "kept, so there is nothing to be a multiple of; pass a larger --budget"
            )
        hand = deepest(lambda n: self.row(HAND, n).required_bytes, budget, start=7 * kept)
        found = [self.row(KEPT, kept), self.row(HAND, hand)]
        layers = MODELS[self.model].layers
        group = 1 if self.options.small else GROUPS[self.model]
        for multiple in self.options.times:
            depth = group
            while layers(depth) < multiple * layers(kept):
                depth += group
            found.append(self.row(FIT, depth, group))
            if not found[-1].fits:
                return found + self._between(max(found[-2].depth, kept), depth, group)
        return found

    def _between(self, low: int, high: int, group: int) -> list[Row]:
        """The deepest that fits, to a tenth: some depth above `low`, below `high`."""
        found = None
        while high > 1.1 * low and (middle := round(math.sqrt(low * high) / group) * group) > low:
            if middle >= high:
                break
            row = self.row(FIT, middle, group)
            low, high, found = (middle, high, row) if row.fits else (low, middle, found)
        return [] if found is None else [found]

    def row(self, kind: str, depth: int, group: int = 1) -> Row:
        """That of the table, or else a new one, which is put there."""
        options, budget = self.options, parse_size(self.options.budget)
        sizes = " ".join(f"{name}={value}" for name, value in options.sizes.items())
        key = {
            "target": options.target, "model": self.model, "sizes": sizes,
            "budget_bytes": budget, "kind": kind, "depth": depth, "group": group,
        }  # fmt: skip
        self.bar.set_postfix_str(f"{self.model}, {kind}, depth {depth}")
        made_by = versions(options.target)
        row = self.table.find(made_by, **key)
        if row is None:
            row = Row(**key, **self._measured(kind, depth, group, budget), versions=made_by)
            self.table.add(row)
        self.bar.update()
        return row

    def _measured(self, kind: str, depth: int, group: int, budget: int) -> dict[str, Any]:
        remat = "hand" if kind == HAND else "none"
        model = MODELS[self.model]
        job = model.job(depth, group, remat, **self.options.sizes)
        if kind == FIT:
            found = planned(job, budget, cost="flops", **self.options.compiling)
        else:
            report = job.report(**self.options.compiling)
            found = Planned(report, report.required_bytes <= budget)
        report = found.report
        return {
            "layers": model.layers(depth),
            "fits": found.fits,
            "required_bytes": report.required_bytes,
            "argument_bytes": report.argument_bytes,
            "temp_bytes": report.temp_bytes,
            "predicted_bytes": found.predicted_bytes,
            "matmul_flops": report.matmul_flops,
            "model_matmul_flops": report.model_matmul_flops,
            "compiler_remat": is_recomputed_by_compiler(report),
            "seconds": report.estimated_seconds,
            "compiles": found.compiles,
        }


if __name__ == "__main__":
    main(tyro.cli(Options))
