"""Gradients that are held in shards over the devices, as ZeRO has them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxmem.accumulate import devices
from jaxmem.accumulate.trees import leaf_names
from jaxmem.parallel.split import Split
from jaxmem.parallel.zero import Zero

# ---------------------------------------------------------------- types

# Who sums gradients over the devices: the partitioner, or, inside `jax.shard_map`, we: each as it
# comes, or all of them after the last microbatch.
Sums = Literal["by the partitioner", "each", "at the end"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["split", "sums", "gathers", "is_zero"],
)
@dataclasses.dataclass(frozen=True)
class Shards:
    """What a parameter's gradient is added to, or rows of that.

    Attributes:
      array: in shards, unless it is summed at the end.
      split: how it is split.
      sums: when gradients are summed over the devices.
      gathers: whether the parameter is split as well, and gathered where it is used.
      is_zero: whether nothing has been added yet, and this is the only microbatch.
    """

    array: Any
    split: Split
    sums: Sums = "by the partitioner"
    gathers: bool = False
    is_zero: bool = False

    def placed(self, array: jax.Array) -> jax.Array:
        """A value of the array's shape, or a row of it, where it belongs."""
        return self.split.scattered(array) if self.sums == "by the partitioner" else array

    def added(self, add: Callable[..., Any], gradient: jax.Array, factor: Any) -> "Shards":
        """With a gradient added, which is reduce-scattered for it."""
        gradient = self.split.summed(gradient) if self.sums == "each" else self.placed(gradient)
        return dataclasses.replace(self, array=self.placed(add(self.array, gradient, factor)))

    def total(self) -> jax.Array:
        """The sum over devices, in shards."""
        return self.split.summed(self.array) if self.sums == "at the end" else self.array


# ---------------------------------------------------------------- API


def checked(name: str, zero: Any, batch_sharding: Any = None) -> Zero | None:
    """The option `zero=` of the function of that name.

    Raises:
      TypeError: it is something else.
      ValueError: it is a stage that `batch_sharding` leaves no room for.
    """
    if not (zero is None or isinstance(zero, Zero)):
        raise TypeError(
            f"zero= of {name} takes a jaxmem.Zero, got {zero!r}; pass jaxmem.Zero(2, mesh=mesh)"
        )
    if zero is not None and zero.stage > 2 and batch_sharding is not None:
        raise ValueError(
            "with batch_sharding each device holds its parameters whole, and stage 3 of ZeRO "
            "splits them; leave batch_sharding= out, or pass stage 2"
        )
    return zero


def path_of(name: str) -> str:
    """The path of a parameter in its tree, from what errors call it: "params/layers/up"."""
    return name.partition("/")[2].removesuffix("/value") or "the value itself"


def splits_of(zero: Zero | None, names: Sequence[str], leaves: Sequence[Any]) -> list[Split] | None:
    """How the gradients of parameters are split, by their names in errors; None for not at all."""
    if zero is None or not zero.stage:
        return None
    return [zero.split(path_of(name), leaf) for name, leaf in zip(names, leaves, strict=True)]


def as_read(zero: Zero | None, name: str, leaf: Any) -> Any:
    """A parameter, by its name in errors, or its type, as a function reads it that is traced.

    In stage 3 it is gathered for that.
    """
    if zero is None or zero.stage < 3:
        return leaf
    return zero.split(path_of(name), leaf).as_read(leaf)


def scattered(zero: Zero | None, gradients: Any) -> Any:
    """A tree of gradients, or of what is like them, in shards."""
    if zero is None or not zero.stage:
        return gradients
    leaves, tree = jax.tree.flatten(gradients)
    splits = [
        zero.split(name, leaf) for name, leaf in zip(leaf_names(gradients), leaves, strict=True)
    ]
    return tree.unflatten(
        [split.scattered(leaf) for split, leaf in zip(splits, leaves, strict=True)]
    )


def begun(
    zero: Zero | None,
    names: Sequence[str],
    leaves: Sequence[Any],
    zeros: Sequence[jax.Array],
    axes: Sequence[str],
) -> list[Any]:
    """The zeros that gradients are added to, each where it belongs.

    Args:
      axes: mesh axes over which the rows of the batch lie, inside `jax.shard_map`.

    Raises:
      ValueError: ZeRO splits over other axes than these.
    """
    splits = splits_of(zero, names, leaves)
    if splits is None or zero is None:
        return list(zeros)
    if not axes:
        return [
            Shards(split.scattered(array), split, gathers=zero.stage > 2)
            for array, split in zip(zeros, splits, strict=True)
        ]
    _check_axes(zero, axes)
    if zero.stage == 1:
        return [
            Shards(array, split, "at the end") for array, split in zip(zeros, splits, strict=True)
        ]
    return [
        Shards(jnp.zeros(split.local(array.shape), array.dtype), split, "each")
        for array, split in zip(zeros, splits, strict=True)
    ]


def specs(
    zero: Zero | None, names: Sequence[str], leaves: Sequence[Any], axes: Sequence[str]
) -> Any:
    """Where gradients come out of `jax.shard_map` over these axes.

    Raises:
      ValueError: ZeRO splits over others.
    """
    _check_axes(zero, axes)
    splits = splits_of(zero, names, leaves)
    return PartitionSpec() if splits is None else [split.spec for split in splits]


def only_once(held: Any, flag: bool) -> Any:
    """What is held, known to be zeros that are added to once, or not any more."""
    if not isinstance(held, list):
        return held
    return [
        dataclasses.replace(leaf, is_zero=flag) if isinstance(leaf, Shards) else leaf
        for leaf in held
    ]


def after(held: Mapping[Any, Any], values: Sequence[jax.Array]) -> dict[Any, Any]:
    """What is held; zeros are made when these values are known.

    Made in advance, they would take their room while the head of a model has its peak.
    """

    def one(leaf: Any) -> Any:
        if not (isinstance(leaf, Shards) and leaf.is_zero and values):
            return leaf
        zero, *_ = lax.optimization_barrier((jnp.zeros((), leaf.array.dtype), *values))
        array = leaf.placed(jnp.broadcast_to(zero, leaf.array.shape))
        return dataclasses.replace(leaf, array=array)

    return {key: one(leaf) for key, leaf in held.items()}


def check_rows(held: Mapping[int, Any]) -> None:
    """Warn of arrays that layers read row by row, if their rows are what is split."""
    for leaf in held.values():
        if isinstance(leaf, Shards):
            leaf.split.check_rows()


def gathered(held: Mapping[int, Any]) -> dict[int, Split]:
    """How parameters are split that have to be gathered where they are read."""
    return {
        key: leaf.split for key, leaf in held.items() if isinstance(leaf, Shards) and leaf.gathers
    }


def finished(
    divided: Callable[..., Any], held: Sequence[Any], divisor: Any, axes: Sequence[str]
) -> list[jax.Array]:
    """Sums over devices, divided, and as arrays."""
    plain = devices.summed([leaf for leaf in held if not isinstance(leaf, Shards)], axes)
    others = iter(plain)
    found = []
    for leaf in held:
        if isinstance(leaf, Shards):
            total = leaf.total()
            found.append(leaf.placed(divided(total, divisor, total)))
        else:
            total = next(others)
            found.append(divided(total, divisor, total))
    return found


def opened(held: Sequence[Any]) -> list[Any]:
    """The arrays alone."""
    return [leaf.array if isinstance(leaf, Shards) else leaf for leaf in held]


# ---------------------------------------------------------------- implementation


def _check_axes(zero: Zero | None, axes: Sequence[str]) -> None:
    if zero is not None and zero.stage and set(axes) != set(zero.axes):
        raise ValueError(
            f"batch_sharding has the rows over {', '.join(map(repr, axes))}, and zero= splits over "
            f"{', '.join(map(repr, zero.axes))}; pass the same axes to both"
        )
