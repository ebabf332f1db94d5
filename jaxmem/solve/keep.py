"""What one layer keeps: which values to store, which to recompute, which to send away.

Each value is recomputed at most once, which is what a `jax.checkpoint`
policy can say.  Dropping a value costs the whole chain of operations that lead
to it from what is kept, not its own operation alone (charging only that is the
known defect of knapsack planners).  With k, h, c in {0, 1} for "kept", "on the
host" and "operation recomputed":

    k[v] + h[v] + c[maker of v] >= 1       for each value v that the backward reads
    k[u] + h[u] + c[maker of u] >= c[e]    for each input u of an operation e

minimise seconds, with bytes <= budget.  Without the budget this is a minimum
cut: at any price per byte the linear program has an answer in whole numbers
and takes milliseconds.  So the corners of the lower hull of (bytes, seconds)
come from pricing, and only the points between them from a mixed integer
program (HiGHS, by `scipy.optimize.milp`).  After Checkmate (Jain et al. 2020,
arXiv 1910.02653), whose stages are left out.
"""

import dataclasses
import functools
import heapq
import itertools
import math
import time
from collections.abc import Sequence

from jaxmem.solve.cover import Keep, Model, keep_set
from jaxmem.solve.pareto import cost, pareto_optimal
from jaxmem.solve.presolve import reduced
from jaxmem.solve.problem import Graph

__all__ = ["Keep", "at_other_prices", "fastest", "keep_within", "least_bytes", "menu", "price"]

# ---------------------------------------------------------------- API


def keep_within(graph: Graph, budget: int, time_limit: float = 2.0) -> Keep | None:
    """The fastest that keeps at most `budget` bytes on the device, or None if nothing does.

    Solved to a relative gap of 1e-6 unless `time_limit` (seconds) comes first;
    `Keep.gap` says what was reached.

    >>> from jaxmem.solve.problem import Graph, Operation
    >>> chain = Graph(
    ...     bytes=(4, 4, 1),
    ...     operations=(Operation((0,), (1,), 2.0), Operation((1,), (2,), 3.0)),
    ...     free=frozenset({0}),
    ...     wanted=frozenset({1, 2}),
    ...     keepable=frozenset({1, 2}),
    ...     keep_seconds=(0.0, 0.0, 0.0),
    ... )
    >>> [keep_within(chain, budget).seconds for budget in (5, 4, 1, 0)]
    [0.0, 2.0, 2.0, 5.0]
    """
    best = _fastest(graph)
    if best is None or least_bytes(graph) > budget:
        return None
    if best.bytes <= budget:
        return best
    return _within(graph, budget, time_limit)


def least_bytes(graph: Graph) -> int:
    """The fewest bytes that any keep set can have.

    Raises:
      ValueError: the backward pass needs a value that can neither be kept nor
        recomputed.
    """
    return _smallest(graph).bytes


def fastest(graph: Graph) -> Keep:
    """The fastest of all keep sets, and of these one of the fewest bytes.

    Raises:
      ValueError: as `least_bytes`.
    """
    found = _fastest(graph)
    if found is None:
        raise ValueError(_impossible(graph))
    return found


def price(graph: Graph, seconds_per_byte: float) -> Keep:
    """The least of seconds + price × bytes: a corner of the lower hull of (bytes, seconds).

    Raises:
      ValueError: as `least_bytes`.
    """
    found = Model(reduced(graph)).priced(1.0, seconds_per_byte)
    if found is None:
        raise ValueError(_impossible(graph))
    return found


def menu(graph: Graph, points: int = 12, time_limit: float = 60.0) -> tuple[Keep, ...]:
    """The choices worth having, fastest first; each next one has fewer bytes and takes longer.

    All corners of the lower hull, and up to `points` more between them, where
    the gaps are widest.  The same graph gives the same menu unless a program
    runs into `time_limit` (seconds, for all of it).

    Raises:
      ValueError: as `least_bytes`.
    """
    deadline = time.monotonic() + time_limit
    found = _corners(graph)
    gaps: list[tuple[float, int, int]] = []

    def open_gap(low: int, low_seconds: float, high: Keep) -> None:
        """Nothing is known between budgets `low` and that of `high`, both left out."""
        if high.bytes - low > 1 and low_seconds > high.seconds:
            size = (high.bytes - low) * (low_seconds - high.seconds)
            heapq.heappush(gaps, (-size, low, high.bytes))

    at = {keep.bytes: keep for keep in found}
    for high, low in itertools.pairwise(found):
        open_gap(low.bytes, low.seconds, high)
    for _ in range(points):
        if not gaps or time.monotonic() > deadline:
            break
        _, low, high = heapq.heappop(gaps)
        budget = (low + high) // 2
        new = _within(graph, budget, max(deadline - time.monotonic(), 0.1))
        if new is None or new.seconds <= at[high].seconds:
            continue
        below = max((b for b in at if b <= low), default=low)
        if new.bytes > below and new.seconds < at[below].seconds:
            at[new.bytes] = new
            open_gap(low, at[below].seconds, new)
        open_gap(budget, new.seconds, at[high])
    return tuple(pareto_optimal(at.values(), cost))


def at_other_prices(
    graph: Graph, known: Sequence[Keep], other: Graph, points: int = 0
) -> list[Keep]:
    """Further choices, which are worth having where the same operations are priced otherwise.

    A menu goes by bytes kept and by seconds, and of choices that hardly differ in either one may
    need far less room than the other while its layer is reversed.

    Args:
      known: what need not be found again.
      other: the same graph with other seconds.
      points: as of `menu`.
    """
    sets = {(keep.kept, keep.offloaded) for keep in known}
    others = [(keep.kept, keep.offloaded) for keep in menu(other, points=points)]
    found = [keep_set(graph, *map(frozenset, one)) for one in others if one not in sets]
    return [keep for keep in found if keep is not None]


# ---------------------------------------------------------------- implementation


def _within(graph: Graph, budget: int, time_limit: float) -> Keep | None:
    best, bound = Model(reduced(graph)).within(budget, time_limit)
    if best is None:
        corners = _corners(graph)
        at = next((i for i, keep in enumerate(corners) if keep.bytes <= budget), None)
        if at is None:
            return None
        best = corners[at]
        if at:  # nothing lies below the hull
            above = corners[at - 1]
            part = (budget - best.bytes) / (above.bytes - best.bytes)
            bound = max(bound, best.seconds - part * (best.seconds - above.seconds))
    missed = best.seconds - bound
    gap = missed / best.seconds if missed > 1e-9 * best.seconds else 0.0
    return dataclasses.replace(best, gap=gap)


@functools.lru_cache(maxsize=64)
def _fastest(graph: Graph) -> Keep | None:
    # Of equally fast ones that of fewest bytes: a byte costs next to nothing, not nothing.
    model = Model(reduced(graph))
    return model.priced(1.0, 1e-6 * model.seconds.sum() / max(model.bytes.sum(), 1.0))


@functools.lru_cache(maxsize=64)
def _smallest(graph: Graph) -> Keep:
    model = Model(reduced(graph))
    found = model.priced(1e-6 * model.bytes.sum() / (model.seconds.sum() or 1.0), 1.0)
    least = model.priced(0.0, 1.0)
    if found is None or least is None:
        raise ValueError(_impossible(graph))
    return min(found, least, key=lambda keep: (keep.bytes, keep.seconds))


@functools.lru_cache(maxsize=64)
def _corners(graph: Graph) -> tuple[Keep, ...]:
    """The lower hull of (bytes, seconds), fastest first, of a graph that has an answer."""
    model, fast, small = Model(reduced(graph)), _fastest(graph), _smallest(graph)
    assert fast is not None
    found, pending = [fast], [(fast, small)]
    while pending:
        left, right = pending.pop()
        if right.bytes >= left.bytes or right.seconds <= left.seconds:
            continue
        rate = (right.seconds - left.seconds) / (left.bytes - right.bytes)
        middle = model.priced(1.0, rate)
        line = left.seconds + rate * left.bytes
        below = middle is not None and line - middle.seconds - rate * middle.bytes
        if middle is not None and below > 1e-9 * line and right.bytes < middle.bytes < left.bytes:
            pending += [(middle, right), (left, middle)]
        else:
            found.append(right)
    return tuple(pareto_optimal(found, cost))


def _impossible(graph: Graph) -> str:
    made = {v for op in graph.operations if op.seconds < math.inf for v in op.outputs}
    lost = sorted(set(range(len(graph.bytes))) - graph.free - graph.keepable - made)
    return (
        "the backward pass needs a value that can neither be kept nor recomputed; values that "
        "are not free, may not be kept and that no operation makes, or none that may run twice: "
        f"{lost}. Add what the backward pass needs of them to `keepable`."
    )
