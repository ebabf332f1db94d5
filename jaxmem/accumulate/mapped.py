"""The loop on each device's own rows, with one sum over the devices at its end."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.accumulate.call import Call
from jaxmem.accumulate.loop import Result
from jaxmem.accumulate.objective import Sink


def axes_of(sharding: Any) -> tuple[tuple[str, ...], Any, int]:
    """Mesh axes of the rows, the mesh to map over (None: mapped already), and its devices.

    Raises:
      TypeError: it is no sharding.
      ValueError: it has no axes for the rows, or no mesh.
    """
    if sharding is None:
        return (), None, 1
    if not isinstance(sharding, NamedSharding | PartitionSpec):
        raise TypeError(
            "batch_sharding must be a jax.sharding.NamedSharding or PartitionSpec, got "
            f"{sharding!r}"
        )
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    first = spec[0] if len(spec) else None
    if not isinstance(first, str | tuple) or not first:
        raise ValueError(
            f"batch_sharding={spec} does not say which mesh axes the rows lie on; its first entry "
            'must be one or several, as in PartitionSpec("data")'
        )
    axes = (first,) if isinstance(first, str) else first
    here = jax.sharding.get_abstract_mesh()
    if set(axes) <= set(here.manual_axes):
        return axes, None, 1
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else here
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"batch_sharding names the axis {missing[0]!r}, and the mesh has {tuple(mesh.shape)}; "
            "pass a NamedSharding, or set the mesh with jax.set_mesh"
        )
    return axes, mesh, int(np.prod([mesh.shape[axis] for axis in axes]))


def on_devices(
    go: Callable[[Call, Sink], Result], call: Call, sink: Sink, mesh: Any, axes: tuple[str, ...]
) -> Result:
    """The loop on each device's own rows."""
    paths = [path for path, leaf in call.leaves.items() if isinstance(leaf, jax.Array | np.ndarray)]
    own = set(call.rows)
    rows = PartitionSpec(axes)
    found: list[Any] = []

    def local(arrays: list[Any], begun: Any) -> Any:
        own_call = call.with_leaves(dict(zip(paths, arrays, strict=True)), call.split)
        result = go(own_call, sink.with_arrays(begun))
        leaves, tree = jax.tree.flatten(result.aux)
        whole, split = [], []
        for leaf, lies in zip(leaves, result.aux_split, strict=True):
            (split if lies else whole).append(leaf)
        found[:] = [tree, result.aux_split]
        return (result.value, result.weights, result.held, whole), (
            split,
            list(result.rows.values()),
        )

    own_diff = [path for path in call.diff if path not in own]
    held_specs = sink.specs(
        [call.leaves[path] for path in own_diff], [call.names[path] for path in own_diff], axes
    )
    whole_spec = PartitionSpec()
    # Types that tell what varies over devices would ask `fun` to be written for them.
    (value, weights, held, whole), (split, row_gradients) = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=([rows if path in own else PartitionSpec() for path in paths], PartitionSpec()),
        out_specs=((whole_spec, whole_spec, held_specs, whole_spec), rows),
        axis_names=set(axes),
        check_vma=False,
    )([call.leaves[path] for path in paths], sink.arrays)
    tree, lies = found
    whole_leaves, split_leaves = iter(whole), iter(split)
    aux = tree.unflatten([next(split_leaves if one else whole_leaves) for one in lies])
    diff = [path for path in call.diff if path in own]
    return Result(
        value, tuple(weights), aux, lies, held, dict(zip(diff, row_gradients, strict=True))
    )
