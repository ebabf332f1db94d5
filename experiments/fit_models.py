"""`jaxmem.fit` on various models: are budgets kept, and how good are the predictions?

    python experiments/fit_models.py            # nearly all of the time is compilation
    python experiments/fit_models.py --models lstm --targets h100-80g --budgets 3

For each model of `budgeted_models.py` and each target, budgets are spread evenly, by factors,
between the least that any plan compiles to and what the fastest needs, or what the accelerator has
if that is less.  In each the compiled program has to be within the budget, and none may take longer
than one with a smaller budget does, by the roofline.  Temporaries are predicted twice:
before anything is compiled, and when `fit` chooses the plan, corrected by plans compiled so far.

It prints a table and writes `results/fit_models.csv`, a row per budget as soon as it is
known; the same command resumes after an interruption.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import tyro
from budgeted_models import MODELS, ONLY_FOR

import jaxmem
from common.compiling import request
from common.table import Record, Table, versions
from jaxmem._util.text import size
from jaxmem.fitting.step_problem import StepProblem
from jaxmem.fitting.ways import build_problem

RESULTS = Path(__file__).parent / "results"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Ask jaxmem.fit for plans of many models within many budgets."""

    models: tuple[str, ...] = tuple(MODELS)
    """Which of budgeted_models.py."""
    targets: tuple[str, ...] = ("h100-80g", "v5e-16g")
    """What to compile for; "local" is the attached backend."""
    budgets: int = 8
    """How many for each, from the least to what the fastest plan needs."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where fit_models.csv is written."""


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """The plan for one budget; sizes in bytes.

    Attributes:
      place: which of the budgets, 0 the least.
      temporaries: of the compiled program.
      predicted: the same, predicted before anything was compiled.
      expected: the same, predicted when this plan was compiled, corrected by plans compiled before.
      seconds: of recomputation, by the roofline.
      matmul_flops: of the compiled program.
      compiles: how often the compiler was asked.
    """

    model: str
    target: str
    place: int
    budget: int
    required: int
    temporaries: int
    predicted: int
    expected: int
    seconds: float
    matmul_flops: int
    compiles: int

    @property
    def off(self) -> float:
        """The relative error of `predicted`."""
        return self.predicted / self.temporaries - 1

    @property
    def off_then(self) -> float:
        """The relative error of `expected`."""
        return self.expected / self.temporaries - 1


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """All rows, written as they come, and printed."""
    table = Table(options.results / "fit_models.csv", Row, ("model", "target", "place"))
    rows = []
    for model, target in itertools.product(options.models, options.targets):
        if not _can_compile(model, target):
            continue
        made_by = versions(target)
        done = {row.place for row in table.of(made_by, model=model, target=target)}
        if not done >= set(range(options.budgets)):
            for row in asked(model, target, options, done):
                table.add(row)
                print(
                    f"{model} {target}: budget {size(row.budget)}, needs {size(row.required)}, "
                    f"predicted {row.off:+.1%} off, {row.seconds * 1e3:.3f} ms more",
                    flush=True,
                )
        rows += sorted(table.of(made_by, model=model, target=target), key=_budget)
    print(report(rows))
    return rows


def asked(model: str, target: str, options: Options, done: set[int]) -> Iterator[Row]:
    """The rows of one model on one target that are not there yet."""
    job = MODELS[model]()
    ask = request(job, target, options.timeout)
    problem = build_problem(ask, False, "roofline")
    least, most = (
        problem.report(ask, candidate).required_bytes for candidate in (len(problem.front) - 1, 0)
    )
    if target != "local":  # a program that is too large is not what was planned: see frontier.py
        most = min(most, jaxmem.target(target).memory)
    for place in range(options.budgets):
        if place in done:
            continue
        share = place / max(options.budgets - 1, 1)
        budget = round(least ** (1 - share) * most**share)
        fitted = jaxmem.fit(
            job.step,
            *job.args,
            budget=budget,
            target=target,
            donate_argnums=job.donate_argnums,
            timeout=options.timeout,
            progress=False,
        )
        report, why = fitted.report, fitted.explain()
        fixed = report.required_bytes - report.temp_bytes
        yield Row(
            model,
            target,
            place,
            budget,
            report.required_bytes,
            report.temp_bytes,
            predicted_bytes(problem, fitted.plan) - fixed,
            why.predicted_bytes - fixed,
            why.extra_seconds,
            report.matmul_flops or 0,
            fitted.compiles,
            versions=versions(target),
        )


def predicted_bytes(problem: StepProblem, plan: jaxmem.StepPlan) -> int:
    """Bytes predicted for a plan, which may be one between those of the front."""
    whole = dataclasses.replace(problem, front=problem.whole)
    place = next(k for k in range(len(whole.front)) if whole.plan(k) == plan)
    return whole.predicted[place]


def report(rows: Sequence[Row]) -> str:
    """What is claimed, and whether it holds."""
    lines = []
    pairs = sorted({(row.model, row.target) for row in rows})
    for model, target in pairs:
        own = sorted((r for r in rows if (r.model, r.target) == (model, target)), key=_budget)
        kept = sum(row.required <= row.budget for row in own)
        falls = all(a.seconds >= b.seconds for a, b in itertools.pairwise(own))
        work = own[0].matmul_flops / max(own[-1].matmul_flops, 1) - 1
        off, then = [abs(row.off) for row in own], [abs(row.off_then) for row in own]
        course = "falls" if falls else "DOES NOT FALL"
        lines.append(
            f"{model:>13} {target:>9}: {size(own[0].required)} to {size(own[-1].required)}, "
            f"{kept} of {len(own)} budgets kept, time {course} with the budget (at the least "
            f"{work:.1%} more matmul FLOPs than at the most), predictions off by "
            f"{statistics.median(off):.1%} in the median, {max(off):.1%} at most "
            f"({statistics.median(then):.1%} and {max(then):.1%} when compiled), "
            f"{max(row.compiles for row in own)} compiles at most"
        )
    if rows:
        for what, found in (
            ("before anything was compiled", [abs(row.off) for row in rows]),
            ("when they were compiled", [abs(row.off_then) for row in rows]),
        ):
            over = sum(one > 0.1 for one in found)
            lines.append(
                f"all {len(rows)}: temporaries predicted {what} are off by "
                f"{statistics.median(found):.1%} in the median, {over} of them by more than 10 %"
            )
    return "\n".join(lines)


# ---------------------------------------------------------------- implementation


def _budget(row: Row) -> int:
    return row.budget


def _can_compile(model: str, target: str) -> bool:
    """Whether the target is of the platform that the model's kernels are for."""
    platform = jax.default_backend() if target == "local" else jaxmem.target(target).platform
    return ONLY_FOR.get(model, platform) == platform


if __name__ == "__main__":
    main(tyro.cli(Options))
