"""The rows of a batch, dealt out to microbatches.

The rows are dealt like cards: with m microbatches, microbatch j gets the rows
j, j + m, j + 2m, …  A batch whose rows lie over devices in blocks is then cut within
each block, so that each device keeps its own rows and none is moved.

13 rows in 4 microbatches are one of 4 rows and three of 3: two groups, each with
microbatches of one size.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import _jax

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Group:
    """Microbatches of one size, one after another.

    Attributes:
      first: number of the first of these microbatches.
      count: how many there are.
      size: rows in each.
      start: first row of the batch that is theirs.
    """

    first: int
    count: int
    size: int
    start: int


@dataclasses.dataclass(frozen=True)
class Split:
    """How many microbatches of which sizes."""

    rows: int
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, rows: int, microbatches: int) -> "Split":
        """As even as can be, the larger ones first.

        >>> [(group.count, group.size) for group in Split.of(13, 4).groups]
        [(1, 4), (3, 3)]
        """
        size, larger = divmod(rows, microbatches)
        groups, first, start = [], 0, 0
        for count, each in ((larger, size + 1), (microbatches - larger, size)):
            if count:
                groups.append(Group(first, count, each, start))
                first, start = first + count, start + count * each
        return cls(rows, tuple(groups))

    @property
    def microbatches(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def even(self) -> bool:
        return len(self.groups) == 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each microbatch."""
        return tuple(group.size for group in self.groups for _ in range(group.count))

    def dealt(self, rows: jax.Array) -> Iterator[tuple[Group, jax.Array]]:
        """Each group with its rows as an array [size, count, …]."""
        for group in self.groups:
            own = rows
            if not self.even:
                own = jax.lax.slice_in_dim(
                    rows, group.start, group.start + group.count * group.size
                )
            spec = _spec(rows)
            yield (
                group,
                _reshape(
                    own,
                    (group.size, group.count, *rows.shape[1:]),
                    spec and PartitionSpec(spec[0], None, *spec[1:]),
                ),
            )

    def collected(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The other way: from [count, size, …] of each group to the rows in their order."""
        joined = []
        for group, part in zip(self.groups, parts, strict=True):
            rows = jnp.swapaxes(part, 0, 1)
            spec = _spec(rows)
            joined.append(
                _reshape(
                    rows,
                    (group.size * group.count, *rows.shape[2:]),
                    spec and PartitionSpec(spec[0], *spec[2:]),
                )
            )
        return joined[0] if self.even else jnp.concatenate(joined)


def microbatch(dealt: jax.Array, index: Any) -> jax.Array:
    """One microbatch [size, …] of a group's rows."""
    if dealt.shape[1] == 1:
        return jnp.squeeze(dealt, 1)
    return jax.lax.dynamic_index_in_dim(dealt, index, axis=1, keepdims=False)


# ---------------------------------------------------------------- implementation


def _spec(x: jax.Array) -> PartitionSpec | None:
    """How an array lies over a mesh whose axes are explicit in its type; None for any other."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _jax.types_tell(sharding.mesh):
        return None
    spec = sharding.spec
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))


def _reshape(x: jax.Array, shape: Sequence[int], spec: PartitionSpec | None) -> jax.Array:
    if tuple(x.shape) == tuple(shape):
        return x
    if spec is None:
        return x.reshape(shape)
    mesh = jax.typeof(x).sharding.mesh  # which need not be the one that is set
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, spec))
