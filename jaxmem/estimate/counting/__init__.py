"""How `jaxmem.estimate.costs` counts: a jaxpr as a flat list of operations, and rules for each."""

from jaxmem.estimate.counting.recomputed import (
    two_levels,
    unrolled_remat,
    unrolled_without_barriers,
)
from jaxmem.estimate.counting.traffic import kind_of, moved
from jaxmem.estimate.counting.walk import walk

__all__ = [
    "kind_of",
    "moved",
    "two_levels",
    "unrolled_remat",
    "unrolled_without_barriers",
    "walk",
]
