"""The user's operations in a kernel, and what they would move if each read and wrote memory.

Compilers add to what a user wrote: bitcasts, broadcasts, conversions to the type that a unit
computes in, copies.  Those are no operations here; what reads one reads what is behind it.  An
operation that the compiler repeats in several kernels, because that is cheaper than to keep its
result, is one operation: it is counted where it is first.
"""

import re
from collections.abc import Hashable, Iterator

from jaxmem.hlo import naming
from jaxmem.hlo.bodies import Body, Node, is_asked_for, is_heavy
from jaxmem.hlo.text import Module
from jaxmem.hlo.traffic import is_free, is_scalar, stated, updates

COLLECTIVES = frozenset(
    [
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    ]
)

# ---------------------------------------------------------------- API


def is_operation(node: Node) -> bool:
    """Whether it is one of the user's, and more than arithmetic of indices."""
    opcode = node.opcode
    if opcode in _NONE or is_scalar(node.shape):
        return False
    if opcode in _OWN:
        return is_asked_for(node.instruction)
    return is_heavy(opcode) or opcode in COLLECTIVES or naming.is_named(node.instruction)


def moved_alone(node: Node, module: Module) -> int:
    """Bytes that an operation would read and write as a kernel without others."""
    opcode = node.opcode
    if opcode in ("dynamic-slice", "slice"):
        return 2 * node.bytes
    if opcode == "gather":
        return 2 * node.bytes + _behind(node.args[1]).bytes
    if opcode == "dynamic-update-slice":
        return 2 * node.args[1].bytes
    if opcode == "scatter" and updates(node):
        return 3 * node.args[2].bytes + _behind(node.args[1]).bytes
    written = node.bytes
    if (said := stated(node)) is not None:
        return said
    read = {_behind(arg) for arg in node.args}
    return written + sum(one.bytes for one in read if one.opcode != "iota" and not is_free(one))


class Numbers:
    """Numbers of values, equal for what is computed alike from the same values."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[Hashable, int] = {}
        self._of: dict[Hashable, int] = {}

    def of(self, kernel: str, body: Body) -> Iterator[tuple[Node, bool]]:
        """The operations of a kernel, and whether another kernel had each before."""
        here: dict[Node, int] = {}
        for node in body.nodes:
            before = len(self._known)
            here[node] = self._number(node, here, kernel)
            if not node.outside and is_operation(node):
                yield node, len(self._known) == before
        for k, node in enumerate(body.outputs):
            self._of[kernel, (k,) if len(body.outputs) > 1 else ()] = here[node]

    def _number(self, node: Node, here: dict[Node, int], kernel: str) -> int:
        if node.outside:
            return self._of.get(node.outside) or self._new(node.outside)
        opcode = node.opcode
        args = tuple(here[arg] for arg in node.args)
        if opcode in _OWN and not is_asked_for(node.instruction) and args:
            return args[0]
        if opcode in _ONCE:
            return self._new((kernel, node.instruction.name))
        attributes = _META.split(node.instruction.attributes, maxsplit=1)[0]
        if "to_apply=" in attributes:
            called = self._module.body(node.instruction, "to_apply")
            attributes = _APPLIED.sub(called.root.opcode if called else "", attributes)
        inside = node.instruction.inside if opcode in ("constant", "iota") else ""
        return self._new((opcode, inside, attributes, node.shape.dims, args))

    def _new(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known) + 1)


# ---------------------------------------------------------------- implementation

# What is no operation wherever it stands.
_NONE = frozenset(
    [
        "add-dependency",
        "after-all",
        "bitcast-convert",
        "broadcast",
        "constant",
        "domain",
        "get-tuple-element",
        "iota",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    ]
)
_NONE |= {""}
# What compilers add for themselves.
_OWN = ("convert", "copy", "transpose")
# What may give something else each time.
_ONCE = frozenset(
    ["custom-call", "infeed", "recv", "rng", "rng-bit-generator", "rng-get-and-update-state"]
)
_META = re.compile(r", (?:metadata|backend_config|frontend_attributes|sharding)=")
_APPLIED = re.compile(r"to_apply=%[^\s,]+")


def _behind(node: Node) -> Node:
    """What an operation reads, behind what the compiler has put there."""
    while not node.outside and node.args:
        if node.opcode in ("broadcast", "get-tuple-element", "bitcast-convert") or (
            node.opcode in _OWN and not is_asked_for(node.instruction)
        ):
            node = node.args[0]
        else:
            break
    return node
