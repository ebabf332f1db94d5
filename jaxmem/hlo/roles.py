"""What a value is to a gradient's computation: saved for the backward pass, recomputed, or a sum.

jax writes into the name of every operation whether it is differentiated ("jvp"), transposed or
recomputed, and compilers keep that.  A value is *saved* if the forward pass computes it and an
operation of the backward pass reads it; so values are followed forwards, to what reads them.
"""

from collections.abc import Iterator

from jaxmem.hlo.buffers import Role
from jaxmem.hlo.naming import DULL, Origin, operation, origin, phase, steps_back
from jaxmem.hlo.text import Instruction, Module
from jaxmem.hlo.values import Value, way

# ---------------------------------------------------------------- API


def role(module: Module, value: Value, known: Origin) -> Role:
    """The role of a value, of which the origin is known.

    A part that is copied out of a stack has none: it is a working copy.  Nor has a copy of an
    argument, unless a loop stacks such copies.
    """
    if known.is_slice or known.rank == 0 or (known.parameter is not None and known.rank < 3):
        return ""
    if known.phase == "recomputed":
        return "recomputed"
    if known.phase == "forward":
        return "saved" if read_in_backward(module, value) else ""
    if _is_sum(module, value, known) and not _is_partial(module, value):
        return "sum"
    return "sum" if _accumulates(module, value) else ""


def read_in_backward(module: Module, value: Value) -> bool:
    """Whether an operation of the backward pass reads a value, or what a loop makes of it."""
    return any(phase(r.op_name) in ("backward", "recomputed") for r in readers(module, value))


def readers(module: Module, value: Value) -> Iterator[Instruction]:
    """The operations that compute with a value, or with what a loop makes of it."""
    left, seen = [value, *_in_body(module, value)], set()
    while left and len(seen) < _FAR:
        instruction, index = left.pop()
        if (instruction.name, index) in seen:
            continue
        seen.add((instruction.name, index))
        if instruction.root:
            left += _returned(module, instruction, index)
        for user, number in module.users.get(instruction.name, ()):
            if _computes(user):
                yield user
            left += _read_by(module, user, number, index)


# ---------------------------------------------------------------- implementation


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that the gradient of a parameter comes out of: contractions and sums.  What is
# elementwise, as an update of parameters in the backward pass is, has gone through one before.
_SUMS = _words("add_any conv_general_dilated dot_general psum reduce_sum scatter-add scatter_add")
_SUMMING = _words("all-reduce convolution dot reduce reduce-scatter scatter")
# Where the way back from an accumulator ends: where it was written or added to before, or at zero.
_CARRIED = _words("add broadcast constant dynamic-update-slice")
_CALLS = _words("async call fusion")
_CARRIES = _CALLS | _words("bitcast conditional copy get-tuple-element opt-barrier tuple while")
_PASSES = _words("convert dynamic-slice reshape slice transpose")
_FAR = 4096
_NEAR = 16


def _is_sum(module: Module, value: Value, known: Origin) -> bool:
    if known.phase != "backward":
        return False
    # Sums over devices are computed in a flat form of several values, without a name.
    opcodes = {instruction.opcode for instruction, _ in steps_back(module, value)[0]}
    opcodes = {opcode.removesuffix("-start").removesuffix("-done") for opcode in opcodes}
    return known.name.partition(" ")[0] in _SUMS or not opcodes.isdisjoint(_SUMMING)


def _is_partial(module: Module, value: Value) -> bool:
    """Whether it is partial sums of a product, of which a reduction makes the product."""
    left, seen = [value], 0
    while left and seen < _NEAR:
        instruction, index = left.pop()
        seen += 1
        for user, number in module.users.get(instruction.name, ()):
            if user.opcode == "reduce" and operation(user.op_name, plain=True) in DULL:
                return True
            if not _computes(user) or user.opcode in _PASSES:
                left += _read_by(module, user, number, index)
    return False


def _accumulates(module: Module, value: Value) -> bool:
    """Whether sums of the backward pass are added to what a loop carries, and to nothing else."""
    made = steps_back(module, value)[0][-1][0]
    if made.opcode != "add":
        return False
    operands = [operand for k in (0, 1) if (operand := module.operand(made, k))]
    sums = [_is_sum(module, (o, ()), origin(module, o.name)) for o in operands]
    ends = [way(module, (operand, ()))[-1][0].opcode for operand in operands]
    return len(ends) == 2 and any(sums[k] and ends[1 - k] in _CARRIED for k in (0, 1))


def _computes(user: Instruction) -> bool:
    """Whether it is more than a way to where a value is read."""
    opcode = user.opcode.removesuffix("-start")
    return opcode not in _CARRIES and not opcode.endswith("-done")


def _read_by(module: Module, user: Instruction, number: int, index: tuple[int, ...]) -> list[Value]:
    """Where a value is found again that an instruction takes as an operand of this number."""
    match user.opcode.removesuffix("-start"):
        case "get-tuple-element":
            return [(user, index[1:])] if index[:1] == (user.number,) else []
        case "tuple":
            return [(user, (number, *index))]
        case "while":
            body = module.body(user, "body")
            inside = body and body.parameter(0)
        case "conditional":
            names = user.all_called()
            branch = (
                module.computations.get(names[number - 1]) if 0 < number <= len(names) else None
            )
            inside = branch and branch.parameter(0)
        case opcode if opcode in _CALLS:
            called = next(filter(None, map(module.computations.get, user.all_called())), None)
            inside = called and called.parameter(number)
        case "dynamic-update-slice":
            # What is written into a stack is another piece of memory; the stack itself goes on.
            return [(user, index)] if number == 0 else []
        case opcode if opcode.endswith("-done"):
            return [(user, ())]
        case opcode if opcode in _CARRIES or opcode in _PASSES:
            return [(user, index)]
        case _:
            return []
    return [(inside, index)] if inside else []


def _returned(module: Module, root: Instruction, index: tuple[int, ...]) -> list[Value]:
    """Where a value is found again that a computation returns: at its callers."""
    found: list[Value] = []
    for caller in module.callers.get(module.home[root.name], ()):
        if caller.opcode == "while":
            body = module.body(caller, "body")
            if body is None or body.root is not root:
                continue  # of the condition
            again = body.parameter(0)
            found += [(again, index)] if again else []
        if caller.opcode.removesuffix("-start") in {*_CALLS, "conditional", "while"}:
            found.append((caller, index))
    return found


def _in_body(module: Module, value: Value) -> list[Value]:
    """What a loop's condition is given, in the loop's body."""
    instruction, index = value
    if instruction.opcode != "parameter":
        return []
    callers = module.callers.get(module.home[instruction.name], ())
    bodies = (module.body(caller, "body") for caller in callers if caller.opcode == "while")
    found = (body and body.parameter(0) for body in bodies)
    return [(parameter, index) for parameter in found if parameter is not None]
