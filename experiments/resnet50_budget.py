"""ResNet-50 with 184 images in the memory of MONeT's plans: how much is recomputed?

    python experiments/resnet50_budget.py            # compiled for an H100 that need not be there
    python experiments/resnet50_budget.py --small    # a small one, on the attached backend

MONeT (Shah et al. 2021) plans what PyTorch keeps and recomputes by integer programming: 15.06 GB
become 10.01, 6.00 and 4.99 for 3.2, 9.3 and 12.0 % more time on a P100.  This is the same net with
the same batch in float32, the compiled loss and gradient of `jax.value_and_grad`, without an
optimizer.  `jaxmem.fit` is given the same shares of the memory with everything kept, once to
minimise matmul FLOPs and once to minimise its roofline's seconds; compared with it are a
hand-written `jax.checkpoint`, around each block and around all with a policy that keeps the results
of convolutions, `@jaxmem.remat_sqrt`, and the least that any plan of `fit` needs.

Memory is arguments, results and temporaries of the compiled program, without cuDNN's workspace.
FLOPs are those of convolutions and matrix products in the compiled program; "roofline" is the
report's estimated time (at the bf16 peak), which includes reading and writing feature maps.  The
published time is measured, and part of it is gained by other means than recomputation: in-place
kernels, and convolutions that are faster with more workspace.

It prints a table and writes `results/resnet50_budget.csv` and `.png`; the same command resumes
after an interruption.
"""

import dataclasses

import tyro

from budgets import compare, nets, study
from budgets.nets import Net
from budgets.published import RESNET_50
from budgets.table import Row

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options(study.Options):
    """Bring ResNet-50 into the memory of published plans."""

    batch: int = RESNET_50.batch
    """Images."""
    image: int = 224
    """Their height and width."""
    memories: tuple[float, ...] = (10.01, 6.00, 4.99)
    """Of the published ones in GB, whose shares of 15.06 `fit` is given."""

    @property
    def net(self) -> Net:
        if self.small:
            return nets.resnet(batch=2, image=32, width=4, stages=(1,))
        return nets.resnet(self.batch, self.image)


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows, completed, printed, drawn."""
    memories = options.memories[: 1 if options.small else None]
    return compare.shares(options, options.net, RESNET_50, memories, "resnet50_budget")


if __name__ == "__main__":
    main(tyro.cli(Options))
