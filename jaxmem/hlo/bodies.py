"""The operations inside of one kernel, flat: those of a fusion and of the fusions nested in it.

Fusions of TPUs hold fusions.  Here all of them are one list of nodes, each with the nodes that it
reads, so that a fusion, a single instruction and a library's call are read in one way.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from jaxmem.hlo import naming
from jaxmem.hlo.shapes import Shape, bits
from jaxmem.hlo.text import Computation, Instruction, Module

# ---------------------------------------------------------------- types


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """An instruction of a kernel, or an array that the kernel reads.

    Attributes:
      instruction: of the kernel; for an array that it reads, what computes that outside.
      shape: of its value.
      args: what it reads.
      outside: the array that it is, as (name, index into a tuple); None for what is computed here.
      opcode: of the instruction; "" for an array that it reads.
      width: bits of an element in the type that the program has it in, where that is narrower
        than the one that it is computed in; else 0.
    """

    instruction: Instruction
    shape: Shape
    args: "Sequence[Node]" = ()
    outside: tuple[str, tuple[int, ...]] | None = None
    opcode: str = dataclasses.field(init=False)
    width: int = 0

    def __post_init__(self) -> None:
        self.opcode = "" if self.outside else self.instruction.opcode.removesuffix("-start")

    @property
    def size(self) -> int:
        """Number of elements; of a tuple's largest array."""
        if self.shape.elements is not None:
            return max((part.size for part in self.shape.elements), default=0)
        return self.shape.size

    @property
    def bytes(self) -> int:
        """Bytes of its value in the type that the program has it in."""
        if self.width and self.shape.elements is None:
            return -(-self.shape.size * self.width // 8)
        return self.shape.bytes


@dataclasses.dataclass(frozen=True)
class Body:
    """A kernel: its nodes, each after those that it reads, and what it returns."""

    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]
    shapes: tuple[Shape, ...]


# ---------------------------------------------------------------- API


def body(module: Module, kernel: Instruction) -> Body:
    """What a kernel computes."""
    reader = _Reader(module)
    inputs = [reader.outside(name) for name in kernel.operands]
    is_fusion = kernel.opcode.removesuffix("-start") == "fusion"
    called = module.body(kernel) if is_fusion else None
    shape = result(kernel)
    if called is None:
        node = Node(kernel, shape, [i for given in inputs for i in given])
        reader.nodes.append(node)
        found = [node]
    else:
        found = reader.inside(called, inputs)
        _set_widths(reader.nodes, found)
    leaves = shape.elements if shape.elements is not None and len(found) > 1 else (shape,)
    return Body(tuple(reader.nodes), tuple(found), tuple(leaves))


def result(instruction: Instruction) -> Shape:
    """The type of what an instruction computes; of an asynchronous one, of what its end gives."""
    shape = instruction.shape
    if not instruction.opcode.endswith("-start") or not shape.elements:
        return shape
    if instruction.opcode == "all-reduce-start" and shape.elements[0].elements is None:
        return shape  # older texts give the results alone
    # A copy's is (result, operand, context), all others' (operands, results, …).
    place = 0 if instruction.opcode == "copy-start" or len(shape.elements) == 1 else 1
    return shape.elements[place]


def place_of(module: Module, name: str) -> tuple[str, tuple[int, ...]]:
    """The array that an operand is: what computes it, and the index in the tuple of that."""
    index: tuple[int, ...] = ()
    for _ in range(_FAR):
        found = module.instructions.get(name)
        operands = found.operands if found is not None and found.opcode in _SAME else ()
        if found is None or not operands:
            break
        if found.opcode == "get-tuple-element":
            index = (found.number, *index)
        elif found.opcode == "tuple":
            if not index or index[0] >= len(operands):
                break
            name, index = operands[index[0]], index[1:]
            continue
        elif found.opcode.endswith("-done"):
            start = module.instructions.get(operands[0])
            if start is None or not start.opcode.endswith("-start"):
                break
        name = operands[0]
    return name, index


def is_asked_for(instruction: Instruction) -> bool:
    """Whether a conversion, copy or transposition is the user's, not one that the compiler adds."""
    if not naming.is_named(instruction):
        return False
    name = naming.operation(instruction.op_name, plain=True)
    if instruction.opcode == "convert":
        return name == "convert_element_type"
    return name in ("copy", "copy_p", "device_put", "transpose")


def is_heavy(opcode: str) -> bool:
    """Whether it is more than elementwise: a product, a reduction, a gather, a sort, a call."""
    return opcode in _HEAVY


# ---------------------------------------------------------------- implementation

_HEAVY = frozenset(
    [
        "convolution",
        "custom-call",
        "dot",
        "fft",
        "gather",
        "ragged-dot",
        "reduce",
        "reduce-window",
        "scaled-dot",
        "scatter",
        "select-and-scatter",
        "sort",
    ]
)
_FAR = 64
_ORIGINAL = re.compile(r'"float_type_correction_info":\{"original_type":"(\w+)"')
_VIEWS = frozenset(["bitcast", "reshape", "opt-barrier"])
_SAME = _VIEWS | {"get-tuple-element", "tuple", "copy-done", "slice-done", "async-done"}


def _set_widths(nodes: Sequence[Node], outputs: Sequence[Node]) -> None:
    """Find what the compiler computes in a wider type than the program, as memory never sees it.

    It converts operands to the wider type and results back, and leaves out what is in between.
    """
    width: dict[Node, int] = {}
    narrowed: dict[Node, int] = {}
    kept = set(outputs)
    for node in nodes:
        mine = bits(node.shape.dtype)
        if not node.outside and node.shape.dtype in ("f32", "f64", "bf16", "f16"):
            if node.opcode == "convert" and not is_asked_for(node.instruction):
                given = node.args[0]
                narrowed[given] = max(narrowed.get(given, 0), mine)
                mine = min(mine, width[given])
            elif match := _ORIGINAL.search(node.instruction.attributes):
                mine = bits(match[1].lower())
            elif node.opcode not in ("constant", "convert", "iota") and not is_heavy(node.opcode):
                floats = [a for a in node.args if a.shape.dtype == node.shape.dtype and a.size > 1]
                if node.size > 1 and floats:
                    mine = min(mine, max(width[arg] for arg in floats))
        width[node] = mine
        if node.opcode != "convert" or is_asked_for(node.instruction):
            kept.update(node.args)
    for node, mine in width.items():
        if node in narrowed and node not in kept and not node.outside:
            mine = min(mine, narrowed[node])
        is_wide = mine < bits(node.shape.dtype) and node not in outputs
        node.width = mine if is_wide else 0


class _Reader:
    def __init__(self, module: Module) -> None:
        self._module = module
        self.nodes: list[Node] = []
        self._outside: dict[tuple[str, tuple[int, ...]], Node] = {}

    def outside(self, name: str) -> list[Node]:
        """The arrays that an operand is, several for a tuple; the same array is the same node."""
        operand = self._module.instructions.get(name)
        if operand is None:
            return []
        if operand.opcode == "tuple":
            return [node for part in operand.operands for node in self.outside(part)]
        place = place_of(self._module, name)
        if place not in self._outside:
            made = self._module.instructions.get(place[0], operand)
            shape = result(operand) if operand.opcode.endswith("-start") else operand.shape
            self._outside[place] = Node(made, shape, (), place)
            self.nodes.append(self._outside[place])
        return [self._outside[place]]

    def inside(self, computation: Computation, inputs: Sequence[Sequence[Node]]) -> list[Node]:
        """The nodes of a computation, in its order; gives those of its result."""
        known: dict[str, list[Node]] = {}
        for instruction in computation.instructions:
            known[instruction.name] = list(self._one(instruction, known, inputs))
        return known[computation.root.name]

    def _one(
        self,
        instruction: Instruction,
        known: dict[str, list[Node]],
        inputs: Sequence[Sequence[Node]],
    ) -> Iterator[Node]:
        opcode = instruction.opcode
        if opcode == "parameter":
            number = instruction.number
            yield from inputs[number] if number < len(inputs) else ()
            return
        operands = [known.get(name, []) for name in instruction.operands]
        args = [node for found in operands for node in found]
        if opcode == "get-tuple-element" and len(args) > max(instruction.number, 1):
            yield args[instruction.number]
        elif opcode == "tuple":
            yield from args
        elif opcode in _VIEWS and args:
            yield args[0]
        elif opcode == "fusion" and (called := self._module.body(instruction)) is not None:
            yield from self.inside(called, operands)
        else:
            node = Node(instruction, instruction.shape, args)
            self.nodes.append(node)
            yield node
