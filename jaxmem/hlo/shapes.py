"""Types of values in HLO: arrays, tuples of them, and where they are in memory."""

import dataclasses
import functools
import math
import re

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Type of a value: an array, or a tuple of them.

    Attributes:
      dtype: in HLO's notation, such as "bf16" or "pred"; "tuple" for a tuple.
      dims: lengths of the dimensions.
      space: number of the memory space, 0 being device memory.
      elements: of a tuple, else None.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    space: int = 0
    elements: "tuple[Shape, ...] | None" = None

    @property
    def size(self) -> int:
        """Number of elements of an array."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of its elements without padding, summed over a tuple."""
        if self.elements is not None:
            return sum(element.bytes for element in self.elements)
        return -(-self.size * bits(self.dtype) // 8)

    def at(self, index: tuple[int, ...]) -> "Shape":
        """The part of a nested tuple that an index such as (1, 0) names."""
        shape = self
        for k in index:
            shape = (shape.elements or ())[k]
        return shape


# ---------------------------------------------------------------- API


@functools.lru_cache(maxsize=8192)
def shape(text: str) -> Shape:
    """Read a shape.

    >>> shape("bf16[24,1024,512]{2,1,0:T(8,128)(2,1)S(1)}")
    Shape(dtype='bf16', dims=(24, 1024, 512), space=1, elements=None)
    >>> [part.dtype for part in shape("(f32[], (s32[2]{0}))").elements]
    ['f32', 'tuple']
    """
    stack: list[list[Shape]] = [[]]
    for match in _SHAPE.finditer(text):
        if match[0] == "(":
            stack.append([])
        elif match[0] == ")":
            elements = tuple(stack.pop())
            stack[-1].append(Shape("tuple", elements=elements))
        else:
            dims = tuple(int(d.lstrip("<=")) for d in match[2].split(",") if d)
            space = _SPACE.search(match[3] or "")
            stack[-1].append(Shape(match[1], dims, int(space[1]) if space else 0))
    return stack[0][0] if stack[0] else Shape("token")


def element(text: str, number: int) -> str:
    """The text of an element of a tuple.

    >>> element("((f32[2]{0}, s32[]), /*index=1*/bf16[8,4]{1,0:T(8,128)(2,1)S(1)}, u32[])", 1)
    'bf16[8,4]{1,0:T(8,128)(2,1)S(1)}'
    >>> element("((f32[2]{0}, s32[]), u32[])", 0)
    '(f32[2]{0}, s32[])'
    """
    depth, start = 0, 1
    for match in _BRACKET_OR_COMMA.finditer(text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        if (match[0] == "," and depth == 1) or depth == 0:
            if number == 0:
                return text[start : match.start()].rpartition("*/")[2].strip()
            number, start = number - 1, match.end()
    raise IndexError(f"no such element in {text}")


@functools.cache
def bits(dtype: str) -> int:
    """Bits of one element in memory.

    >>> bits("bf16"), bits("pred"), bits("s4"), bits("f8e4m3fn"), bits("c64"), bits("token")
    (16, 8, 4, 8, 64, 0)
    """
    if dtype == "pred":
        return 8
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match[1]) if match else 0


# ---------------------------------------------------------------- implementation

_SHAPE = re.compile(r"[()]|([a-z][a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_BRACKET_OR_COMMA = re.compile(r"[()\[\]{},]")
_SPACE = re.compile(r"S\((\d+)\)")
