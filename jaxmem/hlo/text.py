"""Optimized HLO text, as `compiled.as_text()` prints it, as plain data.

Parsing is lazy: an instruction keeps its attributes as text until one is read, so
that megabytes take a fraction of a second.  The syntax read here is the same on
every backend and in jax 0.10 to 0.12; `loops`, `flops`, `values` and `naming`
interpret it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from jaxmem.hlo.shapes import Shape, element, shape

# ---------------------------------------------------------------- types


class Instruction:
    """One line of HLO.

    Attributes:
      name: unique in the module, without the percent sign.
      opcode: such as "dot" or "get-tuple-element".
      root: whether it is what its computation returns.
      inside: the text in its parentheses.
      attributes: the rest of the line.
    """

    __slots__ = ("_op_name", "_shape", "attributes", "inside", "name", "opcode", "root")

    def __init__(self, root: str | None, name: str, shape: str, opcode: str, rest: str) -> None:
        self.root, self.name, self.opcode, self._shape = root is not None, name, opcode, shape
        end = _closing(rest)
        self.inside, self.attributes = rest[:end], rest[end + 1 :]
        self._op_name: str | None = None

    @property
    def shape(self) -> Shape:
        return shape(self._shape)

    @property
    def layout(self) -> str:
        """The text of its shape, with the order of its dimensions in memory and its tiles."""
        return self._shape

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return _NAME.findall(self.inside)

    def called(self, attribute: str) -> list[str]:
        """Names of the computations under an attribute: "calls", "body", "branch_computations"."""
        match = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[^\s,]+)", self.attributes)
        return _NAME.findall(match[1]) if match else []

    def all_called(self) -> list[str]:
        """Names of all computations it calls, in the order of the text."""
        return [name for part in _CALLED.findall(self.attributes) for name in _NAME.findall(part)]

    @property
    def op_name(self) -> str:
        """The operation it comes from in jax, such as "jit(step)/Dense_0/dot_general"."""
        name = self._op_name
        if name is None:  # it is read again and again
            match = _OP_NAME.search(self.attributes)
            name = match[1] if match else ""
            self._op_name = name = _ESCAPED.sub(r"\1", name) if "\\" in name else name
        return name

    @property
    def number(self) -> int:
        """Position of a parameter, or index of a get-tuple-element."""
        if self.opcode == "parameter":
            return int(self.inside)
        match = re.search(r"\bindex=(\d+)", self.attributes)
        return int(match[1]) if match else 0

    @property
    def target(self) -> str:
        """The target of a custom call."""
        match = re.search(r'\bcustom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def __repr__(self) -> str:
        return f"<Instruction {self.name} = {self._shape} {self.opcode}({self.inside})>"


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in the order of the text, which in optimized HLO is the schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @property
    def root(self) -> Instruction:
        return next((i for i in reversed(self.instructions) if i.root), self.instructions[-1])

    def parameter(self, number: int) -> Instruction | None:
        found = (i for i in self.instructions if i.opcode == "parameter" and i.number == number)
        return next(found, None)


@dataclasses.dataclass(frozen=True)
class Frame:
    """One line of a Python stack; `parent` is the calling frame, None for the outermost."""

    file: str
    line: int
    function: str
    parent: int | None


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the name of the entry computation.
      instructions: of all computations, by name.
      home: the name of the computation that an instruction is in, by its name.
      frames: stack frames by number.
      tiled: whether shapes have tiles, which only those of TPUs have.
      devices: how many it runs on.
    """

    computations: dict[str, Computation]
    entry: str
    instructions: dict[str, Instruction]
    home: dict[str, str]
    frames: dict[int, Frame]
    tiled: bool
    devices: int = 1

    @functools.cached_property
    def callers(self) -> dict[str, list[Instruction]]:
        """The instructions that call a computation, by its name."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            if "=%" in instruction.attributes or "={%" in instruction.attributes:
                for name in instruction.all_called():
                    found.setdefault(name, []).append(instruction)
        return found

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """The instructions that take an instruction's value, and as which operand, by its name."""
        found: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for number, name in enumerate(instruction.operands):
                found.setdefault(name, []).append((instruction, number))
        return found

    def operand(self, instruction: Instruction, number: int = 0) -> Instruction | None:
        """The instruction that computes an operand, None if there is none of that number."""
        names = instruction.operands
        return self.instructions.get(names[number]) if number < len(names) else None

    def body(self, instruction: Instruction, attribute: str = "calls") -> Computation | None:
        """The computation under an attribute."""
        names = instruction.called(attribute)
        return self.computations.get(names[0]) if names else None


# ---------------------------------------------------------------- API


def parse(text: str) -> Module:
    """Read the text of a module.

    Raises:
      ValueError: there is no entry computation in it.

    >>> module = parse('''HloModule jit_f
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0), metadata={op_name="x"}
    ...   ROOT %sin.1 = f32[8]{0} sine(%x), metadata={op_name="jit(f)/sin"}
    ... }''')
    >>> [(i.name, i.opcode, i.operands) for i in module.instructions.values()]
    [('x', 'parameter', []), ('sin.1', 'sine', ['x'])]
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    entry, table = "", None
    name, lines = None, []
    for line in text.splitlines():
        if name is not None:
            if line.startswith("}"):
                computations[name] = Computation(name, tuple(_with_elements(lines)))
                name = None
            elif match := _INSTRUCTION.match(line):
                lines.append(Instruction(*match.groups()))
        elif line.endswith("{") and (match := _HEADER.match(line)):
            name, lines, table = match[2], [], None
            if match[1]:
                entry = name
        elif line in _TABLES:
            table = tables.setdefault(line, [])
        elif table is not None and line:
            table.append(line)
    if entry not in computations:
        raise ValueError(
            "no entry computation in the compiler's program text; is it the complete text of an "
            "HLO module, as compiled.as_text() gives it?"
        )
    found = [(i, c.name) for c in computations.values() for i in c.instructions]
    return Module(
        computations=computations,
        entry=entry,
        instructions={i.name: i for i, _ in found},
        home={i.name: home for i, home in found},
        frames=_frames(tables),
        tiled=any(":T(" in i._shape for i in computations[entry].instructions),
        devices=_devices(text),
    )


# ---------------------------------------------------------------- implementation


def _devices(text: str) -> int:
    """Partitions of the program times copies of it, as its first line says."""
    start = text.find("HloModule ")
    head = text[start : text.find("\n", start)] if start >= 0 else ""
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)
    return math.prod(map(int, counts))


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{$")
# A tuple's shape ends at the first parenthesis that an opcode follows.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_NAME = re.compile(r"%([\w.\-#]+)")
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|branch_computations|true_computation|false_computation"
    r"|called_computations|select|scatter|comparator)=(\{[^}]*\}|%[^\s,]+)"
)
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


def _with_elements(lines: list[Instruction]) -> Iterator[Instruction]:
    """The lines, and behind each a get-tuple-element for what others take of it as "%name#1".

    Texts have both; from jax 0.11 on nearly all are of the short form.
    """
    numbers: dict[str, dict[int, None]] = {}
    for line in lines:
        for name in _NAME.findall(line.inside) if "#" in line.inside else ():
            whole, *path = name.split("#")
            for number in path:
                numbers.setdefault(whole, {})[int(number)] = None
                whole = f"{whole}#{number}"
    # What is put in may be taken from in its turn.
    left = lines[::-1]
    while left:
        line = left.pop()
        yield line
        for number in reversed(numbers.get(line.name, {})):
            rest = f"%{line.name}), index={number}"
            name, kind = f"{line.name}#{number}", element(line.layout, number)
            left.append(Instruction(None, name, kind, "get-tuple-element", rest))


def _closing(rest: str) -> int:
    """The position of the parenthesis that closes the one open at the beginning."""
    end = rest.find(")")
    if rest.find("(", 0, end) < 0:
        return end if end >= 0 else len(rest)
    depth = 1
    for match in re.finditer(r"[()]", rest):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(rest)


def _frames(tables: dict[str, list[str]]) -> dict[int, Frame]:
    def texts(table: str) -> dict[int, str]:
        rows = (line.split(" ", 1) for line in tables.get(table, ()))
        return {int(number): text.strip('"') for number, text in rows}

    def numbers(table: str) -> Iterator[tuple[int, dict[str, int]]]:
        for line in tables.get(table, ()):
            number, fields = line.split(" ", 1)
            yield int(number), {key: int(value) for key, value in _FIELD.findall(fields)}

    files, functions = texts("FileNames"), texts("FunctionNames")
    locations = dict(numbers("FileLocations"))
    found: dict[int, Frame] = {}
    # Parents are counted from one more than frames are: the outermost, frame 1, has
    # "parent 1", and frame 2, called by it, has "parent 2".  A parent is always listed
    # before what it calls, so the first frame tells by how much they are apart.
    apart = None
    for number, fields in numbers("StackFrames"):
        parent = fields.get("parent_frame_id", 0)
        apart = parent if apart is None else apart
        location = locations.get(fields.get("file_location_id", 0), {})
        found[number] = Frame(
            file=files.get(location.get("file_name_id", 0), ""),
            line=location.get("line", 0),
            function=functions.get(location.get("function_name_id", 0), ""),
            parent=parent - apart if parent - apart > 0 else None,
        )
    return found


_FIELD = re.compile(r"(\w+)=(-?\d+)")
