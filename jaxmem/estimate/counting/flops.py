"""Floating-point operations of single primitives, from their shapes.

A multiply-add is two operations.  Functions of one number (exp, tanh, erf …) are
one each, as compilers count them, whatever series they are made of.  Operations
on integers, comparisons among them, random bits, and anything that moves or
converts values are none; matrix products are the exception: they count in any
type, so that quantised models have figures.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import numpy as jnp

from jaxmem.estimate.counting.factorisations import FACTORISATIONS
from jaxmem.estimate.counting.primitives import ELEMENTWISE, FREE
from jaxmem.parallel.messages import per_device

# ---------------------------------------------------------------- API


def flops(eqn: Any) -> int | None:
    """Floating-point operations of one equation that is no matrix product; None if unknown."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _elementwise(eqn)
    if name in FREE:
        return 0
    rule = RULES.get(name) or FACTORISATIONS.get(name)
    return None if rule is None else int(rule(eqn))


def matmul_flops(eqn: Any) -> int:
    """Operations of a matrix product, a convolution or fused attention; 0 for anything else.

    Convolutions count the products of real inputs: none with padding or with the
    holes of a dilation.  Attention is counted without discount for masks.
    """
    own = per_device(eqn).matmul_flops
    if own is not None:
        return own * _complex_factor(eqn)
    rule = MATMULS.get(eqn.primitive.name)
    return 0 if rule is None else int(rule(eqn)) * _complex_factor(eqn)


def is_matmul(eqn: Any) -> bool:
    """Whether `matmul_flops` is the whole of what an equation computes."""
    return eqn.primitive.name in MATMULS


# ---------------------------------------------------------------- elementwise


@functools.lru_cache(maxsize=256)
def _weight(dtype: Any, product: bool = False) -> int:
    """Real operations for one on numbers of this type."""
    if jnp.issubdtype(dtype, np.complexfloating):
        return 6 if product else 2
    return 1 if jnp.issubdtype(dtype, np.inexact) else 0


def _elementwise(eqn: Any) -> int:
    # Comparisons, too, count by what they compare: their results are booleans.
    given = eqn.invars[0].aval
    product = eqn.primitive.name == "mul"
    return sum(out.aval.size for out in eqn.outvars if hasattr(out.aval, "size")) * (
        _weight(given.dtype, product) if hasattr(given, "dtype") else 0
    )


def _integer_pow(eqn: Any) -> int:
    power = abs(eqn.params["y"])
    products = max(power.bit_length() - 1, 0) + max(power.bit_count() - 1, 0)
    return (products + (eqn.params["y"] < 0)) * _elementwise(eqn)


def _polynomial(eqn: Any) -> int:
    return 2 * (len(eqn.invars) - 2) * _elementwise(eqn)


# ---------------------------------------------------------------- reductions, sorts, windows


def _of_operand(eqn: Any) -> int:
    """Elements of the first operand, none if they are integers."""
    aval = eqn.invars[0].aval
    return aval.size * _weight(aval.dtype)


def _reduction(eqn: Any) -> int:
    aval, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return max(aval.size - out.size, 0) * _weight(aval.dtype)


def _general_reduction(eqn: Any) -> int:
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    steps = eqn.invars[0].aval.size - eqn.outvars[0].aval.size
    return max(steps, 0) * sum(flops(inner) or 0 for inner in body.eqns)


def _cumulative(eqn: Any) -> int:
    aval = eqn.invars[0].aval
    length = aval.shape[eqn.params["axis"]]
    return aval.size // max(length, 1) * max(length - 1, 0) * _weight(aval.dtype)


def _window(eqn: Any) -> int:
    out = eqn.outvars[0].aval
    steps = max(math.prod(eqn.params["window_dimensions"]) - 1, 0)
    return out.size * steps * _weight(out.dtype)


def _general_window(eqn: Any) -> int:
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    steps = max(math.prod(eqn.params["window_dimensions"]) - 1, 0)
    return eqn.outvars[0].aval.size * steps * sum(flops(inner) or 0 for inner in body.eqns)


def _select_and_scatter(eqn: Any) -> int:
    source = eqn.invars[0].aval
    return source.size * math.prod(eqn.params["window_dimensions"]) * _weight(source.dtype)


def _addition_to_reference(eqn: Any) -> int:
    added = eqn.invars[1].aval
    return added.size * _weight(added.dtype)


def _scatter(eqn: Any) -> int:
    updates = eqn.invars[2].aval
    return updates.size * _weight(updates.dtype)


def _sort(eqn: Any) -> int:
    aval = eqn.invars[0].aval
    length = aval.shape[eqn.params["dimension"]]
    return round(aval.size * math.log2(max(length, 1))) * _weight(aval.dtype)


def _top_k(eqn: Any) -> int:
    return round(_of_operand(eqn) * max(1.0, math.log2(max(eqn.params["k"], 1))))


# ---------------------------------------------------------------- matrix products


def _dot(eqn: Any) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2 * _size(eqn.outvars[0]) * math.prod(shape[d] for d in contracting)


def _ragged_dot(eqn: Any) -> int:
    # Every row belongs to one group: the work is that of a product with one group's matrix.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, rhs_contracting), (_, rhs_batch) = numbers.dot_dimension_numbers
    rhs = eqn.invars[1].aval.shape
    taken = {*rhs_contracting, *rhs_batch, *numbers.rhs_group_dimensions}
    free = math.prod(size for d, size in enumerate(rhs) if d not in taken)
    return 2 * _size(eqn.invars[0]) * free


def _scaled_matmul(eqn: Any) -> int:
    return 2 * _size(eqn.outvars[0]) * eqn.invars[0].aval.shape[-1]


def _convolution(eqn: Any) -> int:
    params, lhs, rhs = eqn.params, eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    numbers, out = params["dimension_numbers"], eqn.outvars[0].aval.shape
    pairs = math.prod(
        _pairs(
            out[numbers.out_spec[d + 2]],
            rhs[numbers.rhs_spec[d + 2]],
            lhs[numbers.lhs_spec[d + 2]],
            params["window_strides"][d],
            params["padding"][d][0],
            params["lhs_dilation"][d],
            params["rhs_dilation"][d],
        )
        for d in range(len(lhs) - 2)
    )
    channels = rhs[numbers.rhs_spec[1]]  # those of one group
    return 2 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * channels * pairs


@functools.lru_cache(maxsize=1024)
def _pairs(out: int, window: int, size: int, stride: int, low: int, hole: int, spread: int) -> int:
    """Pairs of an output position and a window position that meet an input, along one axis.

    Output o and window position k read position p = o·stride + k·spread − low of
    the input with hole − 1 zeros between neighbours, which is an input where
    0 ≤ p ≤ (size − 1)·hole and hole divides p.
    """
    if min(out, window, size) < 1:
        return 0
    offset = np.arange(window, dtype=np.int64) * spread - low
    first = np.maximum(-(offset // stride), 0)  # the least o with p ≥ 0
    last = np.minimum(((size - 1) * hole - offset) // stride, out - 1)
    total = 0
    for residue in range(hole):  # all o of one residue modulo hole are inputs, or none is
        start = first + (residue - first) % hole
        count = np.maximum((last - start) // hole + 1, 0)
        total += int(count[(residue * stride + offset) % hole == 0].sum())
    return total


def _attention(matmuls: int, eqn: Any) -> int:
    """Fused attention as so many products of the size of queries times keys."""
    query, key, value = (eqn.invars[k].aval.shape for k in range(3))
    heads_first = eqn.params["layout"] in (1, "BNTH")
    targets, sources = (query[2], key[2]) if heads_first else (query[1], key[1])
    heads = query[1] if heads_first else query[2]
    depth = query[3] * (matmuls - matmuls // 2) + value[3] * (matmuls // 2)
    return 2 * query[0] * heads * targets * sources * depth


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)


def _complex_factor(eqn: Any) -> int:
    # (a + bi)(c + di): four products and, with the sum over products, four additions.
    return 4 if jnp.issubdtype(eqn.outvars[0].aval.dtype, np.complexfloating) else 1


# ---------------------------------------------------------------- which is which

# Several operations for each element.
_SEVERAL: dict[str, Callable[[Any], int]] = {
    "integer_pow": _integer_pow,
    "one_minus_square": lambda eqn: 3 * _elementwise(eqn),
    "polynomial": _polynomial,
}

# Where each element of the results is made of one of each operand, or is only moved.
OF_ELEMENTS = ELEMENTWISE | FREE | _SEVERAL.keys()

RULES: dict[str, Callable[[Any], int]] = _SEVERAL | {
    "addupdate": _addition_to_reference,
    "approx_top_k": _of_operand,
    "argmax": _reduction,
    "argmin": _reduction,
    "cumlogsumexp": lambda eqn: 4 * _cumulative(eqn),
    "cummax": _cumulative,
    "cummin": _cumulative,
    "cumprod": _cumulative,
    "cumsum": _cumulative,
    "jaxmem_pooled_back": _select_and_scatter,
    "jaxmem_pooled_forward": _window,
    "reduce": _general_reduction,
    "reduce_max": _reduction,
    "reduce_min": _reduction,
    "reduce_prod": _reduction,
    "reduce_sum": _reduction,
    "reduce_window": _general_window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "reduce_window_sum": _window,
    "scatter-add": _scatter,
    "scatter-max": _scatter,
    "scatter-min": _scatter,
    "scatter-mul": _scatter,
    "scatter-sub": _scatter,
    "select_and_gather_add": _window,
    "select_and_scatter_add": _select_and_scatter,
    "sort": _sort,
    "top_k": _top_k,
}

MATMULS: dict[str, Callable[[Any], int]] = {
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "scaled_dot": _dot,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
} | {
    # Forward: queries times keys, weights times values.  Backward: both
    # gradients of each, and queries times keys once more.
    f"dot_product_attention_{fp8}{way}{wrapper}": functools.partial(_attention, matmuls)
    for fp8 in ("", "fp8_")
    for way, matmuls in (("fwd", 2), ("bwd", 5))
    for wrapper in ("", "_wrapper")
}
