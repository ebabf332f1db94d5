"""The buffers that are live at one step of a compiled program: one row per piece of memory.

Values that share bytes are one row: a stack that a loop updates in place appears in
the compiler's list as its allocation, the loop's operand, result and parameter, and
the update.  The row has the most informative of their names.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxmem.hlo import text as hlo
from jaxmem.hlo.buffers import Allocation, Buffer, Kind, Schedule, Value, place
from jaxmem.hlo.liveness import live_range
from jaxmem.hlo.naming import Origin, origin
from jaxmem.hlo.roles import role
from jaxmem.hlo.shapes import shape as read_shape
from jaxmem.hlo.values import Value as InText

# Smaller buffers are not listed.
_LEAST = 1024

# ---------------------------------------------------------------- API


def rows(
    module: hlo.Module, allocations: Iterable[Allocation], schedule: Schedule, step: int
) -> tuple[Buffer, ...]:
    """The buffers live at a step, without small ones and tables of pointers."""
    found: list[Buffer] = []
    for allocation in allocations:
        if allocation.persistent:
            found += _persistent(module, allocation, schedule, step)
        else:
            found += _sharing(module, allocation, schedule, step)
    return tuple(found)


# ---------------------------------------------------------------- implementation


def _in_text(module: hlo.Module, schedule: Schedule, value: Value) -> InText | None:
    """The value in the program's text; one inside an asynchronous operation, whose instructions
    that need not contain, is the result of the operation, whose start is next in the schedule."""
    name, index = value.name, value.index
    if name not in module.instructions and name in schedule.order:
        following = schedule.order[schedule.order.index(name) :]
        name = next((other for other in following if other in module.instructions), name)
        index = (1, *index)
    found = module.instructions.get(name)
    return found and (found, index)


def _named(module: hlo.Module, schedule: Schedule, value: Value) -> Origin:
    there = _in_text(module, schedule, value)
    return origin(module, there[0].name, there[1]) if there else origin(module, value.name)


def _persistent(
    module: hlo.Module, allocation: Allocation, schedule: Schedule, step: int
) -> list[Buffer]:
    """An argument, a result or a constant, which has a separate allocation."""
    if not allocation.values or allocation.size < _LEAST:
        return []
    if allocation.parameter is not None:
        kind: Kind = "argument"
        value = next((v for v in allocation.values if _is_parameter(module, v)), None)
        value = value or allocation.values[0]
        named = _named(module, schedule, value)
    else:
        kind = "constant" if allocation.constant else "output"
        # The buffer of a result may have held other values before.
        whole = [v for v in allocation.values if v.size == allocation.size] or allocation.values
        last = [v for v in whole if live_range(v, schedule)[1] >= len(schedule.order)]
        value, named = _best(module, schedule, last or whole)
    row = _row(module, schedule, allocation, kind, allocation.size, value, named, value)
    if row is None or kind != "output":
        return [row] if row else []
    # Its name is that of the result; its role is that of what it holds now, if of the same shape.
    now = [v for v in allocation.values if _is_live(v, schedule, step)]
    now = [v for v in now if read_shape(v.shape).dims == row.shape]
    if not now:
        return [dataclasses.replace(row, role="", is_stack=False)]
    value, named = _best(module, schedule, now)
    return [dataclasses.replace(row, **_role(module, schedule, kind, value, named))]


def _is_live(value: Value, schedule: Schedule, step: int) -> bool:
    start, end = live_range(value, schedule)
    return start <= step <= end


def _is_parameter(module: hlo.Module, value: Value) -> bool:
    instruction = module.instructions.get(value.name)
    return instruction is not None and instruction.opcode == "parameter"


def _sharing(
    module: hlo.Module, allocation: Allocation, schedule: Schedule, step: int
) -> list[Buffer]:
    """What is live in an allocation that temporaries share."""
    live = []
    for value in allocation.values:
        if value.size and _is_live(value, schedule, step):
            live.append((value.offset, -value.size, live_range(value, schedule)[0], value))
    live.sort(key=lambda item: item[:2])
    found: list[Buffer] = []
    group: list[tuple[int, Value]] = []
    reach = -1
    for offset, _, start, value in [*live, (None, 0, 0, None)]:
        if group and (offset is None or offset >= reach):
            first = min(v.offset for _, v in group)
            found += _shared(module, allocation, schedule, reach - first, step, group)
            group = []
        if value is not None:
            group.append((start, value))
            reach = max(reach, value.offset + value.size)
    return found


def _shared(
    module: hlo.Module,
    allocation: Allocation,
    schedule: Schedule,
    size: int,
    step: int,
    group: list[tuple[int, Value]],
) -> list[Buffer]:
    """The row of values that share memory, each with the step at which it begins."""
    if size < _LEAST:
        return []
    latest = [value for _, value in sorted(group, key=lambda item: -item[0])]
    largest = max(latest, key=lambda value: value.size)
    value, named = _best(module, schedule, latest)
    if named.rank == 0:
        # Uninitialised so far: the values written into it are more informative.
        later = _successors(allocation.values, schedule, largest, step)
        value, named = _best(module, schedule, [*latest, *later])
    shown = value if value in latest and value.size == largest.size else largest
    row = _row(module, schedule, allocation, "temporary", size, shown, named, value)
    return [row] if row else []


def _successors(values: Sequence[Value], schedule: Schedule, room: Value, step: int) -> list[Value]:
    """Values that occupy the same bytes without a gap in time, from a step on."""
    same = [v for v in values if (v.offset, v.size) == (room.offset, room.size)]
    timed = sorted(((live_range(v, schedule), k) for k, v in enumerate(same)))
    found, reach = [], step
    for (start, end), k in timed:
        if end < step:
            continue
        if start > reach:
            break
        reach = max(reach, end)
        found.append(same[k])
    return found


def _best(module: hlo.Module, schedule: Schedule, values: Sequence[Value]) -> tuple[Value, Origin]:
    """The value with the most informative origin, the first of several equal ones."""
    candidates = [(value, _named(module, schedule, value)) for value in values]
    return max(candidates, key=lambda candidate: candidate[1].rank)


def _row(
    module: hlo.Module,
    schedule: Schedule,
    allocation: Allocation,
    kind: Kind,
    size: int,
    shown: Value,
    named: Origin,
    value: Value,
) -> Buffer | None:
    shape = read_shape(shown.shape)
    if shape.elements is not None or size < _LEAST:
        return None
    index = "{" + ",".join(map(str, value.index)) + "}" if value.index else ""
    return Buffer(
        bytes=size,
        shape=shape.dims,
        dtype=shape.dtype,
        name=named.name,
        kind=kind,
        place=place(allocation.color, module.tiled),
        instruction=value.name + index,
        source=named.source,
        module=named.module,
        parameter=allocation.parameter if kind == "argument" else named.parameter,
        padding_bytes=max(shown.size - shape.bytes, 0),
        **_role(module, schedule, kind, value, named),
    )


def _role(
    module: hlo.Module, schedule: Schedule, kind: Kind, value: Value, named: Origin
) -> dict[str, Any]:
    there = _in_text(module, schedule, value)
    if there is None or kind not in ("output", "temporary"):
        return {}
    is_stack = named.rank == 3 and not named.is_slice
    return {"role": role(module, there, named), "is_stack": is_stack}
