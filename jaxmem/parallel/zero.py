"""ZeRO: optimizer state, gradients and parameters in shards over the devices of data parallelism.

Rajbhandari et al. 2020, arXiv 1910.02054; stage 3 is also known as FSDP (arXiv 2304.11277).  In
data parallelism each device holds all of them.  Stage 1 splits the optimizer's state, stage 2 the
gradients as well, stage 3 the parameters, too.  A layer's gradient is then reduce-scattered in the
backward pass as soon as it is there, into the shard in which it is added up or used for the update.

Known gap: jax holds arrays in equal shards, so an array of which no dimension can be divided
by the devices stays whole; `Zero.explain` says so.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import _jax
from jaxmem.parallel.leaves import flat, parameter_in, types_of
from jaxmem.parallel.meshes import check_same, is_silent
from jaxmem.parallel.split import Split
from jaxmem.parallel.zero_plan import ZeroPlan, described

# ---------------------------------------------------------------- API


@dataclasses.dataclass(frozen=True)
class Zero:
    """ZeRO over one or several axes of a mesh, for every function that takes `zero=`.

        zero = jaxmem.Zero(2, mesh=mesh)  # a jax.sharding.Mesh with an axis "data"
        params, state = zero.init(optimizer, params)
        step = jaxmem.value_and_update(loss, optimizer, zero=zero)
        step = jax.jit(step, donate_argnums=(0, 1))
        value, params, state = step(params, state, jax.device_put(batch, zero.batch))

    The numbers are those of one device, up to the order of sums.  With P bytes of parameters on N
    devices and AdamW, a device holds of parameters, gradients and state 4 P without, and

    | stage | split | bytes a device | bytes sent a step |
    |---|---|---|---|
    | 1 | the optimizer's state | (2 + 2/N) P | 2 P |
    | 2 | gradients, too | (1 + 3/N) P | 2 P |
    | 3 | parameters, too | 4/N P | 3 P |

    Axes of the mesh may be of type Auto or Explicit (`jax.make_mesh` makes the latter).  On
    explicit axes a function has to say what jax cannot tell by itself, as ever:
    ``embedding.at[tokens].get(out_sharding=P("data"))``.  In stage 3 it reads whole parameters.

    `jaxmem.value_and_grad`, `jaxmem.value_and_update` and `jaxmem.MultiSteps` take it.  In stages 1
    and 2 the gradient comes back in shards: nothing is gained by more than that.  What differs is
    a batch in microbatches with `batch_sharding`: stage 1 sums them on each device and
    reduce-scatters the sum once a step, stage 2 each microbatch's gradient into a shard.  With an
    optimizer of one's own:

        value, grads = jaxmem.value_and_grad(loss, microbatches=1, zero=zero)(params, batch)
        params, state = jaxmem.apply_gradients(optimizer, grads, state, params, zero=zero)

    Args:
      stage: 1, 2 or 3; 0 for none, where everything is whole on each device.
      mesh: the mesh, also of absent devices (`jaxmem.Target.mesh`); None for the one that
        is set by `jax.set_mesh`.
      axis: the mesh axis, or axes, over which the batch lies.
      min_size: arrays with fewer numbers stay whole.
      specs: from a parameter's path, such as "layers/up", to the `PartitionSpec` by which other
        mesh axes split it already (tensor parallelism), or None.  Needed where arrays do not tell:
        inside `jax.jit`, on axes of type Auto.  ZeRO takes a dimension that is free.
      dim: from a parameter's path to the dimension to split, or None for the choice made here: the
        first one but the leading one (layers are stacked along it) that the devices divide;
        of vectors and matrices the leading one, too, if there is no other.

    Raises:
      TypeError, ValueError: an option cannot be, the mesh lacks the axis, or the axis has one
        device.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> mesh = jaxmem.target("h100-80g", devices=8).mesh({"data": 8})  # or one of jax.make_mesh
    >>> zero = jaxmem.Zero(2, mesh=mesh)
    >>> params = {"layers": jax.ShapeDtypeStruct((24, 1024, 4096), "float32")}
    >>> print(zero.explain(params, optax.adam(1e-3)))
    stage 2: 480.0 MiB of 1.1 GiB on each device
      params/layers      384.0 MiB  whole: stage 2 splits no parameters
      state/0/count            4 B  whole: it has fewer than 65536 numbers
      state/0/mu/layers   48.0 MiB  dimension 1 is split
      state/0/nu/layers   48.0 MiB  dimension 1 is split
    >>> zero.state(optax.adam(1e-3), params)[0].mu["layers"].spec
    P(None, 'data', None)
    """

    stage: int
    mesh: Any = None
    axis: str | tuple[str, ...] = "data"
    min_size: int = 2**16
    specs: Callable[[str], PartitionSpec | None] | None = None
    dim: Callable[[str], int | None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2, 3):
            raise ValueError(
                f"ZeRO has the stages 1 (optimizer state in shards), 2 (gradients, too) and 3 "
                f"(parameters, too), and 0 for none; got stage={self.stage!r}"
            )
        axes = (self.axis,) if isinstance(self.axis, str) else self.axis
        named = isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes)
        if not named or not axes or len(set(axes)) < len(axes):
            raise TypeError(
                f"axis must be the name of a mesh axis, or a tuple of different ones, got "
                f'{self.axis!r}; pass axis="data" or axis=("replica", "data")'
            )
        if self.mesh is not None:
            if not hasattr(self.mesh, "axis_names"):
                raise TypeError(
                    f"mesh must be a jax.sharding.Mesh or AbstractMesh, got {self.mesh!r}; make "
                    'one with jax.make_mesh((8,), ("data",))'
                )
            self._check(self.mesh)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def devices(self) -> int:
        """Over how many devices arrays are split."""
        return math.prod(self._mesh().shape[axis] for axis in self.axes)

    @property
    def batch(self) -> NamedSharding:
        """Where the batch belongs: its rows over the devices."""
        return NamedSharding(self._mesh(), PartitionSpec(self.axis))

    def params(self, params: Any) -> Any:
        """A tree of shardings for parameters: arrays, or types of such.

        Raises:
          ValueError: one lies on another mesh, or cannot be split as `dim` or `specs` say.
        """
        return self._map(params, lambda split: split.shards if self.stage > 2 else split.whole)

    def gradients(self, params: Any) -> Any:
        """A tree of shardings for the gradients as functions with `zero=` return them."""
        return self._map(params, lambda split: split.shards if self.stage else split.whole)

    def state(self, optimizer: Any, params: Any) -> Any:
        """A tree of shardings for what `optimizer.init(params)` returns.

        What belongs to a parameter, by its path in the state, is split as that is: moments,
        8-bit codes and their scales, accumulators.  Where `jaxmem.offload_state` has an array in
        host memory, its shards are there.
        """
        tree, leaves = self._state_leaves(optimizer, params)
        found = []
        for _, leaf, split in leaves:
            place = split.shards if self.stage else split.whole
            found.append(place.with_memory_kind("pinned_host") if _jax.is_on_host(leaf) else place)
        return tree.unflatten(found)

    def init(self, optimizer: Any, params: Any) -> tuple[Any, Any]:
        """Parameters, and the state that the optimizer makes of them, in their places."""
        params = jax.device_put(params, self.params(params))
        init = jax.jit(optimizer.init, out_shardings=self.state(optimizer, params))
        return params, init(params)

    def explain(self, params: Any, optimizer: Any = None) -> ZeroPlan:
        """What each device holds of parameters and, with an optimizer, of its state.

        Args:
          params: arrays, or types of such.
        """
        found = []
        for name, leaf in zip(*flat(params)[:2], strict=True):
            split = self.split(name, leaf)
            if self.stage < 3:
                reason = f"stage {self.stage} splits no parameters"
                split = dataclasses.replace(split, dim=None, reason=reason)
            found.append(described(f"params/{name}", leaf, split))
        if optimizer is not None:
            for name, leaf, split in self._state_leaves(optimizer, params)[1]:
                if not self.stage:
                    split = dataclasses.replace(split, dim=None, reason="stage 0 splits nothing")
                found.append(described(f"state/{name}", leaf, split))
        return ZeroPlan(self.stage, tuple(found))

    def split(self, name: str, leaf: Any) -> Split:
        """How the gradient of a parameter, and the state that it has, are split.

        Args:
          name: its path.
          leaf: an array, traced or not, or its type.
        """
        mesh = self._mesh()
        base = self._base(mesh, name, leaf)
        entries = [*(base or ()), *[None] * (len(leaf.shape) - len(base or ()))]
        others = [axis for axis in mesh.axis_names if axis not in self.axes]
        known = base is not None or all(mesh.shape[axis] == 1 for axis in others)
        dim, reason = self._dim(name, leaf.shape, entries)
        return Split(mesh, self.axes, dim, tuple(entries), known, reason, name)

    def states(self, tree: Any, names: Sequence[str], params: Sequence[Any]) -> Iterator[Split]:
        """How the leaves of an optimizer's state are split, in their order.

        Args:
          tree: the state, or its types.
          names: paths of the parameters.
          params: these, or their types.
        """
        own = {
            name: (leaf, self.split(name, leaf)) for name, leaf in zip(names, params, strict=True)
        }
        others = dataclasses.replace(self, specs=None, dim=None)  # which are of parameters
        for path, leaf in zip(*flat(tree)[:2], strict=True):
            name = parameter_in(path, own)
            param, split = own[name] if name is not None else (leaf, others.split(path, leaf))
            yield split if param.shape == leaf.shape else self._beside(path, leaf, param, split)

    # ------------------------------------------------------------ implementation

    def _mesh(self) -> Any:
        mesh = self.mesh
        if mesh is None:
            mesh = jax.sharding.get_abstract_mesh()
            if not mesh.axis_names:
                raise ValueError(
                    "Zero has no mesh, and none is set; pass mesh=, or set one with jax.set_mesh"
                )
            self._check(mesh)
            with contextlib.suppress(ValueError):  # while a function is traced there is no other
                return jax.sharding.get_mesh()
        return mesh

    def _check(self, mesh: Any) -> None:
        for axis in self.axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"Zero splits over the axis {axis!r}, and the mesh has "
                    f"{', '.join(map(repr, mesh.axis_names))}; pass the axis over which the batch "
                    "lies as axis=, or a mesh that has it"
                )
        devices = math.prod(mesh.shape[axis] for axis in self.axes)
        if self.stage and devices == 1:
            axes = " and ".join(map(repr, self.axes))
            raise ValueError(
                f"stage {self.stage} of ZeRO splits over the devices of {axes}, and there is one; "
                f"the mesh is {dict(mesh.shape)}.  Pass a mesh in which it has several, or stage=0"
            )

    def _base(self, mesh: Any, name: str, leaf: Any) -> tuple[Any, ...] | None:
        """How other mesh axes split an array, without those of ZeRO; None if nobody says."""
        given = self.specs(name) if self.specs is not None else None
        sharding = getattr(leaf, "sharding", None)
        if isinstance(leaf, Tracer):
            sharding = getattr(jax.typeof(leaf), "sharding", None)
        spec = given
        if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names:
            check_same(name, sharding.mesh, mesh)
            if spec is None and not is_silent(leaf, sharding.mesh):
                spec = sharding.spec
        if spec is None:
            return None
        if len(spec) > len(leaf.shape):
            raise ValueError(
                f"{name} has {len(leaf.shape)} dimensions, and specs gives it {spec}, which has "
                f"{len(spec)} entries; pass at most one for each dimension"
            )
        entries = []
        for entry in spec:
            axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            for axis in axes:
                if axis not in mesh.axis_names:
                    raise ValueError(
                        f"{name} is split over the axis {axis!r}, and the mesh of Zero has "
                        f"{', '.join(map(repr, mesh.axis_names))}; name one of these in specs="
                    )
            axes = tuple(axis for axis in axes if axis not in self.axes)
            entries.append(axes[0] if len(axes) == 1 else axes or None)
        return tuple(entries)

    @property
    def _too_small(self) -> str:
        return f"it has fewer than {self.min_size} numbers"

    def _dim(self, name: str, shape: Sequence[int], base: Sequence[Any]) -> tuple[int | None, str]:
        """The dimension to split; or None, and why."""
        devices = self.devices
        wanted = self.dim(name) if self.dim is not None else None
        if wanted is not None:
            if not -len(shape) <= wanted < len(shape):
                raise ValueError(
                    f"{name} has {len(shape)} dimensions, and dim names number {wanted}; name one "
                    "that it has, or None for a choice"
                )
            wanted %= len(shape)
            if shape[wanted] % devices or base[wanted] is not None:
                taken = base[wanted] is not None
                cause = f"is split over {base[wanted]!r} already" if taken else "do not divide it"
                what = f"which {cause}" if taken else f"and {devices} devices {cause}"
                raise ValueError(
                    f"{name} has {shape[wanted]} numbers along dimension {wanted}, {what}; name "
                    "another dimension in dim=, or None for a choice"
                )
            return wanted, ""
        if math.prod(shape) < self.min_size:
            return None, self._too_small
        # Of three dimensions or more, the leading one is that of layers.
        for dim in (*range(1, len(shape)), *(range(1) if len(shape) < 3 else ())):
            if shape[dim] % devices == 0 and base[dim] is None:
                return dim, ""
        first = 1 if len(shape) > 2 else 0
        free = [
            str(length)
            for length, taken in zip(shape[first:], base[first:], strict=True)
            if taken is None
        ]
        return None, (
            f"{devices} devices divide none of {', '.join(free)}; a width that they divide, or "
            "fewer devices on the axis, would split it"
        )

    def _beside(self, path: str, leaf: Any, param: Any, split: Split) -> Split:
        """Of state in another shape than its parameter's, such as scales of blocks."""
        dim, rank = split.dim, len(leaf.shape)
        fits = (
            dim is not None
            and dim < rank
            and leaf.shape[dim] % self.devices == 0
            and leaf.shape[:dim] == param.shape[:dim]
        )
        others = None if dim is None else (*param.shape[:dim], *param.shape[dim + 1 :])
        if split.is_typed and leaf.shape == others:
            # A factor over the other dimensions: an optimizer multiplies it with the one over this
            # dimension, which is split over the same devices.
            fits = False
        base = tuple(
            entry if d < rank and leaf.shape[d] == param.shape[d] else None
            for d, entry in enumerate(split.base[:rank])
        )
        base = (*base, *[None] * (rank - len(base)))
        if fits:
            return dataclasses.replace(split, base=base)
        reason = "its shape is another than its parameter's"
        if math.prod(leaf.shape) < self.min_size:
            reason = self._too_small
        reason = split.reason or reason
        return dataclasses.replace(split, dim=None, base=base, reason=reason)

    def _map(self, params: Any, place: Callable[[Split], NamedSharding]) -> Any:
        names, leaves, tree = flat(params)
        return tree.unflatten(
            [place(self.split(name, leaf)) for name, leaf in zip(names, leaves, strict=True)]
        )

    def _state_leaves(
        self, optimizer: Any, params: Any
    ) -> tuple[Any, list[tuple[str, Any, Split]]]:
        names, leaves, _ = flat(params)
        state, types = types_of(optimizer.init, params)
        paths, _, tree = flat(state)
        splits = self.states(state, names, leaves)
        return tree, list(zip(paths, types, splits, strict=True))
