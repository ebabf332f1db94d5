"""Matmul FLOPs of a compiled program, after all optimizations of the compiler.

Matrix products and convolutions are counted in fusions, in loops (times their trip
counts), in calls of a vendor's library, and as the convolutions into which the TPU
compiler converts all products.  A multiply-add is two operations, of complex numbers
eight.  Convolutions count products with real inputs only, not with padding or with the
holes of a dilation.  A conditional counts as its most expensive branch.  Kernels that
the text does not describe (Pallas) are not counted.
"""

import functools
import json
import math
import re
from collections.abc import Sequence

from jaxmem.hlo.loops import trip_count
from jaxmem.hlo.shapes import Shape
from jaxmem.hlo.text import Instruction, Module

# ---------------------------------------------------------------- API


def matmul_flops(module: Module) -> tuple[int, int, int]:
    """Operations of matrix products and convolutions in one run of the program.

    Returns:
      All of them; those that `jax.checkpoint` recomputes; and how many loops that
      contain them have no known trip count, so that they are counted once.
    """
    known: dict[str, tuple[int, int, int]] = {}

    def of(name: str) -> tuple[int, int, int]:
        if name not in known:
            known[name] = (0, 0, 0)  # HLO has no recursion; a broken text must not hang
            total = (0, 0, 0)
            for instruction in module.computations[name].instructions:
                if instruction.opcode.removesuffix("-start") in _WORTH_A_LOOK:
                    total = _add(total, one(instruction))
            known[name] = total
        return known[name]

    def one(instruction: Instruction) -> tuple[int, int, int]:
        if direct := flops(module, instruction):
            return direct, direct if "rematted_computation" in instruction.op_name else 0, 0
        # Computations of other modules are not in the text.
        called = [of(name) for name in instruction.all_called() if name in module.computations]
        if instruction.opcode == "conditional":
            return max(called, default=(0, 0, 0))
        total = functools.reduce(_add, called, (0, 0, 0))
        if instruction.opcode == "while" and total[0]:
            trips = trip_count(module, instruction)
            if trips is None:
                return total[0], total[1], total[2] + 1
            return total[0] * trips, total[1] * trips, total[2]
        return total

    return of(module.entry)


def flops(module: Module, instruction: Instruction) -> int:
    """Operations of one instruction, 0 if it is neither a product nor a convolution."""
    if instruction.opcode in ("dot", "scaled-dot", "ragged-dot"):
        left = _operand_shape(module, instruction, 0)
        contracted = _numbers(instruction.attributes, "lhs_contracting_dims")
        if instruction.opcode == "ragged-dot" and not set(
            _numbers(instruction.attributes, "lhs_ragged_dims")
        ).isdisjoint(contracted):
            # One product per group, over the group's part of the contracted dimension.
            return _dot(_without_first(instruction.shape), left, contracted)
        return _dot(instruction.shape, left, contracted)
    if instruction.opcode == "convolution":
        left, right = (_operand_shape(module, instruction, k) for k in (0, 1))
        return _convolution(instruction, left, right, instruction.shape)
    if instruction.opcode == "custom-call":
        return _library_call(module, instruction)
    return 0


# ---------------------------------------------------------------- implementation

_WORK = "async call conditional convolution custom-call dot fusion ragged-dot scaled-dot while"
_WORTH_A_LOOK = frozenset(_WORK.split())


def _add(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def _operand_shape(module: Module, instruction: Instruction, number: int) -> Shape:
    operand = module.operand(instruction, number)
    return Shape("token") if operand is None else operand.shape


def _numbers(attributes: str, name: str) -> list[int]:
    match = re.search(rf"\b{name}=\{{([\d,]*)\}}", attributes)
    return [int(n) for n in match[1].split(",") if n] if match else []


def _without_first(shape: Shape) -> Shape:
    return Shape(shape.dtype, shape.dims[1:])


def _dot(out: Shape, left: Shape, contracted: Sequence[int]) -> int:
    length = math.prod(left.dims[d] for d in contracted)
    return 2 * _factor(out) * out.size * length


def _factor(out: Shape) -> int:
    return 4 if out.dtype in ("c64", "c128") else 1


# ---------------------------------------------------------------- convolutions


def _convolution(instruction: Instruction, image: Shape, kernel: Shape, out: Shape) -> int:
    """The multiply-adds of a convolution of `image` with `kernel` that gives `out`, twice."""
    labels = re.search(r"\bdim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0
    image_at, kernel_at, out_at = (
        dict(zip(part, shape.dims, strict=False))
        for part, shape in zip(labels.groups(), (image, kernel, out), strict=True)
    )
    window = _window(instruction.attributes)
    taps = 1
    for d in sorted(label for label in out_at if label.isdigit()):
        stride, low, base, dilation = (
            window[key][int(d)] if key in window else default
            for key, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        )
        taps *= _taps(image_at[d], kernel_at[d], out_at[d], stride, low, base, dilation)
    groups = int(_single(instruction.attributes, "batch_group_count"))
    # The kernel's input features are already those of one group.
    products = kernel_at["i"] * kernel_at["o"] * (image_at["b"] // groups) * taps
    return 2 * _factor(out) * products


def _window(attributes: str) -> dict[str, list[int]]:
    """Size, stride, low padding and dilations along each spatial dimension."""
    match = re.search(r"\bwindow=\{([^}]*)\}", attributes)
    found = {}
    for part in match[1].split() if match else ():
        key, _, values = part.partition("=")
        # Padding is "low_high" in each dimension; the high one follows from the result.
        found[key] = [int(value.split("_")[0]) for value in values.split("x")]
    return found


def _single(attributes: str, name: str, default: str = "1") -> str:
    match = re.search(rf"\b{name}=(\d+)", attributes)
    return match[1] if match else default


@functools.lru_cache(maxsize=4096)
def _taps(
    image: int, kernel: int, out: int, stride: int, low: int, base: int, dilation: int
) -> int:
    """How many pairs of output and kernel positions read a real input, in one dimension.

    Output o and kernel position k read position o·stride + k·dilation - low of an image whose
    elements are `base` apart.  Only the shorter of the two ranges is iterated over.
    """
    if kernel > out:
        kernel, out, stride, dilation = out, kernel, dilation, stride
    shared = math.gcd(stride, base)
    period = base // shared
    inverse = pow(stride // shared, -1, period) if period > 1 else 0
    total = 0
    for k in range(kernel):
        offset = k * dilation - low
        if offset % shared:
            continue  # always in a hole
        # o with 0 <= o·stride + offset <= (image - 1)·base, and a multiple of base
        first = max(-(offset // stride), 0)
        last = min(((image - 1) * base - offset) // stride, out - 1)
        first += (-offset // shared * inverse - first) % period
        if last >= first:
            total += (last - first) // period + 1
    return total


# ---------------------------------------------------------------- libraries


def _library_call(module: Module, call: Instruction) -> int:
    target = call.target
    shapes = [_operand_shape(module, call, k) for k in range(len(call.operands))]
    out = call.shape.elements[0] if call.shape.elements else call.shape
    if target.startswith("__cublas$") or target == "__onednn$matmul":
        numbers = _config(call, "dot_dimension_numbers")
        contracted = [int(d) for d in numbers.get("lhs_contracting_dimensions", ())]
        return _dot(out, shapes[0], contracted) if contracted else 0
    if target.startswith("__cudnn$conv"):
        # The window is that of the forward convolution, also for a gradient.
        roles = {
            "__cudnn$convBackwardInput": (out, shapes[1], shapes[0]),
            "__cudnn$convBackwardFilter": (shapes[0], out, shapes[1]),
        }
        return _convolution(call, *roles.get(target, (shapes[0], shapes[1], out)))
    if target.startswith("__cudnn$fmha"):
        # Scores, then values; in the backward pass two gradients of each, and the scores once more.
        numbers = _config(call, "intermediate_tensor_shape").get("dimensions", ())
        scores = math.prod(int(d) for d in numbers) if numbers else 0
        return (5 if "Backward" in target else 2) * 2 * scores * shapes[0].dims[-1]
    return 0


def _config(call: Instruction, key: str) -> dict:
    """A part of the call's `backend_config`, at any depth."""
    start = call.attributes.find("backend_config=")
    if start < 0:
        return {}
    try:
        config, _ = json.JSONDecoder().raw_decode(call.attributes[start + len("backend_config=") :])
    except json.JSONDecodeError:  # an opaque text: such a call is unknown
        return {}
    parts = [config]
    for part in parts:
        if isinstance(part, dict):
            if isinstance(part.get(key), dict):
                return part[key]
            parts += part.values()
    return {}
