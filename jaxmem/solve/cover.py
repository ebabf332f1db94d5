"""The program that `jaxmem.solve.keep` describes, as HiGHS gets it, and what its answers say."""

import dataclasses
import time
from typing import Any

import numpy as np

from jaxmem.solve.presolve import Reduced
from jaxmem.solve.problem import Graph

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Keep:
    """What one layer keeps, and what that costs.

    Attributes:
      kept: values stored on the device, in order.
      offloaded: values sent to the host, in order.
      recomputed: indices of the operations recomputed, in the order in which they run.
      bytes: of `kept`.
      seconds: of `again`, and of writing and reading `kept` and `offloaded`.
      gap: how much faster, relative to `seconds`, the best of so few bytes could
        still be; 0.0 when none is.
    """

    kept: tuple[int, ...]
    offloaded: tuple[int, ...]
    recomputed: tuple[int, ...]
    bytes: int
    seconds: float
    gap: float = 0.0


# ---------------------------------------------------------------- implementation


class Model:
    """The program of a reduced graph: columns k and h of its values, c of its operations."""

    def __init__(self, small: Reduced):
        from scipy import sparse  # slow to import, and needed by planners alone

        self.small = small
        self.kept = sorted(small.keepable)
        self.sent = sorted(small.hostable)
        k = {v: j for j, v in enumerate(self.kept)}
        h = {v: len(k) + j for j, v in enumerate(self.sent)}
        first = len(k) + len(h)
        self.columns = first + len(small.operations)
        maker = {v: first + e for e, op in enumerate(small.operations) for v in op.outputs}

        def sources(value: int) -> list[tuple[int, float]]:
            found = (k.get(value), h.get(value), maker.get(value))
            return [(column, 1.0) for column in found if column is not None]

        rows = [(sources(v), 1.0) for v in sorted(small.wanted)]
        for e, operation in enumerate(small.operations):
            for u in sorted(operation.inputs - small.wanted):
                rows.append(([*sources(u), (first + e, -1.0)], 0.0))
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

    def within(self, budget: int, time_limit: float) -> tuple[Keep | None, float]:
        """The fastest of at most `budget` bytes as far as found, and how fast it could be."""
        allowed, bound = float(budget), 0.0
        deadline = time.monotonic() + time_limit
        for attempt in range(4):
            left = max(deadline - time.monotonic(), 0.0)
            found = self._solve(self.seconds, True, limit=left, budget=(allowed, budget))
            if attempt == 0 and found.mip_dual_bound is not None:
                bound = found.mip_dual_bound * self._scale(self.seconds)
            best = None if found.x is None else self._read(found.x)
            if best is None or best.bytes <= budget:
                return best, bound
            # Within the solver's tolerance and yet over the budget: ask for a little less.
            allowed -= 2 * (best.bytes - budget)
        return None, bound

    @staticmethod
    def _scale(cost: np.ndarray) -> float:
        # HiGHS' tolerances are absolute, about 1e-7: the largest cost becomes 1000.
        return float(cost.max(initial=0.0)) / 1e3 or 1.0

    def _solve(self, cost, whole, limit=None, budget=None, gap=1e-6):
        from scipy import optimize

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
        return keep_set(self.small.graph, frozenset(kept), frozenset(sent))


def keep_set(graph: Graph, kept: frozenset[int], offloaded: frozenset[int]) -> Keep | None:
    """What storing these values comes to, without those nothing needs; None if it does not do."""
    stored = kept | offloaded
    needed = set(graph.wanted - graph.free)
    recomputed, made = [], set()
    for e in range(len(graph.operations) - 1, -1, -1):
        operation = graph.operations[e]
        if any(v in needed and v not in stored for v in operation.outputs):
            recomputed.append(e)
            made.update(operation.outputs)
            needed.update(v for v in operation.inputs if v not in graph.free)
    if needed - stored - made:
        return None
    # What comes along with another output of its maker need not be stored either.
    offloaded = frozenset((offloaded & needed) - made)
    kept = frozenset((kept & needed) - made - offloaded)
    host = graph.host_seconds or ()
    seconds = sum(graph.operations[e].seconds for e in recomputed)
    seconds += sum(graph.keep_seconds[v] for v in sorted(kept))
    seconds += sum(host[v] for v in sorted(offloaded))
    return Keep(
        kept=tuple(sorted(kept)),
        offloaded=tuple(sorted(offloaded)),
        recomputed=tuple(reversed(recomputed)),
        bytes=sum(graph.bytes[v] for v in kept),
        seconds=float(seconds),
    )
