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
    """
    counts, uneven = [options.microbatches], []
    if options.microbatches is None:
        counts, uneven = _counts(options, stages, rows, others)
    schedules = [options.schedule]
    if options.schedule is None:
        schedules = ["interleaved"] if options.chunks > 1 else ["eager-1f1b", "1f1b"]
        schedules = schedules if options.recompute else ["gpipe"]
    found = [
        PipelineChoice(count, schedule)
        for schedule in schedules
        for count in [*counts, *uneven]
        if schedule is not None and count is not None
    ]

    def rank(one: PipelineChoice) -> tuple[bool, int]:
        return one.microbatches in uneven, abs(one.microbatches - 4 * stages)

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
    """Numbers of microbatches that divide the rows, and such that do not.

    For each of a few numbers that double, the nearest one that divides the rows, if there is one
    that is nearer to it than to the next; one that leaves rows for all other devices goes first.
    Else the number itself: microbatches of two sizes, each with a bubble of its own, need less
    memory than fewer of them.

    Raises:
      ValueError: stages are interleaved, which these rows do not allow.
    """
    near = [stages * times for times in _FOR_EACH_STAGE if stages * times <= rows] or [rows]
    whole = [count for count in range(1, rows + 1) if rows % count == 0]
    spread = [count for count in whole if rows // count % others == 0]
    if options.chunks > 1:
        # Of microbatches of each size the stages have to divide the number.
        if rows % stages:
            raise ValueError(
                f"interleaved stages take microbatches in groups of {stages}, and the {rows} rows "
                f"of the batch are in no such groups; pass a batch of "
                f"{max(rows // stages, 1) * stages} rows or {-(-rows // stages) * stages}, or "
                "leave chunks= out"
            )
        spread, whole = ([one for one in own if one % stages == 0] for own in (spread, whole))
    even: list[int] = []
    uneven: list[int] = []
    for count in near:
        octaves = ([one for one in own if count**2 < 2 * one**2 < 4 * count**2]
                   for own in (spread, whole))  # fmt: skip
        own = next((own for own in octaves if own), [])
        even += [min(own, key=lambda one: abs(one - count))] if own else []
        uneven += [] if own else [count]
    return even, uneven
