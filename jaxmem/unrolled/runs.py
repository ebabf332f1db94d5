"""Runs of equal layers in unrolled code: where a Python loop over layers stood.

A model with its layers written out is the same operations over and over.  A stretch of operations
that repeats with some period, in what they are and in the shapes that they work on, is found in the
sequence of operations alone; then it is cut into layers where the least is live, and those are kept
that are equal in their dataflow as well (`equal`).  Names and lines play no part.  Parameters,
keys and constants may differ from layer to layer, and a layer may be several in turn (local and
global attention): the period is whatever repeats.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Run:
    """Equal layers, one after the other.

    Attributes:
      first: the first operation.
      size: how many operations a layer has.
      count: how many layers there are.
    """

    first: int
    size: int
    count: int

    @property
    def after(self) -> int:
        """The operation behind the last layer."""
        return self.first + self.size * self.count

    @property
    def places(self) -> range:
        """Where layers begin, and the last one ends."""
        return range(self.first, self.after + 1, self.size)


# ---------------------------------------------------------------- API


def find_runs(
    operations: Sequence[Hashable],
    live_bytes: Sequence[int],
    equal: Callable[[int, int, int], Hashable],
    least: int = 2,
    work: Sequence[float] | None = None,
) -> list[Run]:
    """The runs of equal layers in a sequence of operations, in their order.

    Args:
      operations: equal where operations are.
      live_bytes: at the places between operations.
      equal: (first, last, start of the run) -> what is equal for operations first..last-1 where
        their dataflow is.
      least: fewer layers than this are none.
      work: at the places between operations, what the last product before them takes.  Where a
        layer is recomputed nothing reads its result, so that its last product is spared: of places
        with as little live layers end where that is the most.

    >>> find_runs("xabcabcabcy", [9, 9, 1, 9, 9, 1, 9, 9, 1, 9, 9, 9], lambda a, b, _: b - a)
    [Run(first=2, size=3, count=2)]
    """
    kinds: dict[Hashable, int] = {}
    tokens = np.array([kinds.setdefault(one, len(kinds)) for one in operations], np.int64)
    found: list[Run] = []
    pending = [(0, len(tokens))]
    while pending:
        low, high = pending.pop()
        stretch = _stretch(tokens[low:high], least)
        if stretch is None:
            continue
        first, length, period = stretch
        first += low
        run = _layers(first, length, period, live_bytes, work, equal, least)
        if run is not None:
            found.append(run)
            first, length = run.first, run.after - run.first
        pending += [(low, first), (first + length, high)]
    return sorted(found, key=lambda run: run.first)


# ---------------------------------------------------------------- implementation


def _stretch(tokens: Any, least: int) -> tuple[int, int, int] | None:
    """(first, length, period) of what repeats the most operations; None if nothing does.

    Of periods that are multiples of one the shortest repeats the most.
    """
    best, most = None, 1
    for period in range(1, len(tokens) // least + 1):
        same = tokens[period:] == tokens[:-period]
        if np.count_nonzero(same) <= most:
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]])))
        lengths = edges[1::2] - edges[::2]
        at = int(lengths.argmax())
        length = int(lengths[at])
        if length > most and length >= (least - 1) * period:
            best, most = (int(edges[2 * at]), length + period, period), length
    return best


def _layers(
    first: int,
    length: int,
    period: int,
    live_bytes: Sequence[int],
    work: Sequence[float] | None,
    equal: Callable[[int, int, int], Hashable],
    least: int,
) -> Run | None:
    """The most equal layers in a stretch, cut where the least is live; None if they are too few."""

    def widest(phase: int) -> tuple[int, float, int, int]:
        places = range(first + phase, first + length + 1, period)
        inner = [live_bytes[at] for at in places[1:-1]]
        spared = work[places[1]] if work else 0.0
        return max(inner, default=live_bytes[places[0]]), -spared, -len(places), phase

    # What layers have in common may be computed in the first of them.
    for phase in sorted(range(min(period, length - least * period + 1)), key=widest)[:_PHASES]:
        start = first + phase
        places = range(start, first + length + 1, period)
        kinds = [equal(a, b, start) for a, b in itertools.pairwise(places)]
        groups = [(key, len(list(own))) for key, own in itertools.groupby(kinds)]
        at, (_, count) = max(enumerate(groups), key=lambda one: one[1][1])
        if count >= least:
            before = sum(many for _, many in groups[:at])
            return Run(start + before * period, period, count)
    return None


# So many ways to cut a stretch into layers are tried.
_PHASES = 4
