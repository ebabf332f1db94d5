"""How long single operations take on an accelerator, by a roofline: for planning, not for promises.

A matrix product takes as long as its operations at the matrix peak, or as its bytes at the
memory's bandwidth, whichever is more; so does whatever else is a kernel of its own (a sort,
a gather, a loop).  Elementwise operations are fused into what reads them, and computing one
again there takes next to nothing: they count a small share of their bytes, so that of two
plans with the same kernels the one with less such work wins.  What a loop keeps of each turn is
written into an array and read again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from jaxmem import _jax
from jaxmem.estimate.compiler import ANY, Compiler
from jaxmem.estimate.costs import costs
from jaxmem.estimate.counting import flops, kind_of, walk
from jaxmem.estimate.counting.ops import size_of
from jaxmem.parallel.messages import Message, per_device
from jaxmem.parallel.rings import ring_seconds

Kind = Literal["kernel", "fused", "reduction", "view"]

# What is left of the bytes of a fused operation, and of a reduction behind a fused chain.
FUSED_SHARE = 1 / 32
REDUCED_SHARE = 1 / 8
# What is left of all bytes where matmul FLOPs are what counts.  With next to nothing, plans that
# recompute whatever is elementwise looked best, and their programs need up to a tenth more than is
# predicted: of programs that fit the same budget the FLOPs were then up to 0.9 points more.
FLOPS_ONLY_SHARE = 0.3
# Sixteen lanes of PCIe 5, and of PCIe 4; what a copy to the host and back is paid at.
HOST_BANDWIDTH = 25e9


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The speeds that planning goes by.

    Attributes:
      matrix_peak: FLOP per second of dense bf16 matrix products.
      bandwidth: of the device's memory, in bytes per second.
      host_bandwidth: between device and host, in bytes per second.
      flops_only: whether matrix products are what counts, and bytes a part of their time.
      compiler: what it makes of a program.
      link: bytes per second that a device sends to the next one of a ring, and seconds of one step;
        None where what devices send each other costs nothing.
    """

    matrix_peak: float
    bandwidth: float
    host_bandwidth: float = HOST_BANDWIDTH
    flops_only: bool = False
    compiler: Compiler = ANY
    link: tuple[float, float] | None = None

    def operation(self, eqn: Any) -> float:
        """Seconds of one operation, and of what devices send each other for it."""
        return self._computed(eqn) + sum(map(self.message, self._messages(eqn)))

    @property
    def counts_traffic(self) -> bool:
        """Whether what loops keep has a price of its own: where time counts, and it is known."""
        return self.compiler.stack_traffic > 0 and not self.flops_only

    def message(self, message: Message) -> float:
        """Seconds of a collective, in a ring; compilers hide a part of it behind products."""
        if self.link is None:
            return 0.0
        seconds = ring_seconds(message.kind, message.wire_bytes, message.devices, self.link)
        return seconds * (FUSED_SHARE if self.flops_only else 1)

    def _messages(self, eqn: Any) -> Sequence[Message]:
        own = per_device(eqn).messages
        if own or self.link is None or not _jax.all_subjaxprs(eqn):
            return own
        return [
            message
            for op in walk(_jax.as_program(eqn)).ops
            if op.eqn is not None
            for message in per_device(op.eqn).messages * op.place.times
        ]

    def _computed(self, eqn: Any) -> float:
        read = sum(size_of(atom.aval) for atom in eqn.invars if _jax.is_var(atom))
        written = sum(size_of(var.aval) for var in eqn.outvars)
        kind = kind_of(eqn)
        if kind == "view":
            return written / self.bandwidth * FUSED_SHARE / 8
        if kind == "fused":
            return self.moved(written * FUSED_SHARE)
        if kind == "reduction":
            return self.moved(read * REDUCED_SHARE)
        if flops.is_matmul(eqn):
            count, size = flops.matmul_flops(eqn) * _width(eqn), read + written
        elif _jax.all_subjaxprs(eqn):
            work = costs(_jax.as_program(eqn))
            count, size = work.matmul_flops * _width(eqn), work.bytes
        else:
            count, size = 0, read + written
        return max(count / self.matrix_peak, self.moved(size))

    def kept(self, size: int, in_memory: bool) -> float:
        """Seconds to keep so many bytes: next to none for what is in memory anyway."""
        return self.moved(size * (FUSED_SHARE if in_memory else 1))

    def stacked(self, size: int, in_memory: bool, rows: int = 0) -> float:
        """The same in a loop, which writes it into an array with that of the other turns.

        Args:
          rows: bytes of what is read once more for it.
        """
        if self.counts_traffic:
            return self.moved(size * self.compiler.stack_traffic + rows)
        return self.kept(size, in_memory)

    def sent(self, size: int) -> float:
        """Seconds to send so many bytes to the host and to have them back."""
        return 2 * size / self.host_bandwidth

    def moved(self, size: float) -> float:
        """Seconds to read or write so many bytes of the device's memory."""
        return size / self.bandwidth * (FLOPS_ONLY_SHARE if self.flops_only else 1)


def _width(eqn: Any) -> float:
    """How many times longer a product takes than one of 16 bits."""
    sizes = [
        atom.aval.dtype.itemsize
        for atom in (*eqn.invars, *eqn.outvars)
        if _jax.is_var(atom) and jnp.issubdtype(getattr(atom.aval, "dtype", int), jnp.floating)
    ]
    return max(1.0, min(sizes[: len(eqn.invars)], default=2) / 2)
