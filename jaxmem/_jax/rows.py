"""Arrays that are to lie in memory row by row, where a compiler chooses the order of axes.

XLA for TPUs gives each array the order that the operations around it ask for.  What goes through a
barrier is read on both sides of it, and where these ask for two orders each barrier that an array
goes through makes a copy of its own.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# An array is stored in tiles of so many columns, and of rows of so many bytes in each of these.
_COLUMN_BYTES, _COLUMNS = 32, 128

rows_p = Primitive("jaxmem_rows")


def row_major(array: Any) -> Any:
    """The same array, in row-major order on TPUs, where that order pads nothing.

    Where it would pad, and on several devices, the compiler has its way: for this constraint its
    partitioner gathers the array first.  So it has in programs that are exported by others than
    jaxmem, which jax would refuse to write: it promises nothing about how constraints are written.
    """
    return rows_p.bind(array) if _fills_tiles(array) else array


@contextlib.contextmanager
def exported_in_rows() -> Iterator[str]:
    """While open, programs are exported with it; gives the name of the call that jax refuses."""
    token = _EXPORTED.set(True)
    try:
        yield "LayoutConstraint"
    finally:
        _EXPORTED.reset(token)


_EXPORTED: ContextVar[bool] = ContextVar("_EXPORTED", default=False)


rows_p.def_impl(lambda array: array)

rows_p.def_abstract_eval(lambda aval: aval)

ad.deflinear2(rows_p, lambda ct, _: [ct])

batching.defvectorized(rows_p)

mlir.register_lowering(rows_p, lambda ctx, operand: [operand])


def _lowered(ctx: mlir.LoweringRuleContext, operand: Any) -> Any:
    array: Any = ctx.avals_in[0]
    module = ctx.module_context
    refused = module.lowering_parameters.for_export and not _EXPORTED.get()
    several = getattr(module.axis_context, "num_devices", 0) != 1
    if refused or several or not _fills_tiles(array):
        return [operand]
    layout = Layout(tuple(range(len(array.shape))))
    constrained = mlir.lower_fun(
        lambda value: with_layout_constraint(value, layout), multiple_results=False
    )
    return constrained(ctx, operand)


mlir.register_lowering(rows_p, _lowered, platform="tpu")


def _fills_tiles(array: Any) -> bool:
    if len(array.shape) < 2 or not isinstance(array.dtype, np.dtype):  # of keys that is their own
        return False
    rows, columns = array.shape[-2:]
    return columns % _COLUMNS == 0 and rows % (_COLUMN_BYTES // array.dtype.itemsize) == 0
