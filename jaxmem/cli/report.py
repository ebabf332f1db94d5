"""`jaxmem report`: one job on one or several targets, compiled at the same time."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from jaxmem.cli.options import (
    Names,
    cache_option,
    complete_policies,
    complete_targets,
    job_argument,
    json_option,
    set_option,
    timeout_option,
)
from jaxmem.cli.streams import emit, emit_json, results_only, say
from jaxmem.cli.writing import check_files
from jaxmem.jobs.failure import explained, one_line
from jaxmem.jobs.parse import PolicyText


@click.command()
@job_argument
@click.option(
    "--target",
    "targets",
    type=Names(),
    default="local",
    show_default=True,
    metavar="NAMES",
    shell_complete=complete_targets,
    help="Comma-separated accelerators, as jaxmem targets lists them; local is the attached one.",
)
@click.option(
    "--policy",
    default="own",
    metavar="NAME",
    shell_complete=complete_policies,
    help="A policy in place of those in the code, such as sqrt or revolve:slots=4.",
)
@click.option(
    "--plan",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A plan, written by jaxmem fit --save, in place of the policies in the code.",
)
@set_option
@json_option
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw live memory along the program, as PNG or SVG.",
)
@click.option(
    "--fusions",
    is_flag=True,
    help="Say which operations are fused, what the kernels read and write, and what the operations "
    "would one by one (--json has it in any case).",
)
@click.option(
    "--plot-fusions",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the bytes moved by line with and without fusion, and the roofline, as PNG or SVG.",
)
@click.option(
    "--generate-code",
    is_flag=True,
    help="Do not stop when buffers are assigned: the compiler's peak and its refusals, in 2 to 100 "
    "times the time.",
)
@timeout_option
@cache_option
@click.option(
    "--no-suggest", is_flag=True, help="Do not look for a policy under which it would fit."
)
def report(
    where: str,
    targets: tuple[str, ...],
    policy: str,
    plan: Path | None,
    settings: tuple[tuple[str, str], ...],
    as_json: bool,
    plot: Path | None,
    fusions: bool,
    plot_fusions: Path | None,
    generate_code: bool,
    timeout: float,
    no_cache: bool,
    no_suggest: bool,
) -> int:
    """Compile JOB for each target: the memory that it needs, and whether it fits.

    Exit code: 0 it fits everywhere, 2 it does not, 1 an error.

    --json prints one document: the report, or for several targets a list of reports in
    their order. A target that failed has {"target": …, "error": …} in its place; what
    fails before the first compilation is {"error": …} alone.
    """
    if plan is not None and policy != "own":
        raise click.UsageError(
            "--plan and --policy both say what the stacks keep; give one of them"
        )
    check_files(plot=plot, plot_fusions=plot_fusions)
    options = {
        "generate_code": generate_code,
        "timeout": timeout,
        "cache": not no_cache,
        "suggest": not no_suggest,
    }
    with results_only():
        found = _reports(where, targets, PolicyText.parse(policy), plan, settings, options)
    _show(targets, found, as_json, fusions)
    failed = [one for one in found if isinstance(one, BaseException)]
    if plot is not None:
        _plot(targets, found, plot, "plot")
    if plot_fusions is not None:
        _plot(targets, found, plot_fusions, "plot_fusions")
    if failed:
        return 1
    return 2 if any(one.fits is False for one in found) else 0


def _reports(
    where: str,
    targets: tuple[str, ...],
    policy: PolicyText,
    plan: Path | None,
    settings: tuple[tuple[str, str], ...],
    options: dict[str, Any],
) -> list[Any]:
    """A report or an error for each target."""
    from jaxmem.cli import building
    from jaxmem.cli.compilers import compiling
    from jaxmem.jobs.load import find
    from jaxmem.targets import target as named
    from jaxmem.targets import warm_up

    for target in targets:
        if target != "local":
            with contextlib.suppress(ValueError, OSError):  # the report raises it with more detail
                warm_up(named(target))  # while the user's module is imported
    entry = find(where)
    building.check_policies(entry, (policy,))
    job = entry.make(building.settings_of(entry, settings), policy)
    context = building.under(entry, policy, plan)

    def one(target: str) -> Any:
        try:
            with context():
                return job.report(target, **options)
        except Exception as error:
            return error

    if plan is not None and (note := building.made_elsewhere(plan, targets)):
        say(note)
    if (plan is not None or entry.is_forced(policy)) and building.without_stacks(job, context):
        say(building.NO_STACKS if plan is None else building.NO_STACKS_FOR_PLAN)
    if sys.stderr.isatty():
        say(f"compiling {job.name} for {', '.join(targets)} …")
    if len(targets) == 1:
        return [one(targets[0])]
    with compiling(len(targets)) as threads:
        return list(threads.map(one, targets))


def _show(targets: tuple[str, ...], found: list[Any], as_json: bool, fusions: bool) -> None:
    if as_json:
        objects = [
            {"target": target, "error": one_line(one)}
            if isinstance(one, BaseException)
            else json.loads(one.to_json())
            for target, one in zip(targets, found, strict=True)
        ]
        emit_json(objects if len(objects) > 1 else objects[0])
    else:
        for k, one in enumerate(one for one in found if not isinstance(one, BaseException)):
            if k:
                click.echo()
            emit(one)
            if fusions:
                click.echo()
                emit(one.fusions or _NO_KERNELS)
    for target, one in zip(targets, found, strict=True):
        if isinstance(one, BaseException):
            say(explained(one) if len(found) == 1 else f"{target}: {explained(one)}")


_NO_KERNELS = "the compiler gave no readable text of the program, so its kernels are unknown"


def _plot(targets: tuple[str, ...], found: list[Any], path: Path, kind: str) -> None:
    for target, one in zip(targets, found, strict=True):
        if isinstance(one, BaseException):
            continue
        # A target may be a path, "mine.toml:name".
        name = target.rpartition(":")[2].replace("/", "-")
        file = path.with_stem(f"{path.stem}-{name}") if len(targets) > 1 else path
        getattr(one, kind)(file)
        say(f"wrote {file}")
