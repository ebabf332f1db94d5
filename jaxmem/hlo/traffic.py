"""Bytes that one kernel reads from memory and writes to it.

A fusion computes what its results need, so it reads of an array what its operations take: of a
stack that it slices one slice, of a table that it gathers from the rows.  A result that updates an
array in place writes the update.  An array that several operations of the kernel read is read
once, and what it reads of an array never counts more than the array has.
"""

import dataclasses
import re

from jaxmem.hlo.bodies import Body, Node
from jaxmem.hlo.shapes import Shape, bits

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Access:
    """Bytes that a kernel reads or writes of one array.

    Attributes:
      node: for a read, the array; for a write, what computes the result.
      shape: of the array, for its memory space.
      by: the node that reads it first, or that computes it.
    """

    node: Node
    shape: Shape
    bytes: int
    by: Node


# ---------------------------------------------------------------- API


def reads(body: Body) -> list[Access]:
    """What it reads of each array, without counters, indices and flags."""
    wanted, first = _wanted(body)
    found = [
        Access(node, node.shape, _bytes(node, wanted.get(node, 0)), first[node])
        for node in body.nodes
        if node.outside and node in first and not is_free(node) and wanted.get(node)
    ]
    said = stated(body.outputs[0]) if body.outputs else None
    return found if said is None else _scaled(found, said - sum(w.bytes for w in writes(body)))


def writes(body: Body) -> list[Access]:
    """What it writes of each result."""
    found = []
    for node, whole in zip(body.outputs, body.shapes, strict=False):
        parts = _arrays(whole)
        if node.instruction.target.startswith(("__cublas$", "__cudnn$")) and len(parts) > 1:
            parts = parts[:-1]  # the last is workspace, of which nobody knows what is used
        for shape in parts:
            if not is_scalar(shape):
                found.append(Access(node, shape, _written(node, shape), node))
    said = stated(body.outputs[0]) if body.outputs else None
    written = sum(one.bytes for one in found)
    return found if said is None or said >= written else _scaled(found, said)


def updates(node: Node) -> list[Node]:
    """What an update in place of an array from outside writes into it; [] for anything else."""
    found = []
    while node.opcode == "dynamic-update-slice" and len(node.args) > 1:
        found.append(node.args[1])
        node = node.args[0]
        if node.outside:
            return found
    if node.opcode == "scatter" and len(node.args) == 3 and node.args[0].outside:
        return [*found, node.args[2]]
    return []


def stated(node: Node) -> int | None:
    """Bytes that a hand-written kernel states to move (`cost_estimate=`); None without."""
    if node.opcode != "custom-call":
        return None
    match = _STATED.search(node.instruction.attributes)
    return int(match[1]) if match else None


def is_free(node: Node) -> bool:
    """Whether reading an array moves nothing: a number in the program, a counter, an index."""
    constant = node.instruction.opcode == "constant" and node.size == 1
    return constant or is_scalar(node.shape)


def is_scalar(shape: Shape) -> bool:
    """Whether it is the type of a counter, an index or a flag: a single whole number."""
    return shape.elements is None and shape.size == 1 and shape.dtype[0] in "sup"


# ---------------------------------------------------------------- implementation


_STATED = re.compile(r'"bytes_accessed":"?(\d+)')


def _scaled(accesses: list[Access], total: int) -> list[Access]:
    """The same with this sum, in proportion to their bytes."""
    whole = sum(one.bytes for one in accesses)
    if not whole:
        return accesses
    shares = [one.bytes * total // whole for one in accesses]
    shares[0] += total - sum(shares)
    return [dataclasses.replace(a, bytes=b) for a, b in zip(accesses, shares, strict=True)]


def _arrays(shape: Shape) -> list[Shape]:
    if shape.elements is None:
        return [shape]
    return [array for part in shape.elements for array in _arrays(part)]


def _bytes(node: Node, elements: int) -> int:
    if node.shape.elements is not None:
        return node.shape.bytes
    return -(-elements * bits(node.shape.dtype) // 8)


def _written(node: Node, shape: Shape) -> int:
    if new := updates(node):
        return sum(-(-one.size * bits(shape.dtype) // 8) for one in new)
    return shape.bytes


def _wanted(body: Body) -> tuple[dict[Node, int], dict[Node, Node]]:
    """How many elements of each node are needed, and the node that reads each first."""
    wanted: dict[Node, int] = {}
    for node in body.outputs:
        wanted[node] = node.size
    in_place = {node for node in body.outputs if updates(node)}
    first: dict[Node, Node] = {}
    slices: set[tuple[object, ...]] = set()
    for node in body.outputs:
        if node.outside:  # passed on as it is
            first[node] = node
    for user in reversed(body.nodes):
        count = wanted.get(user, 0)
        if user.outside or not count:
            continue
        for k, arg in enumerate(user.args):
            if k == 0 and user in in_place and user.opcode == "dynamic-update-slice":
                if not arg.outside:
                    in_place.add(arg)
                    wanted[arg] = arg.size
                continue
            if user.opcode in _SLICES and k == 0:
                alike = (arg, user.opcode, user.shape, *user.args[1:], _place(user))
                if alike in slices:
                    continue
                slices.add(alike)
            needed = _needed(user, k, arg, count)
            if needed:
                wanted[arg] = min(arg.size, wanted.get(arg, 0) + needed)
                first[arg] = user
    return wanted, first


_SLICES = ("dynamic-slice", "gather", "slice")


def _place(node: Node) -> str:
    """Which part a slice takes, where that is no operand."""
    return node.instruction.attributes.partition(", metadata=")[0]


def _needed(user: Node, k: int, arg: Node, count: int) -> int:
    """Elements of an argument that a number of elements of a result need."""
    match user.opcode:
        case "dynamic-slice" | "slice" | "gather" | "pad" | "broadcast" if k == 0:
            return min(arg.size, count)
        case "dynamic-update-slice" if k == 0:
            return max(arg.size - user.args[1].size, 0)
        case "scatter" if k == 0 and updates(user):
            return user.args[2].size
        case "concatenate":
            return min(arg.size, count)
        case "reduce" | "reduce-window" if arg.size >= user.size:
            return -(-arg.size * count // max(user.size, 1))
    same = arg.shape.elements is None and arg.size == user.size
    return count if same and user.opcode not in _WHOLE else arg.size


# These need all of their operands for any part of the result.
_WHOLE = ("convolution", "custom-call", "dot", "fft", "sort", "triangular-solve")
