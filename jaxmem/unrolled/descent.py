"""More ways to keep what a long segment needs: those whose peak is lower.

The menu of a segment goes by the bytes that are kept, which is not what is live at the
peak: what is recomputed is there for a while, and what is kept may be gone by then.  From
the choices of the menu on, one value is dropped at a time of those that are there at that moment,
the cheapest for its size first, and what comes of it is looked at in turn.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.solve.cover import keep_set
from jaxmem.solve.keep import Keep
from jaxmem.solve.problem import Graph
from jaxmem.trace.layer import Layer, nbytes

# Bytes live at the peak of a choice, and what that is kept is among these.
Moment = Callable[[Keep], tuple[int, frozenset[Any]]]

# What is smaller than this part of what is live is not worth dropping alone.
_WORTH = 1 / 100
# Nor is looked at what is better than what is known by no more than this part, at best.
_NEAR = 1 / 400


def descended(
    layer: Layer, graph: Graph, starts: Sequence[Keep], moment: Moment, looks: int
) -> list[Keep]:
    """Other choices than these, of which fewer bytes are live at the peak.

    Args:
      looks: how many are looked at.
    """
    sizes = [nbytes(var.aval) for var in layer.values]
    near = _NEAR * sum(operation.seconds for operation in graph.operations)
    seen: set[Keep] = set()
    # What nothing beats, with its bytes; and what might: its seconds for each byte less, its bytes
    # at best, and a number that keeps the order the same from one run to the next.
    front: dict[Keep, int] = {}
    pending: list[tuple[float, int, int, Keep]] = []

    def is_beaten(bytes: float, seconds: float) -> bool:
        return any(b <= bytes and keep.seconds <= seconds for keep, b in front.items())

    def look(keep: Keep) -> None:
        seen.add(keep)
        bytes, there = moment(keep)
        if is_beaten(bytes, keep.seconds):
            return
        for other, b in list(front.items()):
            if bytes <= b and keep.seconds <= other.seconds:
                del front[other]
        front[keep] = bytes
        for place in keep.kept:
            if layer.values[place] not in there or sizes[place] <= _WORTH * bytes:
                continue
            less = keep_set(graph, frozenset(keep.kept) - {place}, frozenset(keep.offloaded))
            if less is not None:
                rate = max(less.seconds - keep.seconds, 0.0) / sizes[place]
                number = len(seen) * len(sizes) + place
                heapq.heappush(pending, (rate, bytes - sizes[place], number, less))

    for start in starts:
        look(start)
    while pending and looks:
        _, least, _, keep = heapq.heappop(pending)
        if keep not in seen and not is_beaten((1 + _NEAR) * least, keep.seconds + near):
            looks -= 1
            look(keep)
    return [keep for keep in front if keep not in starts]
