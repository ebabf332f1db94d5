"""The gradient of a max-pooling, for GPUs, from one place for each window.

On GPUs XLA makes it in two kernels.  The first finds, for each window, where its greatest element
is: in every dimension a whole number, and the element, five arrays for images.  The second adds the
gradients there, into zeros; and since all zeros of one shape are the same to XLA, those are made
with what a relu compares with, on the way there, and held until the last pooling of that shape is
reversed.  It may be more than all that is kept of these layers.  Here a place is one number, and
the zeros are made when places are known.

Images and channels may be spread over devices.  Where one image is, the compiler gathers it.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad, batching, mlir

from jaxmem import _jax
from jaxmem.layers.another import another
from jaxmem.trace.layer import nbytes

# ---------------------------------------------------------------- API


def reversed_by_places(eqn: Any, operands: Sequence[Any]) -> list[Any] | None:
    """What an operation makes that pools, to be reversed by places; None for any other."""
    select = _SELECTS.get(eqn.primitive)
    if select is None or not _can_be_placed(eqn):
        return None

    @jax.custom_jvp
    def pooled(x: Any) -> Any:
        return eqn.primitive.bind(x, **eqn.params)

    @pooled.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        tangent = _forward_p.bind(*tangents, *primals, select_prim=select, **eqn.params)
        return pooled(*primals), tangent

    return [pooled(*operands)]


def placing_bytes(eqn: Any) -> tuple[int, int] | None:
    """If a GPU reverses a pooling by this: what it finds first, and what is left of that later.

    First the places and the elements there, with what was pooled in memory; then the places, with
    the gradient that is made.
    """
    if eqn.primitive is not _back_p:
        return None
    windows = eqn.invars[0].aval
    return nbytes(windows) + 4 * windows.size, 4 * windows.size


def operands_pooled(eqn: Any) -> tuple[int, ...]:
    """Which of its operands an operation takes windows of, forward or in its reversal."""
    if (called := _jax.in_call(eqn)) is not None and len(called.jaxpr.eqns) == 1:
        return operands_pooled(called.jaxpr.eqns[0])
    if eqn.primitive is _back_p:
        return (1,)
    return (0,) if eqn.primitive in _POOLINGS else ()


# ---------------------------------------------------------------- implementation

_SELECTS = {primitives.reduce_window_max_p: lax.ge_p, primitives.reduce_window_min_p: lax.le_p}
_POOLINGS = (*_SELECTS, primitives.reduce_window_sum_p)
# jax pads with infinities where there are any.
_WITH_INFINITIES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))
# jax's own linear operations, from tangents and back: what a pooling selects, and where from.
_GATHER, _SCATTER = primitives.select_and_gather_add_p, primitives.select_and_scatter_add_p


def _can_be_placed(eqn: Any) -> bool:
    aval, params = eqn.invars[0].aval, eqn.params
    dilated = any(by != 1 for by in (*params["base_dilation"], *params["window_dilation"]))
    cropped = any(by < 0 for sides in params["padding"] for by in sides)
    how = (params[name] for name in ("window_dimensions", "window_strides", "padding"))
    first, last = _pooled_dims(*how)
    places = math.prod(aval.shape[first:last])
    several = first < last and 0 < places < 2**31 and aval.size > 0
    return several and not dilated and not cropped and aval.dtype in _WITH_INFINITIES


def _pooled_dims(
    sizes: Sequence[int], strides: Sequence[int], padding: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """From which dimension to which a pooling does anything: not over images and channels."""
    each = zip(sizes, strides, padding, strict=True)
    several = [k for k, one in enumerate(each) if one != (1, 1, (0, 0))]
    return (several[0], several[-1] + 1) if several else (0, 0)


# What a pooling does in a dimension in which it does nothing.
_ALONE: dict[str, Any] = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


def _another(name: str, known: Primitive) -> Primitive:
    """An operation that is one of jax in all but its transpose and what it is lowered to."""
    made = another(name, known)
    ad.primitive_transposes[made] = ad.primitive_transposes[known]

    def batched(args: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[Any, int]:
        size = next(arg.shape[k] for arg, k in zip(args, axes, strict=True) if k is not None)
        moved = [
            jnp.broadcast_to(arg, (size, *arg.shape)) if k is None else jnp.moveaxis(arg, k, 0)
            for arg, k in zip(args, axes, strict=True)
        ]
        alone = {name: (_ALONE[name], *params[name]) for name in params if name in _ALONE}
        return made.bind(*moved, **params | alone), 0

    batching.primitive_batchers[made] = batched
    return made


_forward_p = _another("jaxmem_pooled_forward", _GATHER)
_back_p = _another("jaxmem_pooled_back", _SCATTER)


def _pulled_back(ct: Any, tangent: Any, operand: Any, *, select_prim: Any, **how: Any) -> list[Any]:
    if type(ct) is ad.Zero:
        return [ad.Zero(tangent.aval), None]
    del how["base_dilation"], how["window_dilation"]
    return [_back_p.bind(ct, operand, select_prim=select_prim, **how), None]


ad.primitive_transposes[_forward_p] = _pulled_back


# Places that are none.
_PADDED, _NOTHING = -1, -2


def by_places(
    gradient: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> jax.Array:
    """What each window of the operand selects has the window's gradient added."""
    first, last = _pooled_dims(window_dimensions, window_strides, padding)
    # Images stay apart, and channels: they may be spread over devices.
    place = jnp.zeros(operand.shape, jnp.int32)
    for k in range(first, last):
        place = place * operand.shape[k] + lax.broadcasted_iota(jnp.int32, operand.shape, k)

    # As jax has it for GPUs: what is padded may be selected, where nothing is greater.
    least = jnp.asarray(-jnp.inf if select_prim is lax.ge_p else jnp.inf, operand.dtype)
    padded = [(low, high, 0) for low, high in padding]
    elements = lax.pad(operand, least, padded), lax.pad(place, jnp.int32(_PADDED), padded)

    def selected(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        (x, at), (y, there) = one, other
        stays = (there == _NOTHING) | ((at != _NOTHING) & select_prim.bind(x, y))
        return lax.select(stays, x, y), lax.select(stays, at, there)

    nothing = least, jnp.int32(_NOTHING)
    windows = window_dimensions, window_strides, "VALID"
    _, place = lax.reduce_window(elements, nothing, selected, *windows)
    # The zeros are not there before the places are.
    zero, place = lax.optimization_barrier((jnp.zeros((), gradient.dtype), place))

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:first], -1, *x.shape[last:])

    shape = jax.eval_shape(flat, operand).shape
    others = tuple(k for k in range(len(shape)) if k != first)
    found = lax.scatter_add(
        jnp.broadcast_to(zero, shape),
        flat(place)[..., None],
        flat(gradient),
        lax.ScatterDimensionNumbers(
            update_window_dims=(),
            inserted_window_dims=(first,),
            scatter_dims_to_operand_dims=(first,),
            operand_batching_dims=others,
            scatter_indices_batching_dims=others,
        ),
        # Where windows do not meet, no two select the same.
        unique_indices=all(a >= b for a, b in zip(window_strides, window_dimensions, strict=True)),
        mode="drop",
    )
    return found.reshape(operand.shape)


mlir.register_lowering(_back_p, mlir.lower_fun(by_places, multiple_results=False), platform="gpu")
