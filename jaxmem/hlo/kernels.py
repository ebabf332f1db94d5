"""The kernels of a compiled program, read from its text: which, how often, and what is in each.

What the figures mean is said in `jaxmem.hlo.fusions`, which has their types.
"""

import dataclasses
from collections.abc import Sequence

from jaxmem.hlo import naming
from jaxmem.hlo.bodies import Body, Node, body
from jaxmem.hlo.fusions import Fusions, Kernel, Operation
from jaxmem.hlo.loops import trip_count
from jaxmem.hlo.operations import COLLECTIVES, Numbers, is_operation, moved_alone
from jaxmem.hlo.text import Instruction, Module
from jaxmem.hlo.traffic import Access, reads, writes
from jaxmem.hlo.unfused import Made, Unfused, line_of_user, merged_modules, unfused, work_of

# ---------------------------------------------------------------- API


def fusions(module: Module) -> Fusions:
    """The kernels of a program.

    >>> from jaxmem.hlo.text import parse
    >>> found = fusions(parse('''HloModule f
    ... %fused (p: f32[8]) -> f32[8] {
    ...   %p = f32[8]{0} parameter(0)
    ...   %s = f32[8]{0} sine(%p), metadata={op_name="jit(f)/sin"}
    ...   ROOT %t = f32[8]{0} tanh(%s), metadata={op_name="jit(f)/tanh"}
    ... }
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0), metadata={op_name="x"}
    ...   ROOT %fusion.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
    ... }'''))
    >>> [(k.work, k.name, k.read_bytes, k.written_bytes, k.separate_bytes) for k in found.kernels]
    [('elementwise', 'tanh', 32, 32, 128)]
    """
    reader = _Reader(module)
    kernels, breaks = reader.of(module.entry)
    return Fusions(_merged(kernels), _merged_breaks(breaks), reader.unknown_loops)


# ---------------------------------------------------------------- implementation

_Found = tuple[list[Kernel], list[Unfused]]
# These compute nothing and move nothing.
_IDLE = frozenset(
    [
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "domain",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    ]
)
_CALLS = ("async", "call", "conditional", "while")
# Marks for the compiler, which move nothing.
_MARKS = frozenset(
    [
        "AllocateBuffer",
        "AssumeGatherIndicesInBound",
        "ConcatBitcast",
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "annotate_device_placement",
        "xla.sdy.FuncResultSharding",
    ]
)
_HOST = 5


class _Reader:
    """The kernels of a computation, each as often as one run of it executes it."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, _Found] = {}
        self._sources: dict[str, str] = {}
        self.unknown_loops = 0

    def of(self, name: str) -> _Found:
        if name not in self._known:
            self._known[name] = ([], [])  # HLO has no recursion; a broken text must not hang
            self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> _Found:
        kernels: list[Kernel] = []
        breaks: list[Unfused] = []
        made: dict[str, Made] = {}
        numbers = Numbers(self._module)
        for instruction in self._module.computations[name].instructions:
            opcode = instruction.opcode
            if opcode in _IDLE or opcode.endswith(("-done", "-update")):
                continue
            called = self._called(instruction)
            if called is not None:
                kernels += called[0]
                breaks += called[1]
            elif instruction.target not in _MARKS and (one := self._kernel(instruction, numbers)):
                kernels.append(one[0])
                made[instruction.name] = one[1]
        return kernels, breaks + unfused(self._module, made)

    def _called(self, instruction: Instruction) -> _Found | None:
        """What is in the computations that an instruction runs; None for a kernel."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode not in _CALLS:
            return None
        names = [n for n in instruction.all_called() if n in self._module.computations]
        if opcode == "while":
            names = instruction.called("body")
        found = [self.of(name) for name in names]
        if opcode == "conditional":
            return max(found, key=lambda one: sum(k.total_bytes for k in one[0]), default=([], []))
        kernels = [kernel for one in found for kernel in one[0]]
        breaks = [one for each in found for one in each[1]]
        if opcode == "async":  # some compilers write them so, and some without a computation
            kernels = [dataclasses.replace(k, instruction=instruction.name) for k in kernels]
        if opcode == "while" and kernels:
            trips = trip_count(self._module, instruction)
            self.unknown_loops += trips is None
            count = 1 if trips is None else trips
            kernels = [dataclasses.replace(k, times=k.times * count) for k in kernels]
            breaks = [dataclasses.replace(b, times=b.times * count) for b in breaks]
        return kernels, breaks

    def _kernel(self, instruction: Instruction, numbers: Numbers) -> tuple[Kernel, Made] | None:
        inside = body(self._module, instruction)
        operations = list(numbers.of(instruction.name, inside))
        read, written = reads(inside), writes(inside)
        if not read and not written:
            return None  # of counters and flags
        work = work_of(instruction, inside, [node for node, _ in operations])
        named = _named(work, [node for node, _ in operations])
        parts = _Parts()
        for node, repeated in operations:
            alone = 0 if repeated else moved_alone(node, self._module)
            parts.add(*self._words(node.instruction), count=1, separate_bytes=alone)
        owners = _owners(inside)
        for access, what in [
            *((r, "read_bytes") for r in read),
            *((w, "written_bytes") for w in written),
        ]:
            owner = owners.get(access.by)
            words = self._words(owner.instruction) if owner else self._copied(instruction, inside)
            for key, count in self._by_place(access, what).items():
                parts.add(*words, **{key: count})
            if what == "written_bytes" and access.node.opcode in ("broadcast", "iota", "constant"):
                parts.add(*words, separate_bytes=access.bytes)
        name, source = (
            self._words(named.instruction) if named else self._copied(instruction, inside)
        )
        kernel = Kernel(
            work=work,
            name=name,
            source=source,
            module=self._module_of(named.instruction if named else instruction),
            instruction=instruction.name,
            times=1,
            operations=parts.operations(),
        )
        return kernel, Made(instruction, inside, kernel.work, name, source, kernel.module)

    def _by_place(self, access: Access, what: str) -> dict[str, int]:
        space = access.shape.space
        if space == 0 or (not self._module.tiled and space != _HOST):
            return {what: access.bytes}
        # Of a transfer from or to the host, the side of the device counts.
        return {} if space == _HOST else {"on_chip_bytes": access.bytes}

    def _words(self, instruction: Instruction) -> tuple[str, str]:
        opcode = instruction.opcode.removesuffix("-start")
        # jax's name of a collective is that of what is sent, where the partitioner has put it.
        name = opcode if opcode in COLLECTIVES else naming.operation_of(instruction)
        return name, self._source(instruction)

    def _copied(self, instruction: Instruction, inside: Body) -> tuple[str, str]:
        """The compiler's own doing: what it is, and the line that it is for or else comes from."""
        filled = not any(node.outside and node.size > 1 for node in inside.nodes)
        source = self._source(instruction) or line_of_user(self._module, instruction.name)
        if not source and (place := next((n.outside for n in inside.nodes if n.outside), None)):
            source = naming.origin(self._module, *place).source
        return "broadcast" if filled else "copy", source

    def _module_of(self, instruction: Instruction) -> str:
        return naming.scopes(instruction.op_name)

    def _source(self, instruction: Instruction) -> str:
        attributes = instruction.attributes
        start = attributes.find("stack_frame_id=")
        if start < 0:
            return naming.source(self._module, instruction)
        end = start + len("stack_frame_id=")
        key = attributes[end : end + 12].partition("}")[0].partition(" ")[0]
        if key not in self._sources:
            self._sources[key] = naming.source(self._module, instruction)
        return self._sources[key]


class _Parts:
    """Sums by operation, in the order in which they come."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], dict[str, int]] = {}

    def add(self, name: str, source: str, **counts: int) -> None:
        sums = self._sums.setdefault((name, source), dict.fromkeys(_COUNTS, 0))
        for key, count in counts.items():
            sums[key] += count

    def operations(self) -> tuple[Operation, ...]:
        return tuple(
            Operation(name=name, source=source, **{**sums, "count": max(sums["count"], 1)})
            for (name, source), sums in self._sums.items()
        )


_COUNTS = ("count", "read_bytes", "written_bytes", "separate_bytes", "on_chip_bytes")
_PRODUCTS = frozenset(["convolution", "dot", "ragged-dot", "scaled-dot"])


def _named(work: str, operations: Sequence[Node]) -> Node | None:
    """The operation that a kernel is named after."""
    wanted = {"matmul": _PRODUCTS | {"custom-call"}, "reduction": {"reduce", "reduce-window"}}
    chosen = [node for node in operations if node.opcode in wanted.get(work, ())]
    return (chosen or list(operations) or [None])[-1]


def _owners(inside: Body) -> dict[Node, Node]:
    """The operation to which a node's traffic belongs: itself, what reads it, or what it reads."""
    owners: dict[Node, Node] = {}
    for node in reversed(inside.nodes):
        if node.outside:
            continue
        if is_operation(node):
            owners[node] = node
        if node in owners:
            for arg in node.args:
                if not arg.outside and not is_operation(arg):
                    owners[arg] = owners[node]
    for node in inside.nodes:
        if not node.outside and node not in owners:
            found = (owners[arg] for arg in node.args if arg in owners)
            if (first := next(found, None)) is not None:
                owners[node] = first
    return owners


def _merged(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Those that differ only in module and in the compiler's name as one, the heaviest first."""
    groups: dict[Kernel, list[Kernel]] = {}
    for kernel in kernels:
        alike = dataclasses.replace(kernel, module="", instruction="", times=1)
        groups.setdefault(alike, []).append(kernel)
    found = [
        dataclasses.replace(
            group[0],
            module=merged_modules([kernel.module for kernel in group]),
            times=sum(kernel.times for kernel in group),
        )
        for group in groups.values()
    ]
    return tuple(sorted(found, key=lambda k: -k.total_bytes))


def _merged_breaks(found: Sequence[Unfused]) -> tuple[Unfused, ...]:
    """Those that differ only in module, and in which argument or value they are of, as one."""
    groups: dict[tuple[Unfused, bool], list[Unfused]] = {}
    for one in found:
        alike = dataclasses.replace(one, module="", value="", parameter=None, times=1)
        groups.setdefault((alike, one.parameter is None), []).append(one)
    every = [
        dataclasses.replace(
            group[0],
            module=merged_modules([one.module for one in group]),
            times=sum(one.times for one in group),
            others=len({(one.value, one.parameter) for one in group}) - 1,
        )
        for group in groups.values()
    ]
    return tuple(sorted(every, key=lambda one: -one.total_bytes))
