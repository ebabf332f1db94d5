"""The largest size that fits, found by compiling few of them: memory grows about linearly."""

from collections.abc import Callable


def largest(needs: Callable[[int], int], capacity: int, start: int, fixed: int = 0) -> int:
    """The largest rounded size whose need is within the capacity, 0 if that of 1 is not.

    The next rounded size was asked for too, and is beyond it.

    Args:
      needs: bytes of a size; asked at most once for each.
      start: where to begin.
      fixed: about what size 0 would need, as long as only one size is known.

    >>> asked = []
    >>> def needs(n):
    ...     asked.append(n)
    ...     return 500 + 7 * n
    >>> largest(needs, 1000, 8), asked
    (68, [8, 14, 68, 72])
    """
    seen: dict[int, int] = {}
    low, high = 0, None
    guess = rounded(max(start, 1))
    while True:
        seen[guess] = needs(guess)
        if seen[guess] <= capacity:
            low = guess
        else:
            high = guess
        if high is not None and rounded(high - 1) <= low:
            return low
        guess = rounded(max(1, int(_solved(seen, capacity, fixed))))
        # Between what is known to fit and what is known not to, and never far out at once.
        guess = max(guess, following(low))
        guess = min(guess, rounded(high - 1) if high is not None else 16 * max(low, 1))


def rounded(size: int) -> int:
    """The largest number of at most five significant bits that is not above.

    >>> [rounded(n) for n in (1, 31, 33, 70, 1000)]
    [1, 31, 32, 68, 992]
    """
    step = max(size.bit_length() - _BITS, 0)
    return size >> step << step


def following(size: int) -> int:
    """The next such number.

    >>> [following(n) for n in (0, 30, 31, 62, 960)]
    [1, 31, 32, 64, 992]
    """
    return size + (1 << max(size.bit_length() - _BITS, 0))


# ---------------------------------------------------------------- implementation

_BITS = 5


def _solved(seen: dict[int, int], capacity: int, fixed: int) -> float:
    """Where the line through the two sizes nearest to the capacity reaches it."""
    near = sorted(seen, key=lambda size: abs(seen[size] - capacity))[:2]
    points = [(0, min(fixed, *seen.values(), capacity))] if len(near) == 1 else []
    (x0, y0), (x1, y1) = sorted([*points, *((size, seen[size]) for size in near)])
    if y1 <= y0:
        return x1
    return x0 + (capacity - y0) * (x1 - x0) / (y1 - y0)
