"""A chain of unequal stages, the plans for it, and what a plan needs and costs.

A plan is a nesting: each stage, or several as one, is either evaluated with something
kept for its backward (`Kept`), or it belongs to a segment that is evaluated without a tape
and again, from its kept input, when its turn to be reversed comes (`Recomputed`).
In JAX the second is `jax.checkpoint` around the segment.

Accounts follow Beaumont et al. (2019, *Optimal checkpointing for heterogeneous
chains*, known as rotor): while the stages s..t are dealt with, the gradient of
the last result is there, and

- a segment holds its input, and needs the widest of its stages while it is evaluated;
- a kept stage holds its tape; it needs its result as well while it is
  evaluated, its gradient and working space while it is reversed;
- what stands to the left of a stage is held while it is reversed, what stands to
  the right is gone.

Boundaries are counted where they are held, not always as in the paper: the
input of a kept stage takes room only when its option stores it.  The paper's tape
ā of a stage includes the stage's result and not its input, which is
`Option(tape_bytes=input + ā, ..., input_bytes=input, output_bytes=result)`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

Carried = Callable[[int, int], int]


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to keep what the backward of a stage needs.

    Attributes:
      tape_bytes: kept until the stage is reversed, with the stage's input if and
        only if this option stores it.
      seconds: of the forward work that this option does again.
      work_bytes: live on top of the tape and the result's gradient while the stage is reversed.
      input_bytes: of `tape_bytes`, what belongs to the stage's input, and is not
        counted again where that is held anyway.
      output_bytes: of `tape_bytes`, what belongs to the stage's result, likewise.
      result_seconds: of one evaluation, what only the result needs and the tape does not: spared
        where the stage is the last of a segment that is evaluated again, whose result is known.
    """

    tape_bytes: int
    seconds: float
    work_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    result_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a chain.

    Attributes:
      seconds: of one forward evaluation.
      carry_bytes: its result, the input of the next stage.
      options: the ways to keep what its backward needs, at least one.
      gradient_bytes: the gradient of its result.
      overhead_bytes: live on top of input and result while it is evaluated without a tape.

    Raises:
      ValueError: there is no option.
    """

    seconds: float
    carry_bytes: int
    options: tuple[Option, ...]
    gradient_bytes: int = 0
    overhead_bytes: int = 0

    def __post_init__(self):
        if not self.options:
            raise ValueError(
                "a stage without an option cannot be reversed: pass at least one Option"
            )


# Several stages as one, with options of its own: those from the first to before the second number.
Merged = Mapping[tuple[int, int], Stage]
NO_MERGED: Merged = {}


@dataclasses.dataclass(frozen=True)
class Kept:
    """An option of this stage is stored when it is evaluated, or of so many from it on as one."""

    stage: int
    option: int
    length: int = 1

    @property
    def after(self) -> int:
        """The stage behind it."""
        return self.stage + self.length

    def among(self, stages: Sequence[Stage], merged: Merged) -> Stage:
        """The stage, or the several as one."""
        return stages[self.stage] if self.length == 1 else merged[self.stage, self.after]


NO_EXTRA_WORK: Mapping[Kept, int] = {}


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """Stages first..last-1: evaluated without a tape, and again, by `inner`, to be reversed."""

    first: int
    last: int
    inner: "tuple[Kept | Recomputed, ...]"


Steps = tuple[Kept | Recomputed, ...]


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """A plan for a whole chain.

    Attributes:
      bytes: what it needs on top of the chain's input.
      seconds: of forward work beyond one evaluation of each stage.
      steps: what becomes of the stages, in their order.
    """

    bytes: int
    seconds: float
    steps: Steps


def kept_in(steps: Sequence[Kept | Recomputed]) -> list[Kept]:
    """All that is kept, in segments that are recomputed as well."""
    found: list[Kept] = []
    for step in steps:
        found += [step] if isinstance(step, Kept) else kept_in(step.inner)
    return found


def extra_seconds(
    steps: Sequence[Kept | Recomputed], stages: Sequence[Stage], merged: Merged = NO_MERGED
) -> float:
    """Seconds of forward work beyond one evaluation of each stage.

    What the end of a segment takes for its result is spared when that is evaluated again.  Dynamic
    programs do not see it: they propose plans, of which the seconds are then counted.
    """
    total = 0.0
    for step in steps:
        if isinstance(step, Kept):
            total += step.among(stages, merged).options[step.option].seconds
        else:
            total += sum(stage.seconds for stage in stages[step.first : step.last])
            total += extra_seconds(step.inner, stages, merged)
            last = step.inner[-1]
            if isinstance(last, Kept):
                total -= last.among(stages, merged).options[last.option].result_seconds
    return total


def peak_bytes(
    steps: Sequence[Kept | Recomputed],
    stages: Sequence[Stage],
    carried: Carried | None = None,
    merged: Merged = NO_MERGED,
    extra_work: Mapping[Kept, int] = NO_EXTRA_WORK,
) -> int:
    """Bytes live at the peak of a plan whose first input is held by others.

    Args:
      carried, merged: see `jaxmem.solve.chain.solve_chain`.
      extra_work: work_bytes of kept stages on top of those of their options.
    """
    end = steps[-1]
    gradient = stages[(end.after if isinstance(end, Kept) else end.last) - 1].gradient_bytes
    held = peak = passed = 0
    known = None  # the last stage whose input is held
    for step in steps:
        first = step.stage if isinstance(step, Kept) else step.first
        boundary = 0
        if known is None:
            known = first  # the first input of all
        elif known != first:
            boundary = stages[first - 1].carry_bytes
            boundary = min(boundary - passed, carried(known, first) if carried else boundary)
        if isinstance(step, Recomputed):
            held, known, passed = held + boundary, first, 0
            peak = max(
                peak,
                held + gradient + evaluation_bytes(stages, step.first, step.last),
                held + peak_bytes(step.inner, stages, carried, merged, extra_work),
            )
            continue
        stage = step.among(stages, merged)
        option = stage.options[step.option]
        charge, waiting = option.tape_bytes, boundary - option.input_bytes
        if waiting <= 0:
            charge, waiting, known = charge + waiting, 0, first
        peak = max(
            peak,
            held + gradient + charge + waiting + stage.carry_bytes - option.output_bytes,
            held + stage.gradient_bytes + charge + option.work_bytes + extra_work.get(step, 0),
        )
        held, passed = held + charge, option.output_bytes
    return peak


def evaluation_bytes(stages: Sequence[Stage], first: int, last: int) -> int:
    """The most that evaluating stages first..last-1 without a tape takes on top of their input."""
    widest = before = 0
    for stage in stages[first:last]:
        widest = max(widest, before + stage.carry_bytes + stage.overhead_bytes)
        before = stage.carry_bytes
    return widest
