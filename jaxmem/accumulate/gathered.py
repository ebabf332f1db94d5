"""Layers whose parameters lie in shards over the devices, gathered where a layer reads them.

That is stage 3 of ZeRO.  A partitioner that is only told where arrays lie may as well leave
parameters in shards and split the layer's features over the devices, each of which then computes
with the whole batch.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.parallel.split import Split
from jaxmem.stacked import Form
from jaxmem.stacked.stack import Tangent

# ---------------------------------------------------------------- API


def gathering(tangent: Tangent, splits: Mapping[int, Split]) -> Tangent:
    """The same schedule, which gathers rows of parameters as it reads them, and keeps none.

    Args:
      splits: of the stacked parameters, by their places among the operands.
    """
    if not splits:
        return tangent
    own = {place - tangent.first_x: split for place, split in splits.items()}
    form = tangent.form
    fields = {field.name: getattr(form, field.name) for field in dataclasses.fields(form)}
    return Tangent(_Gathering(**fields, splits=tuple(own.items())), tangent.layer, tangent.plan)


def evaluate(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    splits: Mapping[int, Split],
    special: Callable[[Any, list[Any]], list[Any] | None],
    tell: Callable[[Any], None] = lambda gradient: None,
) -> list[Any]:
    """A function of parameters in shards, each gathered for every operation that reads it.

    So none is whole from where a model reads it first to where it does last, as an embedding that
    is the head as well.  Casts and transposes are made of the shards.

    Args:
      splits: of these parameters, by their number among the arguments.
      special: as for `_jax.evaluate`.
      tell: called in the backward pass with the gradient of each such use.
    """
    own = {closed.jaxpr.invars[number]: split for number, split in splits.items()}

    def gathered(eqn: Any, operands: list[Any]) -> list[Any] | None:
        is_split = [_jax.is_var(atom) and atom in own for atom in eqn.invars]
        if not any(is_split):
            return special(eqn, operands)
        moved = _moved(eqn, own)
        if moved is not None:  # in fewer bytes, perhaps
            own[eqn.outvars[0]] = moved
            return [moved.scattered(*_jax.bound(eqn, *operands))]
        others = [
            value
            for value, flag in zip(operands, is_split, strict=True)
            if not flag and _is_numbers(value)
        ]
        whole = [
            own[atom].used(value, others, tell) if flag else value
            for atom, value, flag in zip(eqn.invars, operands, is_split, strict=True)
        ]
        found = special(eqn, whole)
        return _jax.bound(eqn, *whole) if found is None else found

    return _jax.evaluate(closed, args, gathered if own else special)


# ---------------------------------------------------------------- implementation


def _is_numbers(value: Any) -> bool:
    """Whether it is an array of numbers on the device, and no random key."""
    is_array = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.number)
    return is_array and not _jax.is_on_host(value)


def _moved(eqn: Any, own: Mapping[Any, Split]) -> Split | None:
    """How the result is split of an operation that can be done on shards; None of others."""
    split = own.get(eqn.invars[0]) if len(eqn.invars) == 1 else None
    if split is None or split.dim is None:
        return None
    if eqn.primitive.name == "convert_element_type":
        return split
    if eqn.primitive.name == "transpose":
        order = eqn.params["permutation"]
        base = tuple(split.base[d] for d in order)
        return dataclasses.replace(split, base=base, dim=order.index(split.dim))
    return None


@dataclasses.dataclass(frozen=True)
class _Gathering(Form):
    splits: tuple[tuple[int, Split], ...] = ()

    def at(self, xs: Sequence[Any], step: Any) -> list[Any]:
        rows = self.row(xs, step)
        if len(xs) != self.body.num_x:  # cotangents of results
            return rows
        for number, split in self.splits:
            row = rows[number]
            if row.ndim == len(split.base) - 1:
                rows[number] = split.gathered(split.scattered(row))
        return rows

    def read(self, row: Sequence[Any]) -> list[Any]:
        rows = list(row)
        for number, split in self.splits:
            rows[number] = split.as_read(rows[number])
        return rows
