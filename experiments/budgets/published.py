"""Published figures, to compare the rows with; nothing here was measured by this project."""

import dataclasses

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Published:
    """A net under MONeT's plans (Shah et al. 2021, arXiv 2010.14501; the table of its code).

    Memory is what PyTorch's allocator had at its peak in a forward and a backward pass without
    an optimizer, time that of both on a P100, over PyTorch's with everything kept.

    Attributes:
      batch: images.
      kept: memory with everything kept, in GB.
      plans: memory in GB, and percent of time more.
    """

    batch: int
    kept: float
    plans: dict[float, float]

    def share(self, memory: float) -> float:
        """Of the memory with everything kept."""
        return memory / self.kept


# ---------------------------------------------------------------- the tables

RESNET_50 = Published(
    184,
    15.06,
    {10.01: 3.22, 9.01: 4.68, 8.01: 5.56, 6.99: 7.28, 6.00: 9.31, 4.99: 11.95},
)
U_NET = Published(
    11,
    14.32,
    {10.01: -4.10, 9.01: -2.07, 8.02: -0.09, 7.00: 1.39, 6.01: 4.95, 5.01: 11.51},
)
VGG_16 = Published(
    176,
    14.12,
    {9.71: -5.30, 8.66: -4.64, 7.88: -2.18, 6.82: 1.99, 5.90: 5.44, 5.51: 9.11},
)

# Checkmate (Jain et al. 2020, arXiv 1910.02653), figure of the largest batches: VGG19 in 16 GB
# (1e9 bytes, a V100's), at most one more forward pass; memory by their model of it: parameters
# twice and what is live, no workspace.
VGG_19_BATCH = {"all": 167, "sqrt": 197, "greedy": 266, "ILP": 289}
VGG_19_BYTES = 16 * 10**9
