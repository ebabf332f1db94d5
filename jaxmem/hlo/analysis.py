"""The memory and matmul FLOPs of a compiled program, from the compiler's texts.

The inputs are three texts: the optimized HLO, the buffer assignment and the live
ranges.  The result is small, plain and JSON-able, so that reports can be cached on
disk.  Neither jax nor a device is needed.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxmem._util.records import from_data, to_data
from jaxmem.hlo import naming
from jaxmem.hlo import text as hlo
from jaxmem.hlo.buffers import (
    Buffer,
    Loop,
    Place,
    Schedule,
    Timeline,
    allocations,
    place,
    schedule,
)
from jaxmem.hlo.collectives import Collective, collectives
from jaxmem.hlo.flops import matmul_flops
from jaxmem.hlo.fusions import Fusions
from jaxmem.hlo.kernels import fusions
from jaxmem.hlo.liveness import live_bytes, thinned
from jaxmem.hlo.loops import trip_count
from jaxmem.hlo.peak import rows
from jaxmem.hlo.reorder import overlap_bytes
from jaxmem.hlo.replica_groups import Mesh

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The result; all bytes are per device.

    Attributes:
      buffers: what is live at the peak of device memory, and in on-chip and host memory
        at the peaks of those; largest first.
        small_bytes: live in device memory but not listed: below 1 KiB, and tables of pointers.
        timeline: live bytes in device memory.
        live_peak_bytes: their maximum; listed device buffers and `small_bytes` sum to it.
        space_bytes: what is allocated on the "device", "on-chip" and on the "host".
        parameter_bytes: what is allocated for each argument, by its number.
        constant_bytes: device memory of arrays that are constants of the program.  Compilers
        for CPU and GPU omit them from their sums, and that for TPU counts them as code.
        heap_bytes: the device memory shared by temporaries.
        fragmentation_bytes: how much of the heap is not in use even at its fullest.
        matmul_flops: of matrix products and convolutions, loops times their trip counts.
        recomputed_matmul_flops: those among them that `jax.checkpoint` recomputes.
        unknown_loops: loops with matmul FLOPs and no known trip count; counted once.
        xla_remat_instructions: instructions that the compiler itself decided to recompute.
        xla_remat_bytes: bytes of their results.
        custom_call_targets: names of libraries' and kernels' functions, sorted.
        padding_bytes: of the buffers in device memory at the peak.
        has_convolution: whether there are convolutions with a window, for which a GPU uses cuDNN.
        overlap_bytes: device memory at the peak that loops with asynchronous operations would do
        without in another order.
        collectives: what is sent between devices, those that send most first.
      fusions: the kernels, and what they read and write.
    """

    buffers: tuple[Buffer, ...]
    small_bytes: int
    timeline: Timeline
    live_peak_bytes: int
    space_bytes: dict[str, int] = dataclasses.field(hash=False)
    parameter_bytes: dict[int, int] = dataclasses.field(hash=False)
    constant_bytes: int
    heap_bytes: int
    fragmentation_bytes: int
    matmul_flops: int
    recomputed_matmul_flops: int
    unknown_loops: int
    xla_remat_instructions: int
    xla_remat_bytes: int
    custom_call_targets: tuple[str, ...]
    padding_bytes: int
    has_convolution: bool
    overlap_bytes: int
    collectives: tuple[Collective, ...] = ()
    fusions: Fusions | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data for `json`."""
        return to_data(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Analysis":
        """The analysis that `to_dict` wrote.

        Raises:
          ValueError: it is not of that form; the message says where.
        """
        return from_data(cls, data)


# ---------------------------------------------------------------- API


def analyse(hlo_text: str, assignment: str, live_range: str, mesh: Mesh = ()) -> Analysis:
    """Analyse a compiled program.

    Args:
      hlo_text: optimized HLO, `compiled.as_text()`.
      assignment: the "…-buffer-assignment.txt" of its dump.
      live_range: the "…-live-range.txt".
      mesh: names and sizes of the axes of the mesh that the program is sharded over.

    Raises:
      ValueError: a text is not of the expected form; the message says which.
    """
    module = hlo.parse(hlo_text)
    found = [a for a in allocations(assignment) if not a.thread_local]
    order = schedule(live_range)
    spaces: dict[Place, int] = {"device": 0, "on-chip": 0, "host": 0}
    parameters: dict[int, int] = {}
    for allocation in found:
        spaces[place(allocation.color, module.tiled)] += allocation.size
        if allocation.parameter is not None:
            before = parameters.get(allocation.parameter, 0)
            parameters[allocation.parameter] = before + allocation.size
    on_device = [a for a in found if place(a.color, module.tiled) == "device"]
    points = live_bytes(on_device, order)
    peak_step, peak = _highest(points)
    heap = sum(a.size for a in on_device if not a.persistent)
    fixed = sum(a.size for a in on_device if a.persistent)
    buffers = rows(module, on_device, order, peak_step)
    for elsewhere in ("on-chip", "host"):
        there = [a for a in found if place(a.color, module.tiled) == elsewhere]
        buffers += rows(module, there, order, _highest(live_bytes(there, order))[0])
    listed = [b for b in buffers if b.place == "device"]
    flops, recomputed, unknown = matmul_flops(module)
    rematerialised = _rematerialised(module, order)
    return Analysis(
        buffers=tuple(sorted(buffers, key=lambda b: (-b.bytes, b.place, b.instruction))),
        small_bytes=peak - sum(b.bytes for b in listed),
        timeline=_timeline(module, order, points, peak_step),
        live_peak_bytes=peak,
        space_bytes={**spaces},
        parameter_bytes=dict(sorted(parameters.items())),
        constant_bytes=sum(a.size for a in on_device if a.constant),
        heap_bytes=heap,
        fragmentation_bytes=heap - (peak - fixed),
        matmul_flops=flops,
        recomputed_matmul_flops=recomputed,
        unknown_loops=unknown,
        xla_remat_instructions=len(rematerialised),
        xla_remat_bytes=sum(i.shape.bytes for i in rematerialised),
        custom_call_targets=_targets(module),
        padding_bytes=sum(b.padding_bytes for b in listed),
        has_convolution=_has_convolution(module),
        # A TPU's compiler orders for memory and transfers at once.
        overlap_bytes=0 if module.tiled else overlap_bytes(module, order, points),
        collectives=collectives(module, mesh),
        fusions=fusions(module),
    )


# ---------------------------------------------------------------- implementation


def _highest(points: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Step and bytes of the peak, the first of several equal ones."""
    return max(points, key=lambda point: (point[1], -point[0]))


def _timeline(
    module: hlo.Module, order: Schedule, points: Sequence[tuple[int, int]], peak_step: int
) -> Timeline:
    length = max(len(order.order), 1)
    kept = thinned(points, length)
    return Timeline(
        steps=tuple(step for step, _ in kept),
        bytes=tuple(height for _, height in kept),
        loops=_loops(module, order),
        peak_step=peak_step,
        peak_instruction=order.order[peak_step] if peak_step < len(order.order) else "",
        length=length,
    )


def _loops(module: hlo.Module, order: Schedule) -> tuple[Loop, ...]:
    position = {name: step for step, name in enumerate(order.order)}
    starts: dict[str, int] = {}
    found = []
    for step, name in enumerate(order.order):
        loop = module.instructions.get(name)
        if loop is None or loop.opcode != "while":
            continue
        parts = [module.body(loop, attribute) for attribute in ("condition", "body")]
        names = [i.name for part in parts if part for i in part.instructions]
        # An inner loop may precede everything else in the body.
        begins = [starts.get(n, position[n]) for n in names if n in position]
        starts[name] = min(begins, default=step)
        found.append(Loop(starts[name], step, trip_count(module, loop), _loop_name(module, loop)))
    return tuple(sorted(found, key=lambda loop: (loop.start, -loop.end)))


def _loop_name(module: hlo.Module, loop: hlo.Instruction) -> str:
    """The loop's scopes, or else the function that it is in; and its direction."""
    function = re.search(r"\((.*)\)$", naming.source(module, loop))
    name = naming.scopes(loop.op_name) or (function[1] if function else "")
    _, _, direction = naming.operation(loop.op_name).partition(" ")
    return f"{name} {direction}".strip()


def _rematerialised(module: hlo.Module, order: Schedule) -> list[hlo.Instruction]:
    """The instructions that the compiler duplicated to recompute them, known by their names."""
    made = (module.instructions.get(name) for name in order.order if ".remat" in name)
    return [i for i in made if i is not None and i.opcode not in _NO_WORK]


_NO_WORK = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")


def _targets(module: hlo.Module) -> tuple[str, ...]:
    calls = (i for i in module.instructions.values() if i.opcode.startswith("custom-call"))
    return tuple(sorted({call.target for call in calls}))


def _has_convolution(module: hlo.Module) -> bool:
    return any(
        (i.opcode == "convolution" and "window={" in i.attributes)
        or (i.opcode == "custom-call" and i.target.startswith("__cudnn$conv"))
        for i in module.instructions.values()
    )
