"""Where the arrays of a run live: a mesh with the axes data, fsdp, tensor and stage.

`data` and `fsdp` split the sequences of a batch.  `fsdp` splits parameters and
the optimizer's state as well (ZeRO's third stage, arXiv 1910.02054), `tensor`
splits attention heads and the width of the feed-forward branch (Megatron-LM,
arXiv 1909.08053).  The compiler places the collectives, from these shardings
alone.  `stage` splits the stack of layers, which then is a pipeline (`jaxmem.pipeline`).

Known gap: queries, keys and values come out of one matrix, so a split of its
columns over `tensor` cuts across the three, and the compiler moves them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor", "stage")
EXAMPLE = "data=2,fsdp=2,tensor=1"

# ---------------------------------------------------------------- types


class MeshError(Exception):
    """A mesh that cannot be: fact, cause and remedy, in one line."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many devices lie along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    stage: int = 1

    @property
    def devices(self) -> int:
        return math.prod(dataclasses.astuple(self))

    @property
    def rows(self) -> int:
        """Into how many parts a batch is split."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        shown = AXES if self.stage > 1 else AXES[:-1]
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in shown)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shardings of a run's arrays over its mesh."""

    mesh: Mesh

    @property
    def stages(self) -> int:
        return self.mesh.shape["stage"]

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))

    def of(self, tree: Any, of_devices: NamedSharding | None = None) -> Any:
        """The sharding of each leaf of parameters, or of an optimizer's state for them.

        Args:
          of_devices: of what has a row for each device; by default each has its own.
        """
        sizes = dict(self.mesh.shape)

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
            if not _OF_DEVICES.isdisjoint(names):
                return of_devices or NamedSharding(self.mesh, PartitionSpec("data"))
            return NamedSharding(self.mesh, _split(names, leaf.shape, sizes))

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def rows(self, shape: tuple[int, int], cut: Callable[[slice], np.ndarray]) -> jax.Array:
        """A batch of this shape, of which `cut` gives some rows: asked for this process' alone."""

        def piece(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return cut(slice(*index[0].indices(shape[0])))

        return jax.make_array_from_callback(shape, self.batch, piece)


# ---------------------------------------------------------------- API


def parse(text: str) -> Sizes:
    """The sizes that `data=…,fsdp=…,tensor=…` gives; an axis that is left out has size 1.

    Raises:
      MeshError: it names something else.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise MeshError(
                f"--mesh {text}: {axis!r} is no axis, the model knows how to split itself over "
                f"{', '.join(AXES)} only; pass for example --mesh {EXAMPLE}"
            )
        if axis in found:
            raise MeshError(f"--mesh {text}: {axis} has two sizes; pass one")
        if not size.isdecimal() or int(size) < 1:
            raise MeshError(
                f"--mesh {text}: the size of {axis} is {size!r}, and an axis has at least one "
                f"device; pass for example --mesh {EXAMPLE}"
            )
        found[axis] = int(size)
    return Sizes(**found)


def check_devices(sizes: Sizes, processes: int, devices: int) -> None:
    """Raises `MeshError` if the mesh does not take all devices, which all processes hold."""
    if sizes.devices == devices:
        return
    each = f"{devices} device{'s' * (devices > 1)}"
    if processes > 1:
        each = f"{devices} devices, {devices // processes} in each of {processes} processes"
    raise MeshError(
        f"--mesh {sizes} is for {sizes.devices} devices and there are {each}; pass sizes whose "
        f"product is {devices}, for example --mesh data={devices}, or on CPU "
        f"--processes × --devices-per-process = {sizes.devices}"
    )


def check_model(
    sizes: Sizes, *, batch: int, accum: int, width: int, heads: int, layers: int
) -> None:
    """Raises `MeshError` if a batch or the model cannot be split so."""
    if layers % sizes.stage:
        raise MeshError(
            f"stage={sizes.stage} of --mesh {sizes} does not divide --layers {layers}, of which "
            "each stage holds as many; pass --layers that are a multiple of it, or another stage"
        )
    if batch % (accum * sizes.rows):
        part = "--batch" if accum == 1 else f"a microbatch (--batch {batch} in --accum {accum})"
        size = f"{batch / accum:g}"
        raise MeshError(
            f"{part} has {size} sequences, which data × fsdp = {sizes.rows} devices of --mesh "
            f"{sizes} cannot share equally; pass a --batch that is a multiple of "
            f"{accum * sizes.rows}, or a smaller data or fsdp"
        )
    if heads % sizes.tensor:
        raise MeshError(
            f"tensor={sizes.tensor} of --mesh {sizes} does not divide --heads {heads}, and a head "
            "stays on one device; pass a tensor that divides --heads, or other --heads"
        )
    if width % (sizes.tensor * sizes.fsdp):
        raise MeshError(
            f"fsdp × tensor = {sizes.tensor * sizes.fsdp} of --mesh {sizes} does not divide "
            f"--width {width}, along which parameters are split; pass a --width that is a "
            f"multiple of {sizes.tensor * sizes.fsdp}, or a smaller fsdp or tensor"
        )


@functools.cache
def layout(text: str) -> Layout:
    """Over all devices of all processes; `--mesh` has been checked."""
    sizes = dataclasses.astuple(parse(text))
    auto = (AxisType.Auto,) * len(AXES)
    return Layout(jax.make_mesh(sizes, AXES, axis_types=auto, devices=jax.devices()))


# ---------------------------------------------------------------- implementation

# Fields of an optimizer's state that have a row for each device.
_OF_DEVICES = frozenset({"worker_error", "server_error"})

# Which dimension of a layer's parameters `tensor` splits: columns of the matrices that open a
# branch, rows of those that close it, so that a branch needs one sum over the devices.
_TENSOR = {
    ("qkv", "kernel"): -1,
    ("out", "kernel"): -2,
    ("up", "kernel"): -1,
    ("up", "bias"): -1,
    ("down", "kernel"): -2,
}


def _split(names: list[str], shape: tuple[int, ...], sizes: dict[str, int]) -> PartitionSpec:
    spec: list[str | None] = [None] * len(shape)
    # A stack's first dimension is its layers, which the scan goes through one by one.
    free = list(range("blocks" in names, len(shape)))
    if "blocks" in names and shape and sizes["stage"] > 1:
        spec[0] = "stage"
    tensor = next(
        (dim for pair, dim in _TENSOR.items() if tuple(names[-2:]) == pair and len(free) >= -dim),
        None,
    )
    if tensor is not None and shape[tensor] % sizes["tensor"] == 0:
        spec[tensor] = "tensor"
        free.remove(len(shape) + tensor)
    fitting = [dim for dim in free if shape[dim] and shape[dim] % sizes["fsdp"] == 0]
    if fitting:
        spec[max(fitting, key=lambda dim: shape[dim])] = "fsdp"
    return PartitionSpec(*spec)
