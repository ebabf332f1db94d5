"""How `jaxmem.costs` counts: a jaxpr as a flat list of operations, and rules for each."""

from jaxmem.counting.again import two_levels, unrolled_remat, unrolled_without_barriers
from jaxmem.counting.traffic import kind_of, moved
from jaxmem.counting.walk import walk

__all__ = [
    "kind_of",
    "moved",
    "two_levels",
    "unrolled_remat",
    "unrolled_without_barriers",
    "walk",
]
