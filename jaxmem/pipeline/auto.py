"""What "auto" means for the microbatches and the schedule of a pipeline.

Fewer and larger microbatches make a longer bubble and larger inputs of stages; "1f1b" holds half as
many of these as "eager-1f1b", and waits longer.  `jaxmem.fit` chooses by its budget, together with
what layers keep.
"""

import dataclasses

from jaxmem import policies
from jaxmem.pipeline.options import Options
from jaxmem.pipeline.schedule import PipelineSchedule, input_places
from jaxmem.policies import ByLayer, PipelineChoice
from jaxmem.trace import context

# ---------------------------------------------------------------- API


def resolved(options: Options, stages: int, rows: int, others: int) -> Options:
    """The options with a number of microbatches, and a schedule.

    Args:
      rows: of the batch.
      others: over how many devices of other axes the rows of a microbatch may lie.

    Raises:
      ValueError: the plan that is followed has none for this batch and mesh.
    """
    if not options.is_open:
        return options
    choices = possible(options, stages, rows, others)
    told = context.policy_instead(policies.auto())
    choice = told.pipeline(choices) if isinstance(told, ByLayer) else choices[0]
    return dataclasses.replace(options, microbatches=choice.microbatches, schedule=choice.schedule)


def possible(options: Options, stages: int, rows: int, others: int) -> list[PipelineChoice]:
    """How a pipeline may be run; first what it does where no plan says it.

    That is with four microbatches for each stage, or the next best number.
    """
    counts = [options.microbatches]
    if options.microbatches is None:
        counts = _counts(options, stages, rows, others)
    schedules = [options.schedule]
    if options.schedule is None:
        schedules = ["interleaved"] if options.chunks > 1 else ["eager-1f1b", "1f1b"]
        schedules = schedules if options.recompute else ["gpipe"]
    found = [
        PipelineChoice(count, schedule)
        for schedule in schedules
        for count in counts
        if schedule is not None and count is not None
    ]
    return sorted(found, key=lambda one: abs(one.microbatches - 4 * stages))


def waits(schedule: PipelineSchedule, is_uniform: bool) -> tuple[float, float]:
    """How long a step takes, and by how much longer if layers are recomputed in addition.

    In forward passes of one microbatch through one chunk; a backward pass takes two, and one for
    the stage that is recomputed.
    """
    first = schedule.span(1, 3, is_uniform)
    return first, schedule.span(1, 4, is_uniform) - first


def inputs_held(schedule: PipelineSchedule) -> int:
    """How many inputs of stages a device has room for."""
    return input_places(schedule).count


# ---------------------------------------------------------------- implementation

# Microbatches for each stage: 1 makes a bubble of nearly a half, 8 one of a ninth.
_FOR_EACH_STAGE = (1, 2, 4, 8)


def _counts(options: Options, stages: int, rows: int, others: int) -> list[int]:
    """Numbers of microbatches, that divide the rows if any do."""
    near = [stages * times for times in _FOR_EACH_STAGE if stages * times <= rows]
    whole = [count for count in near if rows % count == 0]
    spread = [count for count in whole if (rows // count) % others == 0]
    return spread or whole or near or [stages if options.chunks > 1 else rows]
