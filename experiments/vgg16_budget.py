"""VGG-16 in the memory of MONeT's plans, and the largest batch of VGG-19 in 16 GB.

    python experiments/vgg16_budget.py            # compiled for an H100 that need not be there
    python experiments/vgg16_budget.py --small    # small ones, on the attached backend

MONeT (Shah et al. 2021) brings VGG-16 with 176 images from 14.12 GB to 7.88 and 5.51 for 2.2 % less
and 9.1 % more time on a P100.  What is compared and counted is as in `resnet50_budget.py`; a block
is what lies between two poolings.  VGG has no batch norm, so a batch may also be cut: one more
row is `fit` of `jaxmem.value_and_grad` with four microbatches.

Checkmate (Jain et al. 2020) asks for the largest batch of VGG-19 that 16 GB (1e9 bytes) train with
at most one extra forward pass: 167 images with everything kept, 197 with √n segments, 266
with greedy cuts, 289 by integer programming, by its own model of memory.  Here each size is
compiled: everything kept, `@jaxmem.remat_sqrt`, `jax.checkpoint` around the segments of Chen's
greedy algorithm (the best of eight that its own estimate likes), and the least that any plan of
`fit` needs.  Sizes have at most five significant bits, and the next one was compiled and did not
fit.  Parameters and gradient count; there is no optimizer.

It prints tables and writes `results/vgg16_budget.csv` and `.png`; the same command resumes after
an interruption.
"""

import dataclasses

import tyro

from budgets import batches, nets, picture, study, table
from budgets.nets import Net
from budgets.published import VGG_16, VGG_19_BATCH, VGG_19_BYTES
from budgets.table import Row

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options(study.Options):
    """Bring VGG-16 into the memory of published plans, and as many images as can be into 16 GB."""

    batch: int = VGG_16.batch
    """Images for VGG-16."""
    image: int = 224
    """Their height and width."""
    convs_16: tuple[int, ...] = nets.VGG_16
    """Convolutions of VGG-16 before each pooling."""
    convs_19: tuple[int, ...] = nets.VGG_19
    """Those of VGG-19."""
    width: int = 64
    """Channels of the first convolutions."""
    hidden: int = 4096
    """Width of the two layers before the last."""
    memories: tuple[float, ...] = (7.88, 5.51)
    """Of the published ones in GB, whose shares of 14.12 `fit` is given."""
    microbatches: int = 4
    """Into how many the batch is cut in one more row."""
    capacity: int = VGG_19_BYTES
    """Bytes for VGG-19."""
    start: int = min(VGG_19_BATCH.values())
    """Which batch of VGG-19 is tried first."""
    cuts: int = 8
    """So many of the greedy cuts are compiled, the most promising by their own estimate."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self, batch=4, image=16, width=2, hidden=8, convs_16=(1,), convs_19=(2,),
            memories=self.memories[:1], capacity=150_000, start=5, cuts=1,
        )  # fmt: skip

    def net(self, convs: tuple[int, ...], batch: int) -> Net:
        return nets.vgg(convs, batch, self.image, self.width, self.hidden)


# ---------------------------------------------------------------- API


def main(options: Options) -> tuple[list[Row], list[Row]]:
    """The rows of VGG-16 and those of the largest batches, completed, printed, drawn."""
    options = options.sized()
    own = study.opened(options, "vgg16_budget")
    shares = own.shares(
        options.net(options.convs_16, options.batch), VGG_16, options.memories, options.microbatches
    )
    most = batches.largest(
        own, lambda batch: options.net(options.convs_19, batch), options.capacity, options.start,
        options.cuts,
    )  # fmt: skip
    file = options.results / "vgg16_budget.png"
    picture.draw(shares, VGG_16, "VGG-16", file, most)
    print(f"{table.summary(shares, VGG_16)}\n\n{batches.summary(most)}\n")
    print(f"{table.answer(shares, VGG_16, 'VGG-16')}\n{batches.answer(most)}")
    print(f"written: {file} and its .csv")
    return shares, most


if __name__ == "__main__":
    main(tyro.cli(Options))
