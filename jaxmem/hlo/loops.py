"""Trip counts of the loops of a compiled program.

Compilers for CPU and GPU annotate loops with them.  The one for TPU does not; there,
and wherever the annotation is missing, the condition is read: a counter that starts
from a constant, grows by a constant in each iteration, and is compared with a constant.
"""

import json
import re

from jaxmem.hlo.text import Computation, Instruction, Module

# A value as (element of the loop's tuple or None for none, constant): their sum.
_Linear = tuple[int | None, int]

# ---------------------------------------------------------------- API


def trip_count(module: Module, loop: Instruction) -> int | None:
    """The trip count of a `while`, None if it is unknown."""
    noted = re.search(r'"known_trip_count":\s*(\{[^}]*\})', loop.attributes)
    if noted:
        return int(json.loads(noted[1])["n"])
    condition, body = module.body(loop, "condition"), module.body(loop, "body")
    if condition is None or body is None:
        return None
    found = _comparison(module, condition.root, ())
    if found is None:
        return None
    compare, callers = found
    direction = re.search(r"direction=(\w+)", compare.attributes)
    sides = [_operand(module, compare, k, callers) for k in (0, 1)]
    if direction is None or None in sides:
        return None
    starts_steps = [_over_iterations(module, loop, body, side) for side in sides if side]
    if None in starts_steps:
        return None
    (left, left_step), (right, right_step) = (found for found in starts_steps if found)
    return _count(direction[1], right - left, left_step - right_step)


def entering(module: Module, loop: Instruction, element: int) -> int | None:
    """The initial value of an element of a loop's tuple, if it is a constant."""
    start = module.operand(loop)
    found = None if start is None else _linear(module, start, element, ())
    if found is None:
        return None
    outer_element, constant = found
    if outer_element is None:
        return constant
    # From the tuple of an outer loop: constant, if that loop does not change it.
    for outer in module.callers.get(module.home[loop.name], ()):
        body = module.body(outer, "body") if outer.opcode == "while" else None
        if body is not None and _step(module, body, outer_element) == 0:
            first = entering(module, outer, outer_element)
            return None if first is None else first + constant
    return None


# ---------------------------------------------------------------- implementation


def _count(direction: str, gap: int, closing: int) -> int | None:
    """Iterations until left < right, say, is false, where right - left = gap shrinks."""
    if direction in ("GT", "GE"):
        gap, closing = -gap, -closing
    if direction in ("LE", "GE"):
        gap += 1
    if direction == "NE" and closing < 0:
        gap, closing = -gap, -closing
    if direction == "EQ" or closing <= 0 or (direction == "NE" and (gap < 0 or gap % closing)):
        return None
    return max(-(-gap // closing), 0)


def _over_iterations(
    module: Module, loop: Instruction, body: Computation, value: _Linear
) -> tuple[int, int] | None:
    """The value in the first iteration, and its increment per iteration."""
    element, constant = value
    if element is None:
        return constant, 0
    first, step = entering(module, loop, element), _step(module, body, element)
    return None if first is None or step is None else (first + constant, step)


def _step(module: Module, body: Computation, element: int) -> int | None:
    found = _linear(module, body.root, element, ())
    return found[1] if found is not None and found[0] == element else None


def _comparison(
    module: Module, instruction: Instruction, callers: tuple[Instruction, ...]
) -> tuple[Instruction, tuple[Instruction, ...]] | None:
    """The comparison that decides a condition, and the calls that lead to it."""
    while instruction.opcode != "compare":
        if instruction.opcode in _CALLS and (
            called := module.body(instruction, _attribute(instruction))
        ):
            callers, following = (*callers, instruction), called.root
        elif instruction.opcode in _SAME:
            following = module.operand(instruction)
        else:
            return None
        if following is None:
            return None
        instruction = following
    return instruction, callers


def _linear(
    module: Module,
    instruction: Instruction,
    element: int | None,
    callers: tuple[Instruction, ...],
) -> _Linear | None:
    """A scalar as a sum of a constant and at most one element of its loop's tuple.

    Args:
      element: which part of the instruction's value is meant, if it is a tuple.
      callers: the calls through which the instruction is reached.
    """
    opcode = instruction.opcode
    if opcode == "constant":
        number = re.fullmatch(r"-?\d+", instruction.inside)
        return (None, int(number[0])) if number else None
    if opcode == "parameter":
        if callers:
            return _operand(module, callers[-1], instruction.number, callers[:-1], element)
        return (element, 0) if element is not None else None
    if opcode == "get-tuple-element":
        return _operand(module, instruction, 0, callers, instruction.number)
    if opcode == "tuple" and element is not None:
        return _operand(module, instruction, element, callers)
    if opcode in _SAME:
        return _operand(module, instruction, 0, callers, element)
    if opcode in ("add", "subtract"):
        left, right = (_operand(module, instruction, k, callers) for k in (0, 1))
        if left is None or right is None:
            return None
        if opcode == "subtract":
            return (left[0], left[1] - right[1]) if right[0] is None else None
        if left[0] is not None and right[0] is not None:
            return None
        return (left[0] if left[0] is not None else right[0], left[1] + right[1])
    if opcode in _CALLS and (called := module.body(instruction, _attribute(instruction))):
        return _linear(module, called.root, element, (*callers, instruction))
    return None


def _operand(
    module: Module,
    instruction: Instruction,
    number: int,
    callers: tuple[Instruction, ...],
    element: int | None = None,
) -> _Linear | None:
    operand = module.operand(instruction, number)
    return None if operand is None else _linear(module, operand, element, callers)


def _attribute(instruction: Instruction) -> str:
    return "calls" if instruction.opcode == "fusion" else "to_apply"


_CALLS = ("fusion", "call")
_SAME = ("bitcast", "convert", "copy", "copy-done", "copy-start", "opt-barrier", "reshape")
