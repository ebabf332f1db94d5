"""The gradient of a lookup in a table, added into zeros that are made late.

What is looked up in a table, as of an embedding, has its gradient added into zeros of the table's
size.  They depend on nothing, and in code that is written out XLA for GPUs makes them where the
backward pass begins, and holds them while all layers are reversed.  Here they are made when the
gradient of what was looked up is known: where that is larger than the table, as where images are
resized, when one number of it can be, so that it need not be in memory itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives
from jax.interpreters import ad, batching

from jaxmem import _jax
from jaxmem.layers.another import another
from jaxmem.trace.layer import nbytes

# ---------------------------------------------------------------- API


def reversed_late(eqn: Any, operands: Sequence[Any]) -> list[Any] | None:
    """What a lookup gives, to be reversed into late zeros; None for any other operation."""
    if eqn.primitive is not _GATHER or not _jax.has_tangent(eqn.outvars[0].aval):
        return None

    @jax.custom_jvp
    def looked_up(table: Any, places: Any) -> Any:
        return _GATHER.bind(table, places, **eqn.params)

    @looked_up.defjvp
    def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        # Of what is looked up, estimates know the operation itself.
        out = _GATHER.bind(*primals, **eqn.params)
        return out, _lookup_p.bind(tangents[0], primals[1], **eqn.params)

    return [looked_up(*operands)]


# ---------------------------------------------------------------- implementation

_GATHER = primitives.gather_p


def _batched(args: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[Any, int]:
    return jax.vmap(functools.partial(_GATHER.bind, **params), in_axes=tuple(axes))(*args), 0


# Of tangents: jax's own operation in all but its transpose.
_lookup_p = another("jaxmem_lookup", _GATHER)
batching.primitive_batchers[_lookup_p] = _batched


def _transposed(ct: Any, table: Any, places: Any, **params: Any) -> list[Any]:
    if type(ct) is ad.Zero:
        return [ad.Zero(table.aval), None]
    numbers = params["dimension_numbers"]
    if nbytes(table.aval) > nbytes(jax.typeof(ct)):
        zeros, ct = _jax.zeros_behind(ct)
    else:
        zeros = _jax.zeros_after(ct)
    gradient = lax.scatter_add(
        zeros(table.aval),
        places,
        ct,
        lax.ScatterDimensionNumbers(
            update_window_dims=numbers.offset_dims,
            inserted_window_dims=numbers.collapsed_slice_dims,
            scatter_dims_to_operand_dims=numbers.start_index_map,
            operand_batching_dims=numbers.operand_batching_dims,
            scatter_indices_batching_dims=numbers.start_indices_batching_dims,
        ),
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    return [gradient, None]


ad.primitive_transposes[_lookup_p] = _transposed
