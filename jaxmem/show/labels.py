"""Placement of labels without overlaps: along a line, in rows, around points."""

import itertools
from collections.abc import Sequence

import numpy as np

Box = tuple[float, float, float, float]  # left, bottom, right, top


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres along a line, in the same order, as near as possible to the wanted ones.

        Args:
          wanted: centres, rising.
          sizes: how long each label is along the line.
          low, high: the ends; labels lie beyond `high` only if they do not all fit between.

    Minimises the sum of squared shifts (pool adjacent violators), then shifts what lies
    beyond an end.

        >>> spread([0.0, 1.0], [4.0, 4.0], -10.0, 10.0)
        [-1.5, 2.5]
    """
    if not wanted:
        return []
    # With what stands before it taken off, a label may stand anywhere not below the one before.
    before = [0.0, *itertools.accumulate((a + b) / 2 for a, b in itertools.pairwise(sizes))]
    pools: list[tuple[float, int]] = []
    for want, offset in zip(wanted, before, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] > mean:
            other, many = pools.pop()
            mean, count = (mean * count + other * many) / (count + many), count + many
        pools.append((mean, count))
    first = low + sizes[0] / 2
    last = high - sizes[-1] / 2 - before[-1]
    free = [min(max(mean, first), max(first, last)) for mean, n in pools for _ in range(n)]
    return [mean + offset for mean, offset in zip(free, before, strict=True)]


def rows(spans: Sequence[tuple[float, float]], gap: float) -> list[int]:
    """The lowest row for each span in which it overlaps no earlier one.

    >>> rows([(0, 10), (5, 8), (20, 30)], gap=1)
    [0, 1, 0]
    """
    taken: list[list[tuple[float, float]]] = []
    found = []
    for start, end in spans:
        free = (
            row
            for row, others in enumerate(taken)
            if all(end + gap <= a or start >= b + gap for a, b in others)
        )
        row = next(free, len(taken))
        if row == len(taken):
            taken.append([])
        taken[row].append((start, end))
        found.append(row)
    return found


def around(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    inside: Box,
    taken: Sequence[Box] = (),
    radius: float = 6.0,
    pixel: float = 1.0,
) -> list[tuple[float, float]]:
    """The centre of a label for each point, near to it and covering nothing.

    Args:
      points: in pixels.
      sizes: width and height of each label.
      inside: where all labels must lie.
      taken: what they must not cover, in addition to the points and each other.
      radius: of a point, with a margin.
      pixel: pixels per typographic point, the step by which distances grow.
    """
    obstacles = [*taken, *((x - radius, y - radius, x + radius, y + radius) for x, y in points)]
    boxes: list[Box | None] = [None] * len(points)
    # Points with many neighbours choose first: they have the fewest free places.
    cloud = np.asarray(points, float).reshape(-1, 2)
    distance = np.hypot(*(cloud[:, None] - cloud[None]).transpose(2, 0, 1))
    crowded = np.sort(distance, axis=1)[:, :4].sum(axis=1)
    for k in np.argsort(crowded, kind="stable"):
        (x, y), (width, height) = points[k], sizes[k]
        best, least = None, np.inf
        for reach, (dx, dy) in itertools.product(_REACHES, _SIDES):
            cx = x + dx * (radius + pixel * reach + width / 2)
            cy = y + dy * (radius + pixel * reach + height / 2)
            box = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
            others = [other for other in boxes if other is not None]
            cost = sum(_common(box, other) for other in (*obstacles, *others))
            cost += 1000 * _outside(box, inside) + 0.5 * pixel * reach
            if cost < least:
                best, least = box, cost
        boxes[k] = best
    return [((a + c) / 2, (b + d) / 2) for a, b, c, d in (box for box in boxes if box)]


_REACHES = (0.0, 8.0, 18.0, 30.0, 45.0, 60.0)
_SIDES = (
    (1, 0),
    (-1, 0),
    (0, 1),
    (0, -1),
    (0.7, 0.9),
    (0.7, -0.9),
    (-0.7, 0.9),
    (-0.7, -0.9),
)


def _common(a: Box, b: Box) -> float:
    """Pixels in which two boxes overlap."""
    across = min(a[2], b[2]) - max(a[0], b[0])
    along = min(a[3], b[3]) - max(a[1], b[1])
    return max(across, 0.0) * max(along, 0.0)


def _outside(box: Box, inside: Box) -> float:
    return sum(
        max(by, 0.0)
        for by in (
            inside[0] - box[0],
            inside[1] - box[1],
            box[2] - inside[2],
            box[3] - inside[3],
        )
    )
