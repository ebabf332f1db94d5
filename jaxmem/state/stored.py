"""Where an array of an optimizer's state is, on the device, on the host or on disk, and its rows.

Rows of arrays on the device and on the host are slices.  Rows of an array on disk are read and
written by callbacks while the program runs; in the program, such an array is the number of the
step that its folder is asked for.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.experimental import io_callback

from jaxmem import _jax

# ---------------------------------------------------------------- types


class Folder(Protocol):
    """What reads and writes rows of the arrays of one state."""

    def read(self, layout: "Layout", number: int, mark: Any, first: int, count: int) -> np.ndarray:
        """Rows of an array."""
        ...

    def write(self, layout: "Layout", number: int, mark: Any, first: int, rows: Any) -> np.ndarray:
        """Rows of an array, as they are to be after the next step; the mark to go on with."""
        ...

    def hold(self, step: int) -> None:
        """Until all that was written is on the disk, of which this step is to stay."""
        ...


@dataclasses.dataclass(frozen=True)
class Array:
    """An array on disk.

    Attributes:
      path: in the state, such as "0/mu/layers/up".
      shape, dtype: of all of it.
      chunk: the shape of what goes into one file.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class Layout:
    """All arrays of a state that are on disk, and the folder that they are in."""

    folder: Folder
    arrays: tuple[Array, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((id(self.folder), self.arrays)))

    def __hash__(self) -> int:  # of many arrays, asked for whenever a state is flattened
        return vars(self)["_hash"]

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)


@jax.tree_util.register_pytree_with_keys_class
class OnDisk:
    """An array of an optimizer's state that `jaxmem.disk_state` keeps in a folder.

    In a tree it has one leaf, which is what a checkpoint stores of it.

    Attributes:
      mark: int32[3]: after how many updates the array is meant; a number that was drawn for the
        update that wrote it, by which it is told from others after as many; and within an update,
        the number of that one, else 0.  In `in_host_memory`, the array.
      step: the first of these.
      shape, dtype: of the array on disk.
    """

    def __init__(self, mark: Any, layout: Layout, number: int, is_in_memory: bool = False) -> None:
        self.mark, self.layout, self.number = mark, layout, number
        self._is_in_memory = is_in_memory

    def __repr__(self) -> str:
        known = isinstance(self.mark, jax.Array) and not isinstance(self.mark, core.Tracer)
        when = f" after step {self.step}" if known and not self._is_in_memory else ""
        return f"OnDisk({self.dtype}{list(self.shape)}{when})"

    @property
    def step(self) -> Any:
        return self.mark[0]

    @property
    def _own(self) -> Array:
        return self.layout.arrays[self.number]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._own.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype(self._own.dtype))

    @property
    def bytes_on_disk(self) -> int:
        return self._own.bytes

    def in_host_memory(self) -> "OnDisk":
        """What stands for the array in a program for an absent accelerator, which cannot call back.

        The device gets the same rows, from an array in host memory.
        """
        mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("device",))
        spec = jax.sharding.PartitionSpec()
        place = jax.sharding.NamedSharding(mesh, spec, memory_kind="pinned_host")
        like = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=place)
        return OnDisk(like, self.layout, self.number, is_in_memory=True)

    def hold(self) -> None:
        """For a checkpoint: wait until the state is on the disk, and keep this step there.

        The newest two steps that were held are kept.

        Raises:
          jaxmem.StateOnDiskError: the step is not there, or could not be written.
        """
        self.layout.folder.hold(int(self.step))

    def rows(self, index: Any, count: int) -> jax.Array:
        """Some rows, read from disk when the program gets there."""
        if self._is_in_memory:
            return _jax.on_device(lax.dynamic_slice_in_dim(self.mark, index, count))
        layout, number = self.layout, self.number

        def read(mark: Any, index: Any) -> np.ndarray:
            return layout.folder.read(layout, number, np.asarray(mark), int(index), count)

        like = jax.ShapeDtypeStruct((count, *self.shape[1:]), self.dtype)
        return io_callback(read, like, self._own_mark(), jnp.int32(index))

    def with_rows(self, rows: Any, index: Any) -> "OnDisk":
        """The array of which some rows of the next step are written."""
        layout, number = self.layout, self.number
        if self._is_in_memory:
            rows = jax.device_put(rows, _jax.HOST)
            new = lax.dynamic_update_slice_in_dim(self.mark, rows, index, 0)
            return OnDisk(new, layout, number, is_in_memory=True)

        def write(mark: Any, index: Any, rows: Any) -> np.ndarray:
            # What reads the next step's rows waits for the result.
            return layout.folder.write(layout, number, np.asarray(mark), int(index), rows)

        like = jax.ShapeDtypeStruct((3,), jnp.int32)
        mark = io_callback(write, like, self._own_mark(), jnp.int32(index), rows)
        return OnDisk(mark, layout, number)

    def finished(self) -> "OnDisk":
        """The array after the step of which all rows are written."""
        if self._is_in_memory:
            return self
        mark = jnp.stack([self.mark[0] + 1, self.mark[2], jnp.int32(0)])
        return OnDisk(mark, self.layout, self.number)

    def _own_mark(self) -> Any:
        if jnp.shape(self.mark) != (3,):
            raise ValueError(
                f"the mark of {self._own.path} on disk has the shape {jnp.shape(self.mark)} and "
                "not (3,): a state on disk is one, and cannot go through jax.vmap"
            )
        return self.mark

    def tree_flatten_with_keys(self) -> tuple[Sequence[Any], Hashable]:
        children, aux = self.tree_flatten()
        return [(jax.tree_util.GetAttrKey("mark"), children[0])], aux

    def tree_flatten(self) -> tuple[Sequence[Any], Hashable]:
        return [self.mark], (self.layout, self.number, self._is_in_memory)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> "OnDisk":
        return cls(children[0], *aux)


# ---------------------------------------------------------------- API


def is_on_disk(node: Any) -> bool:
    """Whether a node of a state is an array on disk."""
    return isinstance(node, OnDisk)


def is_on_host(array: Any) -> bool:
    """Whether an array of a state is in host memory."""
    return not is_on_disk(array) and _jax.is_on_host(array)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Arrays of a state, those on disk as one each, and the tree that they are of."""
    return jax.tree.flatten(tree, is_leaf=is_on_disk)


def typed(array: Any) -> Any:
    """The array, or the type that one on disk has when it is read."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype) if is_on_disk(array) else array


def types(tree: Any) -> Any:
    """A state with `typed` of each array."""
    leaves, form = flatten(tree)
    return form.unflatten(list(map(typed, leaves)))


def rows_of(array: Any, index: Any, count: int) -> jax.Array:
    """Some rows, in the memory where the array is; of one on disk on the device."""
    if is_on_disk(array):
        return array.rows(index, count)
    return lax.dynamic_slice_in_dim(array, index, count)


def with_rows(array: Any, rows: Any, index: Any) -> Any:
    """The array with these rows, in its place."""
    if is_on_disk(array):
        return array.with_rows(rows, index)
    return lax.dynamic_update_slice_in_dim(array, _jax.beside(rows, array), index, 0)


def whole(array: Any) -> Any:
    """The array, of one on disk what is read of it."""
    return array.rows(0, array.shape[0]) if is_on_disk(array) else array


def after_step(before: Any, array: Any) -> Any:
    """What an array becomes in an update, which may have written it by rows."""
    if not is_on_disk(before):
        return array
    written = array if is_on_disk(array) else before.with_rows(array, 0)
    return written.finished()
