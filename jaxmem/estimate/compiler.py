"""What a compiler does to the bytes that are live, as plain facts: one value for each kind."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The rules by which live bytes are counted; each can be left out to see what it is worth.

    `experiments/ablation.py` does that, and experiments/README.md has what came of it.

    Attributes:
      writes_in_place: what is elementwise is written over an array of its size that is read there
        for the last time.
      looks_inside: loops, branches and checkpoints need room of their own while they run.
      delays: what only the backward pass reads is computed there.
      counts_operations: whether what is elementwise is kept or computed twice goes by the number of
        its operations that are not cheap; else by what they cost, and by the bytes of an element.
      gathers_stored: what a gather reads is in memory, as a kernel's operands are; else it computes
        that itself, where it reads it.
      fuses_operands: matrix products compute what is elementwise in front of them themselves.
      rounds_operands: of what they read in float32, and nothing else reads, bfloat16 is stored.
      fuses_results: they make what follows from their result alone in the place of it.
      copies_layouts: what a loop keeps of each layer is copied where products want it transposed.
      copies_parts: so are parts of something larger that reductions read.
      calls_libraries: convolutions are calls into a library (cuDNN), over whose results nothing is
        written; see `jaxmem.estimate.liveness.by_library`.
      calls_for_products: so are products of matrices, all of a program of which XLA finds no tiles
        for one; see `jaxmem.estimate.operands.may_pad`.
      swaps_operands: for some of these both operands are copied; see
        `jaxmem.estimate.liveness.copied_to_swap`.
      turns_operands: products read copies of operands whose axes they need in another order, so
        that outside of loops these are not in memory themselves; see
        `jaxmem.estimate.arrays.read_turned`.
      turns_stacks: a stack of all layers' values is copied, whole, in front of a loop that reads it
        in another order of axes than it was written in, or gathers rows of it along another axis
        than the leading one; see `jaxmem.estimate.stacks`.
      reduces_inside: rows are reduced in the kernel that computes from them and from what they are
        reduced to (a softmax, a norm, and their derivatives), and does not write over them.  Where
        that is kept, a kernel of its own reads the rows for it.
      sums_late: a product whose result is summed over devices, and that nothing reads before the
        end of the backward pass, is computed there, piece by piece, so that its operands wait.
      holds_casts: outside of loops, where nothing is recomputed, a parameter that is cast for
        kernels of both passes is cast once, and that is live in between.
      frees_early: of scanned layers, products that no other waits for, as the gradients of
        parameters, are computed as soon as what they read is there, if less is live then.
      holds_fenced: outside of loops, what goes through a barrier of the backward pass is not
        written over.
      stack_traffic: how many times as many bytes as a loop keeps of each turn are read and written
        for that; 0 where it is not known.
      processors: how many blocks run at once.  What columns are reduced from is in memory where
        fewer blocks than that reduce them, which would take long to compute it; 0 for it never is.
        See `jaxmem.estimate.arrays.reduced_in_few_blocks`.
      pools_inside: poolings, and their reversals, compute what they pool themselves.
      merges_readers: what is elementwise and reads the same array is computed in one kernel, which
        does not write over that array.
    """

    writes_in_place: bool = True
    looks_inside: bool = True
    delays: bool = True
    counts_operations: bool = False
    gathers_stored: bool = False
    fuses_operands: bool = False
    rounds_operands: bool = False
    fuses_results: bool = False
    copies_layouts: bool = False
    copies_parts: bool = False
    calls_libraries: bool = False
    calls_for_products: bool = False
    swaps_operands: bool = False
    turns_operands: bool = False
    turns_stacks: bool = False
    reduces_inside: bool = False
    merges_readers: bool = False
    sums_late: bool = False
    holds_fenced: bool = False
    holds_casts: bool = False
    frees_early: bool = False
    stack_traffic: int = 0
    processors: int = 0
    pools_inside: bool = False


# What any of them does, XLA for GPUs, and XLA for TPUs.
ANY = Compiler()
GPU = Compiler(
    calls_libraries=True,
    calls_for_products=True,
    swaps_operands=True,
    turns_operands=True,
    turns_stacks=True,
    reduces_inside=True,
    merges_readers=True,
    holds_fenced=True,
    holds_casts=True,
    frees_early=True,
    stack_traffic=3,  # filled with zeros, written, and copied on the way there or back
    processors=132,  # of an H100
    pools_inside=True,
)
TPU = Compiler(
    counts_operations=True,
    gathers_stored=True,
    fuses_operands=True,
    rounds_operands=True,
    fuses_results=True,
    copies_layouts=True,
    copies_parts=True,
    sums_late=True,
    stack_traffic=2,  # written and read
)


def of_platform(platform: str) -> Compiler:
    """The compiler of a platform, as jax names it."""
    return {"gpu": GPU, "tpu": TPU}.get(platform, ANY)
