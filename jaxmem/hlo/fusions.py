"""What fusion does: the kernels of a compiled program, the operations in each, and what they move.

A kernel is a fusion, or an operation that is in none: a product, a library's call, a copy.  What
it moves is between memory and compute: a fusion's operations hand values to each other in
registers.  Next to that stands what the same operations would move one by one, each reading its
operands and writing its result.

Not counted are padding, caches (what two kernels read counts twice), counters, indices and flags,
the conditions of loops, and a library's workspace.  A loop counts times its trip count, a
conditional as the branch that moves most.  What is in the on-chip memory of a TPU is stated
separately.  A kernel that the text does not describe (Pallas) reads its operands and writes its
results once, unless it states its cost (`cost_estimate=`).
"""

import dataclasses

from jaxmem._util.shown import Shown
from jaxmem.hlo.unfused import Unfused, Work

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation in a kernel, or several of the same name and line; bytes of one execution.

    Attributes:
      name: such as "tanh", "mul (backward)" or "dot_general (recomputed)"; "copy" for what the
        compiler moves for itself.
      source: the user's line, as "file.py:12 (function)"; empty if unknown.
      count: how many operations it stands for.
      read_bytes: what the kernel reads from device memory for it first.
      written_bytes: what the kernel writes to device memory of its results.
      separate_bytes: what it would read and write as a kernel without others.  0 for what
        the compiler adds, and for what it repeats of an earlier kernel.
      on_chip_bytes: what the kernel reads and writes for it in on-chip memory of a TPU.
    """

    name: str
    source: str
    count: int
    read_bytes: int
    written_bytes: int
    separate_bytes: int
    on_chip_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of the compiled program, or several that are alike; bytes of one execution.

    Attributes:
      work: "matmul" (convolutions included), "reduction", "elementwise", "convert", "copy" (only
        moves data), "collective", "custom call" (a hand-written kernel's, or a library's), or
        "other".
      name: of the operation that it is named after: its product, its reduction, or else its last.
      source: the line of that.
      module: scopes around it, such as "Encoder/Block_0"; "Encoder/*" where those of several
        kernels differ.
      instruction: the compiler's name of (the first of) it.
      times: how often such a kernel runs in one call of the program.
      operations: in it, in the order of the program.
    """

    work: Work
    name: str
    source: str
    module: str
    instruction: str
    times: int
    operations: tuple[Operation, ...]

    @property
    def read_bytes(self) -> int:
        """From device memory, in one execution."""
        return sum(one.read_bytes for one in self.operations)

    @property
    def written_bytes(self) -> int:
        """To device memory, in one execution."""
        return sum(one.written_bytes for one in self.operations)

    @property
    def separate_bytes(self) -> int:
        """What its operations would move one by one."""
        return sum(one.separate_bytes for one in self.operations)

    @property
    def on_chip_bytes(self) -> int:
        """Read and written in on-chip memory, in one execution."""
        return sum(one.on_chip_bytes for one in self.operations)

    @property
    def total_bytes(self) -> int:
        """Read and written in device memory in one call of the program."""
        return (self.read_bytes + self.written_bytes) * self.times

    @property
    def fused(self) -> int:
        """How many operations it is made of."""
        return sum(one.count for one in self.operations)


@dataclasses.dataclass(frozen=True)
class LineTraffic:
    """What the operations of one line of the user's code move in one call of the program.

    Attributes:
      source: the line; empty for what has none.
      bytes: in device memory, as the program is compiled.
      separate_bytes: one operation at a time.
    """

    source: str
    bytes: int
    separate_bytes: int


@dataclasses.dataclass(frozen=True)
class Fusions(Shown):
    """The kernels of a compiled program; `print` it.  All bytes are per device.

    Attributes:
      kernels: those that move most first.
      unfused: what keeps elementwise operations apart, copies and conversions, the heaviest first.
      unknown_loops: loops with kernels and no known trip count; counted once.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> report = jaxmem.memory_report(lambda x: jnp.tanh(x * 2) + 1, x, target="h100-80g")
    >>> found = report.fusions
    >>> [operation.name for operation in found.kernels[0].operations]
    ['mul', 'tanh', 'add']
    >>> found.read_bytes == found.written_bytes == 4 * 2**20
    True
    >>> found.separate_bytes == 3 * found.bytes
    True
    """

    kernels: tuple[Kernel, ...]
    unfused: tuple[Unfused, ...] = ()
    unknown_loops: int = 0

    @property
    def read_bytes(self) -> int:
        """From device memory, in one call."""
        return sum(kernel.read_bytes * kernel.times for kernel in self.kernels)

    @property
    def written_bytes(self) -> int:
        """To device memory, in one call."""
        return sum(kernel.written_bytes * kernel.times for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        """Read and written in device memory in one call; `MemoryReport.bytes_moved`."""
        return self.read_bytes + self.written_bytes

    @property
    def on_chip_bytes(self) -> int:
        """Read and written in on-chip memory in one call."""
        return sum(kernel.on_chip_bytes * kernel.times for kernel in self.kernels)

    @property
    def separate_bytes(self) -> int:
        """What the same operations would move in one call, each as a kernel without others."""
        return sum(kernel.separate_bytes * kernel.times for kernel in self.kernels)

    @property
    def lines(self) -> tuple[LineTraffic, ...]:
        """The traffic by line of the user's code, the heaviest one by one first."""
        sums: dict[str, tuple[int, int]] = {}
        for kernel in self.kernels:
            for one in kernel.operations:
                moved, alone = sums.get(one.source, (0, 0))
                sums[one.source] = (
                    moved + (one.read_bytes + one.written_bytes) * kernel.times,
                    alone + one.separate_bytes * kernel.times,
                )
        found = [LineTraffic(source, *pair) for source, pair in sums.items()]
        return tuple(sorted(found, key=lambda line: -max(line.bytes, line.separate_bytes)))
