"""The roofline of a step: how long its products, its traffic and its communication take at least.

Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785.
"""

import dataclasses
from typing import Literal

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """What a target's peaks make of a program's work; lower bounds of times, per device.

    Attributes:
      matmul_flops: of the compiled program, convolutions included.
      bytes: read and written in device memory.
      peak_flops: of the target a second, in dense products of bfloat16.
      bandwidth: of its memory, in bytes a second.
      communication_seconds: of the collectives one after the other; None where that is unknown.

    >>> found = Roofline(matmul_flops=8000, bytes=100, peak_flops=1e3, bandwidth=50.0)
    >>> found.compute_seconds, found.memory_seconds, found.bound
    (8.0, 2.0, 'compute')
    >>> found.intensity, found.ridge
    (80.0, 20.0)
    """

    matmul_flops: int
    bytes: int
    peak_flops: float
    bandwidth: float
    communication_seconds: float | None = None

    @property
    def compute_seconds(self) -> float:
        """Of the products alone."""
        return self.matmul_flops / self.peak_flops

    @property
    def memory_seconds(self) -> float:
        """Of reading and writing alone."""
        return self.bytes / self.bandwidth

    @property
    def intensity(self) -> float | None:
        """Matmul FLOPs for each byte; None for a program that moves nothing."""
        return self.matmul_flops / self.bytes if self.bytes else None

    @property
    def ridge(self) -> float:
        """The intensity at which products and memory take the target as long."""
        return self.peak_flops / self.bandwidth

    @property
    def bound(self) -> Literal["compute", "memory", "communication"]:
        """Which of the three takes longest."""
        times: dict[Literal["compute", "memory", "communication"], float] = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "communication": self.communication_seconds or 0.0,
        }
        return max(times, key=lambda kind: times[kind])
