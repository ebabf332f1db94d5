"""The recurrence of `jaxmem.solve.unequal` for a chain whose stages are all the same.

A segment is then known by its length alone, which leaves two tables over
(length, budget).  Up to `_SHORT` stages every split is tried; for longer
segments only splits near the best one of a segment that is shorter by one, at
the same and at neighbouring budgets, and a few far away, so that a thousand
stages take a moment; the whole chain tries every split again.  That is as good
as exact, but not proved to be.
"""

import dataclasses

import numpy as np

from jaxmem.solve.stages import Kept, Recomputed, Stage, Steps

_HOLD_INPUT = np.iinfo(np.int32).max
_SHORT = 96
_FAR_EVERY = 16


class UniformTable:
    """The tables for `length` equal stages and budgets `least`, ..., `least` + `slots` × `unit`."""

    def __init__(self, stage: Stage, length: int, slots: int, unit: float, least: int):
        self.stage, self.length, self.unit = stage, length, unit
        # A hair above the multiples, so that sums of floats that should be equal are.
        self.budgets = least + unit * (np.arange(slots + 1) + 1e-6)
        shape = (2, length + 1, slots + 1)  # first: the input is loose, or held
        self._seconds, self._bytes = np.full(shape, np.inf), np.full(shape, np.inf)
        self._choice = np.zeros(shape, np.int32)
        self._tables = self._seconds, self._bytes
        self._split = np.ones(slots + 1, int)
        loose, held = self._options(False), self._options(True)
        pay = _Moves(np.array([stage.carry_bytes]), self)
        for n in range(1, length + 1):
            self._keep(n, held)
            if n > 1:
                self._recompute(n)
            self._keep(n, loose)
            seconds, bytes = pay.best(self._seconds[1, n], self._bytes[1, n])
            self._offer(n, False, seconds[0], bytes[0], _HOLD_INPUT)

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """(bytes, seconds) of the whole chain, for each budget; infinite where it does not fit."""
        return self._bytes[1, -1], self._seconds[1, -1]

    def steps(self, m: int) -> Steps:
        """A plan that takes these seconds."""
        return self._steps(0, self.length, m)

    # ------------------------------------------------------------ filling

    def _options(self, held: bool) -> "_Options":
        options = self.stage.options
        charges = [self._charge(choice, held) for choice in range(len(options))]
        needs = [
            charge
            + self.stage.gradient_bytes
            + max(waiting + self.stage.carry_bytes - option.output_bytes, option.work_bytes)
            for option, (charge, waiting) in zip(options, charges, strict=True)
        ]
        prices = [self.stage.carry_bytes - option.output_bytes for option in options]
        charge = np.array([charge for charge, _ in charges], dtype=float)
        return _Options(
            held=held,
            seconds=np.array([option.seconds for option in options])[:, None],
            needs=np.array(needs, dtype=float)[:, None],
            passed=np.array(prices)[:, None] <= 0,
            then_loose=_Moves(charge, self),
            then_held=_Moves(charge + prices, self)
            if min(prices) < self.stage.carry_bytes
            else None,
        )

    def _keep(self, n: int, options: "_Options") -> None:
        columns = np.arange(len(self.budgets))
        seconds = np.zeros((len(options.needs), len(columns)))
        bytes = np.zeros_like(seconds)
        if n > 1:
            seconds, bytes = options.then_loose.best(self._seconds[0, n - 1], self._bytes[0, n - 1])
            if options.then_held:
                other, size = options.then_held.best(self._seconds[1, n - 1], self._bytes[1, n - 1])
                better = (other < seconds) | ((other == seconds) & (size < bytes)) | options.passed
                seconds, bytes = np.where(better, other, seconds), np.where(better, size, bytes)
        seconds, bytes = seconds + options.seconds, np.maximum(bytes, options.needs)
        seconds[bytes > self.budgets] = np.inf
        best = seconds.argmin(axis=0)
        self._offer(n, options.held, seconds[best, columns], bytes[best, columns], best)

    def _recompute(self, n: int) -> None:
        columns = np.arange(len(self.budgets))
        if n <= _SHORT or n == self.length:
            split = np.arange(1, n)[:, None]
            pairs = [(table[1, 1:n], table[0, n - 1 : 0 : -1]) for table in self._tables]
        else:
            split = self._candidates(n)
            first = split * len(columns) + columns
            rest = n * len(columns) + 2 * columns - first
            pairs = [(table[1].take(first), table[0].take(rest)) for table in self._tables]
        stage = self.stage
        seconds = pairs[0][0] + pairs[0][1]
        seconds += stage.seconds * split
        bytes = np.maximum(*pairs[1])
        widest = stage.carry_bytes * np.where(split > 1, 2, 1) + stage.overhead_bytes
        np.maximum(bytes, widest + stage.gradient_bytes, out=bytes)
        seconds[bytes > self.budgets] = np.inf
        best = seconds.argmin(axis=0)
        self._split = np.broadcast_to(split, seconds.shape)[best, columns]
        self._offer(n, True, seconds[best, columns], bytes[best, columns], -self._split)

    def _candidates(self, n: int) -> np.ndarray:
        last = self._split
        near = [last + shift for shift in range(-2, 3)]
        near += [np.concatenate([last[1:], last[-1:]]), np.concatenate([last[:1], last[:-1]])]
        if n % _FAR_EVERY == 0:
            far = np.unique(np.geomspace(1, n, 16).round().astype(int))[:, None]
            near += [*np.broadcast_to(np.concatenate([far, n - far]), (2 * len(far), len(last)))]
        return np.clip(near, 1, n - 1)

    def _charge(self, choice: int, held: bool) -> tuple[int, int]:
        """Bytes held by a kept stage, and of its input while it is evaluated."""
        option = self.stage.options[choice]
        if held:
            return option.tape_bytes - option.input_bytes, 0
        return option.tape_bytes, max(self.stage.carry_bytes - option.input_bytes, 0)

    def _offer(self, n: int, held: bool, seconds, bytes, choice) -> None:
        at = int(held), n
        better = (bytes <= self.budgets) & (seconds < self._seconds[at])
        np.copyto(self._seconds[at], seconds, where=better)
        np.copyto(self._bytes[at], bytes, where=better)
        np.copyto(self._choice[at], choice, where=better, casting="same_kind")

    # ------------------------------------------------------------ reading

    def _steps(self, first: int, n: int, m: int) -> Steps:
        steps: list[Kept | Recomputed] = []
        held, carry = True, self.stage.carry_bytes
        while n:
            choice = int(self._choice[int(held), n, m])
            if choice == _HOLD_INPUT:
                m, held = self._cell(n, m, True, carry)[2], True
                choice = int(self._choice[1, n, m])
            charge, length, price = 0, -choice, carry
            if choice >= 0:
                steps.append(Kept(first, choice))
                charge, length = self._charge(choice, held)[0], 1
                price -= self.stage.options[choice].output_bytes
            else:
                steps.append(Recomputed(first, first + length, self._steps(first, length, m)))
            first, n = first + length, n - length
            if n:
                then_loose = self._cell(n, m, False, charge)
                then_held = self._cell(n, m, True, charge + price)
                held = price <= 0 or (price < carry and then_held[:2] < then_loose[:2])
                m = (then_held if held else then_loose)[2]
        return tuple(steps)

    def _cell(self, n: int, m: int, held: bool, by: int) -> tuple[float, float, int]:
        """One cell of `_Moves.best`: seconds, bytes with these, and the budget it is found at."""
        near, far = (int(slots) for slots in _slots(by, self.unit))
        at = int(held), n
        if m < near or self._bytes[at][m - near] + by > self.budgets[m]:
            near = far
        if m < near:
            return np.inf, np.inf, 0
        return self._seconds[at][m - near], self._bytes[at][m - near] + by, m - near


class _Moves:
    """A row of a table as it is with several numbers of bytes held besides."""

    def __init__(self, by: np.ndarray, table: UniformTable):
        columns = np.arange(len(table.budgets))
        near, far = (slots.astype(int)[:, None] for slots in _slots(by, table.unit))
        # Index 0 is put in front of the row, for what is below it.
        self.near, self.far = (np.maximum(columns - move, -1) + 1 for move in (near, far))
        self.by, self.budgets, self.exact = by[:, None], table.budgets, (near == far).all()

    def best(self, seconds: np.ndarray, bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best of each budget: seconds, and bytes with these."""
        seconds, bytes = (np.concatenate([[np.inf], row]) for row in (seconds, bytes))
        found, size = seconds.take(self.near), bytes.take(self.near) + self.by
        if not self.exact:
            over = size > self.budgets
            np.copyto(found, seconds.take(self.far), where=over)
            np.copyto(size, bytes.take(self.far) + self.by, where=over)
        return found, size


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of the stage, as columns; `passed`: the next stage's input is held thereby."""

    held: bool
    seconds: np.ndarray
    needs: np.ndarray
    passed: np.ndarray
    then_loose: _Moves
    then_held: _Moves | None


def _slots(by, unit: float):
    """How many slots these bytes are, rounded down and up."""
    return np.floor(by / unit + 1e-6), np.ceil(by / unit - 1e-6)
