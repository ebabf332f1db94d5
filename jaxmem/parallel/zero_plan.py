"""What each device holds of a training state that is split."""

import dataclasses
import math
from typing import Any

from jaxmem._util.text import columns, size
from jaxmem.parallel.split import Split

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class SplitLeaf:
    """How one array of a training state lies over the devices.

    Attributes:
      path: "params/layers/up", "state/0/mu/layers/up".
      bytes: of the whole array.
      device_bytes: of what one device holds of it.
      dim: the dimension that is split, None for none.
      reason: why none is.
    """

    path: str
    bytes: int
    device_bytes: int
    dim: int | None
    reason: str


@dataclasses.dataclass(frozen=True)
class ZeroPlan:
    """What each device holds, as `Zero.explain` returns it."""

    stage: int
    leaves: tuple[SplitLeaf, ...]

    @property
    def device_bytes(self) -> int:
        """Of all the arrays, on one device; gradients and activations are not among them."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    def __str__(self) -> str:
        whole = sum(leaf.bytes for leaf in self.leaves)
        head = f"stage {self.stage}: {size(self.device_bytes)} of {size(whole)} on each device"
        rows = [
            [
                leaf.path,
                size(leaf.device_bytes),
                f"whole: {leaf.reason}" if leaf.dim is None else f"dimension {leaf.dim} is split",
            ]
            for leaf in self.leaves
        ]
        return f"{head}\n{columns(rows, right=[1])}"


# ---------------------------------------------------------------- API


def described(path: str, leaf: Any, split: Split) -> SplitLeaf:
    """One array, by its type, as a plan has it."""
    shape, bytes = leaf.shape, math.prod(leaf.shape) * leaf.dtype.itemsize
    place = split.whole if split.dim is None else split.shards
    own = math.prod(place.shard_shape(tuple(shape))) * leaf.dtype.itemsize
    return SplitLeaf(path, bytes, own, split.dim, split.reason)
