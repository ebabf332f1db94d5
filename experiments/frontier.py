"""`jaxmem.fit` beside the policies in use: how much a transformer recomputes in the same memory.

    python experiments/frontier.py            # ten minutes or more, nearly all of them compilers'
    python experiments/frontier.py --small    # a small transformer, on the attached backend

The reference transformer of `programs.py` is compiled under each policy of `front/rivals.py`,
and `fit` is asked for a plan in the memory of each, in between, and at a 7th, a 10th and a 19th
of the temporaries.  Matrix work is counted in the compiled programs, loops times their trip
counts, so that nobody is charged for what a compiler removes.  Nothing runs, and no target need
be there.

It prints what came of it and writes `results/frontier.csv` and a picture for each target,
`results/frontier_TARGET.png`.  The same command goes on where it was stopped; rows of other
versions are made anew, and all are with `--again` (programs that have not changed are not
compiled again even then).
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import tyro
from tqdm import tqdm

import jaxmem
from common.table import Table, versions
from front import claims, picture, rivals
from front.rivals import RIVALS, Asked, Rival
from front.table import FIT, FRONTIER, HAND, POLICY, TOO_LARGE, Made, Row, of, table

RESULTS = Path(__file__).parent / "results"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare jaxmem.fit with the checkpoint policies in use."""

    targets: tuple[str, ...] = ("h100-80g", "v5e-16g")
    """What to compile for; "local" is the attached backend."""
    batch: int = 8
    """Sequences."""
    sequence: int = 1024
    """Their length."""
    width: int = 1024
    """Of the model."""
    layers: int = 24
    """How many."""
    heads: int = 16
    """Of attention."""
    points: int = 12
    """Plans of the frontier itself."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where frontier.csv and the pictures are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: a small transformer on the attached backend."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self, targets=("local",), batch=2, sequence=64, width=64, layers=6, heads=4, points=4
        )

    @property
    def size(self) -> dict[str, Any]:
        """Keywords of `programs.transformer`."""
        names = ("batch", "sequence", "width", "layers", "heads")
        return {name: getattr(self, name) for name in names}


# ---------------------------------------------------------------- API


def main(options: Options) -> dict[str, list[Row]]:
    """The rows of each target, completed, printed, drawn."""
    options = options.sized()
    known = table(options.results / "frontier.csv")
    found = {}
    for target in options.targets:
        rows = found[target] = _rows(options, known, target)
        file = options.results / f"frontier_{target.rpartition(':')[2]}.png"
        picture.draw(rows, file)
        print(f"{target}\n{claims.summary(rows)}\nwritten: {known.path}, {file}\n")
    return found


# ---------------------------------------------------------------- implementation


def _rows(options: Options, known: Table[Row], target: str) -> list[Row]:
    made = Made(
        target,
        " ".join(f"{name}={value}" for name, value in options.size.items()),
        versions(target),
    )
    if options.again:
        known.drop(of(known, made, HAND, POLICY, FIT, FRONTIER))
    with tqdm(total=len(RIVALS), desc=target, unit="program", disable=None) as bar:
        for rival in RIVALS:
            with _step(bar, rival.name):
                if _find(known, made, rival.kind, rival.name) is None:
                    known.add(_rival(rival, options, made))
        asked = rivals.asked(of(known, made, HAND, POLICY))
        bar.total += len(asked) + 1
        with _step(bar, "frontier"):
            if len(of(known, made, FRONTIER)) != options.points:
                known.drop(of(known, made, FRONTIER))
                known.add(*_frontier(options, made))
        for one in asked:
            with _step(bar, one.name):
                if _find(known, made, FIT, one.name, one.budget) is None:
                    known.add(_fit(one, options, made))
    wanted = {(one.name, one.budget) for one in asked}
    rows = of(known, made, HAND, POLICY, FIT, FRONTIER)
    return [row for row in rows if row.kind != FIT or (row.name, row.budget_bytes) in wanted]


@contextlib.contextmanager
def _step(bar: Any, name: str) -> Iterator[None]:
    bar.set_postfix_str(name)
    yield
    bar.update()


def _find(
    known: Table[Row], made: Made, kind: str, name: str, budget: int | None = None
) -> Row | None:
    key = {"target": made.target, "program": made.program, "kind": kind, "name": name}
    return known.find(made.versions, **key, budget_bytes=budget)


def _rival(rival: Rival, options: Options, made: Made) -> Row:
    report = rival.report(options.size, made.target, options.timeout)
    return made.row(rival.kind, rival.name, report, note=_refused(report))


def _frontier(options: Options, made: Made) -> list[Row]:
    job = programs.transformer(**options.size)
    found = jaxmem.frontier(
        job.step,
        *job.args,
        target=made.target,
        points=options.points,
        timeout=options.timeout,
        progress=False,
    )
    return [
        made.row(
            FRONTIER,
            str(number),
            point.report,
            predicted_bytes=point.predicted_bytes,
            extra_seconds=point.extra_seconds,
            note="; ".join(
                filter(None, ["" if point.pareto else "dominated", _refused(point.report)])
            ),
        )
        for number, point in enumerate(found.points, 1)
    ]


def _fit(one: Asked, options: Options, made: Made) -> Row:
    job = programs.transformer(**options.size)
    try:
        fitted = jaxmem.fit(
            job.step,
            *job.args,
            budget=one.budget,
            target=made.target,
            timeout=options.timeout,
            progress=False,
        )
    except jaxmem.BudgetError as error:
        # What it needs at least is above the budget: no answer, so no matrix work.
        return made.row(
            FIT,
            one.name,
            error.report,
            budget_bytes=one.budget,
            matmul_flops=None,
            note="no plan fits",
        )
    why = fitted.explain()
    notes = ["" if why.closed else "not closed", _refused(fitted.report)]
    return made.row(
        FIT,
        one.name,
        fitted.report,
        budget_bytes=one.budget,
        predicted_bytes=why.predicted_bytes,
        extra_seconds=why.extra_seconds,
        compiles=fitted.compiles,
        note="; ".join(filter(None, notes)),
    )


def _refused(report: jaxmem.MemoryReport) -> str:
    return TOO_LARGE if report.fits is False else ""


if __name__ == "__main__":
    main(tyro.cli(Options))
