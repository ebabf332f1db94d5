"""The arrays that a collective sends: its operands, and what combiners have put together."""

from jaxmem.hlo.bodies import result
from jaxmem.hlo.shapes import Shape
from jaxmem.hlo.text import Instruction, Module
from jaxmem.hlo.values import Value, way

# ---------------------------------------------------------------- API


def arrays(module: Module, instruction: Instruction, opcode: str) -> list[tuple[Value, Shape]]:
    """Each array that is sent, and the form in which it counts."""
    operands = [o for name in instruction.operands if (o := module.instructions.get(name))]
    if not operands:
        return []
    first = operands[0]
    if opcode == "all-gather":
        gathered = result(instruction)
        several = gathered.elements if gathered.elements is not None else (gathered,)
        return [((o, ()), shape) for o, shape in zip(operands, several, strict=False)]
    if opcode == "ragged-all-to-all" or "slice_sizes=" in instruction.attributes:
        return [((first, ()), first.shape)]  # the others are where it is written, and offsets
    if opcode == "all-to-all" and len(operands) > 1:
        # One part for each device of the group.
        count = len(operands)
        return [((first, ()), Shape(first.shape.dtype, (count, *first.shape.dims)))]
    if opcode == "collective-permute":
        operands = [o for o in operands if o.shape.dims or o is first]
    return [((o, ()), o.shape) for o in operands]


def concatenated(module: Module, value: Value, shape: Shape) -> list[tuple[Value, Shape]]:
    """The parts of an array that is put together only to be sent at once; or it alone.

    GPUs' combiners do so with summands.
    """
    made, index = way(module, value)[-1]
    if made.opcode != "concatenate" or index:
        return [(value, shape)]
    parts = [part for name in made.operands if (part := module.instructions.get(name))]
    if sum(part.shape.size for part in parts) != shape.size or len(shape.dims) != 1:
        return [(value, shape)]
    found: list[tuple[Value, Shape]] = []
    for part in parts:
        # Each in the form that it had before it was made flat.
        before = way(module, (part, ()))
        forms = (v[0].shape.at(v[1]) for v in before if v[0].opcode != "parameter" or not v[1])
        same = [f for f in forms if f.elements is None and f.size == part.shape.size]
        dims = max((f.dims for f in same), key=len, default=part.shape.dims)
        found.append(((part, ()), Shape(shape.dtype, dims)))
    return found
