"""The fastest candidate of a front that fits, found by asking the compiler a few times.

Predictions say where to ask; what fits is only what was compiled.  From each answer the
predictions are moved by what they were off there.  The search ends when the candidate found is
next to one that was seen not to fit, so that (as long as faster candidates need more) the answer
is the same wherever the search began: larger budgets never get a slower candidate, and smaller
ones none that needs more.  Fronts are not always that even: of the faster candidates those that
were predicted to need hardly more than the budget are asked for, too, and where the least of all
does not fit, those predicted to need hardly more than that, and some of those predicted to need a
little more.  The first candidate, at which nothing is
recomputed, is another program than the rest, and less well predicted: it is asked for if it may
fit at all.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
      candidate: the fastest candidate seen to fit; None if none did.
      seen: bytes of each candidate that was compiled, in the order in which they were.
      closed: whether the next faster candidate was seen not to fit, or there is none.
    """

    candidate: int | None
    seen: dict[int, int]
    closed: bool


def search(
    predicted: Sequence[int], budget: int, compiled: Callable[[int], int], most: int = 6
) -> SearchResult:
    """Find the fastest candidate within the budget.

    Args:
      predicted: bytes of each candidate, fastest and largest first.
      budget: bytes.
      compiled: what a candidate needs in truth.
      most: how often `compiled` may be asked.

    >>> truth = [100, 90, 80, 70, 60, 50]
    >>> search([95, 85, 75, 65, 55, 45], 72, truth.__getitem__)
    SearchResult(candidate=3, seen={3: 70, 2: 80}, closed=True)
    >>> search([95, 85], 72, truth.__getitem__).candidate is None
    True
    """
    seen: dict[int, int] = {}
    # Candidates up to `low` are too large, from `high` on they fit.
    low, high = -1, len(predicted)

    def ask(candidate: int) -> None:
        if candidate not in seen and len(seen) < most:
            seen[candidate] = compiled(candidate)

    while len(seen) < most and high - low > 1:
        left = most - len(seen)
        between = range(low + 1, high)
        guess = next((k for k in between if expected(k, predicted, seen) <= budget), between[-1])
        if (
            high < len(predicted)
            and guess == between[-1]
            and expected(guess, predicted, seen) > budget
        ):
            guess = high - 1  # to have seen that it does not fit
        # What is asked first goes by the predictions alone.
        if seen and left <= 3 and len(between) >= 2 ** (left - 1):
            guess = (low + high) // 2  # what is left to ask is just enough to halve
        if left == 1 and high == len(predicted) and (seen or predicted[guess] > budget / _ROOM):
            guess = between[-1]  # only the least of all can say that nothing fits
        seen[guess] = compiled(guess)
        if seen[guess] <= budget:
            high = guess
        else:
            low = guess
    if high == len(predicted) and predicted:
        ask(0)  # where loops are small, nothing recomputed can be the least
    if high == len(predicted) and seen and min(seen.values()) > budget:
        least = predicted[-1]
        # Of plans that are predicted to need next to the least any may be the least in truth.
        near = [k for k, size in enumerate(predicted) if size <= max(least * _NEAR, least)]
        for guess in (near[0], near[len(near) // 2]):
            ask(guess)
        # And of small steps any predicted to need little more: what is left is spread over these.
        near = [k for k, size in enumerate(predicted) if size <= max(least * _ROOM, least)]
        near = [k for k in reversed(near) if k not in seen]
        for guess in near[:: -(-len(near) // max(most - len(seen), 1)) or 1]:
            if min(seen.values()) > budget:
                ask(guess)
        high = next((k for k, size in seen.items() if size <= budget), high)
        if 0 < high < len(predicted):
            ask(high - 1)  # whether it is the fastest
    if high < len(predicted):
        near = [
            k
            for k in range(min(max(low, 0), high))
            if predicted[k] <= budget * _NEAR and k not in seen
        ]
        for guess in near[: -_PROBES - 1 : -1]:
            # The candidate in front of one that fits says that there is none faster.
            while len(seen) < most and guess >= 0 and guess not in seen:
                seen[guess] = compiled(guess)
                guess -= seen[guess] <= budget
        if predicted[0] <= budget * _ROOM:
            ask(0)
    fits = [candidate for candidate, size in seen.items() if size <= budget]
    candidate = min(fits, default=None)
    closed = candidate is not None and (candidate == 0 or seen.get(candidate - 1, budget) > budget)
    return SearchResult(candidate, seen, closed)


def refine(
    predicted: Sequence[int],
    budget: int,
    compiled: Callable[[int], int],
    seen: Mapping[int, int],
    most: int,
    enough: int,
) -> SearchResult:
    """Go on between two candidates of a search, of which the slower one fits, among finer ones.

    Args:
      predicted: bytes of the faster one, those between, and the slower one.
      budget, compiled: as for `search`.
      seen: bytes of those that were compiled, the last one among them.
      most: how often `compiled` may be asked.
      enough: so many bytes may stay unused.

    >>> truth = [100, 90, 80, 70, 60, 50]
    >>> refine([95, 85, 75, 65, 55, 45], 72, truth.__getitem__, {0: 100, 5: 50}, 3, 1)
    SearchResult(candidate=3, seen={0: 100, 5: 50, 3: 70, 2: 80}, closed=True)
    """
    known = dict(seen)
    low, high = (0 if 0 in known else -1), len(predicted) - 1
    while high - low > 1 and len(known) - len(seen) < most and budget - known[high] > enough:
        between = range(low + 1, high)
        # Where none is expected to fit the nearest one says so.
        fit = (k for k in between if expected(k, predicted, known) <= budget)
        guess = next(fit, between[-1])
        known[guess] = compiled(guess)
        if known[guess] <= budget:
            high = guess
        else:
            low = guess
    return SearchResult(high, known, known.get(high - 1, budget) > budget)


Searched = Callable[[Callable[[int], int]], SearchResult]


def upcoming(
    searched: Searched,
    predicted: Sequence[int],
    budget: int,
    seen: Mapping[int, int],
    most: int,
) -> list[int]:
    """What a search will ask for next, and then, the likeliest first.

    Each answer is taken to be what is expected, or else on the other side of the budget.

    Args:
      searched: the search, given what answers it.
      predicted, budget: as there.
      seen: what it was told until now, by candidate.
      most: so many candidates are of interest.

    >>> def searched(answer):
    ...     return search([95, 85, 75, 65, 55, 45], 72, answer)
    >>> upcoming(searched, [95, 85, 75, 65, 55, 45], 72, {}, 3)
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
        likely = expected(asked, predicted, known)
        other = budget + 1 if likely <= budget else budget
        paths += [{**known, asked: likely}, {**known, asked: other}]
    return found


class _Unknown(Exception):
    def __init__(self, candidate: int) -> None:
        super().__init__(candidate)
        self.candidate = candidate


def _told(known: Mapping[int, int], candidate: int) -> int:
    if candidate not in known:
        raise _Unknown(candidate)
    return known[candidate]


# Predictions are this far off at times: by this much a plan has to be predicted to be smaller than
# the budget to be the only one that is asked for.
_ROOM = 1.25
# What is predicted to need no more than this times the budget, or the least, may yet fit, though a
# slower candidate does not; so many are tried.
_NEAR = 1.03
_PROBES = 2


def expected(candidate: int, predicted: Sequence[int], seen: Mapping[int, int]) -> int:
    """A prediction moved by what those of the candidates seen were off, on both sides of it.

    What is off grows with what is kept: below all that was seen it shrinks with the prediction.

    >>> expected(1, [100, 50], {}), expected(1, [100, 50], {0: 110})
    (50, 55)
    >>> expected(1, [100, 75, 50], {0: 110, 2: 50})
    80
    """
    if not seen:
        return predicted[candidate]
    known = sorted(seen, key=lambda other: predicted[other])
    misses = [seen[other] - predicted[other] for other in known]
    miss = np.interp(predicted[candidate], [predicted[k] for k in known], misses)
    share = min(1.0, predicted[candidate] / max(predicted[known[0]], 1))
    return predicted[candidate] + round(share * float(miss))
