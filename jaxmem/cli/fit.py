"""`jaxmem fit`: the fastest plan with which a job fits a budget, to save."""

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxmem.cli.options import (
    Budget,
    cache_option,
    complete_targets,
    job_argument,
    json_option,
    set_option,
    timeout_option,
)
from jaxmem.cli.streams import emit, emit_json, results_only, say
from jaxmem.cli.writing import check_files

if TYPE_CHECKING:
    from jaxmem.errors import BudgetError
    from jaxmem.fitting import Fitted
    from jaxmem.jobs.job import Job

_File = click.Path(dir_okay=False, path_type=Path)


@click.command()
@job_argument
@click.option(
    "--budget",
    type=Budget(),
    required=True,
    metavar="SIZE",
    help="Memory of one device, as in 40GiB.",
)
@click.option(
    "--target",
    default="local",
    show_default=True,
    metavar="NAME",
    shell_complete=complete_targets,
    help="An accelerator, as jaxmem targets lists them; local is the attached one.",
)
@click.option("--save", type=_File, metavar="FILE", help="Where to write the plan, as JSON.")
@click.option("--explain", is_flag=True, help="Print the decision on each value of a layer.")
@json_option
@click.option(
    "--plot",
    type=_File,
    metavar="FILE",
    help="Draw memory against recomputation, as PNG or SVG; compiles further plans.",
)
@click.option(
    "--points",
    type=click.IntRange(min=2),
    default=8,
    show_default=True,
    metavar="NUMBER",
    help="How many plans to draw.",
)
@click.option("--offload", is_flag=True, help="Allow values to be kept in host memory.")
@click.option(
    "--cost",
    type=click.Choice(["roofline", "flops", "measured"]),
    default="roofline",
    show_default=True,
    help="What to minimise: seconds by a roofline, seconds measured on the attached device, or "
    "matmul FLOPs.",
)
@click.option(
    "--max-compiles",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="NUMBER",
    help="How many times the step may be compiled to find the plan.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Take the best plan so far after this time, once one fits.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="NUMBER",
    help="How many plans may be compiled at once for a named target.",
)
@set_option
@timeout_option
@cache_option
def fit(
    where: str,
    budget: int,
    target: str,
    save: Path | None,
    explain: bool,
    as_json: bool,
    plot: Path | None,
    points: int,
    offload: bool,
    cost: str,
    max_compiles: int,
    max_seconds: float | None,
    workers: int,
    settings: tuple[tuple[str, str], ...],
    timeout: float,
    no_cache: bool,
) -> int:
    """Find the fastest plan for the decorated code of JOB within a memory budget.

    jaxmem.use_plan and jaxmem report --plan apply a saved plan.
    Exit code: 0 it fits, 2 no plan fits the budget or the plan does not fit the device, 1 an
    error.
    """
    check_files(save=save, plot=plot)
    options = {
        "target": target,
        "allow_offload": offload,
        "cost": cost,
        "workers": workers,
        "timeout": timeout,
        "cache": not no_cache,
    }
    with results_only():
        job = _job(where, settings)
        limits = {"max_compiles": max_compiles, "max_seconds": max_seconds}
        found = _fitted(job, budget, {**options, **limits})
    fits = not isinstance(found, Exception)
    if as_json:
        emit_json(_data(found, budget, explain))
    elif fits:
        _show(found, explain)
    if not fits:
        say(str(found))
    if fits and save is not None:
        found.plan.save(save)
        say(f"wrote {save}")
    if plot is not None:
        _draw(job, plot, points, options)
    return 0 if fits and (found.report is None or found.report.fits is not False) else 2


def _job(where: str, settings: tuple[tuple[str, str], ...]) -> "Job":
    from jaxmem.cli.building import settings_of
    from jaxmem.fitting.fit import fit as function
    from jaxmem.jobs.load import find

    entry = find(where)
    job = entry.make(settings_of(entry, settings))
    reserved = inspect.signature(function).parameters
    if clash := [key for key in job.kwargs if key in reserved]:
        raise ValueError(
            f"the step's keyword argument {clash[0]!r} is also an option of jaxmem.fit; "
            "pass it by position in args=, or bind it with functools.partial"
        )
    return job


def _fitted(job: "Job", budget: int, options: dict[str, Any]) -> "Fitted | BudgetError":
    from jaxmem.errors import BudgetError
    from jaxmem.fitting import fit as function

    try:
        return function(
            job.step,
            *job.args,
            budget=budget,
            donate_argnums=job.donate_argnums,
            static_argnums=job.static_argnums,
            **options,
            **job.kwargs,
        )
    except BudgetError as error:
        return error


def _show(fitted: "Fitted", explain: bool) -> None:
    from jaxmem._util.text import size
    from jaxmem.show.words import signed_share

    report = fitted.report
    work = report.recompute_overhead
    overhead = "" if work is None else f"; {signed_share(work)} matmul FLOPs"
    compiles = f"{fitted.compiles} compile{'s' if fitted.compiles > 1 else ''}"
    click.echo(
        f"needs {size(report.required_bytes)} of a budget of {size(fitted.budget)} on "
        f"{report.target}: fits{overhead} ({compiles})"
    )
    click.echo(str(fitted.explain() if explain else fitted.plan))
    if report.fits is False:
        # A budget may be larger than the device.
        emit(report.verdict)


def _data(found: "Fitted | BudgetError", budget: int, explain: bool) -> dict[str, Any]:
    """The JSON of a plan, or of the least memory that was reached."""
    from jaxmem._util.records import to_data

    if isinstance(found, Exception):
        report = None if found.report is None else json.loads(found.report.to_json())
        return {
            "fits": False,
            "budget_bytes": budget,
            "least_bytes": found.least_bytes,
            "error": str(found),
            "report": report,
        }
    why = found.explain()
    data = {
        "fits": True,
        "budget_bytes": budget,
        "required_bytes": found.report.required_bytes,
        "predicted_bytes": why.predicted_bytes,
        "extra_seconds": why.extra_seconds,
        "gap": why.gap,
        "closed": why.closed,
        "compiles": found.compiles,
        "plan": json.loads(found.plan.to_json()),
        "report": json.loads(found.report.to_json()),
    }
    return {**data, "values": [to_data(row) for row in why.rows]} if explain else data


def _draw(job: "Job", path: Path, points: int, options: dict[str, Any]) -> None:
    from jaxmem.fitting.frontier import frontier

    with results_only():
        drawn = frontier(
            job.step,
            *job.args,
            points=points,
            donate_argnums=job.donate_argnums,
            static_argnums=job.static_argnums,
            **options,
            **job.kwargs,
        )
    drawn.plot(path)
    say(f"wrote {path}")
