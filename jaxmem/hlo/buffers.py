"""Buffers of a compiled program, and its memory along the schedule, from the compiler's dump.

The compiler assigns each value a place in an allocation
("…-buffer-assignment.txt") and writes the order of instructions and the first
and last of them at which a value is live ("…-live-range.txt").  This module has the
types that reports hold, and the two texts as data; `liveness` computes a
timeline from them, `analysis` adds names.
"""

import dataclasses
import re
from typing import Literal

Kind = Literal["argument", "output", "temporary", "constant"]
Place = Literal["device", "on-chip", "host"]
Role = Literal["", "saved", "recomputed", "sum"]

# ---------------------------------------------------------------- types of reports


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One piece of memory live at the peak of its memory space; values that share it are one row.

    Attributes:
      bytes: its size in memory, padding included.
      shape: of the value in it.
      dtype: in HLO's notation, such as "bf16" or "pred".
      name: the operation whose result it holds ("tanh", or "tanh (backward)"); for a
      stack that a loop fills, the one whose results are stacked; for an argument its name.
      kind: its role in the program.
      place: "device" memory, "on-chip" memory of a TPU (VMEM), or "host" memory.
      instruction: the compiler's name of it.
      source: the user's line, as "file.py:12 (function)"; empty if unknown.
      module: scopes around the operation, such as "Encoder/Block_0"; may be empty.
      parameter: number of the argument that it is or (in part) copies; else None.
      padding_bytes: bytes that hold no elements, because of tiling or alignment.
      role: in a gradient's computation: "saved" in the forward pass for the backward pass,
        "recomputed" there, or a product or "sum" of the backward pass, such as the gradient of a
        parameter or of an activation; "" for others and what the compiler's text does not tell.
      is_stack: whether a loop stacks it.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    name: str
    kind: Kind
    place: Place
    instruction: str
    source: str
    module: str
    parameter: int | None
    padding_bytes: int
    role: Role = ""
    is_stack: bool = False


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop in the schedule: its body is the steps from `start` to before `end`.

    Attributes:
      start, end: positions in the schedule, which lists a body once.
      trip_count: how often it runs, None if unknown.
      name: scopes and direction, such as "Encoder" or "Encoder (backward)"; may be empty.
    """

    start: int
    end: int
    trip_count: int | None
    name: str


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Live bytes in device memory along the schedule.

    Attributes:
      steps: positions in the schedule, ascending, beginning with 0.
      bytes: what is live from each of them on.
      loops: outer ones before inner ones.
      peak_step: the first position at which most is live.
      peak_instruction: the instruction there.
      length: number of positions in all.
    """

    steps: tuple[int, ...]
    bytes: tuple[int, ...]
    loops: tuple[Loop, ...]
    peak_step: int
    peak_instruction: str
    length: int


# ---------------------------------------------------------------- types of the texts


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """A value and its place: instruction and index into its tuple, offset and size in bytes."""

    name: str
    index: tuple[int, ...]
    size: int
    offset: int
    shape: str


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A piece of memory, as the compiler's text lists it.

    Attributes:
      color: the memory space; 0 is device memory.
      parameter: number of the argument that it is, else None.
      persistent: whether it lives for the whole program: an argument, a result or a constant.
    """

    number: int
    size: int
    color: int
    parameter: int | None
    constant: bool
    thread_local: bool
    live_out: bool
    values: tuple[Value, ...]

    @property
    def persistent(self) -> bool:
        return self.parameter is not None or self.constant or self.live_out


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of instructions, and the first and the last step at which each value is live.

    The body of a loop is listed once, before the loop.
    """

    order: tuple[str, ...]
    ranges: dict[tuple[str, tuple[int, ...]], tuple[int, int]]


# ---------------------------------------------------------------- API


def allocations(text: str) -> tuple[Allocation, ...]:
    """Read a buffer assignment.

    Raises:
      ValueError: there is no allocation in it.

    >>> text = '''BufferAssignment:
    ... allocation 0: size 32, parameter 0, shape |f32[8]| at ShapeIndex {}, maybe-live-out:
    ...  value: <1 x.1 @0> (size=32,offset=0): f32[8]{0}
    ... allocation 1: size 64, color 1, preallocated-temp:
    ...  value: <2 fusion{1} @1> (size=16,offset=8): f32[4]{0:S(1)}'''
    >>> first, second = allocations(text)
    >>> first.parameter, first.live_out, second.color, second.values[0].index
    (0, True, 1, (1,))
    """
    found: list[Allocation] = []
    head: re.Match[str] | None = None
    values: list[Value] = []

    def close() -> None:
        if head is not None:
            found.append(_allocation(head, tuple(values)))

    for line in text.splitlines():
        if line.startswith(" value:"):
            if match := _VALUE.match(line):
                name, index, size, offset, shape = match.groups()
                values.append(Value(name, _index(index), int(size), int(offset), shape))
        elif match := _ALLOCATION.match(line):
            close()
            head, values = match, []
    close()
    if not found:
        raise ValueError(
            "no allocation in the compiler's buffer assignment; is it the text of a dump "
            "(*-buffer-assignment.txt), and of a compiler that this version of jaxmem knows?"
        )
    return tuple(found)


def schedule(text: str) -> Schedule:
    """Read the live ranges.

    >>> found = schedule('''HloLiveRange (max 2):
    ...   InstructionSequence:
    ...     0:x.1
    ...     1:fusion
    ...   BufferLiveRange:
    ...     x.1{}:0-2
    ...     fusion{1}:1-2''')
    >>> found.order, found.ranges["fusion", (1,)]
    (('x.1', 'fusion'), (1, 2))
    """
    body, _, _ = text.partition("\n  Live ranges at ")
    sequence, _, ranges = body.partition("\n  BufferLiveRange:")
    order = tuple(match[1] for match in _STEP.finditer(sequence))
    live = {
        (match[1], _index(match[2])): (int(match[3]), int(match[4]))
        for match in _RANGE.finditer(ranges)
    }
    return Schedule(order, live)


def place(color: int, tpu: bool) -> Place:
    """The place of a memory space; on a TPU all except device and host memory are on the chip.

    >>> place(0, True), place(1, True), place(5, True), place(1, False)
    ('device', 'on-chip', 'host', 'device')
    """
    if color == _HOST:
        return "host"
    # On a GPU colors are pools of the same memory, such as that of collectives.
    return "on-chip" if tpu and color else "device"


# ---------------------------------------------------------------- implementation

_HOST = 5
_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*)$")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_COLOR = re.compile(r"\bcolor (\d+)")
_PARAMETER = re.compile(r"\bparameter (\d+)")
_STEP = re.compile(r"^    \d+:(.+)$", re.MULTILINE)
_RANGE = re.compile(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)


def _index(text: str | None) -> tuple[int, ...]:
    digits = (text or "").strip("{}")
    return tuple(map(int, digits.split(","))) if digits else ()


def _allocation(head: re.Match[str], values: tuple[Value, ...]) -> Allocation:
    number, size, rest = head.groups()
    # The text between bars is a shape, which can be long.
    before, _, shape = rest.partition("|")
    words = before + shape.rpartition("|")[2]
    color, parameter = _COLOR.search(before), _PARAMETER.search(before)
    return Allocation(
        number=int(number),
        size=int(size),
        color=int(color[1]) if color else 0,
        parameter=int(parameter[1]) if parameter else None,
        constant="constant" in words,
        thread_local="thread-local" in words,
        live_out="maybe-live-out" in words,
        values=values,
    )
