"""`jaxmem verify`: the prediction against the allocator of an attached GPU or TPU."""

import click

from jaxmem.cli.options import (
    complete_policies,
    job_argument,
    json_option,
    set_option,
)
from jaxmem.cli.streams import emit, results_only


@click.command()
@job_argument
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="NUMBER",
    help="How many steps to run.",
)
@click.option(
    "--policy",
    default="own",
    metavar="NAME",
    shell_complete=complete_policies,
    help="For the decorated stacks instead of their own.",
)
@set_option
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.05,
    show_default=True,
    metavar="FRACTION",
    help="How far off a prediction may be.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop what takes longer, compiling included.",
)
@json_option
def verify(
    where: str,
    steps: int,
    policy: str,
    settings: tuple[tuple[str, str], ...],
    tolerance: float,
    timeout: float,
    as_json: bool,
) -> int:
    """Run steps of JOB on the attached accelerator and compare its peak with the prediction.

    Exit code: 0 they agree, 2 they differ by more than the tolerance, 1 an error,
    such as no accelerator.
    """
    from jaxmem.cli.building import once
    from jaxmem.jobs.verify import verify as run

    # The job is not loaded here: this process must not take hold of the accelerator.
    with results_only():
        found = run(where, once(settings), steps=steps, policy=policy, timeout=timeout)
    if as_json:
        click.echo(found.to_json())
    else:
        emit(found)
    return 2 if abs(found.error) > tolerance else 0
