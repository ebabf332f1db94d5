"""Optimal checkpointing of a uniform chain with a fixed number of slots.

Known as *revolve* or *treeverse* (Griewank & Walther 2000, ACM TOMS 26(1),
algorithm 799).  A slot holds one carry, the initial state counts as one.  The
chain is swept forward once; then the layers are reversed from the last to the
first, and each time the carry in front of a layer is missing, it is recomputed
from the nearest slot before it.
"""

import dataclasses
import functools
from math import comb


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What the slots hold while each layer is reversed.

    Attributes:
      held: for layer i, the positions of the carries held when layer i is
        reversed, in slot order; position p is the carry in front of layer p,
        -1 an empty slot; one beyond i is left over and not used again.  Slot 0
        always holds position 0, the initial state.
      restart: for layer i, the slot from which the carry in front of layer i is
        computed, as the slots stood after layer i + 1 was reversed.
    """

    held: tuple[tuple[int, ...], ...]
    restart: tuple[int, ...]

    @property
    def extra(self) -> int:
        """Layer evaluations beyond one forward pass.

        The first sweep is the forward pass itself; it evaluates every layer and
        keeps the last one's tape, so the last layer costs nothing more.
        """
        last = len(self.held) - 1
        return sum(1 + i - self.held[i + 1][self.restart[i]] for i in range(last))


def extra_steps(n: int, slots: int) -> int:
    """Fewest forward steps beyond the first n, for n layers and `slots` carries.

    The closed form t = r n - C(s + r, r - 1), with r the least repetition number
    for which C(s + r, s) >= n.

    >>> [extra_steps(10, s) for s in (2, 3, 4, 5, 8)]
    [20, 15, 14, 13, 10]
    """
    if n <= 1:
        return 0
    slots = min(slots, n)
    if slots == 1:
        return n * (n - 1) // 2
    r = _repetitions(n, slots)
    return r * n - comb(slots + r, r - 1)


@functools.lru_cache(maxsize=16)
def schedule(n: int, slots: int) -> Schedule:
    """The positions held at each step of an optimal reversal; costs `extra_steps(n, slots)`.

    >>> schedule(4, 2).held
    ((0, 1), (0, 1), (0, 2), (0, 2))
    """
    slots = max(min(slots, n), 1)
    held: list[tuple[int, ...]] = [()] * n
    restart = [0] * n
    positions = [0] + [-1] * (slots - 1)
    top = 0
    for layer in range(n - 1, -1, -1):
        while positions[top] > layer:  # that slot's part of the chain is done
            top -= 1
        restart[layer] = top
        while (rest := layer + 1 - positions[top]) > 1 and top + 1 < slots:
            positions[top + 1] = positions[top] + _split(rest, slots - top)
            top += 1
        held[layer] = tuple(positions)
    return Schedule(tuple(held), tuple(restart))


def first_sweep(n: int, slots: int) -> tuple[int, ...]:
    """The positions that the forward pass keeps: the schedule's row for the last layer."""
    positions, slots = [0], max(min(slots, n), 1)
    while (rest := n - positions[-1]) > 1 and len(positions) < slots:
        positions.append(positions[-1] + _split(rest, slots - len(positions) + 1))
    return tuple(positions)


def _split(n: int, slots: int) -> int:
    """How far to advance before the next carry is stored: any minimiser of
    i + t(i, s) + t(n - i, s - 1).

    Both t are convex and piecewise linear with kinks at binomials, so i is
    optimal where the two repetition numbers are r - 1 or r; the largest such i
    is taken.
    """
    r = _repetitions(n, slots)
    least = max(comb(slots + r - 2, slots), n - comb(slots + r - 1, slots - 1))
    most = min(comb(slots + r - 1, slots), n - comb(slots + r - 2, slots - 1))
    return max(min(max(least, most), n - 1), 1)


def _repetitions(n: int, slots: int) -> int:
    r = 1
    while comb(slots + r, slots) < n:
        r += 1
    return r
