"""`jaxmem.fit` and the policies in use: how much a transformer recomputes in the same memory.

python experiments/frontier.py            # minutes per target, nearly all of it compilation
python experiments/frontier.py --small    # a small transformer, on the attached backend

The reference transformer of `programs.py` is compiled under each policy of `front/rivals.py`, and
as flax, haliax and equinox run its layers (`front/peers.py`) with the same weights; their
gradients are compared.  `fit` is asked for a plan in the memory of each, in between, and at a 7th,
a 10th and a 19th of the temporaries.  Matmul FLOPs are counted in the compiled programs, loops
times their trip counts, so that recomputation removed by the compiler does not count, and `fit` is
asked for the fewest (`cost="flops"`).  Only the
gradients of a small transformer are executed, and no target needs to be present.

It prints the results and writes `results/frontier.csv` and a picture per target,
`results/frontier_TARGET.png`.  The same command resumes after an interruption; rows of other
versions are replaced, all of them with `--again` (unchanged programs still come from the cache).
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
from common.compiling import QUICK
from common.table import Table, versions
from front import claims, picture, rivals
from front.rivals import Asked, Rival
from front.table import DOMINATED, FIT, FRONTIER, KINDS, RIVALS, Made, Row, of, refused, table
from jaxmem.fitting.step_problem import Cost

RESULTS = Path(__file__).parent / "results"
COST: Cost = "flops"  # what is compared

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
    dtype: programs.Dtype = "bfloat16"
    """Of parameters and activations."""
    points: int | None = None
    """Plans of the frontier itself: 12, or 8 for TPUs, whose compiler takes its time."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where frontier.csv and the pictures are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """A quick trial: a small transformer on the attached backend."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self,
            targets=("local",),
            batch=8,
            sequence=256,
            width=256,
            layers=12,
            heads=4,
            dtype="float32",
            points=2,
        )

    @property
    def size(self) -> dict[str, Any]:
        """Keywords of `programs.transformer`."""
        names = ["batch", "sequence", "width", "layers", "heads"]
        if self.dtype != "bfloat16":  # which rows do not say of themselves
            names.append("dtype")
        return {name: getattr(self, name) for name in names}

    @property
    def compiling(self) -> dict[str, Any]:
        """Options of each compilation."""
        quick = QUICK if self.small else None
        return {"timeout": self.timeout, "compiler_options": quick}

    @property
    def fitting(self) -> dict[str, Any]:
        """Options of `jaxmem.fit` alone."""
        return {"max_compiles": 3} if self.small else {}

    @property
    def rivals(self) -> list[Rival]:
        """All that `fit` is compared with."""
        found = [*rivals.RIVALS, *rivals.of_others(self.layers)]
        return rivals.of_each_kind(found) if self.small else found


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
        known.drop(of(known, made, *KINDS))
    with tqdm(total=len(options.rivals), desc=target, unit="program", disable=None) as bar:
        for rival in options.rivals:
            with _step(bar, rival.name):
                if _find(known, made, rival.kind, rival.name) is None:
                    try:
                        known.add(rival.row(options.size, made, **options.compiling))
                    except jaxmem.CompileError as error:  # the others can still be compared
                        why = str(error).partition("\n")[0]
                        tqdm.write(f"{rival.name} is not in the table: {why}")
        asked = rivals.asked(of(known, made, *RIVALS), all_of_it=not options.small)
        bar.total += len(asked) + 1
        with _step(bar, "frontier"):
            points = options.points or (8 if _is_tpu(target) else 12)
            if len(of(known, made, FRONTIER)) != points:
                found = _frontier(options, made, points)
                known.drop(of(known, made, FRONTIER))
                known.add(*found)
        for one in asked:
            with _step(bar, one.name):
                if _find(known, made, FIT, one.name, one.budget) is None:
                    known.add(_answered(one, known, made) or _fit(one, options, made))
    wanted = {(one.name, one.budget) for one in asked}
    rows = of(known, made, *KINDS)
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
    return known.find(made.by(kind), **key, budget_bytes=budget)


def _answered(one: Asked, known: Table[Row], made: Made) -> Row | None:
    """The answer to the same budget under another name, of which there are as many as rivals."""
    for row in of(known, made, FIT):
        if row.budget_bytes == one.budget:
            return dataclasses.replace(row, name=one.name)
    return None


def _is_tpu(target: str) -> bool:
    return target != "local" and jaxmem.target(target).platform == "tpu"


def _frontier(options: Options, made: Made, points: int) -> list[Row]:
    job = programs.transformer(**options.size)
    found = jaxmem.frontier(
        job.step,
        *job.args,
        target=made.target,
        points=points,
        cost=COST,
        progress=False,
        **options.compiling,
    )
    return [
        made.row(
            FRONTIER,
            str(number),
            point.report,
            "" if point.pareto else DOMINATED,
            refused(point.report),
            predicted_bytes=point.predicted_bytes,
            extra_seconds=point.extra_seconds,
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
            cost=COST,
            progress=False,
            **options.fitting,
            **options.compiling,
        )
    except jaxmem.BudgetError as error:
        # What it needs at least is above the budget: no answer, so no matmul FLOPs.
        return made.row(
            FIT,
            one.name,
            error.report,
            "no plan fits",
            budget_bytes=one.budget,
            matmul_flops=None,
        )
    why = fitted.explain()
    return made.row(
        FIT,
        one.name,
        fitted.report,
        "" if why.closed else "not closed",
        refused(fitted.report),
        budget_bytes=one.budget,
        predicted_bytes=why.predicted_bytes,
        extra_seconds=why.extra_seconds,
        compiles=fitted.compiles,
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
