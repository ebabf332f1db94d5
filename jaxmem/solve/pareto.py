"""Plans that no other one beats."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

P = TypeVar("P")


class Sized(Protocol):
    """A plan with its bytes at the peak."""

    @property
    def seconds(self) -> float: ...

    @property
    def bytes(self) -> int: ...


class Held(Sized, Protocol):
    """One with those as well that are live when the forward pass is done."""

    @property
    def kept_bytes(self) -> int: ...


def cost(plan: Sized) -> tuple[float, int]:
    """What a plan costs where nothing follows it."""
    return plan.seconds, plan.bytes


def cost_of_part(plan: Held) -> tuple[float, int, int]:
    """What a plan costs that is one part of several: what it keeps is live while others run."""
    return plan.seconds, plan.bytes, plan.kept_bytes


def pareto_optimal(
    plans: Iterable[P],
    cost: Callable[[P], tuple[float, ...]],
    rank: Callable[[P], int] | None = None,
) -> list[P]:
    """Those that no other one beats in all that they cost, fastest first.

    Args:
      cost: seconds first, then bytes of one kind or several.
      rank: of plans that cost the same, the one with the least is taken.

    >>> pareto_optimal([(3.0, 5), (1.0, 9), (2.0, 9), (2.0, 7), (4.0, 5)], lambda plan: plan)
    [(1.0, 9), (2.0, 7), (3.0, 5)]
    """

    rows = []
    for plan in plans:
        seconds, *sizes = cost(plan)
        # Sums of the same seconds in another order differ in the last digits.
        rows.append((float(f"{seconds:.11e}"), tuple(sizes), rank(plan) if rank else 0, plan))
    best: list[P] = []
    front: list[tuple[float, ...]] = []  # sizes of those so far, none of which beats another
    for _, sizes, _, plan in sorted(rows, key=lambda row: row[:3]):
        if any(_within(other, sizes) for other in front):
            continue
        front = [other for other in front if not _within(sizes, other)]
        front.append(sizes)
        best.append(plan)
    return best


def _within(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
