"""Several stacks of one step, one plan for each: the Pareto front of plans for the whole.

Stacks are met in the order of the forward pass, and reversed in the opposite one.  While
one is reversed, what those before it keep is live, and what those after it kept is gone:
the peak of a step is the highest of these, not their sum.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxmem.solve.pareto import cost, cost_of_part, pareto_optimal
from jaxmem.solve.stacks import Candidate

T = TypeVar("T")

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class StepCandidate:
    """One plan for a step.

    Attributes:
      bytes: at the peak, of all that stacks keep and work with.
      seconds: more than a forward and a backward pass.
      picks: which candidate of each stack.
      kept_bytes: live when the forward pass is done.
      variant: which of several ways to run the stacks these are plans for.
      kind: plans of the same are predicted as well as each other.
    """

    bytes: int
    seconds: float
    picks: tuple[int, ...]
    kept_bytes: int = 0
    variant: int = 0
    kind: str = ""


# ---------------------------------------------------------------- API


def pareto_front(
    stacks: Sequence[Sequence[Candidate]],
    most: int = 400,
    turn_bytes: int = 0,
    places: Sequence[Sequence[int]] | None = None,
    costs: Callable[[StepCandidate], tuple[float, ...]] = cost,
) -> tuple[StepCandidate, ...]:
    """The plans for a step that no other beats in bytes and seconds, fastest first.

    Args:
      stacks: of each stack, in the order in which the step runs them, its candidates.
      most: how many partial plans are gone on with after each stack.
      turn_bytes: live next to what all of them keep, when the last one has been evaluated and
        none has been reversed.
      places: which candidates of each stack are taken, fastest first; None for all.
      costs: what a plan for the step costs.
    """
    found = [StepCandidate(0, 0.0, (), 0)]
    each = most // 4 if len(stacks) > 1 else max(map(len, stacks), default=0)
    for number, one in enumerate(stacks):
        last = number == len(stacks) - 1
        taken = range(len(one)) if places is None else places[number]
        offered = _thinned([(k, one[k]) for k in taken], [one[k] for k in taken], each)
        grown = [
            StepCandidate(
                bytes=max(
                    candidate.bytes,
                    candidate.kept_bytes + c.bytes,
                    candidate.kept_bytes + c.kept_bytes + (turn_bytes if last else 0),
                ),
                seconds=candidate.seconds + c.seconds,
                picks=(*candidate.picks, place),
                kept_bytes=candidate.kept_bytes + c.kept_bytes,
            )
            for candidate in found
            for place, c in offered
        ]
        found = pareto_optimal(grown, costs if last else cost_of_part)
        found = found if last else _thinned(found, found, most)
    return tuple(found)


def thinned_front(
    front: Sequence[StepCandidate], others: int, most: int = 63
) -> tuple[StepCandidate, ...]:
    """At most so many plans, fastest first, each a good step smaller than the one before.

    First come those where the trade of seconds for bytes turns most sharply (the corners of
    the convex hull), then such that no gap in the whole of the step's bytes stays wide.

    Args:
      front: from `pareto_front`.
      others: bytes of the step that no plan changes.
    """
    if len(front) <= 2:
        return tuple(front)
    whole = [math.log(max(candidate.bytes + others, 1)) for candidate in front]
    corners = _corners(front)
    taken = {0, len(front) - 1, *corners[: most // 2]}
    closest = 0.004  # less than this is within what a prediction is worth
    while len(taken) < most:
        places = sorted(taken)
        gaps = [(whole[a] - whole[b], a, b) for a, b in itertools.pairwise(places) if b - a > 1]
        gaps = [gap for gap in gaps if gap[0] > 2 * closest]
        if not gaps:
            break
        _, a, b = max(gaps)
        middle = (whole[a] + whole[b]) / 2
        taken.add(min(range(a + 1, b), key=lambda k: abs(whole[k] - middle)))
    # Of two that are nearly as large the sharper corner stays, and the least of all.
    sharp = {k: float(len(corners) - place) for place, k in enumerate(corners)}
    sharp[len(front) - 1] = math.inf
    thinned = [0]
    for k in sorted(taken - {0}):
        if whole[thinned[-1]] - whole[k] >= closest:
            thinned.append(k)
        elif len(thinned) > 1 and sharp.get(k, 0) > sharp.get(thinned[-1], 0):
            thinned[-1] = k
    return tuple(front[k] for k in thinned)


# ---------------------------------------------------------------- implementation


def _thinned(items: Sequence[T], sizes: Sequence[StepCandidate | Candidate], most: int) -> list[T]:
    """At most so many, each about as many times smaller than the one before.

    Not every so manieth: of hundreds of plans that are nearly alike a few are enough, and the
    only one for miles around must not be passed over.
    """
    if len(items) <= most:
        return list(items)
    way = [0.0]
    for one, other in itertools.pairwise(sizes):
        way.append(
            way[-1]
            + abs(math.log(max(one.bytes, 1) / max(other.bytes, 1)))
            + abs(math.log(max(one.kept_bytes, 1) / max(other.kept_bytes, 1)))
        )
    if not way[-1]:
        return [items[0]]
    wanted = (way[-1] * k / (most - 1) for k in range(most))
    places = {min(bisect.bisect_left(way, at), len(items) - 1) for at in wanted}
    return [items[place] for place in sorted({0, *places, len(items) - 1})][:most]


def _corners(front: Sequence[StepCandidate]) -> list[int]:
    """Inner corners of the lower convex hull, the sharpest first."""
    hull: list[int] = []
    for k, candidate in enumerate(front):
        while len(hull) > 1:
            a, b = front[hull[-2]], front[hull[-1]]
            turn = (b.bytes - a.bytes) * (candidate.seconds - a.seconds) - (
                b.seconds - a.seconds
            ) * (candidate.bytes - a.bytes)
            if turn < 0:
                break
            hull.pop()
        hull.append(k)

    def sharpness(at: int) -> float:
        a, b, c = (front[hull[at + d]] for d in (-1, 0, 1))
        before = (b.seconds - a.seconds) / max(a.bytes - b.bytes, 1)
        after = (c.seconds - b.seconds) / max(b.bytes - c.bytes, 1)
        return math.log(after / before) if before > 0 and after > 0 else math.inf

    inner = sorted(range(1, len(hull) - 1), key=sharpness, reverse=True)
    return [hull[at] for at in inner]
