"""A stack of equal layers: what each keeps, how the stack is cut, both at once.

A layer has several options, each a set of values to keep (`jaxmem.solve.keep`).  A stack
either keeps something of every layer, or the carries at periodic cuts and something of the
layers in one segment at a time.  In the first form layers may differ: those that keep least
come first, since their backward pass, which needs the most room to recompute, comes last,
when what the others kept is gone; and of the very last layer, whose backward pass begins at
once, what is kept would be live in any case.

Among all such plans the Pareto set of bytes and seconds is returned.  It is found by listing
them: with two or three runs of layers there are some ten thousand.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxmem.solve.pareto import pareto_optimal
from jaxmem.solve.periodic import evaluations, shortest_segments
from jaxmem.solve.revolve import extra_steps

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way in which a layer can be kept.

    Attributes:
      bytes: kept until the layer is reversed.
      seconds: of what is recomputed, and of keeping the rest.
      work_bytes: live on top of these while the layer is reversed.
      loop_bytes: more than that in a loop over layers, whose tapes are one array there.
      copy_bytes: of each layer's tape, what is live twice in front of such a loop.
    """

    bytes: int
    seconds: float
    work_bytes: int = 0
    loop_bytes: int = 0
    copy_bytes: int = 0


class Loose(NamedTuple):
    """Bytes of a single layer that keeps everything, in no loop.

    Attributes:
      live: at the peak, while it is reversed.
      kept: of that, what is there from its forward pass on.
    """

    live: int
    kept: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One plan for a stack.

    Attributes:
      bytes: at the peak, of what the stack keeps and works with.
      seconds: more than a forward and a backward pass.
      kind: "keep" (single values), "periodic" or "revolve".
      runs: for "keep", pairs of a number of layers and their choice, first to last.
      lengths: for "periodic", the segment lengths, outermost first.
      choice: for "periodic", that of the layers in a segment.
      slots: for "revolve", the number of carries.
      kept_bytes: of `bytes`, what is live when the forward pass is done.
    """

    bytes: int
    seconds: float
    kind: Literal["keep", "periodic", "revolve"] = "keep"
    runs: tuple[tuple[int, int], ...] = ()
    lengths: tuple[int, ...] = ()
    choice: int = 0
    slots: int = 0
    kept_bytes: int = 0


# ---------------------------------------------------------------- API


def candidates(
    length: int,
    carry_bytes: int,
    forward_seconds: float,
    choices: Sequence[Choice],
    loose: Loose | None = None,
    later_bytes: int = 0,
    others: int = 0,
    turn_bytes: int = 0,
    alike: bool = False,
    round_seconds: float = 0.0,
) -> tuple[Candidate, ...]:
    """The plans that no other one beats in both bytes and seconds, fastest (and largest) first.

    Args:
      length: number of layers.
      carry_bytes: passed from layer to layer.
      forward_seconds: of one evaluation of a layer.
      choices: of a layer in a loop; the first keeps all that its backward pass reads, which takes
        no time where a layer is in no loop.
      loose: what that is for a single layer, which is in no loop, so that a compiler need not store
        what it can fuse; all of it by default.
      later_bytes: of what is counted elsewhere, as there all the time, and is made only when
        the backward pass comes to the first loop: stacked gradients.
      others: how many more such stacks there are: what these keep counts too where two plans are
        compared, but is no part of `Candidate.bytes`.
      turn_bytes: live next to what the stack keeps before its backward pass begins: the loss's.
        Plans are compared by it too, and it is no part of `Candidate.bytes` either.
      alike: whether all layers are to have the same choice, in one loop.
      round_seconds: of keeping everything of a layer until later in the same round of a loop.

    >>> found = candidates(16, 1, 1.0, [Choice(8, 0.0), Choice(1, 1.0, work_bytes=8)])
    >>> [(c.bytes, c.seconds) for c in found][:3]
    [(128, 0.0), (121, 1.0), (114, 2.0)]
    >>> found[-1].bytes, found[-1].kind  # one carry, and one layer's tape to work on
    (9, 'revolve')
    """
    if length < 1:
        return ()
    if not choices:
        raise ValueError("a layer needs at least one choice: everything kept")
    loose = loose or Loose(choices[0].bytes, choices[0].bytes)
    found = [*_kept(length, choices, loose, later_bytes, others, turn_bytes, alike)]
    if not alike:
        found += _cut(length, carry_bytes, forward_seconds, choices, loose)
        found += revolved(length, carry_bytes, forward_seconds, choices, loose, round_seconds)
    return pareto(found, others, turn_bytes - later_bytes)


def pareto(
    found: Iterable[Candidate], others: int = 0, turn_bytes: int = 0
) -> tuple[Candidate, ...]:
    """Those that no other one beats in both bytes and seconds, fastest first."""

    def cost(one: Candidate) -> tuple[float, int]:
        own = max(one.bytes, one.kept_bytes + turn_bytes)
        return one.seconds, own + others * one.kept_bytes

    return tuple(pareto_optimal(found, cost, rank=lambda one: len(one.runs)))


def revolved(
    length: int,
    carry_bytes: int,
    forward_seconds: float,
    choices: Sequence[Choice],
    loose: Loose | None = None,
    round_seconds: float = 0.0,
) -> Iterator[Candidate]:
    """The plans that store a number of carries, and recompute all else, fewest carries first.

    Args:
      length, carry_bytes, forward_seconds, choices, loose, round_seconds: as of `candidates`.
    """
    loose = loose or Loose(choices[0].bytes, choices[0].bytes)
    # Of one layer at a time there is a tape, made and used in the same round of a loop, which needs
    # what a layer does of which something is recomputed.
    alone = max(loose.live, *(choice.work_bytes for choice in choices))
    for slots in sorted({*range(1, 17), *(round(2 ** (k / 2)) for k in range(8, 20))}):
        if slots < length:
            yield Candidate(
                bytes=slots * carry_bytes + alone,
                seconds=extra_steps(length, slots) * forward_seconds + length * round_seconds,
                kind="revolve",
                slots=slots,
                kept_bytes=slots * carry_bytes + loose.kept,  # the last layer's tape
            )


# ---------------------------------------------------------------- implementation

# Longer stacks are divided at this many places.
_PLACES = 48


def _kept(
    length: int,
    choices: Sequence[Choice],
    loose: Loose,
    later: int,
    more: int,
    turn: int,
    alike: bool = False,
) -> Iterator[Candidate]:
    kept = np.array([c.bytes for c in choices], float)
    seconds = np.array([c.seconds for c in choices])
    work = np.array([c.work_bytes for c in choices], float)
    looped = work + np.array([c.loop_bytes for c in choices], float)
    copied = np.array([c.copy_bytes for c in choices], float)
    # Of a single layer outside of loops, whose tape is part of its work.  It has no copies for
    # loops; but those with such copies were predicted 20 % too small where these did not count.
    alone = looped.max()
    for tail in (0,) if alike else (0, 1):  # whether the last layer keeps everything
        rest = length - tail
        if rest < 1:
            continue
        counts = np.unique(np.linspace(1, rest, min(rest, _PLACES)).round().astype(int))
        grids = np.meshgrid(range(len(choices)), range(len(choices)), counts, indexing="ij")
        first, second, count = (grid.ravel() for grid in grids)
        # One run, or two of which the first keeps less.
        take = (count == rest) & (first == second)
        if not alike:
            take |= (count < rest) & (kept[first] < kept[second])
        if tail:
            # A last run that keeps everything as well is one with the tail, and so in a loop.
            take &= second != 0
        if not take.any():
            continue
        first, second, count = first[take], second[take], count[take]
        others = rest - count
        below = count * kept[first]
        stored = below + others * kept[second]
        peak = below + np.where(count > 1, looped[first], alone)
        peak = np.maximum(peak, stored + np.where(others > 1, looped[second], 0))
        # Of both loops the last one is reversed first, and gradients are made for it then.
        ahead = np.where(others > 1, 0, turn - later)
        peak = np.maximum(peak, below + np.where(count > 1, count * copied[first] + ahead, 0))
        twice = np.where(others > 1, others * copied[second] + turn - later, 0)
        peak = np.maximum(peak, stored + twice)
        # Single layers behind the last loop are reversed first.
        ahead = np.where(count > 1, later, 0)
        peak = np.where(others == 1, np.maximum(peak, stored + alone - ahead), peak)
        if tail:
            ahead = np.where((count > 1) | (others > 1), later, 0)
            peak = np.maximum(peak, stored + loose.live - ahead)
        total = count * seconds[first] + others * seconds[second]
        whole = stored + tail * loose.kept
        # Of all that need no less, only the fastest is of use.
        order = np.lexsort((total, np.maximum(peak, whole + turn - later) + more * whole))
        fastest = np.minimum.accumulate(total[order])
        better = np.concatenate([[True], total[order][1:] < fastest[:-1]])
        for at in order[better]:
            runs = [(int(count[at]), int(first[at])), (int(others[at]), int(second[at]))]
            runs = [run for run in (*runs, (tail, 0)) if run[0]]
            yield Candidate(
                bytes=int(np.ceil(peak[at])),
                seconds=float(total[at]),
                runs=tuple(runs),
                kept_bytes=int(whole[at]),
            )


def _cut(
    length: int,
    carry_bytes: int,
    forward_seconds: float,
    choices: Sequence[Choice],
    loose: Loose,
) -> Iterator[Candidate]:
    for lengths in _cuts(length):
        outer, carries = length, 0
        for inner in lengths:
            carries += carry_bytes * -(-outer // inner)
            outer = inner
        again = evaluations(length, lengths)
        for number, choice in enumerate(choices):
            yield Candidate(
                bytes=carries + outer * choice.bytes + choice.work_bytes + choice.loop_bytes,
                seconds=again * forward_seconds + length * choice.seconds,
                kind="periodic",
                lengths=lengths,
                choice=number,
                kept_bytes=carry_bytes * -(-length // lengths[0]),
            )


def _cuts(length: int) -> Iterator[tuple[int, ...]]:
    """Segment lengths of one and of two levels."""
    for outer in shortest_segments(length):
        if 1 < outer < length:
            yield (outer,)
            yield from ((outer, inner) for inner in shortest_segments(outer) if 1 < inner < outer)
