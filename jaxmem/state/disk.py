"""`disk_state`: an optimizer whose state is on disk.

ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857) for one device: rows of the state are read
ahead of the update that needs them, and written behind it, while the device computes.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core

from jaxmem import _jax
from jaxmem.accumulate.trees import described, difference, leaf_names
from jaxmem.errors import check_flags, check_positive
from jaxmem.state import created, rows, stored
from jaxmem.state.folder import StateFolder, state_folder
from jaxmem.state.stored import Array, Layout, OnDisk
from jaxmem.state.update import is_as_a_whole
from jaxmem.state.wrapping import check_keep, check_optimizer

# ---------------------------------------------------------------- types


class DiskState(optax.GradientTransformationExtraArgs):
    """What `disk_state` returns: an optax transformation, and a hand on its folder."""

    _folder: StateFolder

    def steps(self) -> tuple[int, ...]:
        """The whole steps that the folder holds, by the number of updates before them."""
        return self._folder.steps()

    def wait(self) -> None:
        """Until all that was written is on the disk."""
        self._folder.wait()

    def close(self) -> None:
        """Wait, and leave the folder to other processes; the end of the process does so, too."""
        self._folder.close()


# ---------------------------------------------------------------- API


def disk_state(
    optimizer: Any,
    folder: str | os.PathLike[str],
    *,
    every: int | None = None,
    memory: int = 2**30,
    min_size: int = 2**20,
    keep: Callable[[str], bool] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> DiskState:
    """The same optimizer with its state on disk, for states that the host's memory cannot hold.

        optimizer = jaxmem.disk_state(optax.adamw(3e-4), "/scratch/run-1", every=100)

    Large arrays of the state are written to a folder by `init`, one after the other.  An update
    reads some rows at a time and writes those of the next step next to them; what was read next
    in the step before is read ahead, and the program does not wait for what it writes.  In
    `jaxmem.value_and_update` this happens in the backward pass, layer by layer.  With
    `jaxmem.quantize_state` inside of it, a quarter of the bytes is read and written.

    In the tree of the state an array on disk is a `jaxmem.OnDisk`, whose only leaf says which
    update wrote it: a checkpoint of parameters and state stores that, and a run goes on from it if
    the folder still holds that step.  An update replaces the step that it was given as soon as the
    next one begins.  So ``hold()`` an array of the state before a checkpoint, which keeps the step
    on the disk, or give in ``every`` the number of steps between checkpoints: multiples of it are
    on the disk before the update is over.  The newest two of each are kept.  To go on, restore the
    checkpoint into what `init` would return, without calling it:

        like = jax.eval_shape(optimizer.init, params)

    A process that is killed at any moment leaves the last whole step, and those that are kept.  The
    disk needs room for two states, and for those.  What ``every`` counts are updates of this
    transformation: inside of `optax.apply_if_finite` they may be fewer than steps.

    Files have checksums.  The folder is used by one process at a time, on one device.  A program
    for an absent accelerator cannot call back; with `offload_state` in the place of this it
    requires the same memory on the device.

    Args:
      optimizer: an optax transformation.
      folder: where the state goes; made if it is not there.
      every: of which multiples updates are kept; None for none.
      memory: bytes of the host's memory for rows that are read ahead and written behind.
      min_size: arrays with fewer numbers stay on the device; each that does not is a file and
        two callbacks at least.
      keep: from the path of an array in the optimizer's state, such as "0/nu/embedding", to whether
        it stays on the device.
      overwrite: whether `init` removes a state that is in the folder.
      progress: whether `init` shows how far it is.

    Returns:
      An optax transformation that can also `wait`, `close` and tell its whole `steps`.  Its state
      is that of `optimizer`, with `OnDisk` in the place of arrays.

    Raises:
      TypeError, ValueError: an option cannot be; at an update: the optimizer changes the form of
        its state.
      jaxmem.StateOnDiskError: at `init`, the folder holds a state, is in use, or its disk is too
        small.  At a step, within the error of jax that ends the program: the disk is full, a file
        is damaged, or the folder does not hold this step, this optimizer or these parameters.

    >>> import jax, jax.numpy as jnp, jaxmem, optax, tempfile
    >>> params = {"w": jnp.ones((64, 512)), "b": jnp.ones(512)}
    >>> folder = tempfile.TemporaryDirectory()
    >>> adam = jaxmem.disk_state(optax.adam(1e-3), folder.name, min_size=4096)
    >>> state = adam.init(params)
    >>> updates, state = jax.jit(adam.update)(params, state, params)
    >>> state[0].nu["w"], state[0].nu["b"].shape, adam.steps()
    (OnDisk(float32[64, 512] after step 1), (512,), (0, 1))
    >>> adam.close(); folder.cleanup()
    """
    check_optimizer("disk_state", optimizer)
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise TypeError(f"folder takes a path, got {described(folder)}")
    check_keep(keep, "stays on the device")
    check_flags(overwrite=overwrite, progress=progress)
    every = None if every is None else check_positive("every", every)
    own = state_folder(folder, every, check_positive("memory", memory))
    kept = _Kept(
        optax.with_extra_args_support(optimizer),
        own,
        check_positive("min_size", min_size),
        keep or (lambda path: False),
        overwrite,
        progress,
    )
    found = DiskState(kept.init, kept.update)
    found._folder = own
    return found


# ---------------------------------------------------------------- implementation


@dataclasses.dataclass(frozen=True)
class _Kept:
    optimizer: Any
    folder: StateFolder
    min_size: int
    keep: Callable[[str], bool]
    overwrite: bool
    progress: bool

    def init(self, params: Any) -> Any:
        if jax.process_count() > 1:
            raise ValueError(
                f"disk_state is for one process, and there are {jax.process_count()}; keep the "
                "state sharded in the devices' memory, or in the hosts' (jaxmem.offload_state)"
            )
        self.folder.overwrite = self.overwrite
        types = created.shapes(self.optimizer.init, params)
        if any(map(stored.is_on_disk, stored.flatten(types)[0])):
            raise ValueError("the state is on disk already: disk_state is inside of disk_state")
        arrays, numbers = self._placed(types)
        layout = Layout(self.folder, arrays)
        tree = jax.tree.structure(types)
        if any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(params)):
            leaves = jax.tree.leaves(self.optimizer.init(jax.tree.map(_jax.on_device, params)))
            mark = jnp.asarray(_NOTHING, jnp.int32)
            empty = [n if n is None else OnDisk(mark, layout, n) for n in numbers]
            return tree.unflatten(
                [
                    leaf if on_disk is None else on_disk.with_rows(leaf, 0).finished()
                    for leaf, on_disk in zip(leaves, empty, strict=True)
                ]
            )
        if arrays:
            self.folder.start(layout)
        found = []
        leaves = created.one_by_one(self.optimizer.init, params)
        with self._bar(layout) as bar:
            for leaf, number in zip(leaves, numbers, strict=True):
                if number is not None:
                    mark: Any = _NOTHING
                    for first, part in _parts(leaf, arrays[number]):
                        mark = self.folder.write(layout, number, mark, first, part)
                        bar.update(part.nbytes)
                    leaf = OnDisk(jnp.asarray(mark), layout, number).finished()
                found.append(leaf)
        return tree.unflatten(found)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if not is_as_a_whole():
            state = created.in_its_form(state, self.init, updates if params is None else params)
        leaves, tree = stored.flatten(state)

        def run(updates: Any, state: Sequence[Any], params: Any, extra: Any) -> tuple[Any, Any]:
            before = tree.unflatten(state)
            found, after = self.optimizer.update(updates, before, params, **extra)
            changed = difference(after, before, ("the state after an update", "that before it"))
            if changed:
                raise ValueError(
                    f"the optimizer changes the form of its state: {changed}; disk_state stores "
                    "arrays in their places, and needs a transformation that keeps them"
                )
            return found, jax.tree.leaves(after)

        if is_as_a_whole():
            if any(map(stored.is_on_disk, leaves)):
                raise ValueError(
                    "disk_state is inside of a wrapper that stores the state itself, such as "
                    "jaxmem.quantize_state; put it around that one"
                )
            found, new = run(updates, leaves, params, extra)
        else:
            found, new = rows.by_rows(run, updates, leaves, params, extra)
        return found, tree.unflatten(new)

    def _placed(self, types: Any) -> tuple[tuple[Array, ...], list[int | None]]:
        """The arrays that go to the disk; of each leaf of the state the number of its array."""
        arrays: list[Array] = []
        numbers: list[int | None] = []
        names = leaf_names(created.without_variables(types))
        for name, leaf in zip(names, jax.tree.leaves(types), strict=True):
            goes = leaf.ndim and math.prod(leaf.shape) >= self.min_size and not self.keep(name)
            numbers.append(len(arrays) if goes else None)
            if goes:
                arrays.append(Array(name, leaf.shape, leaf.dtype.name, _chunk(leaf)))
        return tuple(arrays), numbers

    def _bar(self, layout: Layout) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=layout.bytes,
            unit="B",
            unit_scale=True,
            desc=f"state to {self.folder.path}",
            disable=None if self.progress else True,  # only in a terminal
            leave=False,
        )


# Numbers in a chunk, which is one file: rows of a stack have files of their own, however small
# they are, as they are read one at a time; long rows are cut.
_CHUNK = rows.CHUNK
_NOTHING = (-1, 0, 0)  # the mark of an array of which nothing is written
_STACK = 256  # an array with so many rows is taken for parameters of layers


def _chunk(leaf: Any) -> tuple[int, ...]:
    row = math.prod(leaf.shape[1:])
    if row > _CHUNK and leaf.ndim > 1:
        pieces = -(-row // _CHUNK)
        return (1, -(-leaf.shape[1] // pieces), *leaf.shape[2:])
    count = rows.rows_at_once(leaf.shape) or leaf.shape[0]
    is_stack = leaf.ndim > 2 and leaf.shape[0] <= _STACK
    return (1 if is_stack else min(count, max(1, _CHUNK // row)), *leaf.shape[1:])


def _parts(leaf: Any, array: Array) -> Iterator[tuple[int, np.ndarray]]:
    """Rows of a leaf, as many as its chunks have, in the host's memory."""
    for first in range(0, array.shape[0], array.chunk[0]):
        yield first, np.asarray(leaf[first : first + array.chunk[0]])
