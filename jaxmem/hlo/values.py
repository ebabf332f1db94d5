"""Tracing the values of a compiled program back to the instructions that compute them.

A value is followed back through tuples, copies, conversions, slices, fusions, loops
and their carries; and, for a stack that is filled in place, from the stack to what is
written into it.
"""

from jaxmem.hlo.text import Computation, Instruction, Module

# ---------------------------------------------------------------- types

# An instruction, and an index into its tuple.
Value = tuple[Instruction, tuple[int, ...]]

# ---------------------------------------------------------------- API


def way(module: Module, value: Value) -> list[Value]:
    """A value and its predecessors, back to the instruction that computes it."""
    found, seen = [value], {_key(value)}
    while len(found) < _FAR and (before := _before(module, found[-1])):
        if _key(before) in seen:
            break
        seen.add(_key(before))
        found.append(before)
    return found


def update_of(module: Module, value: Value) -> Value | None:
    """The value written, if `value` is the result of an in-place update of another."""
    instruction, index = value
    update = module.operand(instruction, 1)
    if instruction.opcode.removesuffix("-start") != _UPDATE or update is None:
        return None
    chosen = way(module, (update, index))[-1][0]
    if chosen.opcode == "select":
        # A masked write: one of the two operands is the previous content.
        cases = [operand for k in (1, 2) if (operand := module.operand(chosen, k))]
        new = [c for c in cases if way(module, (c, index))[-1][0] is not instruction]
        if len(new) == 1:
            return new[0], index
    return update, () if instruction.opcode != _UPDATE else index


# ---------------------------------------------------------------- implementation

_UPDATE = "dynamic-update-slice"
_FAR = 256
_PASSING = (
    "bitcast bitcast-convert convert copy dynamic-slice opt-barrier reduce-precision reshape slice "
    "transpose"
)
_PASSES = frozenset(_PASSING.split())
_CALLS = ("call", "conditional", "fusion", "while")


def _key(value: Value) -> tuple[str, tuple[int, ...]]:
    return value[0].name, value[1]


def _before(module: Module, value: Value) -> Value | None:
    """The same value one step earlier, None at the instruction that computes it."""
    instruction, index = value
    opcode = instruction.opcode
    if opcode == "get-tuple-element":
        operand = module.operand(instruction)
        return operand and (operand, (instruction.number, *index))
    if opcode == "tuple":
        operand = module.operand(instruction, index[0]) if index else None
        return operand and (operand, index[1:])
    if opcode.endswith(("-start", "-done")):
        return _asynchronous(module, instruction, index)
    if opcode in _PASSES or instruction.target == "ConcatBitcast":
        operand = module.operand(instruction)
        return operand and (operand, index)
    if opcode in _CALLS:
        called = _called(module, instruction)
        return called and (called.root, index)
    if opcode == "parameter":
        return _passed(module, instruction, index)
    return None


def _asynchronous(module: Module, instruction: Instruction, index: tuple[int, ...]) -> Value | None:
    """The halves of an asynchronous operation; the first one's value is (operands, result)."""
    operand = module.operand(instruction)
    if instruction.opcode.endswith("-done"):
        return operand and (operand, (1, *index))
    if instruction.opcode == "copy-start":
        return operand and (operand, index[1:])
    if instruction.opcode.removesuffix("-start") in _PASSES:
        return operand and (operand, ())
    # What such a collective calls is how it sums, and not what is computed.
    sums = instruction.opcode.startswith(("all-reduce", "reduce"))
    called = None if sums else _called(module, instruction)
    if called is not None and index[:1] == (1,):
        return called.root, index[1:]
    if called is not None and len(index) > 1:
        operand = module.operand(instruction, index[1])
        return operand and (operand, index[2:])
    return None


def _called(module: Module, instruction: Instruction) -> Computation | None:
    """The computation that gives a call's value; for a conditional the first branch."""
    if instruction.opcode == "while":
        return module.body(instruction, "body")
    found = (module.computations.get(name) for name in instruction.all_called())
    return next(filter(None, found), None)


def _passed(module: Module, parameter: Instruction, index: tuple[int, ...]) -> Value | None:
    """The value passed for a parameter: by a caller, or by the previous iteration of a loop."""
    home = module.home[parameter.name]
    for caller in module.callers.get(home, ()):
        if caller.opcode == "while":
            body = module.body(caller, "body")
            again = body and _carried(module, body.root, index)
            if body and again and not _is_parameter(module, again, (body.name, index)):
                return again
            operand = module.operand(caller)
        elif caller.opcode == "conditional":
            branches = caller.all_called()
            operand = module.operand(caller, 1 + branches.index(home))
        elif caller.opcode.removesuffix("-start") in ("async", "call", "fusion"):
            operand = module.operand(caller, parameter.number)
        else:
            continue
        return operand and (operand, index)
    return None


def _carried(module: Module, root: Instruction, index: tuple[int, ...]) -> Value | None:
    if root.opcode == "tuple" and index:
        operand = module.operand(root, index[0])
        return operand and (operand, index[1:])
    return root, index


def _is_parameter(module: Module, value: Value, parameter: tuple[str, tuple[int, ...]]) -> bool:
    """Whether a loop's body, here by its name, passes an element on unchanged."""
    home, index = parameter
    seen: set[tuple[str, tuple[int, ...]]] = set()
    following: Value | None = value
    while following is not None and _key(following) not in seen:
        if following[0].opcode == "parameter" and module.home[following[0].name] == home:
            return following[1] == index
        seen.add(_key(following))
        following = _before(module, following)
    return False
