"""Pipeline schedules as plain data: which stage does what in which tick.

A batch goes through the stages in microbatches.  In each tick every stage does at most one forward
and one backward pass of a microbatch, and then sends to its neighbours.  With S stages and m
microbatches, each stage is idle for the share (S − 1) / (m + S − 1) of the time, the bubble; with v
chunks of layers on each device, it is (S − 1) / (v m + S − 1).

* "gpipe" (Huang et al. 2019, arXiv 1811.06965): all forward passes, then all backward passes.
* "1f1b" (PipeDream-Flush, Narayanan et al. 2021, arXiv 2104.04473): backward passes begin as soon
  as they can, and stage s holds at most S − s microbatches.
* "eager-1f1b" (Zhuang et al. 2023, arXiv 2211.05322): stage s holds 2 (S − s) − 1 of them, so that
  in each tick it can do the forward pass of one and the backward pass of another.  Where stages run
  in lockstep, as they do in one compiled loop, that takes less time.
* "interleaved" (arXiv 2104.04473): a device holds v chunks, which are not neighbours.  A stage's
  order of work is as published, and fits the same ticks as "eager-1f1b".
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxmem._util.shown import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---------------------------------------------------------------- types

Kind = Literal["forward", "backward"]


class Work(NamedTuple):
    """The pass of one microbatch through one chunk.

    Attributes:
      microbatch: its number.
      chunk: the number of the chunk in the order of the layers: chunk k is on stage k mod S.
    """

    microbatch: int
    chunk: int


Row = tuple[Work | None, ...]


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """What each stage does in each tick.

    Attributes:
      name: "gpipe", "1f1b", "eager-1f1b" or "interleaved".
      stages: S, the devices along the axis.
      microbatches: m.
      chunks: v, those of one device.
      forward, backward: for each tick, the work of each stage; None where it has none.

    >>> schedule = PipelineSchedule.of("1f1b", stages=4, microbatches=8)
    >>> schedule.ticks, round(schedule.bubble, 4), schedule.in_flight
    (22, 0.2727, (4, 3, 2, 1))
    >>> print(PipelineSchedule.of("1f1b", stages=2, microbatches=3))
    stage 0  F0 F1  . B0 F2 B1  . B2
    stage 1   . F0 B0 F1 B1 F2 B2  .
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    forward: tuple[Row, ...]
    backward: tuple[Row, ...]

    @classmethod
    def of(cls, name: str, stages: int, microbatches: int, chunks: int = 1) -> "PipelineSchedule":
        """A schedule by its name.

        Raises:
          ValueError: there is none of this name, or the numbers do not fit it.
        """
        if name not in NAMES:
            raise ValueError(f"schedule={name!r} is none; there are {', '.join(map(repr, NAMES))}")
        if name == "interleaved":
            if chunks < 2:
                raise ValueError(
                    f'schedule="interleaved" gives each device several chunks of layers, got '
                    f'chunks={chunks}; pass chunks=2 or more, or schedule="1f1b"'
                )
            if microbatches % stages:
                raise ValueError(
                    f'schedule="interleaved" takes microbatches in groups of {stages}, one for '
                    f"each stage, and {stages} do not divide {microbatches}; pass "
                    f"microbatches={max(microbatches // stages, 1) * stages} or "
                    f'{-(-microbatches // stages) * stages}, or schedule="1f1b"'
                )
        elif chunks != 1:
            raise ValueError(
                f'chunks={chunks} is for schedule="interleaved", and {name!r} has one chunk on '
                'each device; pass schedule="interleaved", or leave chunks= out'
            )
        return _made(name, stages, microbatches, chunks)

    @property
    def ticks(self) -> int:
        """How many there are, forward and backward."""
        return len(self.forward)

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage is idle, if all passes take the same time.

        A tick takes as long as the stage that has most to do in it.
        """
        return 1 - 2 * self.microbatches * self.chunks / self.span(1, 1)

    def span(self, forward: float, backward: float, is_uniform: bool = False) -> float:
        """The time that all ticks take, if each waits for its slowest stage.

        Args:
          forward, backward: the time of a pass through one chunk.
          is_uniform: whether all stages do in a tick what any of them does.
        """
        total = 0.0
        for rows in zip(self.forward, self.backward, strict=True):
            works = [(a is not None, b is not None) for a, b in zip(*rows, strict=True)]
            if is_uniform:
                works = [tuple(map(any, zip(*works, strict=True)))]
            total += max(a * forward + b * backward for a, b in works)
        return total

    @functools.cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Of each stage, for how many passes at most it holds the residuals of the forward pass."""
        found, held = [0] * self.stages, [0] * self.stages
        for forward, backward in zip(self.forward, self.backward, strict=True):
            for stage in range(self.stages):
                held[stage] += forward[stage] is not None
                found[stage] = max(found[stage], held[stage])
                held[stage] -= backward[stage] is not None
        return tuple(found)

    def works(self, kind: Kind) -> Iterator[tuple[int, int, Work]]:
        """Tick, stage and work, in the order of the ticks."""
        for tick, row in enumerate(self.forward if kind == "forward" else self.backward):
            for stage, work in enumerate(row):
                if work is not None:
                    yield tick, stage, work

    def forward_only(self) -> "PipelineSchedule":
        """The schedule that makes the value alone."""
        rows = _earliest(self.stages, self.chunks, _orders_forward(self))
        return dataclasses.replace(self, forward=rows[0], backward=rows[1])

    def plot(self, path: str | os.PathLike[str] | None = None, **options: Any) -> "Figure":
        """Draw what each stage does when.

        Args:
          path: where to write it, as PNG or SVG by its ending; None for nowhere.
          **options: see `jaxmem.show.schedule.plot_schedule`.

        Raises:
          ImportError: matplotlib is not installed; says what to type.
          ValueError: the file is neither PNG nor SVG.
        """
        return picture(self, "plot", path, options)

    def __str__(self) -> str:
        return text_table(self)


def text_table(schedule: PipelineSchedule, width: int = 0) -> str:
    """A line for each stage: F and B with the number of the microbatch, a full stop where idle.

    Args:
      width: of the lines, in characters; ticks beyond are left out.  0 for all.
    """
    lines = []
    for stage in range(schedule.stages):
        cells = []
        for forward, backward in zip(schedule.forward, schedule.backward, strict=True):
            a, b = forward[stage], backward[stage]
            cells.append("".join(f"{kind}{_number(schedule, work)}" for kind, work in (
                ("F", a), ("B", b)) if work is not None) or ".")  # fmt: skip
        lines.append(cells)
    room = max(len(cell) for cells in lines for cell in cells)
    labels = [f"stage {stage}" for stage in range(schedule.stages)]
    label = max(map(len, labels))
    found = []
    for name, cells in zip(labels, lines, strict=True):
        line = f"{name:<{label}}  " + " ".join(cell.rjust(room) for cell in cells)
        found.append(line if not width or len(line) <= width else f"{line[: width - 2]} …")
    return "\n".join(found)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where what is received is held until it is used, in as few places as can be.

    Each table has a row for each tick and an entry for each stage, −1 for none.

    Attributes:
      count: how many places each device has; all devices run one program.
      received: where that goes which the neighbour sent at the end of the tick before.
      used: where that is which this tick's forward (of inputs) and backward pass reads.
    """

    count: int
    received: tuple[tuple[int, ...], ...]
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]


# ---------------------------------------------------------------- API

NAMES = ("gpipe", "1f1b", "eager-1f1b", "interleaved")


def input_places(schedule: PipelineSchedule) -> Places:
    """Those of what enters a chunk, from its arrival to the backward pass.

    The first chunk has none: it begins with the batch.
    """
    ends = {work: tick for tick, _, work in schedule.works("backward")}
    uses = {work: tick for tick, _, work in schedule.works("forward")}
    last = schedule.stages * schedule.chunks - 1
    arrivals = [
        (tick + 1, (stage + 1) % schedule.stages, Work(work.microbatch, work.chunk + 1))
        for tick, stage, work in schedule.works("forward")
        if work.chunk < last
    ]
    return _placed(schedule, arrivals, {work: ends.get(work, uses[work]) for work in uses})


def cotangent_places(schedule: PipelineSchedule) -> Places:
    """Those of the cotangent of what leaves a chunk, from its arrival to the backward pass."""
    ends = {work: tick for tick, _, work in schedule.works("backward")}
    arrivals = [
        (tick + 1, (stage - 1) % schedule.stages, Work(work.microbatch, work.chunk - 1))
        for tick, stage, work in schedule.works("backward")
        if work.chunk > 0
    ]
    return _placed(schedule, arrivals, ends)


def state_places(schedule: PipelineSchedule) -> Places:
    """Those of what a forward pass reads beside its input, from there to the backward pass."""
    ends = {work: tick for tick, _, work in schedule.works("backward")}
    arrivals = list(schedule.works("forward"))
    return _placed(schedule, arrivals, {work: ends.get(work, tick) for tick, _, work in arrivals})


# ---------------------------------------------------------------- implementation

Step = tuple[Kind, Work]


@functools.lru_cache(maxsize=64)
def _made(name: str, stages: int, microbatches: int, chunks: int) -> PipelineSchedule:
    if name in ("eager-1f1b", "interleaved"):
        rows = _eager(stages, microbatches, chunks)
    elif name == "gpipe":
        rows = _gpipe(stages, microbatches)
    else:
        orders = [_one_after_the_other(stage, stages, microbatches) for stage in range(stages)]
        rows = _earliest(stages, chunks, orders)
    return PipelineSchedule(name, stages, microbatches, chunks, *rows)


Rows = tuple[tuple[Row, ...], tuple[Row, ...]]


def _rows(stages: int, steps: Mapping[tuple[Kind, int, int], Work]) -> Rows:
    """Tables from (kind, tick, stage)."""
    ticks = 1 + max(tick for _, tick, _ in steps)

    def table(kind: Kind) -> tuple[Row, ...]:
        return tuple(
            tuple(steps.get((kind, tick, stage)) for stage in range(stages))
            for tick in range(ticks)
        )

    return table("forward"), table("backward")


def _gpipe(stages: int, microbatches: int) -> Rows:
    """Backward in the reverse order of forward, as a loop over ticks is differentiated."""
    steps: dict[tuple[Kind, int, int], Work] = {}
    ticks = 2 * (microbatches + stages - 1)
    for j in range(microbatches):
        for stage in range(stages):
            steps["forward", j + stage, stage] = Work(j, stage)
            steps["backward", ticks - 1 - j - stage, stage] = Work(j, stage)
    return _rows(stages, steps)


def _eager(stages: int, microbatches: int, chunks: int) -> Rows:
    """In each tick the next forward and the next backward pass, without a gap on any stage."""
    steps: dict[tuple[Kind, int, int], Work] = {}
    first = stages * chunks - 1  # the tick in which the first microbatch leaves the last chunk
    for number in range(microbatches * chunks):
        for stage in range(stages):
            forward, backward = (
                _work(number, stage, stages, chunks, reverse) for reverse in (False, True)
            )
            steps["forward", number + stage, stage] = forward
            steps["backward", first + number + stages - 1 - stage, stage] = backward
    return _rows(stages, steps)


def _work(number: int, stage: int, stages: int, chunks: int, reverse: bool) -> Work:
    """Of a stage, by its number among all of one kind: groups of microbatches, chunk by chunk."""
    if chunks == 1:
        return Work(number, stage)
    group, inside = divmod(number, stages * chunks)
    chunk = inside // stages
    chunk = chunks - 1 - chunk if reverse else chunk
    return Work(group * stages + inside % stages, chunk * stages + stage)


def _one_after_the_other(stage: int, stages: int, microbatches: int) -> list[Step]:
    """The order of a stage's work in 1F1B."""
    forward: list[Step] = [("forward", Work(j, stage)) for j in range(microbatches)]
    backward: list[Step] = [("backward", Work(j, stage)) for j in range(microbatches)]
    warm_up = min(stages - 1 - stage, microbatches)
    steps = forward[:warm_up]
    for f, b in zip(forward[warm_up:], backward, strict=False):
        steps += [f, b]
    return steps + backward[microbatches - warm_up :]


def _orders_forward(schedule: PipelineSchedule) -> list[list[Step]]:
    found: list[list[Step]] = [[] for _ in range(schedule.stages)]
    for _, stage, work in schedule.works("forward"):
        found[stage].append(("forward", work))
    return found


def _earliest(stages: int, chunks: int, orders: Sequence[Sequence[Step]]) -> Rows:
    """Each stage does its work in this order, and each piece in the first tick in which it can."""
    last = stages * chunks - 1
    done: dict[Step, int] = {}
    at = [0] * stages
    steps: dict[tuple[Kind, int, int], Work] = {}

    def needs(kind: Kind, work: Work) -> Step | None:
        if kind == "forward":
            return None if work.chunk == 0 else ("forward", Work(work.microbatch, work.chunk - 1))
        if work.chunk == last:
            return "forward", work
        return "backward", Work(work.microbatch, work.chunk + 1)

    tick = 0
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        begun = []
        for stage in range(stages):
            if at[stage] == len(orders[stage]):
                continue
            kind, work = orders[stage][at[stage]]
            before = needs(kind, work)
            if before is None or done.get(before, tick) < tick:
                begun.append((stage, kind, work))
        assert begun, "the order of work has a circle"
        for stage, kind, work in begun:
            steps[kind, tick, stage] = work
            done[kind, work] = tick
            at[stage] += 1
        tick += 1
    return _rows(stages, steps)


def _placed(
    schedule: PipelineSchedule, arrivals: Sequence[tuple[int, int, Work]], ends: Mapping[Work, int]
) -> Places:
    """Places by colouring intervals: one is free again in the tick after its last use."""
    ticks, stages = schedule.ticks, schedule.stages
    free_from: list[list[int]] = [[] for _ in range(stages)]
    place_of: dict[Work, int] = {}
    received = _table(ticks, stages)
    for tick, stage, work in sorted(arrivals):
        own = free_from[stage]
        place = next((k for k, free in enumerate(own) if free <= tick), len(own))
        if place == len(own):
            own.append(0)
        own[place] = ends[work] + 1
        place_of[work] = place
        received[tick][stage] = place

    def used(kind: Kind) -> tuple[tuple[int, ...], ...]:
        table = _table(ticks, stages)
        for tick, stage, work in schedule.works(kind):
            table[tick][stage] = place_of.get(work, -1)
        return _frozen(table)

    count = max(1, *map(len, free_from))
    return Places(count, _frozen(received), used("forward"), used("backward"))


def _table(ticks: int, stages: int) -> list[list[int]]:
    return [[-1] * stages for _ in range(ticks)]


def _frozen(table: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, table))


def _number(schedule: PipelineSchedule, work: Work) -> str:
    own = work.chunk // schedule.stages
    return f"{work.microbatch}" + ("" if schedule.chunks == 1 else chr(ord("a") + own % 26))
