"""A U-Net with 11 images in the memory of MONeT's plans: how much is recomputed?

    python experiments/unet_budget.py            # compiled for an H100 that need not be there
    python experiments/unet_budget.py --small    # a small one, on the attached backend

MONeT (Shah et al. 2021) brings its U-Net (416×608 pixels, 64 to 512 channels, batch norm, four
levels) from 14.32 GB to 8.02 and 5.01 for 0.1 % less and 11.5 % more time on a P100.  Here is the
same net with the same batch in float32, its loss and gradient compiled.  What is compared and
counted is as in `resnet50_budget.py`; a block is what a level does on the way down or up.

It prints a table and writes `results/unet_budget.csv` and `.png`; the same command resumes after
an interruption.
"""

import dataclasses

import tyro

from budgets import compare, nets, study
from budgets.nets import Net
from budgets.published import U_NET
from budgets.table import Row

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options(study.Options):
    """Bring a U-Net into the memory of published plans."""

    batch: int = U_NET.batch
    """Images."""
    height: int = 416
    """Of them."""
    width: int = 608
    """Of them."""
    memories: tuple[float, ...] = (8.02, 5.01)
    """Of the published ones in GB, whose shares of 14.32 `fit` is given."""

    @property
    def net(self) -> Net:
        if self.small:
            return nets.unet(batch=2, height=32, width=16, channels=4, levels=1)
        return nets.unet(self.batch, self.height, self.width)


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows, completed, printed, drawn."""
    memories = options.memories[: 1 if options.small else None]
    return compare.shares(options, options.net, U_NET, memories, "unet_budget")


if __name__ == "__main__":
    main(tyro.cli(Options))
