"""What keeps operations apart that could be one kernel, and kernels that only move or convert.

Three things of which a user can do something: a hand-written kernel or a library's call in the
middle of elementwise operations; a copy into another layout; and a conversion whose result is
written to memory.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxmem.hlo import naming
from jaxmem.hlo.bodies import Body, Node, is_asked_for, place_of
from jaxmem.hlo.operations import COLLECTIVES
from jaxmem.hlo.shapes import Shape
from jaxmem.hlo.text import Instruction, Module
from jaxmem.hlo.traffic import reads, writes

Work = Literal[
    "matmul",
    "reduction",
    "elementwise",
    "convert",
    "copy",
    "collective",
    "custom call",
    "other",
]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfused:
    """Something that is a kernel by itself, and what that moves; bytes of one execution.

    Attributes:
      kind: "custom call" between elementwise operations, "layout copy" or "convert".
      bytes: for a custom call, of the arrays that pass between it and those operations through
        device memory, written and read; else what the kernel reads and writes there.
      times: how often it runs in one call of the program.
      dtype, shape: of the array that it gives, dtype in HLO's notation.
      from_dtype: of what it is given.
      name: of the operation; "copy" for one that the compiler adds for itself.
      value: name of what it copies or converts; empty for a custom call.
      parameter: number of the argument that this is, or is a part of; else None.
      others: how many other values are copied or converted alike, of which `times` counts each.
      source: the user's line; empty if unknown.
      module: scopes around it.
      before, after: names of the elementwise operations before and after a custom call.
      asked_for: whether an operation of the user is that copy or conversion, and not one that the
        compiler adds for itself.
    """

    kind: Literal["custom call", "layout copy", "convert"]
    bytes: int
    times: int
    dtype: str
    shape: tuple[int, ...]
    from_dtype: str
    name: str
    source: str
    module: str
    value: str = ""
    parameter: int | None = None
    others: int = 0
    before: str = ""
    after: str = ""
    asked_for: bool = True

    @property
    def total_bytes(self) -> int:
        """In one call of the program."""
        return self.bytes * self.times


@dataclasses.dataclass(frozen=True)
class Made:
    """A kernel of a computation, as it is looked at here."""

    instruction: Instruction
    body: Body
    work: Work
    name: str
    source: str
    module: str


# ---------------------------------------------------------------- API


def work_of(kernel: Instruction, inside: Body, operations: Sequence[Node]) -> Work:
    """What a kernel does, by its heaviest kind of operation."""
    opcodes = {node.opcode for node in operations}
    opcode = kernel.opcode.removesuffix("-start")
    if opcode in COLLECTIVES or opcodes & COLLECTIVES:
        return "collective"
    targets = [node.instruction.target for node in operations if node.opcode == "custom-call"]
    if opcodes & _PRODUCTS or any(target.startswith(_LIBRARIES) for target in targets):
        return "matmul"
    if targets:
        return "custom call"
    if opcodes & _OTHERS:
        return "other"
    if opcodes & _REDUCTIONS:
        return "reduction"
    if opcodes <= _MOVES | {"convert"}:
        return "convert" if any(node.opcode == "convert" for node in inside.nodes) else "copy"
    return "elementwise"


def unfused(module: Module, made: Mapping[str, Made]) -> list[Unfused]:
    """What of the kernels of one computation is a kernel for no good reason."""
    found: list[Unfused] = []
    for kernel in made.values():
        match kernel.work:
            case "custom call":
                found += _broken(module, made, kernel)
            case "copy":
                found += _relaid(module, kernel)
            case "convert":
                found += _converted(module, kernel)
    return found


def line_of_user(module: Module, name: str) -> str:
    """The line of the first instruction that reads a value and has one; "" if there is none."""
    lines = (naming.source(module, user) for user in _users(module, (name, ())))
    return next(filter(None, lines), "")


def merged_modules(modules: Sequence[str]) -> str:
    """What several scopes have in common, with a star for a part in which they differ.

    >>> merged_modules(["GPT/h_0/mlp", "GPT/h_1/mlp"]), merged_modules(["a", "b/c"])
    ('GPT/*/mlp', '')
    """
    parts = {tuple(module.split("/")) for module in dict.fromkeys(modules)}
    if len({len(one) for one in parts}) > 1:
        return ""
    columns = zip(*parts, strict=True)
    return "/".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


# ---------------------------------------------------------------- implementation


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PRODUCTS = _words("convolution dot ragged-dot scaled-dot")
_LIBRARIES = ("__cublas$", "__cudnn$conv", "__cudnn$fmha", "__onednn$matmul")
_OTHERS = _words(
    "cholesky fft gather rng rng-bit-generator scatter select-and-scatter sort triangular-solve"
)
_REDUCTIONS = _words("reduce reduce-window")
_MOVES = _words("concatenate copy dynamic-slice dynamic-update-slice pad reverse slice transpose")


def _broken(module: Module, made: Mapping[str, Made], call: Made) -> list[Unfused]:
    """A call between elementwise operations, which write for it and read from it."""
    name = call.instruction.name
    before = {}
    for access in reads(call.body):
        outside = access.node.outside
        maker = made.get(outside[0]) if outside else None
        if not outside or not maker or maker.work != "elementwise":
            continue
        alone = all(user is call.instruction for user in _users(module, outside))
        if alone and _on_device(module, access.shape):
            before[outside] = (access.bytes, maker.name)
    after = {}
    results = [access for access in writes(call.body) if _on_device(module, access.shape)]
    for k, access in enumerate(results):
        place = (name, (k,)) if call.instruction.shape.elements is not None else (name, ())
        users = [made.get(user.name) for user in _users(module, place)]
        if users and all(user and user.work == "elementwise" for user in users):
            after[place] = (access.bytes, next(user.name for user in users if user))
    if not before or not after or not results:
        return []
    largest = max(results, key=lambda access: access.bytes).shape
    return [
        Unfused(
            kind="custom call",
            bytes=2 * sum(count for count, _ in (*before.values(), *after.values())),
            times=1,
            dtype=largest.dtype,
            shape=largest.dims,
            from_dtype="",
            name=call.name,
            source=call.source,
            module=call.module,
            before=", ".join(dict.fromkeys(one for _, one in before.values())),
            after=", ".join(dict.fromkeys(one for _, one in after.values())),
        )
    ]


def _relaid(module: Module, copy: Made) -> list[Unfused]:
    """A copy whose result has another order of dimensions in memory."""
    turned = [n for n in copy.body.nodes if not n.outside and _turns(module, n)]
    result = copy.body.shapes[0]
    moved = _moved(module, copy)
    if not turned or not moved or not reads(copy.body) or result.elements is not None:
        return []
    node = turned[-1]
    asked = is_asked_for(node.instruction)
    value = _given(module, copy)
    return [
        Unfused(
            kind="layout copy",
            bytes=moved,
            times=1,
            dtype=result.dtype,
            shape=result.dims,
            from_dtype=result.dtype,
            name=copy.name,
            source=copy.source,
            module=copy.module or value.module,
            value=value.name,
            parameter=value.parameter,
            asked_for=asked,
        )
    ]


def _turns(module: Module, node: Node) -> bool:
    if node.opcode == "transpose":
        return True  # one that changes nothing in memory is a bitcast
    before = module.operand(node.instruction)
    if node.opcode != "copy" or before is None:
        return False
    orders = [re.search(r"\]\{([\d,]+)", one.layout) for one in (node.instruction, before)]
    return None not in orders and len({order[1] for order in orders if order}) == 2


def _converted(module: Module, kernel: Made) -> list[Unfused]:
    """A conversion that is a kernel, neither of a loop's slices nor for the program's result."""
    nodes = [node for node in kernel.body.nodes if not node.outside]
    if any(node.opcode.startswith("dynamic-") for node in nodes) or _is_result(module, kernel):
        return []
    made = [node for node in nodes if node.opcode == "convert"]
    moved = _moved(module, kernel)
    if not made or not moved or not reads(kernel.body):
        return []
    node, result, value = made[-1], kernel.body.shapes[0], _given(module, kernel)
    return [
        Unfused(
            kind="convert",
            bytes=moved,
            times=1,
            dtype=node.shape.dtype,
            shape=result.dims,
            from_dtype=made[0].args[0].shape.dtype,
            name=kernel.name,
            source=kernel.source,
            module=kernel.module,
            value=value.name,
            parameter=value.parameter,
            asked_for=is_asked_for(node.instruction),
        )
    ]


def _given(module: Module, kernel: Made) -> naming.Origin:
    """What a kernel copies or converts: the largest array that it reads."""
    given = max(reads(kernel.body), key=lambda access: access.bytes)
    return naming.origin(module, *(given.node.outside or (kernel.instruction.name, ())))


def _moved(module: Module, kernel: Made) -> int:
    """What it reads and writes in device memory; 0 where one of the two is on the chip."""
    sides = [
        sum(one.bytes for one in side if _on_device(module, one.shape))
        for side in (reads(kernel.body), writes(kernel.body))
    ]
    return sum(sides) if all(sides) else 0


def _on_device(module: Module, shape: Shape) -> bool:
    return shape.space == 0 or not module.tiled


def _users(module: Module, place: tuple[str, tuple[int, ...]]) -> list[Instruction]:
    """The instructions that read an array, behind what only passes it on."""
    found: list[Instruction] = []
    left = [place[0]]
    while left:
        for user, _ in module.users.get(left.pop(), ()):
            if user.opcode == "get-tuple-element":
                left += [user.name] if place_of(module, user.name) == place else []
            elif user.opcode in ("bitcast", "copy-start", "copy-done"):
                left.append(user.name)
            else:
                found.append(user)
    return found


def _is_result(module: Module, kernel: Made) -> bool:
    """Whether the program returns what the kernel gives."""
    if module.home[kernel.instruction.name] != module.entry:
        return False
    if kernel.instruction.root:
        return True
    users = _users(module, (kernel.instruction.name, ()))
    return any(user.opcode == "tuple" and user.root for user in users)
