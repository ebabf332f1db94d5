"""A chain of unequal links, the plans for it, and what a plan needs and costs.

A plan is a nesting: each link, or several as one, is either evaluated with something
kept for its backward (`Kept`), or it belongs to a stretch that is evaluated without a tape
and again, from its kept input, when its turn to be reversed comes (`Again`).
In JAX the second is `jax.checkpoint` around the stretch.

Accounts follow Beaumont et al. (2019, *Optimal checkpointing for heterogeneous
chains*, known as rotor): while the links s..t are dealt with, the gradient of
the last result is there, and

- a stretch holds its input, and needs the widest of its links while it is evaluated;
- a kept link holds its tape; it needs its result beside that while it is
  evaluated, its gradient and working space while it is reversed;
- what stands to the left of a link is held while it is reversed, what stands to
  the right is gone.

Boundaries are counted where they are held, not always as in the paper: the
input of a kept link takes room only when its option stores it.  The paper's tape
ā of a link includes the link's result and has the input beside it, which is
`Option(tape_bytes=input + ā, ..., input_bytes=input, output_bytes=result)`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

Carried = Callable[[int, int], int]


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to keep what the backward of a link needs.

    Attributes:
      tape_bytes: kept until the link is reversed, with the link's input if and
        only if this option stores it.
      seconds: of the forward work that this option does again.
      work_bytes: alive beside the tape and the result's gradient while the link is reversed.
      input_bytes: of `tape_bytes`, what belongs to the link's input, and is not
        counted again where that is held anyway.
      output_bytes: of `tape_bytes`, what belongs to the link's result, likewise.
    """

    tape_bytes: int
    seconds: float
    work_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Link:
    """One link of a chain.

    Attributes:
      seconds: of one forward evaluation.
      carry_bytes: its result, the input of the next link.
      options: the ways to keep what its backward needs, at least one.
      gradient_bytes: the gradient of its result.
      overhead_bytes: alive beside input and result while it is evaluated without a tape.

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
                "a link without an option cannot be reversed: pass at least one Option"
            )


# Several links as one, with options of its own: those from the first to before the second number.
Wide = Mapping[tuple[int, int], Link]
NO_WIDE: Wide = {}


@dataclasses.dataclass(frozen=True)
class Kept:
    """An option of this link is stored when it is evaluated, or of so many from it on as one."""

    link: int
    option: int
    length: int = 1

    @property
    def after(self) -> int:
        """The link behind it."""
        return self.link + self.length

    def among(self, links: Sequence[Link], wide: Wide) -> Link:
        """The link, or the several as one."""
        return links[self.link] if self.length == 1 else wide[self.link, self.after]


NO_MORE: Mapping[Kept, int] = {}


@dataclasses.dataclass(frozen=True)
class Again:
    """Links first..last-1: evaluated without a tape, and again, by `inner`, to be reversed."""

    first: int
    last: int
    inner: "tuple[Kept | Again, ...]"


Steps = tuple[Kept | Again, ...]


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """A plan for a whole chain.

    Attributes:
      bytes: what it needs beside the chain's input.
      seconds: of forward work beyond one evaluation of each link.
      steps: what becomes of the links, in their order.
    """

    bytes: int
    seconds: float
    steps: Steps


def extra_seconds(
    steps: Sequence[Kept | Again], links: Sequence[Link], wide: Wide = NO_WIDE
) -> float:
    """Seconds of forward work beyond one evaluation of each link."""
    total = 0.0
    for step in steps:
        if isinstance(step, Kept):
            total += step.among(links, wide).options[step.option].seconds
        else:
            total += sum(link.seconds for link in links[step.first : step.last])
            total += extra_seconds(step.inner, links, wide)
    return total


def peak_bytes(
    steps: Sequence[Kept | Again],
    links: Sequence[Link],
    carried: Carried | None = None,
    wide: Wide = NO_WIDE,
    more: Mapping[Kept, int] = NO_MORE,
) -> int:
    """Bytes alive at the worst moment of a plan whose first input is held by others.

    Args:
      carried, wide: see `jaxmem.solve.chain.solve_chain`.
      more: work_bytes of kept links beside those of their options.
    """
    end = steps[-1]
    gradient = links[(end.after if isinstance(end, Kept) else end.last) - 1].gradient_bytes
    held = peak = passed = 0
    known = None  # the last link whose input is held
    for step in steps:
        first = step.link if isinstance(step, Kept) else step.first
        boundary = 0
        if known is None:
            known = first  # the first input of all
        elif known != first:
            boundary = links[first - 1].carry_bytes
            boundary = min(boundary - passed, carried(known, first) if carried else boundary)
        if isinstance(step, Again):
            held, known, passed = held + boundary, first, 0
            peak = max(
                peak,
                held + gradient + evaluation_bytes(links, step.first, step.last),
                held + peak_bytes(step.inner, links, carried, wide, more),
            )
            continue
        link = step.among(links, wide)
        option = link.options[step.option]
        charge, waiting = option.tape_bytes, boundary - option.input_bytes
        if waiting <= 0:
            charge, waiting, known = charge + waiting, 0, first
        peak = max(
            peak,
            held + gradient + charge + waiting + link.carry_bytes - option.output_bytes,
            held + link.gradient_bytes + charge + option.work_bytes + more.get(step, 0),
        )
        held, passed = held + charge, option.output_bytes
    return peak


def evaluation_bytes(links: Sequence[Link], first: int, last: int) -> int:
    """The most that evaluating links first..last-1 without a tape takes beside their input."""
    widest = before = 0
    for link in links[first:last]:
        widest = max(widest, before + link.carry_bytes + link.overhead_bytes)
        before = link.carry_bytes
    return widest
