"""The fastest candidate of a front that fits, found by asking the compiler a few times.

Predictions say where to ask; what fits is only what was compiled.  From each answer the
predictions are moved by what they were off there.  The search aims a little below the budget, and
ends when the best candidate leaves next to nothing of it unused, or the next faster one was seen
not to fit.  Fronts are not always even: of the faster candidates those predicted to need hardly
more than the budget are asked for, too, while much of it is unused, or the fastest of these where
all spare much; and where the least of all does not fit, those predicted to need hardly more than
that, and some of those predicted to need a little more.  The first candidate, at which nothing is
recomputed, is another program than the rest, and less well predicted: it is asked for if it may fit
at all.

Candidates may be of several kinds, on predictions of each of which the compiler has its own say: of
one that was off nothing follows for another.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
      candidate: the fastest candidate seen to fit; None if none did.
      seen: bytes of each candidate that was compiled, in the order in which they were.
      closed: whether next to nothing is unused, the next faster candidate was seen not to fit, or
        there is none.
    """

    candidate: int | None
    seen: dict[int, int]
    closed: bool


# ---------------------------------------------------------------- API


def search(
    predicted: Sequence[int],
    budget: int,
    compiled: Callable[[int], int],
    most: int = 6,
    *,
    enough: int = 0,
    seconds: Sequence[float] = (),
    worth: float = 0.0,
    kinds: Sequence[Hashable] = (),
    apart: Sequence[int] = (),
) -> SearchResult:
    """Find the fastest candidate within the budget.

    Args:
      predicted: bytes of each candidate, fastest first; of one kind the largest first.
      budget: bytes.
      compiled: what a candidate needs in truth.
      most: how often `compiled` may be asked.
      enough: so many bytes may stay unused.
      seconds: of each candidate; none for steps that are worth the same.
      worth: what would spare no more seconds than this is not worth a question.
      kinds: of each candidate; none for a single one.
      apart: candidates that differ well, to be tried where much stays unused.

    >>> truth = [100, 90, 80, 70, 60, 50]
    >>> search([95, 85, 75, 65, 55, 45], 72, truth.__getitem__)
    SearchResult(candidate=3, seen={3: 70, 2: 80}, closed=True)
    >>> search([95, 85, 75, 65, 55, 45], 72, truth.__getitem__, enough=4).seen
    {3: 70}
    >>> search([95, 85], 72, truth.__getitem__).candidate is None
    True
    """
    times = seconds or range(len(predicted))
    one = _Search(predicted, budget, compiled, most, enough, times, worth, kinds)
    one.approach()
    if one.best is None:
        one.look_for_the_least()
    else:
        one.look_for_faster(apart)
    return SearchResult(one.best, one.seen, one.is_closed)


Searched = Callable[[Callable[[int], int]], SearchResult]


def upcoming(
    searched: Searched,
    expect: Callable[[int, Mapping[int, int]], int],
    budget: int,
    seen: Mapping[int, int],
    most: int,
) -> list[int]:
    """What a search will ask for next, and then, the likeliest first.

    Each answer is taken to be what is expected, or else on the other side of the budget.

    Args:
      searched: the search, given what answers it.
      expect: bytes of a candidate, from those of others.
      budget: as there.
      seen: what it was told until now, by candidate.
      most: so many candidates are of interest.

    >>> predicted = [95, 85, 75, 65, 55, 45]
    >>> def searched(answer):
    ...     return search(predicted, 72, answer)
    >>> def expect(candidate, seen):
    ...     return expected(candidate, predicted, seen)
    >>> upcoming(searched, expect, 72, {}, 3)
    [3, 2, 4]
    """
    found: list[int] = []
    paths = [dict(seen)]
    while paths and len(found) < most:
        known = paths.pop(0)
        try:
            searched(lambda candidate, known=known: _told(known, candidate))
        except _Unknown as unknown:
            asked = unknown.candidate
        else:
            continue
        if asked not in found:
            found.append(asked)
        likely = expect(asked, known)
        other = budget + 1 if likely <= budget else budget
        paths += [{**known, asked: likely}, {**known, asked: other}]
    return found


def expected(
    candidate: int,
    predicted: Sequence[int],
    seen: Mapping[int, int],
    kinds: Sequence[Hashable] = (),
) -> int:
    """A prediction moved by what those of the candidates seen were off, on both sides of it.

    What is off grows with what is kept: below all that was seen it shrinks with the prediction.

    Args:
      seen: bytes of candidates; those of another kind say nothing.

    >>> expected(1, [100, 50], {}), expected(1, [100, 50], {0: 110})
    (50, 55)
    >>> expected(1, [100, 75, 50], {0: 110, 2: 50})
    80
    >>> expected(1, [100, 50], {0: 110}, "ab")
    50
    """
    if kinds:
        seen = {other: size for other, size in seen.items() if kinds[other] == kinds[candidate]}
    if not seen:
        return predicted[candidate]
    known = sorted(seen, key=lambda other: predicted[other])
    misses = [seen[other] - predicted[other] for other in known]
    miss = np.interp(predicted[candidate], [predicted[k] for k in known], misses)
    share = min(1.0, predicted[candidate] / max(predicted[known[0]], 1))
    return predicted[candidate] + round(share * float(miss))


# ---------------------------------------------------------------- implementation

# Predictions are this far off at times: by this much a plan has to be predicted to be smaller than
# the budget to be the only one that is asked for.
_ROOM = 1.25
# What is predicted to need no more than this times the budget, or the least, may yet fit, though a
# slower candidate does not.
_NEAR = 1.03
# Where more than this times what is enough stays unused, faster candidates are tried that are
# expected to need no more than so many times the budget.
_WASTED = 1.5
_NEARBY = 1.12
# A next faster candidate that spares so much of the extra seconds is worth a question of its own.
_STEP = 0.05
# Where nothing but candidates that spare more than this is faster, another of these is, too.
_LEAP = 0.1


@dataclasses.dataclass(eq=False)
class _Search:
    """A search that is on."""

    predicted: Sequence[int]
    budget: int
    compiled: Callable[[int], int]
    most: int
    enough: int
    seconds: Sequence[float]
    worth: float
    kinds: Sequence[Hashable]
    seen: dict[int, int] = dataclasses.field(default_factory=dict)
    # Of each kind, the slowest candidate that is too large.
    _low: dict[Hashable, int] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> int | None:
        """The fastest that fits."""
        return min((k for k, size in self.seen.items() if size <= self.budget), default=None)

    @property
    def is_closed(self) -> bool:
        best = self.best
        if best is None:
            return False
        return not best or self._unused < self.enough or not self._is_open(best - 1)

    def approach(self) -> None:
        """Ask on, from both sides of the budget."""
        while self._left and (open_ := self._open()):
            guess = self._guess(open_)
            if guess is None:
                break
            self._ask(guess)

    def look_for_the_least(self) -> None:
        """Nothing fits yet: try what may need less than it is predicted to."""
        if not self.predicted:
            return
        self._ask(0)  # where loops are small, nothing recomputed can be the least
        least = min(self.predicted)
        # Of plans that are predicted to need next to the least any may be the least in truth.
        near = self._within(max(least * _NEAR, least))
        for guess in (near[0], near[len(near) // 2]):
            if self.best is None:
                self._ask(guess)
        # And of small steps any predicted to need little more: what is left is spread over these.
        near = [k for k in reversed(self._within(max(least * _ROOM, least))) if k not in self.seen]
        for guess in near[:: -(-len(near) // max(self._left, 1)) or 1]:
            if self.best is None:
                self._ask(guess)
        if self.best:
            self._ask(self.best - 1)  # whether it is the fastest

    def look_for_faster(self, apart: Sequence[int]) -> None:
        """Something fits: try what may need less than it is expected to."""
        assert self.best is not None
        if self._unused >= self.enough:
            near = [k for k in self._faster() if self.predicted[k] <= self.budget * _NEAR]
            guess = max(near, default=-1)
            # The candidate in front of one that fits says that there is none faster.
            while self._left and guess >= 0 and guess not in self.seen:
                guess -= self._ask(guess)
        near = [k for k in self._faster() if self._expected(k) <= self.budget * _NEAR]
        if near and self._spared(near[-1]) > _LEAP * self.seconds[self.best]:
            self._ask(near[0])  # of several that are predicted to need as much, another one
        nearby = _NEARBY * self.budget
        if self.predicted[0] <= _ROOM * self.budget and self._expected(0) <= nearby:
            self._ask(0)
        if self._unused > _WASTED * self.enough:
            faster = sorted({*apart}.intersection(self._faster()))
            while faster and self._left:
                guess = min(faster, key=lambda k: (self._expected(k), k))
                faster.remove(guess)
                if self._expected(guess) > nearby or self._ask(guess):
                    break

    # ------------------------------------------------------------ implementation

    @property
    def _left(self) -> int:
        return self.most - len(self.seen)

    @property
    def _unused(self) -> int:
        assert self.best is not None
        return self.budget - self.seen[self.best]

    def _spared(self, candidate: int) -> float:
        """By how many seconds it is faster than the best."""
        assert self.best is not None
        return self.seconds[self.best] - self.seconds[candidate]

    def _kind(self, candidate: int) -> Hashable:
        return self.kinds[candidate] if self.kinds else None

    def _expected(self, candidate: int) -> int:
        return expected(candidate, self.predicted, self.seen, self.kinds)

    def _faster(self) -> list[int]:
        """What is faster than the best, and not known."""
        return [k for k in range(self.best or 0) if k not in self.seen]

    def _within(self, size: float) -> list[int]:
        """What is predicted to need no more."""
        return [k for k, predicted in enumerate(self.predicted) if predicted <= size]

    def _is_open(self, candidate: int) -> bool:
        """Whether neither it nor a slower one of its kind was seen to be too large."""
        return candidate not in self.seen and candidate > self._low.get(self._kind(candidate), -1)

    def _open(self) -> list[int]:
        """What may fit and be faster than the best."""
        best = self.best
        return [k for k in range(len(self.predicted) if best is None else best) if self._is_open(k)]

    def _ask(self, candidate: int) -> bool:
        """Whether a candidate fits, if it is not known and may be asked for."""
        if candidate not in self.seen:
            if not self._left:
                return False
            self.seen[candidate] = self.compiled(candidate)
        fits = self.seen[candidate] <= self.budget
        if not fits:
            kind = self._kind(candidate)
            self._low[kind] = max(self._low.get(kind, -1), candidate)
        return fits

    def _guess(self, open_: Sequence[int]) -> int | None:
        """What is asked for next; None if there is nothing more to know."""
        best, nearest = self.best, open_[-1]
        if best is not None and self._spared(open_[0]) <= self.worth:
            return None
        sizes = {k: self._expected(k) for k in open_}
        if best is not None and self._unused < self.enough:
            is_near = sizes[nearest] <= self.budget + self.enough
            if is_near and self._spared(nearest) > _STEP * self.seconds[best]:
                return nearest
            likely = next((k for k, size in sizes.items() if size <= self.budget), best)
            return likely if self._spared(likely) > self.worth else None
        # The more was too large, the further below the budget it is better to aim.
        aim = self.budget - (1 + len(self.seen) * (best is None)) * self.enough // 2
        for limit in (aim, self.budget):
            for k, size in sizes.items():
                if size <= limit:
                    return self._last_resort(k, open_)
        if best is None:
            return self._last_resort(min(sizes, key=lambda k: (sizes[k], -k)), open_)
        # To have seen that it does not fit.
        near = nearest == best - 1 or sizes[nearest] <= self.budget * _NEAR
        return nearest if near else None

    def _last_resort(self, guess: int, open_: Sequence[int]) -> int:
        """The guess, or where it is the last question and nothing fits, the least of all.

        Before that, where predictions were too small, what is halfway to it.
        """
        far = self.seen or self.predicted[guess] > self.budget / _ROOM
        if self.best is not None or self._left > 1 + bool(self.seen) or not far:
            return guess
        least = min(open_, key=lambda k: (self.predicted[k], -k))
        if self._left == 1:
            return least
        halfway = (self.predicted[guess] + self.predicted[least]) / 2
        return next(k for k in open_ if self.predicted[k] <= halfway)


class _Unknown(Exception):
    def __init__(self, candidate: int) -> None:
        super().__init__(candidate)
        self.candidate = candidate


def _told(known: Mapping[int, int], candidate: int) -> int:
    if candidate not in known:
        raise _Unknown(candidate)
    return known[candidate]
