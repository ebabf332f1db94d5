"""The collectives of a compiled program: what is sent between devices, how much and how often.

Read from the optimised HLO, so it is what the partitioner made of the shardings, in the program
of one device.  A collective that is split in two halves (start and done), or on a TPU in the steps
of a chain of fusions, counts once; an all-reduce of which a TPU's fusion keeps one device's slice
is a reduce-scatter.  Arrays that the compiler sends together (its combiners) are listed one by one.

What a device sends is that of the ring algorithms (Patarasuk and Yuan 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002), which are the least for a bandwidth-bound collective.
A library may choose others (trees, reductions in an NVLink switch), which send as much or less.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxmem.hlo import naming
from jaxmem.hlo.collective_arrays import arrays, concatenated
from jaxmem.hlo.collective_fusions import end_of_chain, is_continued, is_scattered
from jaxmem.hlo.loops import trip_count
from jaxmem.hlo.replica_groups import Mesh, axes_along, axes_of, pairs, replica_groups
from jaxmem.hlo.roles import readers
from jaxmem.hlo.text import Instruction, Module
from jaxmem.hlo.values import Value
from jaxmem.parallel.rings import ring_bytes

Kind = Literal[
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """An array that devices exchange, and how often in one call of the program.

    Attributes:
      kind: HLO's name of it.
      bytes: of the array in one execution, on one device: of an all-gather the gathered result,
        of all others what goes in (of an all-reduce or a reduce-scatter the whole summand, of
        a ragged-all-to-all the buffer, of which less may be sent).
      wire_bytes: what one device sends in one execution, in a group of n by a ring:
        (n-1)/n · bytes for all-gather, reduce-scatter and all-to-all, twice that for
        an all-reduce, and all bytes for a permutation and a broadcast.
      times: how often in one call, loops times their trip counts; a loop of unknown length
        counts once.
      group_size: how many devices take part in each; of a permutation, how many there are along
        its axes.
      axes: the names of the mesh's axes that it goes over; () where its groups are
        not made of whole axes, or the program has no mesh.
      dtype, shape: of the array that `bytes` counts, dtype in HLO's notation, shape without
        dimensions of length 1, which differ between compilers.
      name: the operation whose result is sent, or the path of the argument.
      source: the user's line that asks for it, as "file.py:12 (function)"; empty if unknown.
      module: scopes around it, such as "Encoder/Block_0"; may be empty.
      parameter: number of the argument that is sent, whole or a slice of it; else None.
      recomputed: whether only recomputation asks for it: it is in the scope of
        `jax.checkpoint`'s recomputation, and no other operation of the backward pass reads it.
      in_loop: whether it is inside of a loop.
      of_stack: of an all-gather, whether a loop reads slices of what it gives, as of a stack of
        layers.
    """

    kind: Kind
    bytes: int
    wire_bytes: int
    times: int
    group_size: int
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    name: str
    source: str
    module: str
    parameter: int | None
    recomputed: bool
    in_loop: bool
    of_stack: bool = False

    @property
    def total_bytes(self) -> int:
        """What one device sends in one call of the program."""
        return self.wire_bytes * self.times

    @property
    def over(self) -> str:
        """The axes in words, or the size of the groups.

        >>> import dataclasses
        >>> found = Collective(
        ...     kind="all-gather", bytes=8, wire_bytes=6, times=1, group_size=4, axes=("data",),
        ...     dtype="f32", shape=(2,), name="w", source="", module="", parameter=0,
        ...     recomputed=False, in_loop=False)
        >>> found.over, dataclasses.replace(found, axes=()).over
        ('data', 'groups of 4')
        """
        return " × ".join(self.axes) or f"groups of {self.group_size}"


# ---------------------------------------------------------------- API


def collectives(module: Module, mesh: Mesh = ()) -> tuple[Collective, ...]:
    """The collectives of a program, those that send most first; equal ones are merged.

    Args:
      mesh: names and sizes of the axes of the mesh that the program is sharded over.

    >>> from jaxmem.hlo.text import parse
    >>> found = collectives(parse('''HloModule f, num_partitions=4
    ... ENTRY %main (x: f32[8]) -> f32[32] {
    ...   %x = f32[8]{0} parameter(0), metadata={op_name="x"}
    ...   ROOT %g = f32[32]{0} all-gather(%x), replica_groups=[1,4]<=[4], channel_id=1,
    ...     dimensions={0}, use_global_device_ids=true
    ... }'''.replace(",\\n    ", ",")), [("data", 4)])
    >>> [(c.kind, c.name, c.bytes, c.wire_bytes, c.axes) for c in found]
    [('all-gather', 'x', 128, 96, ('data',))]
    """
    return merged(_Reader(module, mesh).of(module.entry))


def merged(found: Sequence[Collective]) -> tuple[Collective, ...]:
    """Those that differ only in how often they are executed as one, those that send most first."""
    times: dict[Collective, int] = {}
    for one in found:
        alike = dataclasses.replace(one, times=1)
        times[alike] = times.get(alike, 0) + one.times
    every = (dataclasses.replace(one, times=count) for one, count in times.items())
    return tuple(sorted(every, key=lambda c: (-c.total_bytes, c.kind, c.name, c.shape)))


# ---------------------------------------------------------------- implementation

_KINDS = frozenset(Kind.__args__)  # type: ignore[attr-defined]
_HALVES = ("-done", "-update")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


class _Reader:
    """Collectives by computation, each as often as one run of its computation executes it."""

    def __init__(self, module: Module, mesh: Mesh) -> None:
        self._module = module
        whole = math.prod(size for _, size in mesh)
        self._mesh = mesh if whole == module.devices else ()
        self._known: dict[str, list[Collective]] = {}

    def of(self, name: str) -> list[Collective]:
        if name not in self._known:
            self._known[name] = []  # HLO has no recursion; a broken text must not hang
            found = [
                one
                for instruction in self._module.computations[name].instructions
                for one in self._executed(instruction)
            ]
            self._known[name] = found
        return self._known[name]

    def _executed(self, instruction: Instruction) -> list[Collective]:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _KINDS:
            return list(self._read(instruction, opcode))
        if opcode.endswith(_HALVES) or "=" not in instruction.attributes:
            return []
        # Computations of other modules are not in the text.
        names = [n for n in instruction.all_called() if n in self._module.computations]
        called = [self.of(name) for name in names]
        if opcode == "conditional":
            return max(called, key=lambda found: sum(c.total_bytes for c in found), default=[])
        found = [one for each in called for one in each]
        if opcode == "while" and found:
            trips = trip_count(self._module, instruction)
            count = 1 if trips is None else trips
            return [dataclasses.replace(c, times=c.times * count, in_loop=True) for c in found]
        return found

    def _read(self, instruction: Instruction, opcode: str) -> Iterator[Collective]:
        if is_continued(self._module, instruction):
            return
        size, axes = self._groups(instruction, opcode)
        if size < 2:
            return
        sent = arrays(self._module, instruction, opcode)
        for k, (operand, shape) in enumerate(sent):
            kind = opcode
            if kind == "all-reduce" and is_scattered(self._module, instruction, k, len(sent)):
                kind = "reduce-scatter"
            result = self._result(instruction, (k,) if len(sent) > 1 else ())
            recomputed = self._is_recomputed(instruction, result)
            of_stack = kind == "all-gather" and self._is_sliced(result)
            for value, part in concatenated(self._module, operand, shape):
                found = naming.origin(self._module, value[0].name, value[1])
                where = _asking(self._module, instruction)
                yield Collective(
                    kind=kind,  # type: ignore[arg-type]
                    bytes=part.bytes,
                    wire_bytes=ring_bytes(kind, part.bytes, size),
                    times=1,
                    group_size=size,
                    axes=axes,
                    dtype=part.dtype,
                    shape=tuple(length for length in part.dims if length != 1),
                    name=found.name,
                    source=next(filter(None, (naming.source(self._module, i) for i in where)), "")
                    or found.source
                    or self._source_of_readers(result),
                    module=found.module
                    or next(filter(None, (naming.scopes(i.op_name) for i in where)), ""),
                    parameter=found.parameter,
                    recomputed=recomputed,
                    in_loop=False,
                    of_stack=of_stack,
                )

    def _groups(self, instruction: Instruction, opcode: str) -> tuple[int, tuple[str, ...]]:
        """The size of the largest group, and the axes."""
        devices, attributes = self._module.devices, instruction.attributes
        if opcode == "collective-permute":
            sent = tuple(pair for pair in pairs(attributes) if pair[0] != pair[1])
            axes = axes_along(sent, self._mesh)
            sizes = dict(self._mesh)
            along = math.prod(sizes[axis] for axis in axes)
            return along if axes else len({device for pair in sent for device in pair}), axes
        groups = replica_groups(attributes, devices)
        largest = max(map(len, groups))
        by_copy = opcode in _BY_COPY and "use_global_device_ids=true" not in attributes
        if by_copy and largest == 1 and _CHANNEL.search(attributes):
            # The groups are of copies of the program, and mean all partitions of each.
            groups, largest = (tuple(range(devices)),), devices
        return largest, axes_of(groups, self._mesh)

    def _result(self, instruction: Instruction, index: tuple[int, ...]) -> Value:
        """What it gives, at its end where it has two halves or is a chain of steps."""
        if done := end_of_chain(self._module, instruction):
            return done, ()
        for half in _asking(self._module, instruction):
            for user, _ in self._module.users.get(half.name, ()):
                if user.opcode.endswith("-done"):
                    return user, index
        return instruction, index

    def _source_of_readers(self, result: Value) -> str:
        """Where the first is that reads what the partitioner put in without saying for which."""
        found = (naming.source(self._module, one) for one in readers(self._module, result))
        return next(filter(None, found), "")

    def _is_recomputed(self, instruction: Instruction, result: Value) -> bool:
        named = (i.op_name for i in _asking(self._module, instruction) if i.op_name)
        if naming.phase(next(named, "")) != "recomputed":
            return False
        return "backward" not in {naming.phase(r.op_name) for r in readers(self._module, result)}

    def _is_sliced(self, result: Value) -> bool:
        read = readers(self._module, result)
        return any(_is_layer(self._module, one) and _is_in_loop(self._module, one) for one in read)


_BY_COPY = ("all-gather", "all-reduce", "reduce-scatter")


def _is_layer(module: Module, reader: Instruction) -> bool:
    """Whether it takes one of several along a dimension, not the part that a device keeps."""
    operand = module.operand(reader)
    if reader.opcode != "dynamic-slice" or operand is None:
        return False
    lengths = zip(operand.shape.dims, reader.shape.dims, strict=False)
    return any(several > one == 1 for several, one in lengths)


def _is_in_loop(module: Module, instruction: Instruction) -> bool:
    outermost = _asking(module, instruction)[-1]
    return module.home[outermost.name] != module.entry


def _asking(module: Module, instruction: Instruction) -> list[Instruction]:
    """The instruction, then what calls it: a fusion or an asynchronous wrapper."""
    found, home = [instruction], module.home[instruction.name]
    while home != module.entry and len(found) < 8:
        callers = [c for c in module.callers.get(home, ()) if c.opcode != "while"]
        if not callers or callers[0].opcode == "conditional":
            break
        found.append(callers[0])
        home = module.home[callers[0].name]
    return found
