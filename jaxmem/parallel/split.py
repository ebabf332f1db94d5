"""How one array is split over the devices, and how a value is made to lie so inside a step.

What a device holds of an array is its shard.  A gradient that is a sum over devices and asked for
in shards is *reduce-scattered*: the partitioner sees that each device wants a part of the sum
alone.  What lies in shards and is asked for whole is all-gathered.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem.errors import JaxmemWarning, warn

# Numbers of an array that are gathered at once, about, where that goes row by row.
CHUNK = 2**22

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Split:
    """Where an array lies, in shards and whole.

    Attributes:
      mesh: concrete or abstract.
      axes: mesh axes that the shards lie over.
      dim: the dimension that is split; None for an array that stays whole.
      base: how the array is split over other mesh axes, one entry for each dimension.
      known: whether `base` is all there is; else the compiler may split other dimensions over
        other axes of the mesh, as tensor parallelism does.
      reason: why the array stays whole, if it does.
      path: of the array in its tree.
    """

    mesh: Any
    axes: tuple[str, ...]
    dim: int | None
    base: tuple[Any, ...]
    known: bool = True
    reason: str = ""
    path: str = ""

    @property
    def shards(self) -> NamedSharding:
        """Of the array in shards."""
        return NamedSharding(self.mesh, PartitionSpec(*self._entries(is_split=True)))

    @property
    def whole(self) -> NamedSharding:
        """Of the array whole on each of the devices."""
        return NamedSharding(self.mesh, PartitionSpec(*self.base))

    @property
    def is_typed(self) -> bool:
        """Whether types tell how arrays are split, as on axes of type Explicit."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return any(kinds[axis] == AxisType.Explicit for axis in self.axes)

    @property
    def spec(self) -> PartitionSpec:
        """Of the shards inside `jax.shard_map` over `axes` alone."""
        return PartitionSpec(*(self.axes if d == self.dim else None for d in range(len(self.base))))

    def check_rows(self) -> None:
        """Warn of an array that layers read row by row, if its rows are what is split."""
        if self.dim == 0:
            warn(
                f"{self.path} is stacked over layers and split along them, so that a layer's row "
                f"lies on one of {self._devices} devices, and all others wait for it; name another "
                "dimension in dim= of jaxmem.Zero, one that they divide, or keep the array whole "
                "by min_size=",
                JaxmemWarning,
            )

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a shard inside `jax.shard_map`."""
        lengths = list(shape)
        if self.dim is not None:
            lengths[self.dim] //= self._devices
        return tuple(lengths)

    def scattered(self, value: jax.Array) -> jax.Array:
        """A value of the array's shape, or a row of it, in shards."""
        return self._constrained(value, is_split=True)

    def gathered(self, value: jax.Array) -> jax.Array:
        """A value of the array's shape, or a row of it, whole."""
        return self._constrained(value, is_split=False)

    def as_read(self, value: Any) -> Any:
        """What is in shards by its type, or a row of it, as an operation reads it: whole.

        On axes of type Auto it is what it was: types do not tell there.

        Args:
          value: an array or a type.
        """
        aval = jax.typeof(value) if isinstance(value, jax.Array) else value
        if self.dim is None or not self._told_by(aval):
            return value
        first = len(self.base) - len(aval.shape)
        if tuple(aval.sharding.spec) != tuple(self._entries(is_split=True)[first:]):
            return value
        if isinstance(value, jax.Array):
            return self.gathered(value)
        whole = PartitionSpec(*self.base[first:])
        return aval.update(sharding=NamedSharding(aval.sharding.mesh, whole))

    def as_updated(self, aval: Any) -> Any:
        """The type of a value, as an update of the shards has it."""
        if self.dim is None or not self._told_by(aval):
            return aval
        return aval.update(sharding=NamedSharding(aval.sharding.mesh, self.shards.spec))

    def used(
        self,
        shards: jax.Array,
        others: Sequence[jax.Array] = (),
        tell: Callable[[jax.Array], None] = lambda gradient: None,
    ) -> jax.Array:
        """Shards, gathered for an operation; the gradient of them is reduce-scattered.

        Args:
          others: what the operation reads as well: they are gathered when that is there.
          tell: called with that gradient, in the backward pass.
        """
        return shards if self.dim is None else _used(self, tell, shards, list(others))

    def summed(self, value: jax.Array) -> jax.Array:
        """The sum over devices, in shards; inside `jax.shard_map`, where it has to be said."""
        if self.dim is None:
            return lax.psum(value, self.axes)
        dim = self.dim - (len(self.base) - value.ndim)
        return lax.psum_scatter(value, self.axes, scatter_dimension=dim, tiled=True)

    def written(self, whole: jax.Array, shards: jax.Array) -> jax.Array:
        """Shards gathered into the place of the whole array.

        A compiler gathers along another dimension than the first into a buffer of its own, and
        copies from there.  So it goes by rows where the array is large: the buffer is theirs.
        """
        rows = _rows_at_once(shards.shape) if self.dim else None
        if rows is None:
            return self.gathered(shards)

        def step(whole: jax.Array, index: Any) -> tuple[jax.Array, None]:
            some = self.scattered(lax.dynamic_slice_in_dim(shards, index * rows, rows))
            new = lax.dynamic_update_slice_in_dim(
                whole, self._gathered_in_rows(some), index * rows, 0
            )
            return self.gathered(new), None

        return lax.scan(step, self.gathered(whole), jnp.arange(shards.shape[0] // rows))[0]

    # ------------------------------------------------------------ implementation

    @property
    def _devices(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def _told_by(self, aval: Any) -> bool:
        """Whether a type tells where the array lies."""
        return self.is_typed and not aval.sharding.mesh.empty

    def _gathered_in_rows(self, shards: jax.Array) -> jax.Array:
        """The same as `gathered`, with the shards one after the other until they are copied.

        Else what gathers wants the split dimension first in memory, and so for the whole array.
        """
        dim, known = self.dim, all(entry is None for entry in self.base) and self.known
        if not dim or not known or shards.shape[0] == 1:
            return self.gathered(shards)
        shape = shards.shape
        parts = shards.reshape(*shape[:dim], self._devices, -1, *shape[dim + 1 :])
        parts = jnp.moveaxis(parts, dim, 0)
        first = dataclasses.replace(self, dim=0, base=tuple(None for _ in parts.shape))
        parts = first.gathered(first.scattered(parts))
        return jnp.moveaxis(parts, 0, dim).reshape(shape)

    def _entries(self, is_split: bool) -> list[Any]:
        entries = list(self.base)
        if is_split and self.dim is not None:
            (axis, *more) = self.axes
            entries[self.dim] = self.axes if more else axis
        return entries

    def _constrained(self, value: jax.Array, is_split: bool) -> jax.Array:
        entries = self._entries(is_split)
        if self.dim is None and not self._told_by(jax.typeof(value)):
            return value
        if not (self.known or self.is_typed):
            free = PartitionSpec.UNCONSTRAINED
            entries = [e if d == self.dim else free for d, e in enumerate(entries)]
        first = len(entries) - value.ndim  # a row has one dimension less
        if self.dim is not None and (
            self.dim < first or value.shape[self.dim - first] % self._devices
        ):
            return value  # a row of what is split along its rows
        place = NamedSharding(self.mesh, PartitionSpec(*entries[first:]))
        if self.is_typed:
            return jax.sharding.reshard(value, place)
        return lax.with_sharding_constraint(value, place)


# ---------------------------------------------------------------- implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _used(
    split: Split, tell: Callable[[jax.Array], None], shards: jax.Array, others: list[jax.Array]
) -> jax.Array:
    if others:
        shards, *_ = lax.optimization_barrier((shards, *others))
    return split.gathered(split.scattered(shards))


def _forward(split: Split, tell: Any, shards: jax.Array, others: list[jax.Array]) -> Any:
    return _used(split, tell, shards, others), None


def _backward(split: Split, tell: Any, _: Any, gradient: jax.Array) -> Any:
    own = split.scattered(gradient)
    tell(own)
    return own, None


_used.defvjp(_forward, _backward)


def _rows_at_once(shape: tuple[int, ...]) -> int | None:
    """How many rows go at once: a divisor of their number; None for all of them."""
    size = math.prod(shape)
    if len(shape) < 2 or size <= CHUNK:
        return None
    most = max(1, CHUNK // (size // shape[0]))
    return next(rows for rows in range(min(most, shape[0]), 0, -1) if shape[0] % rows == 0)
