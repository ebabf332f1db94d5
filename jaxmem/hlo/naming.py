"""Names for the values of a compiled program, in terms of the user's code.

A compiler's buffer is called "loop_dynamic_update_slice_fusion.4".  A reader
wants "tanh, model.py:12 (body), in Encoder/Block_0": the operation whose result
it holds.  For the stacks that loops fill, that is the operation whose result is
*written*, so a value is followed back through in-place updates, fusions, loop carries,
conversions and copies to the instruction that computed it.
"""

import dataclasses
import functools
import os
import re
import sysconfig
from typing import Literal

from jaxmem.hlo.text import Frame, Instruction, Module
from jaxmem.hlo.values import Value, update_of, way

# ---------------------------------------------------------------- types

# Where in a gradient's computation; "" for what is in none, or where the compiler does not say.
Phase = Literal["", "forward", "backward", "recomputed"]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The name and source of a value.

    Attributes:
      name: of the operation, such as "tanh"; of an argument, jax's name of it.
      source: the user's line, as "file.py:12 (function)"; empty if unknown.
      module: the scopes around it, such as "Encoder/Block_0"; empty if there are none.
      parameter: the number of the argument that it is, or is a copy of; else None.
      rank: how informative this is: 3 for values stacked by a loop, 2 for a computed
        value, 1 for an argument, 0 for an uninitialised or zero buffer to be overwritten.
      phase: in which it is computed or, if a loop stacks it, stacked.
      is_slice: whether it is a part, copied out, of what has this origin.
    """

    name: str
    source: str
    module: str
    parameter: int | None
    rank: int
    phase: Phase = ""
    is_slice: bool = False


# ---------------------------------------------------------------- API


def origin(module: Module, name: str, index: tuple[int, ...] = ()) -> Origin:
    """The origin of an instruction's value, or of the part of it at an index.

    Args:
      name: of the instruction.
      index: into its tuple, such as (1,).
    """
    instruction = module.instructions.get(name)
    if instruction is None:
        return Origin(name, "", "", None, 0)
    back, stacked = steps_back(module, (instruction, index))
    made = back[-1][0]
    sliced = _is_slice(back)
    if made.opcode == "parameter" and module.home[made.name] == module.entry:
        name, rank = made.op_name or made.name, 3 if stacked else 1
        return Origin(name, "", "", made.number, rank, _phase_of_stack(back), sliced)
    # The instruction that computes the value says most; if it has no op_name, its consumers do.
    known = [one for one, _ in reversed(back) if one.op_name]
    # Where several products are computed as one, the slice says which this is.
    parts = (one for one in known if one.opcode == "slice")
    part = next((o for o in parts if operation(o.op_name, plain=True) in _PRODUCTS.values()), None)
    named = part or (known[0] if known else made)
    text = named.op_name
    if made.opcode in _PRODUCTS and operation(text, plain=True) in DULL:
        # The compiler merged the operation that jax names it after into the product.
        text = f"{text.rpartition('/')[0]}/{_PRODUCTS[made.opcode]}"
    rank = 0 if made.opcode in _ROOM or made.target == "AllocateBuffer" else 3 if stacked else 2
    return Origin(
        name=operation(text) if _ends_with_operation(text) else made.target or made.opcode,
        source=source(module, named),
        module=scopes(text),
        parameter=None,
        rank=rank,
        phase=phase(text),
        is_slice=sliced,
    )


def phase(op_name: str) -> Phase:
    """In which part of a gradient's computation an operation is.

    >>> phase("jit(step)/jvp(Encoder)/dot_general"), phase("jit(step)/add")
    ('forward', '')
    >>> phase("jit(step)/transpose(jvp())/while/body/rematted_computation/jvp()/tanh")
    'recomputed'
    """
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


@functools.lru_cache(maxsize=16384)
def operation(op_name: str, plain: bool = False) -> str:
    """The operation at the end of an `op_name`.

    Unless `plain`, it also says if it is in the backward pass or recomputed.

    >>> operation("jit(step)/jvp(Encoder)/Block_0/dot_general")
    'dot_general'
    >>> operation("jit(f)/transpose(jvp())/while/body/closed_call/checkpoint/transpose")
    'transpose (backward)'
    >>> operation("jit(f)/transpose(jvp())/checkpoint/rematted_computation/tanh")
    'tanh (recomputed)'
    """
    parts = _split(op_name)
    if not parts:
        return ""
    last = parts[-1]
    while match := _WRAPPED.fullmatch(last):
        last = match[2] or match[1]
    if plain:
        return last
    if "rematted_computation" in parts:
        return f"{last} (recomputed)"
    return f"{last} (backward)" if "transpose(" in op_name else last


def operation_of(instruction: Instruction) -> str:
    """The operation that an instruction is; the compiler's word where its `op_name` says none."""
    text = instruction.op_name
    if not is_named(instruction):
        return instruction.target or instruction.opcode.removesuffix("-start")
    if instruction.opcode in _SUMMED and operation(text, plain=True) in DULL:
        # The compiler merged the operation that jax names it after into the product, or it is the
        # sum of a product's parts.
        text = f"{text.rpartition('/')[0]}/{_SUMMED[instruction.opcode]}"
    return operation(text)


def is_named(instruction: Instruction) -> bool:
    """Whether an operation of the user is known that an instruction is, or is a part of."""
    # An argument's name has no slash, unless in a key.
    return "/" in (text := instruction.op_name) and "(" in text and _ends_with_operation(text)


@functools.lru_cache(maxsize=16384)
def scopes(op_name: str) -> str:
    """The readable part of an `op_name`: Flax modules and named scopes, without jax's wrappers.

    >>> scopes("jit(step)/transpose(jvp(Encoder))/while/body/closed_call/Block_0/checkpoint/mul")
    'Encoder/Block_0'
    """
    kept: list[str] = []
    for part in _split(op_name)[:-1]:
        while match := _WRAPPED.fullmatch(part):
            # The name inside jit(...) is a function, inside the others a scope.
            part = "" if match[1] in _FUNCTIONS else match[2]
        words = part in _WORDS or _BRANCH.fullmatch(part) or "->" in part  # an einsum's formula
        if part and not words and part not in kept[-1:]:
            kept.append(part)
    return "/".join(kept)


def source(module: Module, instruction: Instruction) -> str:
    """The innermost line of the user's code that an instruction comes from, "" if unknown."""
    if match := _FRAME.search(instruction.attributes):
        number: int | None = int(match[1])
        seen: set[int] = set()
        while number is not None and number not in seen and (frame := module.frames.get(number)):
            if not in_library(frame.file):
                return _line(frame)
            seen.add(number)
            number = frame.parent
    elif (match := _INLINE.search(instruction.attributes)) and not in_library(match[1]):
        return f"{os.path.basename(match[1])}:{match[2]}"
    return ""


@functools.lru_cache(maxsize=4096)
def in_library(file: str) -> bool:
    """Whether a file belongs to Python, to jaxmem, or to a library of layers.

    >>> in_library("/venv/lib/python3.12/site-packages/flax/linen/linear.py")
    True
    >>> in_library("/venv/lib/python3.12/site-packages/mymodels/block.py")
    False
    """
    path = file.replace("\\", "/")
    if not path or (path.startswith(("<", _OWN, *_STANDARD)) and "-packages/" not in path):
        return True
    return _LIBRARY.search(path) is not None


# ---------------------------------------------------------------- texts


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_INLINE = re.compile(r'\bsource_file="([^"]*)" source_line=(\d+)')
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))).replace("\\", "/") + "/"
_STANDARD = tuple(
    os.path.abspath(sysconfig.get_path(name)).replace("\\", "/") + "/"
    for name in ("stdlib", "platstdlib")
)
# Programs may have been traced by another Python than this one, hence the second line.
_LIBRARY = re.compile(
    r"-packages/(?:jax|jaxlib|flax|optax|equinox|haiku|chex|jaxmem)/"
    r"|/lib/python3\.\d+/(?!(?:site|dist)-packages/)"
)
_WRAPPED = re.compile(r"([\w.\-]+)\((.*)\)")
_FUNCTIONS = frozenset({"jit", "pjit", "pmap", "xla_call"})
_BRANCH = re.compile(r"branch_\d+_fun")
_WORDS = _words(
    """
    body call_exported checkpoint closed_call cond core_call custom_jvp_call custom_lin
    custom_vjp_call custom_vjp_call_jaxpr eval_jaxpr jaxmem_piece jaxmem_policy named pjit remat
    remat2 rematted_computation scan shard_map transpose while
    """
)


def _split(op_name: str) -> list[str]:
    """The parts between slashes; those in parentheses do not count."""
    parts, depth, start = [], 0, 0
    for match in _DIVIDERS.finditer(op_name):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")":
            depth -= 1
        elif depth == 0:
            parts.append(op_name[start : match.start()])
            start = match.end()
    return [part for part in (*parts, op_name[start:]) if part]


_DIVIDERS = re.compile(r"[()/]")


def _line(frame: Frame) -> str:
    function = frame.function.rsplit("<locals>.", 1)[-1]
    return f"{os.path.basename(frame.file)}:{frame.line} ({function})"


# ---------------------------------------------------------------- implementation

_PRODUCTS = {"dot": "dot_general", "convolution": "conv_general_dilated"}
_SUMMED = {**_PRODUCTS, "reduce": "dot_general"}
DULL = ("", "convert_element_type", "reshape", "transpose")
_ROOM = ("after-all", "broadcast", "constant", "iota", "tuple")
_DEEPEST = 16


def steps_back(module: Module, value: Value) -> tuple[list[Value], bool]:
    """The way back to the instruction that computes a value, and whether a loop stacks them."""
    back, stacked = way(module, value), False
    for _ in range(_DEEPEST):
        last, index = back[-1]
        if update := update_of(module, (last, index)):
            # Nested loops write stacks into stacks.
            back += way(module, update)
            stacked = True
        elif last.opcode == "reduce" and operation(last.op_name, plain=True) in DULL:
            # The last part of a product that was split along its contracted dimension.
            operand = module.operand(last)
            if operand is None:
                break
            back += way(module, (operand, ()))
        else:
            break
    return back, stacked


def _is_slice(steps: list[Value]) -> bool:
    """Whether a value is cut out of another, on its way up to the write into a stack."""
    for instruction, _ in steps:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "dynamic-slice":
            return True
        if opcode == "dynamic-update-slice":
            return False
    return False


def _phase_of_stack(steps: list[Value]) -> Phase:
    """The phase of the first write into a stack, "" if there is none."""
    for instruction, _ in steps:
        if instruction.opcode.removesuffix("-start") == "dynamic-update-slice":
            return phase(instruction.op_name)
    return ""


@functools.lru_cache(maxsize=16384)
def _ends_with_operation(op_name: str) -> bool:
    """Whether an `op_name` ends with an operation, not with one of jax's wrappers."""
    last = _split(op_name)[-1:]
    return bool(last) and last[0] not in _WORDS - {"transpose"} and "(" not in last[0]
