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

    That is with four microbatches for each stage, or the next best number; one that divides the
    rows, if there is any.

    Raises:
      ValueError: stages are interleaved, and the rows are in no groups for them.
    """
    counts, smaller = [options.microbatches], []
    if options.microbatches is None:
        counts, smaller = _counts(options, stages, rows, others)
    schedules = [options.schedule]
    if options.schedule is None:
        schedules = ["interleaved"] if options.chunks > 1 else ["eager-1f1b", "1f1b"]
        schedules = schedules if options.recompute else ["gpipe"]
    found = [
        PipelineChoice(count, schedule)
        for schedule in schedules
        for count in [*counts, *smaller]
        if schedule is not None and count is not None
    ]

    def rank(one: PipelineChoice) -> tuple[bool, int]:
        return one.microbatches in smaller, abs(one.microbatches - 4 * stages)

    return sorted(found, key=rank)


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


def _counts(options: Options, stages: int, rows: int, others: int) -> tuple[list[int], list[int]]:
    """Numbers of microbatches that make the best of the devices, and such as may need less memory.

    For each of a few numbers that double, the nearest one that divides the rows and leaves each
    microbatch rows for all other devices, if there is one that is nearer to it than to the next.
    Else the number itself: microbatches of two sizes, each with a bubble of its own, take as long
    as fewer of them, and are smaller.

    Raises:
      ValueError: stages are interleaved, which these rows do not allow.
    """
    near = [stages * times for times in _FOR_EACH_STAGE if stages * times <= rows] or [rows]
    whole = [one for one in range(min(stages, rows), rows + 1) if rows % one == 0]
    if options.chunks > 1:
        # Of microbatches of each size the stages have to divide the number.
        if rows % stages:
            raise ValueError(
                f"interleaved stages take microbatches in groups of {stages}, and the {rows} rows "
                f"of the batch are in no such groups; pass a batch of "
                f"{max(rows // stages, 1) * stages} rows or {-(-rows // stages) * stages}, or "
                "leave chunks= out"
            )
        whole = [one for one in whole if one % stages == 0]
    whole = [one for one in whole if rows // one % others == 0] or whole
    best: list[int] = []
    smaller: list[int] = []
    for count in near:
        if octave := [one for one in whole if count**2 < 2 * one**2 < 4 * count**2]:
            best.append(min(octave, key=lambda one: abs(one - count)))
        elif rows // count >= others:
            smaller.append(count)
    return best, smaller if best or smaller else near
