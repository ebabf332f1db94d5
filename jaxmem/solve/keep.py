"""What one layer keeps: which values to store, which to compute again, which to send away.

Each value is computed again at most once, which is what a `jax.checkpoint`
policy can say.  Dropping a value costs the whole chain of operations that lead
to it from what is kept, not its own operation alone (charging only that is the
known defect of knapsack planners).  With k, h, c in {0, 1} for "kept", "on the
host" and "operation computed again":

    k[v] + h[v] + c[maker of v] >= 1       for each value v that the backward reads
    k[u] + h[u] + c[maker of u] >= c[e]    for each input u of an operation e

minimise seconds, with bytes <= budget.  Without the budget this is a minimum
cut: at any price per byte the linear program has an answer in whole numbers
and takes milliseconds.  So the corners of the lower hull of (bytes, seconds)
come from pricing, and only the points between them from a mixed integer
program (HiGHS, by `scipy.optimize.milp`).  After Checkmate (Jain et al. 2020,
arXiv 1910.02653), whose stages are left out; `jaxmem.solve.staged` has them.
"""

import dataclasses
import functools
import heapq
import itertools
import math
import time
from typing import Any

import numpy as np
from scipy import optimize, sparse

from jaxmem.problem import Graph
from jaxmem.solve.presolve import Reduced, reduced

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Keep:
    """What one layer keeps, and what that costs.

    Attributes:
      kept: values stored on the device, in order.
      offloaded: values sent to the host, in order.
      again: indices of the operations computed again, in the order in which they run.
      bytes: of `kept`.
      seconds: of `again`, and of writing and reading `kept` and `offloaded`.
      gap: how much faster, relative to `seconds`, the best of so few bytes could
        still be; 0.0 when none is.
    """

    kept: tuple[int, ...]
    offloaded: tuple[int, ...]
    again: tuple[int, ...]
    bytes: int
    seconds: float
    gap: float = 0.0


# ---------------------------------------------------------------- API


def keep_within(graph: Graph, budget: int, time_limit: float = 2.0) -> Keep | None:
    """The fastest that keeps at most `budget` bytes on the device, or None if nothing does.

    Solved to a relative gap of 1e-6 unless `time_limit` (seconds) comes first;
    `Keep.gap` says what was reached.

    >>> from jaxmem.problem import Graph, Operation
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
    fastest = _fastest(graph)
    if fastest is None or least_bytes(graph) > budget:
        return None
    if fastest.bytes <= budget:
        return fastest
    return _Model(reduced(graph)).within(budget, time_limit)


def least_bytes(graph: Graph) -> int:
    """The fewest bytes that any keep set can have.

    Raises:
      ValueError: the backward pass needs a value that can neither be kept nor
        computed again.
    """
    return _smallest(graph).bytes


def price(graph: Graph, seconds_per_byte: float) -> Keep:
    """The least of seconds + price × bytes: a corner of the lower hull of (bytes, seconds).

    Raises:
      ValueError: as `least_bytes`.
    """
    found = _Model(reduced(graph)).priced(1.0, seconds_per_byte)
    if found is None:
        raise ValueError(_impossible(graph))
    return found


def menu(graph: Graph, points: int = 12, time_limit: float = 10.0) -> tuple[Keep, ...]:
    """The choices worth having, fastest first; each next one has fewer bytes and takes longer.

    All corners of the lower hull, and up to `points` more between them, where
    the gaps are widest.  The same graph gives the same menu unless a program
    runs into `time_limit` (seconds, for all of it).

    Raises:
      ValueError: as `least_bytes`.
    """
    deadline = time.monotonic() + time_limit
    found = _corners(graph)
    model = _Model(reduced(graph))
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
        new = model.within(budget, max(deadline - time.monotonic(), 0.1))
        if new is None or new.seconds <= at[high].seconds:
            continue
        below = max((b for b in at if b <= low), default=low)
        if new.bytes > below and new.seconds < at[below].seconds:
            at[new.bytes] = new
            open_gap(low, at[below].seconds, new)
        open_gap(budget, new.seconds, at[high])
    return _pareto(at.values())


# ---------------------------------------------------------------- implementation


class _Model:
    """The program of a reduced graph: columns k and h of its values, c of its operations."""

    def __init__(self, small: Reduced):
        self.small = small
        self.kept = sorted(small.keepable)
        self.sent = sorted(small.hostable)
        k = {v: j for j, v in enumerate(self.kept)}
        h = {v: len(k) + j for j, v in enumerate(self.sent)}
        first = len(k) + len(h)
        self.columns = first + len(small.operations)
        maker = {v: first + e for e, op in enumerate(small.operations) for v in op.outputs}

        def ways(value: int) -> list[tuple[int, float]]:
            found = (k.get(value), h.get(value), maker.get(value))
            return [(column, 1.0) for column in found if column is not None]

        rows = [(ways(v), 1.0) for v in sorted(small.wanted)]
        for e, operation in enumerate(small.operations):
            for u in sorted(operation.inputs - small.wanted):
                rows.append(([*ways(u), (first + e, -1.0)], 0.0))
        at = [(i, j, x) for i, (row, _) in enumerate(rows) for j, x in row]
        i, j, x = zip(*at, strict=True) if at else ((), (), ())
        self.matrix = sparse.csr_matrix((x, (i, j)), shape=(len(rows), self.columns))
        self.least: Any = np.array([least for _, least in rows], dtype=float)
        graph = small.graph
        host = graph.host_seconds or ()
        self.bytes = np.zeros(self.columns)
        self.bytes[: len(k)] = [graph.bytes[v] for v in self.kept]
        self.seconds = np.array(
            [graph.keep_seconds[v] for v in self.kept]
            + [host[v] for v in self.sent]
            + [operation.seconds for operation in small.operations],
            dtype=float,
        )

    def priced(self, seconds: float, bytes: float) -> Keep | None:
        """The least of a weighted sum; whole numbers come out of the linear program."""
        cost = seconds * self.seconds + bytes * self.bytes
        found = self._solve(cost, whole=False)
        if found.x is not None and np.abs(found.x - np.round(found.x)).max(initial=0) > 1e-6:
            found = self._solve(cost, whole=True, gap=0.0)
        return None if found.x is None else self._read(found.x)

    def within(self, budget: int, time_limit: float) -> Keep | None:
        """The fastest of at most `budget` bytes."""
        allowed, bound, best = float(budget), 0.0, None
        deadline = time.monotonic() + time_limit
        for attempt in range(4):
            left = max(deadline - time.monotonic(), 0.05)
            found = self._solve(self.seconds, True, limit=left, budget=(allowed, budget))
            if attempt == 0 and found.mip_dual_bound is not None:
                bound = found.mip_dual_bound
            if found.x is None:
                break
            best = self._read(found.x)
            if best is None or best.bytes <= budget:
                break
            # Within the solver's tolerance and yet over the budget: ask for a little less.
            allowed -= 2 * (best.bytes - budget)
        if best is None or best.bytes > budget:
            corners = _corners(self.small.graph)
            best = next((keep for keep in corners if keep.bytes <= budget), None)
            if best is None:
                return None
        missed = best.seconds - bound * self._scale(self.seconds)
        gap = missed / best.seconds if missed > 1e-9 * best.seconds else 0.0
        return dataclasses.replace(best, gap=gap)

    @staticmethod
    def _scale(cost: np.ndarray) -> float:
        # HiGHS' tolerances are absolute, about 1e-7: the largest cost becomes 1000.
        return float(cost.max(initial=0.0)) / 1e3 or 1.0

    def _solve(self, cost, whole, limit=None, budget=None, gap=1e-6):
        rows = [optimize.LinearConstraint(self.matrix, self.least)] if len(self.least) else []
        most: Any = np.ones(self.columns)
        if budget is not None:
            allowed, most_bytes = budget
            unit = self._scale(self.bytes)
            most[self.bytes > most_bytes] = 0.0
            rows.append(optimize.LinearConstraint(self.bytes[None] / unit, ub=allowed / unit))
        if not self.columns:
            feasible = not (self.least > 0).any()
            return optimize.OptimizeResult(x=np.zeros(0) if feasible else None, mip_dual_bound=0.0)
        options: dict[str, float] = {"mip_rel_gap": gap}
        if limit is not None:
            options["time_limit"] = limit
        return optimize.milp(
            cost / self._scale(cost),
            integrality=np.full(self.columns, int(whole)),
            bounds=optimize.Bounds(0.0, most),
            constraints=rows,
            options=options,
        )

    def _read(self, x: np.ndarray) -> Keep | None:
        on = x > 0.5
        n = len(self.kept)
        kept = {v for v, one in zip(self.kept, on, strict=False) if one}
        sent = {v for v, one in zip(self.sent, on[n:], strict=False) if one}
        return settle(self.small.graph, frozenset(kept), frozenset(sent))


def settle(graph: Graph, kept: frozenset[int], offloaded: frozenset[int]) -> Keep | None:
    """What storing these values comes to, without those nothing needs; None if it does not do."""
    stored = kept | offloaded
    needed = graph.wanted - graph.free
    again, made = [], set()
    for e in range(len(graph.operations) - 1, -1, -1):
        operation = graph.operations[e]
        if needed.intersection(operation.outputs) - stored:
            again.append(e)
            made.update(operation.outputs)
            needed |= set(operation.inputs) - graph.free
    if needed - stored - made:
        return None
    # What comes along with another output of its maker need not be stored either.
    offloaded = frozenset((offloaded & needed) - made)
    kept = frozenset((kept & needed) - made - offloaded)
    host = graph.host_seconds or ()
    seconds = sum(graph.operations[e].seconds for e in again)
    seconds += sum(graph.keep_seconds[v] for v in sorted(kept))
    seconds += sum(host[v] for v in sorted(offloaded))
    return Keep(
        kept=tuple(sorted(kept)),
        offloaded=tuple(sorted(offloaded)),
        again=tuple(reversed(again)),
        bytes=sum(graph.bytes[v] for v in kept),
        seconds=float(seconds),
    )


@functools.lru_cache(maxsize=64)
def _fastest(graph: Graph) -> Keep | None:
    # Of equally fast ones that of fewest bytes: a byte costs next to nothing, not nothing.
    model = _Model(reduced(graph))
    return model.priced(1.0, 1e-6 * model.seconds.sum() / max(model.bytes.sum(), 1.0))


@functools.lru_cache(maxsize=64)
def _smallest(graph: Graph) -> Keep:
    model = _Model(reduced(graph))
    found = model.priced(1e-6 * model.bytes.sum() / (model.seconds.sum() or 1.0), 1.0)
    least = model.priced(0.0, 1.0)
    if found is None or least is None:
        raise ValueError(_impossible(graph))
    return min(found, least, key=lambda keep: (keep.bytes, keep.seconds))


@functools.lru_cache(maxsize=64)
def _corners(graph: Graph) -> tuple[Keep, ...]:
    """The lower hull of (bytes, seconds), fastest first, of a graph that has an answer."""
    model, fast, small = _Model(reduced(graph)), _fastest(graph), _smallest(graph)
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
    return _pareto(found)


def _pareto(keeps) -> tuple[Keep, ...]:
    """Those that no other beats in both, fastest first."""
    chosen: list[Keep] = []
    for keep in sorted(keeps, key=lambda keep: (keep.bytes, keep.seconds)):
        if not chosen or (keep.bytes > chosen[-1].bytes and keep.seconds < chosen[-1].seconds):
            chosen.append(keep)
    return tuple(reversed(chosen))


def _impossible(graph: Graph) -> str:
    made = {v for op in graph.operations if op.seconds < math.inf for v in op.outputs}
    lost = sorted(set(range(len(graph.bytes))) - graph.free - graph.keepable - made)
    return (
        "the backward pass needs a value that can neither be kept nor computed again; values that "
        "are not free, may not be kept and that no operation makes, or none that may run twice: "
        f"{lost}. Add what the backward pass needs of them to `keepable`."
    )
