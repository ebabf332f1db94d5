"""Plans that recompute layers whole, or keep all of them: of each run the last ones are kept.

With none kept that is what models have for an option of their own, a `jax.checkpoint` around each
layer.  What such a layer needs while it is reversed is its own tape, predicted better than that of
one that keeps single values.  The dynamic program knows these plans, and passes them by where
others are predicted to need less of what it sees, which the loss is no part of.  Here one layer
after the other is kept, the one that spares the most seconds for the bytes that are live at the
peak, whatever that is.  The last layers are reversed first: what they keep is gone by then.  Of
what stands outside of layers single values are kept as well, to fill what is left of a budget.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from jaxmem.solve.stages import ChainPlan, Kept, Merged, Recomputed, Stage, Steps, extra_seconds
from jaxmem.unrolled.runs import Run

P = TypeVar("P", bound=ChainPlan)

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Stages that are recomputed together, or kept.

    Attributes:
      run: the number of the run that it is a layer of; None for code outside of these.
      ways: from recomputed whole to all kept, more bytes and fewer seconds from one to the next.
    """

    run: int | None
    ways: tuple[Steps, ...]


# ---------------------------------------------------------------- API


def whole_layers(
    cuts: Sequence[int],
    runs: Sequence[Run],
    stages: Sequence[Stage],
    merged: Merged,
    held: Callable[[Steps], P],
    needed: Callable[[P], int],
) -> Iterator[P]:
    """Plans in which layers, and stages outside of layers, are recomputed whole or kept.

    From all of them recomputed on, more of one is kept at a time; all that are looked at on the way
    are among these.

    Args:
      cuts: the operations at which stages begin, and the end.
      runs: of operations.
      stages, merged: see `jaxmem.solve.chain.solve_chain`.
      held: the plan of these steps.
      needed: what it has live at its peak, with the loss.
    """
    if not runs:
        return
    units = _units(cuts, runs, stages, merged)

    def plan(levels: Sequence[int]) -> P:
        each = (unit.ways[level] for unit, level in zip(units, levels, strict=True))
        return held(tuple(itertools.chain.from_iterable(each)))

    levels = [0] * len(units)
    yield (best := plan(levels))
    while growing := _growing(units, levels):
        several = {k: plan([*levels[:k], levels[k] + 1, *levels[k + 1 :]]) for k in growing}
        yield from filter(_recomputes, several.values())
        k = _most_spared(best, several, needed)
        levels[k], best = levels[k] + 1, several[k]


# ---------------------------------------------------------------- implementation

_Way = tuple[int, float, Steps]  # bytes that are kept, seconds


def _units(
    cuts: Sequence[int], runs: Sequence[Run], stages: Sequence[Stage], merged: Merged
) -> list[_Unit]:
    """All stages, those of one layer together."""
    layers = {place: number for number, run in enumerate(runs) for place in run.places[:-1]}
    inside = {place for run in runs for place in range(run.first + 1, run.after)}
    begins = [at for at in cuts[:-1] if at in layers or at not in inside]
    numbers = {at: number for number, at in enumerate(cuts)}
    found = []
    for begin, end in itertools.pairwise([*begins, cuts[-1]]):
        first, after, run = numbers[begin], numbers[end], layers.get(begin)
        kept = tuple(Kept(number, 0) for number in range(first, after))
        inner = (Kept(first, 0, after - first),) if (first, after) in merged else kept
        whole = (Recomputed(first, after, inner),)
        if run is None:
            found.append(_Unit(None, _hull(whole, stages)))
        else:
            found.append(_Unit(run, (whole, kept)))
    return found


def _hull(whole: tuple[Recomputed], stages: Sequence[Stage]) -> tuple[Steps, ...]:
    """Ways to keep more and more of a stage, each step as good a bargain as can be had."""
    first = whole[0].first
    hull: list[_Way] = [(0, extra_seconds(whole, stages), whole)]
    options = enumerate(stages[first].options)
    ways = [(one.tape_bytes, one.seconds, (Kept(first, number),)) for number, one in options]
    for way in sorted(ways, key=lambda way: way[:2]):
        if way[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _rate(hull[-2], way) >= _rate(hull[-2], hull[-1]):
            hull.pop()
        hull.append(way)
    return tuple(steps for _, _, steps in hull)


def _rate(one: _Way, other: _Way) -> float:
    """Seconds that the other spares, for each byte more."""
    return (one[1] - other[1]) / max(other[0] - one[0], 1)


def _growing(units: Sequence[_Unit], levels: Sequence[int]) -> list[int]:
    """Of which more could be kept: of each run the last layer that is recomputed."""
    found: dict[int, int] = {}
    for k, (unit, level) in enumerate(zip(units, levels, strict=True)):
        if level + 1 < len(unit.ways):
            found[-1 - k if unit.run is None else unit.run] = k
    return list(found.values())


def _recomputes(plan: ChainPlan) -> bool:
    """Whether anything is recomputed whole; plans without are others' to find."""
    return any(isinstance(step, Recomputed) for step in plan.steps)


def _most_spared(before: P, several: Mapping[int, P], needed: Callable[[P], int]) -> int:
    """Which plan spares the most seconds for each byte more; of those that need none, seconds."""

    def rate(k: int) -> tuple[float, float]:
        spared, more = before.seconds - several[k].seconds, needed(several[k]) - needed(before)
        return (spared / more if more > 0 else math.inf), spared

    return max(several, key=rate)
