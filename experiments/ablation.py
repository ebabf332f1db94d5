"""What each rule of the estimate is worth: `fit` without it, in budgets that are known.

    python experiments/ablation.py                        # half an hour per target
    python experiments/ablation.py --rules writes_in_place --models matrix_chain --places 3

`jaxmem.estimate.compiler.Compiler` holds what a compiler does to live bytes.  Each of these rules
spares compilations, or finds better plans, or goes.  For models and budgets of
`results/fit_models.csv`, `fit` is asked with all rules and without each: "worse" and "better"
count the budgets where the plan recomputes more or less by over 0.2 % of the model's matmul FLOPs,
"lost" is the mean of that, "compiles" how many more compilations were asked for in all, and "off"
what the plans' temporaries were predicted wrong by before anything was compiled, in the median and
at most.  A budget that is no longer met is told of.

It prints a table for each target and writes `results/ablation.csv`; the same command resumes after
an interruption.
"""

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import tyro
from budgeted_models import MODELS
from fit_models import Row as Known
from fit_models import predicted_bytes
from tqdm import tqdm

import jaxmem
from common.compiling import request
from common.table import Record, Table, markdown, read, versions
from jaxmem.estimate import compiler
from jaxmem.fitting.step_problem import Cost, build_problem

RESULTS = Path(__file__).parent / "results"
ALL = "all rules"
COST: Cost = "flops"  # what is compared

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Plan models of fit_models.py without one rule at a time."""

    targets: tuple[str, ...] = ("h100-80g", "v5e-16g")
    """What to compile for."""
    models: tuple[str, ...] = tuple(model for model in MODELS if "fused" not in model)
    """Which of budgeted_models.py."""
    places: tuple[int, ...] = (1, 3, 5)
    """Which of the eight budgets."""
    rules: tuple[str, ...] | None = None
    """Which rules; by default all that the target's compiler has."""
    compiles: int = 6
    """How often `fit` may ask the compiler for one budget."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where fit_models.csv is read, and ablation.csv written."""


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """The plan for one budget without a rule; sizes in bytes.

    Attributes:
      predicted: the temporaries of the plan, before anything was compiled.
      compiles: how often the compiler was asked.
      required, matmul_flops: of the compiled program; None where no plan was found to fit.
    """

    rule: str
    target: str
    model: str
    place: int
    budget: int
    compiles: int = 0
    required: int | None = None
    temporaries: int | None = None
    predicted: int | None = None
    matmul_flops: int | None = None

    @property
    def off(self) -> float | None:
        """The relative error of `predicted`."""
        if self.predicted is None or self.temporaries is None:
            return None
        return self.predicted / self.temporaries - 1


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """All rows, made where they are not there, and printed."""
    table = Table(options.results / "ablation.csv", Row, ("rule", "target", "model", "place"))
    asked = list(_asked(options))
    rows = []
    for rule, known in tqdm(asked, unit="plan", disable=None):
        own = versions(known.target)
        key = {"rule": rule, "target": known.target, "model": known.model, "place": known.place}
        row = table.find(own, **key)
        if row is None or row.budget != known.budget:
            asking = Row(rule, known.target, known.model, known.place, known.budget, versions=own)
            row = _planned(asking, options)
            table.add(row)
        rows.append(row)
    for target in options.targets:
        print(f"\n{target}\n\n{summary([row for row in rows if row.target == target])}")
    return rows


def rules_of(target: str) -> list[str]:
    """The rules that the target's compiler has, of those about bytes."""
    own = compiler.of_platform(jaxmem.target(target).platform)
    return [field.name for field in dataclasses.fields(own) if getattr(own, field.name) is True]


def summary(rows: Sequence[Row]) -> str:
    """A Markdown table: what changes without each rule."""
    whole = {(row.model, row.place): row for row in rows if row.rule == ALL}
    lines = [["without", "budgets", "worse", "better", "lost", "compiles", "off", "at most"]]
    for rule, group in itertools.groupby(rows, lambda row: row.rule):
        own = list(group)
        changes = [_change(row, whole[row.model, row.place]) for row in own]
        met = [change for change in changes if change is not None]
        off = [abs(row.off) for row in own if row.off is not None]
        more = sum(row.compiles - whole[row.model, row.place].compiles for row in own)
        lines.append(
            [
                rule,
                f"{len(own)}" + (f", {len(own) - len(met)} not met" if len(met) < len(own) else ""),
                str(sum(change > _SMALL for change in met)),
                str(sum(change < -_SMALL for change in met)),
                f"{statistics.mean(met):+.2%}",
                f"{sum(row.compiles for row in own)}" if rule == ALL else f"{more:+d}",
                f"{statistics.median(off):.1%}",
                f"{max(off):.1%}",
            ]
        )
    return markdown(lines)


# ---------------------------------------------------------------- implementation

# Less than this part of the FLOPs is no change.
_SMALL = 0.002


def _asked(options: Options) -> Iterator[tuple[str, Known]]:
    """Rules and budgets, all rules first."""
    known = read(options.results / "fit_models.csv", Known)
    for target in options.targets:
        for rule in (ALL, *(options.rules or rules_of(target))):
            for row in known:
                asked = row.model in options.models and row.place in options.places
                if asked and row.target == target:
                    yield rule, row


@contextlib.contextmanager
def _without(rule: str, platform: str) -> Iterator[None]:
    own = compiler.of_platform(platform)
    less = own if rule == ALL else dataclasses.replace(own, **{rule: False})
    with mock.patch.object(compiler, platform.upper(), less):
        yield


def _planned(row: Row, options: Options) -> Row:
    job = MODELS[row.model]()
    how = {
        "target": row.target,
        "donate_argnums": job.donate_argnums,
        "max_compiles": options.compiles,
        "timeout": options.timeout,
    }
    with _without(row.rule, jaxmem.target(row.target).platform):
        try:
            fitted = jaxmem.fit(
                job.step, *job.args, budget=row.budget, cost=COST, progress=False, **how
            )
        except jaxmem.BudgetError:
            return dataclasses.replace(row, compiles=options.compiles)
        problem = build_problem(request(job, row.target, options.timeout), False, COST)
    report = fitted.report
    fixed = report.required_bytes - report.temp_bytes
    return dataclasses.replace(
        row,
        compiles=fitted.compiles,
        required=report.required_bytes,
        temporaries=report.temp_bytes,
        predicted=predicted_bytes(problem, fitted.plan) - fixed,
        matmul_flops=report.matmul_flops,
    )


def _change(row: Row, whole: Row) -> float | None:
    """How much more is recomputed, in parts of all matmul FLOPs; None where no plan fits."""
    if row.matmul_flops is None or whole.matmul_flops is None:
        return None
    return row.matmul_flops / whole.matmul_flops - 1


if __name__ == "__main__":
    main(tyro.cli(Options))
