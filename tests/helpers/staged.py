"""The optimal schedule of a graph that may compute each value many times: Checkmate's program.

Jain et al. 2020 (arXiv 1910.02653).  The nodes stand in an order in which they
can run, and stage t is what runs until node t has been made for the first time.
R[t, i]: node i is computed in stage t; S[t, i]: it is held when stage t begins;
Free[t, i, k]: it is let go in stage t once node k has run; U[t, k]: bytes held
after that.  All schedules are in reach, at the price of thousands of binaries:
this is the reference that bounds what the quick solvers find, for a few dozen
nodes, and not a planner.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import optimize, sparse

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Staged:
    """A schedule.

    Attributes:
      computed: the nodes that each stage computes, in order.
      held: the nodes that are held when each stage begins.
      seconds: of everything computed.
      gap: how much less the optimum may be, relative to `seconds`; 0.0 when proved.
    """

    computed: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    seconds: float
    gap: float = 0.0


# ---------------------------------------------------------------- API


def staged(
    inputs: Sequence[Sequence[int]],
    seconds: Sequence[float],
    bytes: Sequence[int],
    budget: int | Sequence[int],
    time_limit: float = 60.0,
) -> Staged | None:
    """The least seconds in which every node is computed within the budget, None if none does.

    Args:
      inputs: of each node, all of them earlier ones.
      seconds: of each node.
      bytes: of each node's result.
      budget: the most bytes held at any time, or at any time of each stage.
      time_limit: for the solver, in seconds; when it runs out, `Staged.gap` says
        how good the schedule is.

    Raises:
      ValueError: an input is not an earlier node.
      TimeoutError: the time ran out before there was any schedule.

    Three layers, a loss, and their backwards, each of which reads its layer's result:

    >>> inputs = [(), (0,), (1,), (2,), (3, 2), (4, 1), (5, 0)]
    >>> [staged(inputs, [1.0] * 7, [1] * 7, budget).seconds for budget in (3, 4, 5)]
    [10.0, 8.0, 7.0]
    """
    n = len(inputs)
    for node, row in enumerate(inputs):
        if any(not 0 <= i < node for i in row):
            raise ValueError(
                f"node {node} has the inputs {tuple(row)}: list nodes in an order in which they "
                "can run, so that each one's inputs are before it"
            )
    budgets = [budget] * n if isinstance(budget, int) else list(budget)
    model = _Model([tuple(dict.fromkeys(row)) for row in inputs], bytes, budgets)
    found = model.solve(seconds, time_limit)
    if found.x is None:
        if found.status == 2:
            return None
        raise TimeoutError(f"no schedule of {n} nodes was found in {time_limit:g} s; allow more")
    on = found.x > 0.5
    computed = tuple(tuple(i for i in range(t + 1) if on[model.run[t, i]]) for t in range(n))
    held = tuple(tuple(i for i in range(t) if on[model.hold[t, i]]) for t in range(n))
    total = float(sum(seconds[i] for row in computed for i in row))
    return Staged(computed, held, total, float(found.mip_gap) if found.status == 1 else 0.0)


# ---------------------------------------------------------------- implementation


class _Model:
    def __init__(self, inputs, bytes, budgets):
        self.n = n = len(inputs)
        self.inputs, self.columns = inputs, 0
        self.run = self._new((t, i) for t in range(n) for i in range(t + 1))
        self.hold = self._new((t, i) for t in range(n) for i in range(t))
        self.free = self._new(
            (t, i, k) for t in range(n) for k in range(t + 1) for i in (*inputs[k], k)
        )
        self.binaries = self.columns
        self.use = self._new((t, k) for t in range(n) for k in range(t + 1))
        self.rows: list[tuple[list[tuple[int, float]], float, float]] = []
        # HiGHS' tolerances are absolute: sizes and budgets become about 1.
        self.unit = float(max([*bytes, 1]))
        self.sizes = [size / self.unit for size in bytes]
        self.budgets = [most / self.unit for most in budgets]
        self._order()
        self._let_go()
        self._account()

    def _new(self, keys):
        made = {key: self.columns + j for j, key in enumerate(keys)}
        self.columns += len(made)
        return made

    def _order(self) -> None:
        """What is held was held before or has just been made; so are the inputs of what runs."""
        for t in range(self.n):
            for i in range(t):
                row = [(self.hold[t, i], 1.0), (self.run[t - 1, i], -1.0)]
                if i < t - 1:
                    row.append((self.hold[t - 1, i], -1.0))
                self.rows.append((row, -np.inf, 0.0))
            for k in range(t + 1):
                for u in self.inputs[k]:
                    row = [(self.run[t, k], 1.0), (self.run[t, u], -1.0)]
                    row += [(self.hold[t, u], -1.0)] if u < t else []
                    self.rows.append((row, -np.inf, 0.0))

    def _let_go(self) -> None:
        """Free = 1 exactly when k runs, the next stage does not hold i, and no reader follows."""
        readers: list[list[int]] = [[] for _ in range(self.n)]
        for k, row in enumerate(self.inputs):
            for u in row:
                readers[u].append(k)
        for (t, i, k), free in self.free.items():
            hazards = [(self.run[t, k], -1.0)]
            hazards += [(self.run[t, j], 1.0) for j in readers[i] if k < j <= t]
            if t + 1 < self.n:
                hazards.append((self.hold[t + 1, i], 1.0))
            # 1 - Free <= hazards + 1 <= most × (1 - Free)
            most = float(len(hazards))
            self.rows.append(([*hazards, (free, 1.0)], 0.0, np.inf))
            self.rows.append(([*hazards, (free, most)], -np.inf, most - 1.0))

    def _account(self) -> None:
        for t in range(self.n):
            for k in range(t + 1):
                row = [(self.use[t, k], -1.0), (self.run[t, k], self.sizes[k])]
                if k == 0:
                    row += [(self.hold[t, i], self.sizes[i]) for i in range(t)]
                else:
                    row.append((self.use[t, k - 1], 1.0))
                    gone = (*self.inputs[k - 1], k - 1)
                    row += [(self.free[t, i, k - 1], -self.sizes[i]) for i in gone]
                self.rows.append((row, 0.0, 0.0))

    def solve(self, seconds: Sequence[float], time_limit: float):
        at = [(r, j, x) for r, (row, _, _) in enumerate(self.rows) for j, x in row]
        rows, columns, entries = zip(*at, strict=True)
        matrix = sparse.csr_matrix((entries, (rows, columns)), (len(self.rows), self.columns))
        low: Any = np.array([least for _, least, _ in self.rows])
        high: Any = np.array([most for _, _, most in self.rows])
        cost, least, most = np.zeros(self.columns), np.zeros(self.columns), np.ones(self.columns)
        scale = max([*seconds, 0.0]) or 1.0
        for (t, i), column in self.run.items():
            cost[column] = seconds[i] / scale
            least[column] = float(t == i)
        for (t, _), column in self.use.items():
            most[column] = self.budgets[t]
        return optimize.milp(
            cost,
            integrality=np.arange(self.columns) < self.binaries,
            bounds=optimize.Bounds(least, most),  # pyright: ignore[reportArgumentType]
            constraints=[optimize.LinearConstraint(matrix, low, high)],
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )
