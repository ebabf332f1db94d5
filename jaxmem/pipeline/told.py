"""What is told of a pipeline before it is compiled: to its user, and to who plans the step."""

from collections.abc import Sequence
from typing import Any

from jaxmem import policies
from jaxmem.pipeline.auto import inputs_held, waits
from jaxmem.pipeline.choices import flops_of, kept_by_layers
from jaxmem.pipeline.part import Part
from jaxmem.pipeline.plan import PipelinePlan, PipelineStage
from jaxmem.policies import ByLayer, NoRemat, PipelineNote
from jaxmem.trace import context

# ---------------------------------------------------------------- API


def explained(parts: Sequence[Part]) -> PipelinePlan:
    """What `explain` returns."""
    first = max(parts, key=lambda part: part.group.size).program
    stages, schedule = first.stages, first.schedule
    layer, begin, end = flops_of(stages.cut)
    policy = kept_by_layers(stages)
    count = schedule.stages
    found = []
    for stage in range(count):
        own = stages.sizes[stage::count]
        flops = layer * sum(own)
        flops += begin * (stage == 0) + end * (stage == count - 1)
        held = max(part.program.schedule.in_flight[stage] for part in parts)
        found.append(PipelineStage(own, flops, held))
    held = max(
        part.program.stages.message_bytes * inputs_held(part.program.schedule) for part in parts
    )
    return PipelinePlan(
        tuple(part.program.schedule for part in parts),
        tuple(part.group.size for part in parts),
        tuple(found),
        stages.message_bytes,
        held,
        repr(policy),
        # Two for the gradients, one for a stage that is recomputed, and one for its layers.
        2.0 + first.recompute + (not isinstance(policy, NoRemat)),
        first.branches,
    )


def note(parts: Sequence[Part], mesh: Any) -> None:
    """Tell who plans the step what its stages hold, and how long they wait."""
    told = context.policy_instead(policies.auto())
    if not isinstance(told, ByLayer):
        return
    programs = [part.program for part in parts]
    times = [waits(program.schedule, not program.branches) for program in programs]
    seconds, again = (sum(several) for several in zip(*times, strict=True))
    devices = mesh.size // programs[0].schedule.stages
    held = [program.stages.message_bytes * inputs_held(program.schedule) for program in programs]
    schedule = programs[0].schedule
    rows = sum(part.group.size * part.group.count for part in parts)
    told.note_pipeline(
        PipelineNote(
            schedule.stages, schedule.chunks, programs[0].total, rows, schedule.name,
            max(held) // devices, seconds, again,
        )
    )  # fmt: skip
