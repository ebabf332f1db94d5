"""Policies that say how a stack of layers is cut."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmem.errors import check_positive, check_segments
from jaxmem.policies.base import ByLayer, Policy
from jaxmem.policies.for_layers import Names


@dataclasses.dataclass(frozen=True)
class Auto(ByLayer):
    """What `jaxmem.fit` finds or `jaxmem.use_plan` says; without either keep everything."""

    kind = "auto"

    def plan_for(self, stack: Any, layer: Any) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class NoRemat(Policy):
    """Keep everything, as jax does by itself."""

    kind = "none"


@dataclasses.dataclass(frozen=True)
class Sqrt(Policy):
    """Keep every c-th carry and recompute the segments between them.

    Attributes:
      segments: into how many segments the stack is cut, at most; one number for
        each level if several are given.  None takes the cut that needs the
        fewest bytes for the layer's own carry and residuals.
      levels: how many times the cut is nested; each level is one more forward,
        memory goes as (levels + 1) n^(1 / (levels + 1)).
    """

    kind = "sqrt"

    segments: int | tuple[int, ...] | None = None
    levels: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.segments, Sequence):
            object.__setattr__(self, "segments", tuple(self.segments))
        check_segments(self.segments, self.levels)


@dataclasses.dataclass(frozen=True)
class Revolve(Policy):
    """The optimal schedule for a fixed number of carries (Griewank & Walther 2000).

    Attributes:
      slots: how many carries are kept, the initial state counted in.
    """

    kind = "revolve"

    slots: int = 8

    def __post_init__(self) -> None:
        check_positive("slots", self.slots)


@dataclasses.dataclass(frozen=True)
class Offload(Policy):
    """Keep every carry, on the host; layers are recomputed from them.

    Attributes:
      names: named values of the layer that go to the host as well.
    """

    kind = "offload"

    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", Names(offload=self.names).offload)
