"""What single operations do to the rows of stacked arrays.

A row is one index of an axis that belongs to layers.  Where an operation computes each row of its
result from the same row of its operands, it can be applied to one row alone, or to some: as it
stands, with an axis of their number in the place of the axis of rows.  The rules here say for
which operations that is so, where the axis goes, and which of their parameters name its size.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.trace.layer import FUSED

# ---------------------------------------------------------------- types


class Mixed(Exception):
    """An operation whose rows are not computed row by row; the message says in what way not."""


# Where the axis of rows is in each operand; None for what has no rows.
Axes = Sequence[int | None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one operation is applied to one row, or to some.

    Attributes:
      out: the axis of rows in its results.
      into: the axis of rows that each operand needs; None for operands used whole.
      sizes: a parameter that names the number of rows, and where in it.
    """

    out: int
    into: tuple[int | None, ...]
    sizes: tuple[str, int] | None = None

    def params(self, eqn: Any, count: int) -> dict[str, Any]:
        """Those parameters that are others for so many rows."""
        if self.sizes is None:
            return {}
        name, axis = self.sizes
        return {name: _with(eqn.params[name], axis, count)}


# ---------------------------------------------------------------- API


def rule(eqn: Any, axes: Axes) -> Rule:
    """How an operation is applied to one row.

    Args:
      eqn: the operation, on whole arrays.
      axes: of operands; at least one is not None.

    Raises:
      Mixed: it is not computed row by row, or no rule is known.
    """
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _elementwise(eqn, axes)
    if name in _RULES:
        return _RULES[name](eqn, axes)
    raise Mixed(f"{name} is not known to work row by row")


def is_known(eqn: Any) -> bool:
    """Whether there is a rule for an operation, for some of its parameters at least."""
    return eqn.primitive.name in ELEMENTWISE or eqn.primitive.name in {"iota", *_RULES}


def for_one(eqn: Any, number: int) -> dict[str, Any]:
    """The parameters of one of `EACH` for one of its operands alone."""
    return {
        name: value[number : number + 1] if isinstance(value, tuple) else value
        for name, value in eqn.params.items()
    }


def reduces_rows(eqn: Any, axes: Axes) -> bool:
    """Whether an operation takes all rows together in a way that can be done one at a time."""
    return eqn.primitive.name in COMBINED and axes[0] in eqn.params["axes"]


def without_rows(eqn: Any, axis: int) -> Rule | None:
    """For an operation of which no operand has rows: how one row of its result is made.

    None if that has to be cut out of the whole.
    """
    name = eqn.primitive.name
    (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
    if out is None:
        return None
    if name == "broadcast_in_dim":
        placed = tuple(eqn.params["broadcast_dimensions"])
        into = placed.index(axis) if axis in placed else None
        if into is not None and eqn.invars[0].aval.shape[into] == 1:
            into = None
        return Rule(axis, (into, *[None] * (len(eqn.invars) - 1)), ("shape", axis))
    if name == "iota" and eqn.params["dimension"] != axis:
        return Rule(axis, (), ("shape", axis))
    if name == "reshard" and _leaves_whole(eqn, axis):
        return Rule(axis, (axis,))
    if name in ELEMENTWISE:
        size = out.aval.shape[axis]
        if any(atom.aval.ndim not in (0, out.aval.ndim) for atom in eqn.invars):
            return None  # numbers are cast to others that take more or fewer bytes
        into = tuple(
            axis if atom.aval.ndim > axis and atom.aval.shape[axis] == size else None
            for atom in eqn.invars
        )
        return Rule(axis, into)
    return None


# Operations on whole arrays that can be done on rows one after the other, and how results of two
# rows are put together.
COMBINED = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}

# Operations that do the same to each of their operands, alone.
EACH = ("optimization_barrier", "device_put")

# fmt: off
ELEMENTWISE = frozenset({
    *FUSED, "add_any", "conj", "device_put", "digamma", "erf_inv", "igamma", "lgamma", "nextafter",
    "population_count", "bitcast_convert_type", "optimization_barrier", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "name",
}) - {
    "broadcast_in_dim", "concatenate", "dynamic_slice", "expand_dims", "iota", "pad", "reshape",
    "rev", "slice", "squeeze", "transpose", "sharding_constraint", "random_wrap", "random_unwrap",
}
# fmt: on

# ---------------------------------------------------------------- implementation


def _elementwise(eqn: Any, axes: Axes) -> Rule:
    found = {axis for axis in axes if axis is not None}
    if len(found) > 1:
        raise Mixed(f"{eqn.primitive.name} takes rows along one axis and rows along another")
    (axis,) = found
    size = next(
        atom.aval.shape[axis] for atom, own in zip(eqn.invars, axes, strict=True) if own is not None
    )
    if any(out.aval.shape[axis : axis + 1] != (size,) for out in eqn.outvars):
        raise Mixed(f"{eqn.primitive.name} makes of the axis of rows another one")
    into = []
    for atom, own in zip(eqn.invars, axes, strict=True):
        shape = getattr(atom.aval, "shape", ())
        whole = own is None and (len(shape) <= axis or shape[axis] != size)
        into.append(None if whole else axis)
    return Rule(axis, tuple(into))


def _broadcast(eqn: Any, axes: Axes) -> Rule:
    axis = _first(eqn, axes)
    out = eqn.params["broadcast_dimensions"][axis]
    shape = eqn.params["shape"]
    if shape[out] != eqn.invars[0].aval.shape[axis]:
        raise Mixed("broadcast_in_dim repeats one row")
    into = (axis, *[None] * (len(axes) - 1))
    return Rule(out, into, ("shape", out))


def _reshape(eqn: Any, axes: Axes) -> Rule:
    axis = _first(eqn, axes)
    before, after = eqn.invars[0].aval.shape, tuple(eqn.params["new_sizes"])
    ahead = math.prod(before[:axis])
    for out, size in enumerate(after):
        if size == before[axis] and math.prod(after[:out]) == ahead:
            break
    else:
        raise Mixed(f"reshape from {before} to {after} joins or splits rows")
    if eqn.params.get("dimensions") is not None:
        raise Mixed("reshape reorders")
    return Rule(out, (axis, *[None] * (len(axes) - 1)), ("new_sizes", out))


def _resharded(eqn: Any, axes: Axes) -> Rule:
    axis = _first(eqn, axes)
    if not _leaves_whole(eqn, axis):
        raise Mixed("reshard splits rows over devices")
    return Rule(axis, (axis,))


def _leaves_whole(eqn: Any, axis: int) -> bool:
    """Whether a reshard splits rows over no devices, so that it can be done to one."""
    spec = eqn.params["dst_sharding"].spec
    return axis >= len(spec) or spec[axis] is None


def _squeeze(eqn: Any, axes: Axes) -> Rule:
    axis = _first(eqn, axes)
    gone = eqn.params["dimensions"]
    if axis in gone:
        raise Mixed("squeeze takes the axis of rows away")
    return Rule(axis - sum(d < axis for d in gone), (axis,))


def _transpose(eqn: Any, axes: Axes) -> Rule:
    axis = _first(eqn, axes)
    return Rule(tuple(eqn.params["permutation"]).index(axis), (axis,))


def _reduced(eqn: Any, axes: Axes) -> Rule:
    axis = _first(eqn, axes)
    gone = eqn.params["axes"]
    if axis in gone:
        raise Mixed(f"{eqn.primitive.name} takes all rows together")
    return Rule(axis - sum(d < axis for d in gone), (axis, *[None] * (len(axes) - 1)))


def _along(key: str) -> Callable[[Any, Axes], Rule]:
    """Of operations that work along one axis, or several, and leave all axes as they are."""

    def along(eqn: Any, axes: Axes) -> Rule:
        found = _elementwise(eqn, axes)
        along = eqn.params[key]
        if found.out in (along if isinstance(along, Sequence) else (along,)):
            raise Mixed(f"{eqn.primitive.name} goes along the axis of rows")
        return found

    return along


def _padded(eqn: Any, axes: Axes) -> Rule:
    axis = _first(eqn, axes)
    if tuple(eqn.params["padding_config"][axis]) != (0, 0, 0):
        raise Mixed("pad adds rows")
    return Rule(axis, (axis, None))


def _sliced(eqn: Any, axes: Axes) -> Rule:
    axis = _first(eqn, axes)
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"]
    size = eqn.invars[0].aval.shape[axis]
    if (start[axis], limit[axis]) != (0, size) or (strides is not None and strides[axis] != 1):
        raise Mixed("slice takes some of the rows")
    return Rule(axis, (axis,), ("limit_indices", axis))


def _product(eqn: Any, axes: Axes) -> Rule:
    contracted, batch = eqn.params["dimension_numbers"]
    out, into = None, ()
    for side, axis in enumerate(axes):
        if axis is None:
            continue
        if axis in contracted[side]:
            raise Mixed("dot_general takes all rows together")
        if axis in batch[side]:
            place = tuple(batch[side]).index(axis)
            into = batch[0][place], batch[1][place]
        else:
            if axes[1 - side] is not None:
                raise Mixed("dot_general takes each row with each other")
            free = [
                d
                for d in range(eqn.invars[side].aval.ndim)
                if d not in batch[side] and d not in contracted[side]
            ]
            place = len(batch[0]) + free.index(axis)
            if side:
                place += eqn.invars[0].aval.ndim - len(batch[0]) - len(contracted[0])
            into = (axis, None) if side == 0 else (None, axis)
        if out is not None and out != place:
            raise Mixed("dot_general takes rows along one axis and rows along another")
        out = place
    assert out is not None
    return Rule(out, into)


def _first(eqn: Any, axes: Axes) -> int:
    """The axis of rows of the first operand, the only one that has any."""
    if axes[0] is None or any(axis is not None for axis in axes[1:]):
        raise Mixed(f"{eqn.primitive.name} reads its sizes from rows")
    return axes[0]


def _with(sizes: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])


_RULES: dict[str, Callable[[Any, Axes], Rule]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "reshard": _resharded,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "pad": _padded,
    "slice": _sliced,
    "dot_general": _product,
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(
        (*COMBINED, "reduce_prod", "reduce_xor", "argmax", "argmin"),
        _reduced,
    ),
}
