"""How often a step runs each of its regions, and how many of them it holds at once.

A region is known in the whole step by the name scope that it was traced in.  What is traced once
may be called several times, by scans and by calls of jitted functions; what is evaluated and not
differentiated holds nothing, and neither does what `jax.checkpoint` recomputes, but then.
"""

import collections
import dataclasses
import re
from collections.abc import Collection, Hashable, Mapping
from typing import Any, Literal

from jaxmem import _jax

SCOPE = "jaxmem_region_"
# In a program that has a gradient: on the way there or on the way back.
Way = Literal["there", "back"] | None

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Uses:
    """Where a step runs regions that are alike.

    Attributes:
      times: how often they are reversed; where a gradient is taken in each turn of a scan, in one.
      live: of how many what they keep is there at once.
      copies: of what one turn of a scan keeps, before it is stacked.
      iterations: how often scans around one run it, one after the other; 0 where there are none.
      stacked: whether a scan stacks what they keep.
    """

    times: int = 1
    live: int = 1
    copies: int = 0
    iterations: int = 0
    stacked: bool = False

    @property
    def others(self) -> int:
        """How often what they keep is there, that of the one that is reversed apart."""
        return self.live + self.copies - 1


ONCE, NOWHERE = Uses(), Uses(times=0, live=0)

# ---------------------------------------------------------------- API


def uses(closed: Any, regions: Mapping[str, Hashable]) -> dict[Hashable, Uses]:
    """Of regions that are alike, where the step reverses them; nowhere, if it only evaluates them.

    What is not found in it is left out.

    Args:
      closed: the jaxpr of the step.
      regions: what stands in the scope of each name; equal where it is alike.
    """
    return {
        region: Uses(seen.times, seen.live, seen.peak - seen.live, seen.iterations, seen.stacked)
        for region, seen in _seen(closed.jaxpr, regions, None).items()
    }


def twice_differentiated(closed: Any, regions: Mapping[str, Hashable]) -> set[Hashable]:
    """Regions whose backward pass is differentiated in turn, as for a gradient of a gradient."""
    found: set[Hashable] = set()
    for eqn in closed.jaxpr.eqns:
        stack = str(eqn.source_info.name_stack)
        # Not just anywhere: so does a backward pass look that is a user's, with a gradient in it.
        if re.search(r"(^|/)jvp\((jvp\()*transpose\(", stack):
            found.update(regions[scope] for scope in scopes_in(stack, regions))
        for sub in _jax.all_subjaxprs(eqn):
            found |= twice_differentiated(sub, regions)
    return found


def scopes_in(stack: str, scopes: Collection[str]) -> set[str]:
    """Those of the scopes of regions that a name stack is in."""
    return {scope for scope in re.findall(rf"{SCOPE}\d+\.", stack) if scope in scopes}


def way_of(stack: str, way: Way) -> Way:
    """On which way the equation of a name stack is, `way` being that of what it stands in."""
    for part in stack.split("/"):
        if "transpose(" in part:
            way = "back"
        # The way back bears the names of the way there as well.
        elif part == _jax.RECOMPUTED or ("jvp(" in part and way is None):
            way = "there"
    return way


# ---------------------------------------------------------------- implementation


@dataclasses.dataclass
class _Seen:
    """Of regions that are alike, what was seen of them, from the end of a program to its start.

    Attributes:
      times, live, iterations, stacked: see `Uses`; `peak` is `live` with the copies.
      reversed: there at the start of what was seen, to be reversed in it.
      made: the other way round: there at its end, and made in it.
    """

    times: int = 0
    live: int = 0
    peak: int = 0
    reversed: int = 0
    made: int = 0
    iterations: int = 0
    stacked: bool = False

    def add(self, earlier: "_Seen") -> None:
        """Go on with what stands before it."""
        self.live = max(self.live, self.reversed + earlier.live)
        self.peak = max(self.peak, self.reversed + earlier.peak)
        matched = min(self.reversed, earlier.made)
        self.reversed += earlier.reversed - matched
        self.made += earlier.made - matched
        self.times += earlier.times
        self.iterations = max(self.iterations, earlier.iterations)
        self.stacked |= earlier.stacked

    def either(self, other: "_Seen") -> None:
        """One of the two is run."""
        for field in dataclasses.fields(self):
            name = field.name
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def in_scan(self, length: int) -> None:
        """It is one turn of a scan that is itself there, or back."""
        stacked = self.reversed * length
        if self.reversed:  # all iterations stacked, and one by itself
            self.live, self.peak, self.stacked = stacked, stacked + self.peak, True
        self.reversed, self.made = stacked, self.made * length
        self.iterations = length * max(self.iterations, 1) if self.times else 0
        self.times *= length


def _seen(jaxpr: Any, regions: Mapping[str, Hashable], way: Way) -> dict[Hashable, _Seen]:
    """What is seen of regions in a jaxpr, from its end to its start.

    Of the equations of one region the first that is met stands for it.

    Args:
      way: the one that all of it is on, if there is one.
    """
    found: dict[Hashable, _Seen] = collections.defaultdict(_Seen)
    met: set[tuple[str, Way]] = set()
    for eqn in reversed(jaxpr.eqns):
        stack = str(eqn.source_info.name_stack)
        own_way = way_of(stack, way)
        own = scopes_in(stack, regions)
        if own_way:
            for scope in sorted(own):
                if (scope, own_way) not in met:
                    met.add((scope, own_way))
                    found[regions[scope]].add(_one(own_way))
        # An equation of a region is a part of that one, whatever is in it.
        others = {s: region for s, region in regions.items() if s not in own} if own else regions
        inner: dict[Hashable, _Seen] = collections.defaultdict(_Seen)
        for sub in _jax.all_subjaxprs(eqn):
            # Of the branches of a cond one is taken.
            for region, seen in _seen(sub.jaxpr, others, own_way).items():
                inner[region].either(seen)
        length = _jax.scan_parts(eqn).length if own_way and _jax.is_scan(eqn) else 1
        for region, seen in inner.items():
            if length > 1:
                seen.in_scan(length)
            found[region].add(seen)
    return found


def _one(way: Way) -> _Seen:
    return _Seen(made=1) if way == "there" else _Seen(times=1, live=1, peak=1, reversed=1)
