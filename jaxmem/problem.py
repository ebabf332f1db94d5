"""What a stack costs, as the solvers see it: lengths and bytes, no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes of one layer stack.

    Attributes:
      length: number of layers.
      carry_bytes: the state that one layer hands to the next.
      tape_bytes: what the backward of one layer needs beyond its parameters and
        whatever is cheaply had again from them.
      param_bytes: one layer's slice of the stacked inputs.
      alone_bytes: the part of the tape that is in memory when the layer is
        computed again and reversed at once, so that what is cheap never gets
        stored; None for all of it.
    """

    length: int
    carry_bytes: int = 1
    tape_bytes: int = 1
    param_bytes: int = 0
    alone_bytes: int | None = None
