"""What a pipeline will do, before anything of it is compiled."""

import dataclasses

from jaxmem._util.text import columns, size
from jaxmem.pipeline.schedule import PipelineSchedule

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class PipelineStage:
    """One stage.

    Attributes:
      layers: of each of its chunks.
      flops: of a forward pass of one microbatch, all its chunks; with what is before or after the
        layers.
      in_flight: for how many forward passes at most their input is held.
    """

    layers: tuple[int, ...]
    flops: float
    in_flight: int


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """What `explain` of a pipeline returns.

    Attributes:
      schedules: one for microbatches of each size, done one after the other.
      rows: of a microbatch, for each schedule.
      stages: in their order.
      message_bytes: what a stage sends to the next for one microbatch, on all devices of the stage
        together; of the largest microbatch.
      held_bytes: of inputs of stages, on all devices of one stage: they run one program,
        so that each has room for as many as the first.
      policy: what layers keep while a stage is recomputed or differentiated.
      backward: what a backward pass takes, in forward passes, recomputation included.
      branches: whether a stage computes no more than is asked of it; with other axes in the mesh
        all stages compute the same in each tick.
    """

    schedules: tuple[PipelineSchedule, ...]
    rows: tuple[int, ...]
    stages: tuple[PipelineStage, ...]
    message_bytes: int
    held_bytes: int
    policy: str
    backward: float
    branches: bool

    @property
    def ticks(self) -> int:
        """Of all schedules, forward and backward."""
        return sum(schedule.ticks for schedule in self.schedules)

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage is idle, if all passes take the same time."""
        spans = [schedule.span(1, 1) for schedule in self.schedules]
        idle = [s * schedule.bubble for s, schedule in zip(spans, self.schedules, strict=True)]
        return sum(idle) / sum(spans)

    @property
    def slowdown(self) -> float:
        """The time of all ticks over that without a bubble, all stages being equal."""
        passes = sum(schedule.microbatches * schedule.chunks for schedule in self.schedules)
        spans = sum(
            schedule.span(1, self.backward, not self.branches) for schedule in self.schedules
        )
        return spans / (passes * (1 + self.backward))

    @property
    def imbalance(self) -> float:
        """By how much the slowest stage takes longer than the mean of all."""
        flops = [stage.flops for stage in self.stages]
        return max(flops) * len(flops) / sum(flops) - 1 if sum(flops) else 0.0

    def __str__(self) -> str:
        first = self.schedules[0]
        parts = " + ".join(
            f"{schedule.microbatches} of {rows} row{'' if rows == 1 else 's'}"
            for schedule, rows in zip(self.schedules, self.rows, strict=True)
        )
        head = (
            f"{first.name}, {first.stages} stages, microbatches: {parts}; {self.ticks} ticks, "
            f"bubble {self.bubble:.1%}"
        )
        mean = sum(stage.flops for stage in self.stages) / len(self.stages)
        rows = [["", "layers", "FLOPs", "in flight"]]
        for number, stage in enumerate(self.stages):
            share = f"{stage.flops / mean:.2f} of the mean" if mean else "0"
            layers = " + ".join(map(str, stage.layers))
            rows.append([f"stage {number}", layers, share, str(stage.in_flight)])
        tail = (
            f"a stage's input is {size(self.message_bytes)}; {size(self.held_bytes)} of them are "
            f"held; layers: {self.policy}\n"
            f"time of the ticks: {self.slowdown:.2f} times that without a bubble, a backward pass "
            f"being {self.backward:g} forward ones"
        )
        if not self.branches:
            tail += "; with other axes in the mesh, all stages compute in each tick"
        return f"{head}\n{columns(rows, right=[1, 2, 3])}\n{tail}"
