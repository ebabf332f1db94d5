"""Dynamic program over the segments of a chain whose stages differ.

Beaumont et al. (2019), with Rockmate's choice among several ways to keep a stage
(Zhao et al. 2023, arXiv 2307.01236).  Two tables over (first stage s, last stage t,
budget m), of seconds of extra work:

    held[s][t, m]    the input of s is held, outside m
    loose[s][t, m]   it is not: m has to pay for it if something wants it

A segment s..s'-1 is evaluated again, or s is kept with one of its options, or several
stages from s on as one with one of theirs; the rest is another segment.  Whole blocks
over (t, m) are handled at once, so that L stages and M budgets take L²/2 block
operations of at most L M numbers.

Budgets are multiples of a unit; sizes are not rounded.  Each cell also has the
bytes that its plan really needs, and a budget takes the plan of the next larger
cell where that one's real need fits.  So a plan never exceeds its budget, and
what rounding loses does not add up along the chain.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxmem.solve.stages import Carried, Kept, Merged, Recomputed, Stage, Steps

_HOLD_INPUT = np.iinfo(np.int16).max  # in `loose`: keep the input, then go on as in `held`


@dataclasses.dataclass(frozen=True)
class _Cells:
    """The best for each last stage and budget: seconds, bytes, and what starts it.

    A choice is one of the ways to keep the first stage, or several from it on as one, or
    minus the length of the segment that is evaluated again.
    """

    seconds: np.ndarray
    bytes: np.ndarray
    choice: np.ndarray

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> "_Cells":
        return cls(np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape, np.int16))

    def improve(self, rows: slice, seconds: np.ndarray, bytes: np.ndarray, choice: int) -> None:
        better = seconds < self.seconds[rows]
        np.copyto(self.seconds[rows], seconds, where=better)
        np.copyto(self.bytes[rows], bytes, where=better)
        self.choice[rows][better] = choice


class Table:
    """The tables for budgets `least`, `least` + `unit`, ..., `least` + `slots` × `unit`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        slots: int,
        unit: float,
        least: int,
        carried: Carried | None,
        merged: Merged,
    ):
        self.stages, self.unit, self.carried, self.merged = stages, unit, carried, merged
        self.candidates: list[list[Kept]] = [
            [Kept(s, option) for option in range(len(stage.options))]
            for s, stage in enumerate(stages)
        ]
        for (first, after), stage in sorted(merged.items()):
            options = range(len(stage.options))
            self.candidates[first] += [Kept(first, option, after - first) for option in options]
        # A hair above the multiples, so that sums of floats that should be equal are.
        self.budgets = least + unit * (np.arange(slots + 1) + 1e-6)
        self.gradients = np.array([stage.gradient_bytes for stage in stages], dtype=float)
        self.held: list[_Cells] = []
        self.loose: list[_Cells] = []
        for s in range(len(stages) - 1, -1, -1):
            self._fill(s)

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """(bytes, seconds) of the whole chain, for each budget; infinite where it does not fit."""
        cells = self._at(0, True)
        return cells.bytes[-1], cells.seconds[-1]

    def steps(self, m: int) -> Steps:
        """A plan that takes these seconds."""
        return self._steps(0, len(self.stages) - 1, m)

    # ------------------------------------------------------------ filling

    def _at(self, s: int, held: bool) -> _Cells:
        return (self.held if held else self.loose)[len(self.stages) - 1 - s]

    def _fill(self, s: int) -> None:
        shape = (len(self.stages) - s, len(self.budgets))
        for held, tables in ((True, self.held), (False, self.loose)):
            tables.append(_Cells.empty(shape))
            if s == 0 and not held:
                break
            for choice in range(len(self.candidates[s])):
                self._keep(s, choice, held)
            if held:
                self._recompute(s)
            else:
                paid = self._less(self._at(s, True), self.stages[s - 1].carry_bytes)
                tables[-1].improve(slice(None), *paid, _HOLD_INPUT)

    def _keep(self, s: int, choice: int, held: bool) -> None:
        charge, waiting = self._charge(s, choice, held)
        kept = self.candidates[s][choice]
        stage = kept.among(self.stages, self.merged)
        option = stage.options[kept.option]
        forward = charge + waiting + stage.carry_bytes - option.output_bytes
        backward = charge + option.work_bytes + stage.gradient_bytes
        last = kept.after - 1
        needs = np.maximum(self.gradients[last:] + forward, backward)[:, None]
        seconds = np.zeros((len(self.stages) - last, len(self.budgets)))
        bytes = np.zeros_like(seconds)
        if len(seconds) > 1:
            seconds[1:], bytes[1:] = self._rest(kept.after, self._price(s, choice, held), charge)
        seconds += option.seconds
        self._offer(s, held, slice(last - s, None), seconds, np.maximum(bytes, needs), choice)

    def _recompute(self, s: int) -> None:
        seconds, widest, before = 0.0, 0, 0
        cells = self._at(s, True)
        for after in range(s + 1, len(self.stages)):
            stage = self.stages[after - 1]
            seconds += stage.seconds
            widest = max(widest, before + stage.carry_bytes + stage.overhead_bytes)
            before = stage.carry_bytes
            rest, bytes = self._rest(after, self._price(s, s - after, True))
            # Row after-1 is final: all that splits there has been tried.
            row = after - 1 - s
            needs = np.maximum(cells.bytes[row], self.gradients[after:, None] + widest)
            rows = slice(after - s, None)
            found = rest + (cells.seconds[row] + seconds)
            self._offer(s, True, rows, found, np.maximum(bytes, needs), s - after)

    def _offer(self, s, held, rows, seconds, bytes, choice) -> None:
        seconds = np.where(bytes <= self.budgets, seconds, np.inf)
        self._at(s, held).improve(rows, seconds, bytes, choice)

    def _charge(self, s: int, choice: int, held: bool) -> tuple[int, int]:
        """Bytes held by a kept stage, and of its input while it is evaluated."""
        kept = self.candidates[s][choice]
        option = kept.among(self.stages, self.merged).options[kept.option]
        if held:
            return option.tape_bytes - option.input_bytes, 0
        return option.tape_bytes, max(self.stages[s - 1].carry_bytes - option.input_bytes, 0)

    def _price(self, s: int, choice: int, held: bool) -> int:
        """Bytes that holding the input of what follows adds."""
        if choice < 0:
            after = s - choice
            price = self.stages[after - 1].carry_bytes
        else:
            kept = self.candidates[s][choice]
            after = kept.after
            option = kept.among(self.stages, self.merged).options[kept.option]
            price = self.stages[after - 1].carry_bytes - option.output_bytes
        return min(price, self.carried(s, after)) if held and self.carried else price

    def _rest(self, s: int, price: int, charge: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """What follows, with `charge` held: its first input held too, or not, if that is better."""
        if price <= 0:
            return self._less(self._at(s, True), charge)
        loose = self._less(self._at(s, False), charge)
        if price >= self.stages[s - 1].carry_bytes:
            return loose  # there, this has been tried
        held = self._less(self._at(s, True), charge + price)
        better = (held[0] < loose[0]) | ((held[0] == loose[0]) & (held[1] < loose[1]))
        return np.where(better, held[0], loose[0]), np.where(better, held[1], loose[1])

    def _less(self, cells: _Cells, by: int) -> tuple[np.ndarray, np.ndarray]:
        """The best with `by` more bytes held, of each budget."""
        if by == 0:
            return cells.seconds, cells.bytes
        near, far = self._moves(by)
        seconds, bytes = _moved(cells.seconds, near), _moved(cells.bytes, near) + by
        if near != far:
            over = bytes > self.budgets
            np.copyto(seconds, _moved(cells.seconds, far), where=over)
            np.copyto(bytes, _moved(cells.bytes, far) + by, where=over)
        return seconds, bytes

    def _moves(self, by: int) -> tuple[int, int]:
        slots = by / self.unit
        return int(np.floor(slots + 1e-6)), int(np.ceil(slots - 1e-6))

    # ------------------------------------------------------------ reading

    def _steps(self, s: int, t: int, m: int) -> Steps:
        steps: list[Kept | Recomputed] = []
        held = True
        while s <= t:
            choice = int(self._at(s, held).choice[t - s, m])
            if choice == _HOLD_INPUT:
                m = self._cell(s, t, m, True, self.stages[s - 1].carry_bytes)[2]
                choice, held = int(self._at(s, True).choice[t - s, m]), True
            charge, before = 0, s
            if choice >= 0:
                steps.append(kept := self.candidates[s][choice])
                charge, s = self._charge(s, choice, held)[0], kept.after
            else:
                s -= choice
                steps.append(Recomputed(before, s, self._steps(before, s - 1, m)))
            if s <= t:
                price = self._price(before, choice, held)
                candidates = [(False, charge), (True, charge + price)]
                if price <= 0:
                    candidates = candidates[1:]
                elif price >= self.stages[s - 1].carry_bytes:
                    candidates = candidates[:1]
                cells = [(self._cell(s, t, m, *way), way[0]) for way in candidates]
                (_, _, m), held = min(cells, key=lambda cell: cell[0][:2])
        return tuple(steps)

    def _cell(self, s: int, t: int, m: int, held: bool, by: int) -> tuple[float, float, int]:
        """One cell of `_less`: seconds, bytes with these, and the budget it is found at."""
        cells, (near, far) = self._at(s, held), self._moves(by)
        if m < near or cells.bytes[t - s, m - near] + by > self.budgets[m]:
            near = far
        if m < near:
            return np.inf, np.inf, 0
        return cells.seconds[t - s, m - near], cells.bytes[t - s, m - near] + by, m - near


def _moved(table: np.ndarray, by: int) -> np.ndarray:
    moved = np.full_like(table, np.inf)
    by = min(by, table.shape[1])
    moved[:, by:] = table[:, : table.shape[1] - by]
    return moved
