"""Live bytes along a compiled program.

Arguments, results and constants are live throughout.  The rest is in allocations
that values share: the live bytes at a step are the union of the address ranges of
the values live then, since one value may be updated in place under several names.
(Area of a union of rectangles: Bentley's sweep over time with a segment tree over
addresses.)
"""

import bisect
from collections.abc import Iterable, Sequence

from jaxmem.hlo.buffers import Allocation, Schedule, Value

# ---------------------------------------------------------------- API


def live_bytes(allocations: Iterable[Allocation], schedule: Schedule) -> list[tuple[int, int]]:
    """Live bytes in these allocations, as (step, bytes from that step on), changes only."""
    fixed, base = 0, 0
    times: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for allocation in allocations:
        if allocation.persistent:
            fixed += allocation.size
            continue
        for value in allocation.values:
            where = (base + value.offset, base + value.offset + value.size)
            if value.size:
                times.setdefault(where, []).append(live_range(value, schedule))
        base += allocation.size
    events: dict[int, list[tuple[int, int, int]]] = {}
    for (low, high), ranges in times.items():
        for start, end in _merged(ranges):
            events.setdefault(start, []).append((low, high, 1))
            events.setdefault(end + 1, []).append((low, high, -1))
    covered = _Covered(sorted({edge for where in times for edge in where}))
    found = [(0, fixed)]
    length = max(len(schedule.order), 1)
    for step in sorted(events):
        for low, high, change in events[step]:
            covered.add(low, high, change)
        now = fixed + covered.length
        if now != found[-1][1] and step < length:
            if step == found[-1][0]:
                found.pop()
            found.append((step, now))
    return found


def live_range(value: Value, schedule: Schedule) -> tuple[int, int]:
    """First and last step at which a value is live; the whole schedule if unknown."""
    whole = (0, len(schedule.order))
    return schedule.ranges.get((value.name, value.index), whole)


def thinned(
    points: Sequence[tuple[int, int]], length: int, most: int = 2000
) -> list[tuple[int, int]]:
    """At most `most` points: the highest of each interval of steps."""
    if len(points) <= most:
        return list(points)
    kept: dict[int, tuple[int, int]] = {}
    for step, height in points:
        interval = step * most // max(length, 1)
        if interval not in kept or height > kept[interval][1]:
            kept[interval] = (step, height)
    first = kept[min(kept)]
    return [(0, first[1]), *list(kept.values())[1:]]


# ---------------------------------------------------------------- implementation


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Time intervals, with adjacent and overlapping ones joined."""
    ranges.sort()
    joined = [ranges[0]]
    for start, end in ranges[1:]:
        if start <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


class _Covered:
    """The length of a line that is covered, while spans are added and removed.

    A segment tree over the intervals between all edges: each node stores how many
    spans cover all of it, and how much of it is covered.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = edges
        self.leaves = max(len(edges) - 1, 0)
        self.spans = [0] * (4 * self.leaves)
        self.lengths = [0] * (4 * self.leaves)

    @property
    def length(self) -> int:
        return self.lengths[1] if self.leaves else 0

    def add(self, low: int, high: int, change: int) -> None:
        first, last = bisect.bisect_left(self.edges, low), bisect.bisect_left(self.edges, high)
        self._add(1, 0, self.leaves, first, last, change)

    def _add(self, node: int, low: int, high: int, first: int, last: int, change: int) -> None:
        if first <= low and high <= last:
            self.spans[node] += change
        else:
            middle = (low + high) // 2
            if first < middle:
                self._add(2 * node, low, middle, first, last, change)
            if last > middle:
                self._add(2 * node + 1, middle, high, first, last, change)
        if self.spans[node]:
            self.lengths[node] = self.edges[high] - self.edges[low]
        elif high - low == 1:
            self.lengths[node] = 0
        else:
            self.lengths[node] = self.lengths[2 * node] + self.lengths[2 * node + 1]
