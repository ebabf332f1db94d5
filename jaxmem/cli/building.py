"""What `report`, `fit` and `sweep` check before anything is compiled."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxmem.jobs.job import Job
from jaxmem.jobs.load import Entry
from jaxmem.jobs.parse import PolicyText

if TYPE_CHECKING:
    from jaxmem.compile.program import Program

Under = Callable[[], contextlib.AbstractContextManager[None]]

NO_STACKS = (
    "warning: the policy does nothing: no layer stack in the step is decorated with jaxmem.remat, "
    "and the job takes no keyword policy"
)
NO_STACKS_FOR_PLAN = (
    "warning: the plan does nothing: no layer stack in the step is decorated; put "
    "@jaxmem.remat_auto on the function that has the scan"
)


def settings_of(entry: Entry, settings: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """--set as keywords of the job."""
    return entry.parse(once(settings))


def once(settings: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """--set as texts, none given twice."""
    keys = [key for key, _ in settings]
    if twice := [key for k, key in enumerate(keys) if key in keys[:k]]:
        raise click.UsageError(f"--set {twice[0]}=… is given twice")
    return dict(settings)


def check_policies(entry: Entry, policies: tuple[PolicyText, ...]) -> None:
    """Refuse a mistyped policy before anything is compiled.

    Raises:
      ValueError, TypeError: no such policy or option.
    """
    for policy in policies:
        with entry.under(policy):
            pass


def trace(job: Job, platform: str | None = None) -> "Program":
    """The job's step, traced for a platform, None for the attached one; call in `Entry.under`."""
    from jaxmem.compile.program import Program

    donated, static = job.donate_argnums, job.static_argnums
    return Program(job.step, job.args, dict(job.kwargs), donated, static, platform)


def under(entry: Entry, policy: PolicyText, plan: Path | None) -> Under:
    """A factory of the context in which the job is traced; each thread makes its own.

    Raises:
      ValueError: the file holds no plan.
    """
    if plan is None:
        return lambda: entry.under(policy)
    from jaxmem.fitting.step_plan import StepPlan, following

    loaded = StepPlan.load(plan)
    return lambda: following(loaded)


def made_elsewhere(plan: Path, targets: Sequence[str]) -> str:
    """A note on targets for which the plan was not made; "" if there are none."""
    from jaxmem.fitting.step_plan import StepPlan

    made_for = StepPlan.load(plan).target
    others = [target for target in targets if target != made_for]
    if not made_for or not others:
        return ""
    return (
        f"{plan} was made for {made_for}: on {', '.join(others)} it may need more memory, or "
        f"recompute more, than a plan made for it (jaxmem fit --target {others[0]})"
    )


def without_stacks(job: Job, context: Under) -> bool:
    """Whether the step has no decorated stack for a policy or a plan to act on."""
    with context():
        return not trace(job).record.regions
