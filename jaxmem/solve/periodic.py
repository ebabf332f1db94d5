"""Periodic cuts: every c-th carry is kept, the tapes of one segment at a time.

Also known as sqrt(n) checkpointing (Chen et al. 2016, arXiv 1604.06174), here
with the two sizes that decide it kept apart: the carry that is stored at each
cut, and the tape that a layer needs for its backward.  When they are equal the
textbook answer sqrt(n) falls out; when the tape is r times the carry the best
segment is sqrt(r) times shorter.

A cut is a tuple of segment lengths, outermost level first.  Level 1 cuts the
stack, level 2 cuts one segment of level 1, and so on; inside a segment of the
last level all tapes are live at once.
"""

import functools
from collections.abc import Sequence


def periodic_bytes(
    length: int,
    lengths: Sequence[int],
    carry_bytes: int,
    residual_bytes: int,
    alone_bytes: int | None = None,
) -> int:
    """Bytes live at the peak: the carries at the cuts of each level, one segment's tapes.

    Segments of one layer need `alone_bytes` for their tape (all of it by
    default): a compiler fuses what is recomputed and used at once.

    >>> periodic_bytes(64, (8,), 1, 1)
    16
    """
    total, outer = 0, length
    for inner in lengths:
        total += carry_bytes * -(-outer // inner)
        outer = inner
    if lengths and outer == 1 and alone_bytes is not None:
        return total + alone_bytes
    return total + residual_bytes * outer


def segment_lengths(
    length: int,
    levels: int = 1,
    carry_bytes: int = 1,
    residual_bytes: int = 1,
    alone_bytes: int | None = None,
) -> tuple[int, ...]:
    """The cut of `levels` levels that needs the fewest bytes, found by trying every one.

    Only the shortest segment for each number of segments has to be tried: a
    longer one keeps as many carries and more tapes.  Of equals, the one with
    the shortest segments is taken: what a layer needs while it works, which no
    one counts here, is then least.

    >>> segment_lengths(64)
    (8,)
    >>> segment_lengths(64, residual_bytes=16)
    (2,)
    >>> segment_lengths(1000, levels=2)
    (100, 10)
    """
    if length < 1:
        return ()
    # A carry of no bytes (a stack that only reads) costs nothing to keep.
    residual_bytes = max(residual_bytes, 1)
    alone = residual_bytes if alone_bytes is None else alone_bytes

    @functools.cache
    def best(n: int, depth: int) -> tuple[int, tuple[int, ...]]:
        if depth == 0:
            return (alone if n == 1 else residual_bytes * n), ()
        options = []
        for c in shortest_segments(n):
            inner, cut = best(c, depth - 1)
            options.append((carry_bytes * -(-n // c) + inner, c, (c, *cut)))
        cost, _, cut = min(options)
        return cost, cut

    return best(length, levels)[1]


def evaluations(length: int, lengths: Sequence[int]) -> int:
    """Layers evaluated beyond the first forward pass, which itself keeps the outermost carries.

    >>> evaluations(64, (8,)), evaluations(64, (16, 4))
    (64, 112)
    """
    return sum(count * _reversal(m, lengths[1:]) for count, m in blocks(length, lengths[0]))


def blocks(n: int, length: int) -> list[tuple[int, int]]:
    """How n layers fall into segments of `length`: pairs (how many, of what length), first to last.

    >>> blocks(61, 8)
    [(7, 8), (1, 5)]
    """
    count, rest = divmod(n, length)
    return [pair for pair in ((count, length), (1, rest)) if pair[0] and pair[1]]


def _reversal(n: int, lengths: Sequence[int]) -> int:
    """Evaluations to reverse n layers from the carry in front of them."""
    if not lengths:
        return n  # the tapes, all at once
    parts = blocks(n, lengths[0])
    advance = (sum(count for count, _ in parts) - 1) * lengths[0]
    return advance + sum(count * _reversal(m, lengths[1:]) for count, m in parts)


def shortest_segments(n: int) -> list[int]:
    """The distinct values of ceil(n / k), about 2 sqrt(n) of them."""
    found, k = [], 1
    while True:
        c = -(-n // k)
        found.append(c)
        if c == 1:
            return found
        k = -(-n // (c - 1))
