"""Optimal plans for a chain of stages, for every budget at once.

A dynamic program on memory in slots (`jaxmem.solve.unequal`; Beaumont et al. 2019,
Zhao et al. 2023) proposes plans; each is then counted in bytes, and the best are kept.

Known gap: the plans are persistent, which means that what is kept stays until
its stage is reversed.  Without that the optimum is a little better now and then.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxmem.solve.pareto import pareto_optimal
from jaxmem.solve.stages import (
    NO_MERGED,
    Carried,
    ChainPlan,
    Kept,
    Merged,
    Option,
    Recomputed,
    Stage,
    Steps,
    extra_seconds,
    peak_bytes,
)
from jaxmem.solve.unequal import Table

__all__ = [
    "Recomputed",
    "ChainPlan",
    "ChainTable",
    "Kept",
    "Stage",
    "Option",
    "Steps",
    "peak_bytes",
    "solve_chain",
]

# ---------------------------------------------------------------- types


class ChainTable:
    """The plans for one chain that no other one found beats in both bytes and seconds."""

    def __init__(self, found: Iterable[tuple[int, float, Callable[[], Steps]]]):
        self._found = pareto_optimal(found, lambda point: (point[1], point[0]))[::-1]

    def plan(self, budget: int) -> ChainPlan | None:
        """The fastest plan within `budget` bytes, None if there is none."""
        at = bisect.bisect_right(self._found, budget, key=lambda point: point[0])
        if at == 0:
            return None
        bytes, seconds, steps = self._found[at - 1]
        return ChainPlan(bytes, seconds, steps())

    def frontier(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of the plans: more bytes and fewer seconds from one to the next."""
        return [(bytes, seconds) for bytes, seconds, _ in self._found]


# ---------------------------------------------------------------- API


def solve_chain(
    stages: Sequence[Stage],
    slots: int = 500,
    carried: Carried | None = None,
    merged: Merged = NO_MERGED,
) -> ChainTable:
    """The best persistent plans for a chain, from the fewest bytes to no work done again.

    What is counted, and how the paper's sizes map to these, stands in
    `jaxmem.solve.stages`.  A plan never needs more than its budget.  The best is
    found when all sizes are multiples of some unit and the fastest plan has at
    most `slots` of it; else it is the best but for budgets being cut into
    `slots` pieces (finer ones for small budgets), some per cent of the extra
    seconds at most.  Of more than 100 unequal stages the pieces are fewer.

    Args:
      stages: in the order in which they are evaluated; the first one's input is
        there throughout and not counted.
      slots: how finely budgets are told apart.
      carried: `carried(i, j)`, the bytes that holding the input of stage j adds
        when that of stage i < j is held (what passes through both is one array,
        and passes through all between); by default all of it.
      merged: stages `first`..`after`-1 as one, by (first, after): what can be kept where all
        of them are looked at together, and what that needs.

    Raises:
      ValueError: there is no stage.

    >>> option = Option(tape_bytes=3, seconds=0.0, input_bytes=1, output_bytes=1)
    >>> stage = Stage(seconds=1.0, carry_bytes=1, options=(option,), gradient_bytes=1)
    >>> table = solve_chain([stage] * 10)
    >>> table.frontier()[:3]
    [(4, 45.0), (5, 20.0), (6, 14.0)]
    >>> table.plan(21).seconds
    0.0
    """
    stages = tuple(stages)
    if not stages:
        raise ValueError("a chain without stages has no plan: pass at least one Stage")
    if carried and all(
        carried(j - 1, j) >= stages[j - 1].carry_bytes for j in range(1, len(stages))
    ):
        carried = None  # nothing passes through a stage, so nothing through several
    carried = carried and functools.cache(carried)
    most = _PASSES * sum(
        stage.seconds + max(option.seconds for option in stage.options) for stage in stages
    )
    return ChainTable(point for point in _found(stages, slots, carried, merged) if point[1] <= most)


# ---------------------------------------------------------------- implementation

# Plans that take more passes than this, each with the slowest options, are left out: no one wants
# them, and their nesting is deeper than Python's recursion.  Up to 120 equal stages have none.
_PASSES = 60
# Small budgets get tables of their own with finer slots; so many in all.
_RANGES = 3


def _found(stages: tuple[Stage, ...], slots: int, carried: Carried | None, merged: Merged):
    slots = max(slots * 100 // max(len(stages), 100), 50)
    fastest = _fastest(stages, merged)
    most = peak_bytes(fastest, stages, carried, merged)
    yield most, extra_seconds(fastest, stages, merged), lambda: fastest
    least = min(_least(stage) for stage in (*stages, *merged.values()))
    for count, unit in _grids(stages, most - least, slots, carried, merged):
        table = Table(stages, count, unit, least, carried, merged)
        _, seconds = table.points()
        if not np.isfinite(seconds[-1]):
            return
        for m in range(count + 1):
            if not np.isfinite(seconds[m]) or (m and seconds[m] == seconds[m - 1]):
                continue
            # Such a table is large: plans are read from it at once.
            steps = table.steps(m)
            size = peak_bytes(steps, stages, carried, merged)
            yield size, extra_seconds(steps, stages, merged), functools.partial(tuple, steps)


def _fastest(stages: tuple[Stage, ...], merged: Merged) -> tuple[Kept, ...]:
    """A plan of the fewest seconds, which no better one exceeds in bytes.

    Several stages as one are taken only where that is faster than each by itself.
    """
    best: list[tuple[float, tuple[Kept, ...]]] = [(0.0, ())]
    spans = sorted(merged, key=lambda span: span[1])
    for after, stage in enumerate(stages, 1):
        found = _with(best[after - 1], stage, Kept(after - 1, 0))
        for first, last in spans:
            if last == after:
                other = _with(best[first], merged[first, last], Kept(first, 0, last - first))
                found = other if other[0] < found[0] * (1 - 1e-12) else found
        best.append(found)
    return best[-1][1]


def _with(
    before: tuple[float, tuple[Kept, ...]], stage: Stage, kept: Kept
) -> tuple[float, tuple[Kept, ...]]:
    """A plan and its seconds, one stage longer, by that stage's fastest option."""
    option = min(range(len(stage.options)), key=lambda k: stage.options[k].seconds)
    seconds, steps = before
    return (
        seconds + stage.options[option].seconds,
        (*steps, dataclasses.replace(kept, option=option)),
    )


def _grids(stages, width: int, slots: int, carried: Carried | None, merged: Merged):
    """(slots, unit) of each table, for budgets that go `width` beyond the least one."""
    sizes = math.gcd(width, *_sizes((*stages, *merged.values())), *_crossings(len(stages), carried))
    if width <= slots * sizes:
        yield (width // sizes if sizes else 0), sizes or 1
        return
    # The finest tells half a carry apart; the others are spread evenly between.
    carry = sum(stage.carry_bytes for stage in stages) / len(stages)
    finer = max(slots * carry / 2 / width, 1e-9) ** (1 / (_RANGES - 1))
    for k in range(_RANGES):
        yield slots, width * min(finer, 0.5) ** k / slots


def _least(stage: Stage) -> int:
    """What reversing this stage needs at least, with its input held by others."""
    return min(
        option.tape_bytes
        - option.input_bytes
        + max(stage.carry_bytes - option.output_bytes, option.work_bytes)
        for option in stage.options
    )


def _crossings(count: int, carried: Carried | None):
    if carried:
        yield from (carried(i, j) for j in range(count) for i in range(j))


def _sizes(stages: Sequence[Stage]):
    for stage in set(stages):
        yield from (stage.carry_bytes, stage.gradient_bytes, stage.overhead_bytes)
        for option in stage.options:
            yield from (option.tape_bytes, option.work_bytes)
            yield from (option.input_bytes, option.output_bytes)
