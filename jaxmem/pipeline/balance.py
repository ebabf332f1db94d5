"""How many layers each chunk gets, when they do not divide or stages have other work as well."""

from collections.abc import Sequence


def balanced(layers: int, layer: float, others: Sequence[float]) -> tuple[int, ...]:
    """Sizes by which the slowest chunk is as fast as can be; each has one layer at least.

    Layers are equal, and stay in their order; so the best sizes follow from the least time in which
    all of them fit.

    Args:
      layers: how many.
      layer: what one costs.
      others: of each chunk, what it has to do next to layers: the first one what is before the
        stack, the last one what is after.

    >>> balanced(10, 1.0, [0, 0, 0, 2.0])
    (3, 3, 3, 1)
    """
    chunks = len(others)
    layer = max(layer, 1e-30)
    times = sorted({other + k * layer for other in others for k in range(1, layers + 1)})

    def room(time: float) -> list[int]:
        return [max(int((time - other) / layer + 1e-9), 1) for other in others]

    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(room(times[middle])) >= layers:
            high = middle
        else:
            low = middle + 1
    sizes = room(times[low])
    for _ in range(sum(sizes) - layers):
        loads = [(other + size * layer, size) for other, size in zip(others, sizes, strict=True)]
        slowest = max(
            (k for k in range(chunks) if sizes[k] > 1), key=lambda k: (loads[k][0], loads[k][1])
        )
        sizes[slowest] -= 1
    return tuple(sizes)
