"""`jaxmem verify`: compare the prediction with the allocator's peak on an attached GPU or TPU."""

import json

import click

from jaxmem.cli.options import (
    complete_policies,
    job_argument,
    json_option,
    set_option,
)
from jaxmem.cli.streams import emit, emit_json, results_only


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
    help="A policy in place of those in the code.",
)
@set_option
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.05,
    show_default=True,
    metavar="FRACTION",
    help="Largest relative error of the prediction.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop after this time, compilation included.",
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

    # The job is not loaded here: this process must not initialise the accelerator.
    with results_only():
        found = run(where, once(settings), steps=steps, policy=policy, timeout=timeout)
    if as_json:
        emit_json(json.loads(found.to_json()))
    else:
        emit(found)
    return 2 if abs(found.error) > tolerance else 0
