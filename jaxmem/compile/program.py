"""A call of a function as a program for a compiler: traced, its arguments named, exported.

The worker gets `jax.export`'s portable form, with flat arguments and results, so that
it does not need the user's types.
"""

import contextlib
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from jaxmem import _jax
from jaxmem.targets import CompileError
from jaxmem.trace.arguments import check_keywords, is_array, named_leaves
from jaxmem.trace.context import Record, recording
from jaxmem.trace.source import source_line
from jaxmem.trace.state_fields import state_leaves
from jaxmem.trace.training_state import Leaf, Named, told

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Argument:
    """One leaf of the arguments.

    Attributes:
      name: its path, such as "params/Dense_0/kernel".
      shape, dtype, bytes: of the whole array over all devices.
      donated: whether the program may overwrite it.
      memory_kind: "pinned_host" and the like; None for device memory.
      field: of an optimizer's state, such as "mu"; None for what is none.
      is_parameter: whether it is one of the model's parameters.
      disk_bytes: of the array on disk that it stands for; 0 for an array in memory.
      split: for each dimension the axes of the mesh that it is split over; None for an array
        without such a sharding of its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    donated: bool
    memory_kind: str | None
    field: str | None = None
    is_parameter: bool = False
    disk_bytes: int = 0
    split: tuple[tuple[str, ...], ...] | None = None


@dataclasses.dataclass(frozen=True)
class Exported:
    """A program exported for a compiler in another process.

    Attributes:
      blob: `jax.export`'s serialization, flat trees in and out.
      module: its text, for a digest.
      kept: indices of the arguments that the program reads; it has no others.
      donate: indices among `kept` of the arguments that it may overwrite.
      devices: for how many devices it is.
      mesh: axis names and sizes of the mesh it is sharded over, None for none.
      axes: the same, also where only the program names it and not its arguments; () for none.
      memory_kinds: of the arguments and of the results, None where none is on the host.
    """

    blob: bytes
    module: str
    kept: tuple[int, ...]
    donate: tuple[int, ...]
    devices: int
    mesh: tuple[tuple[str, int], ...] | None
    axes: tuple[tuple[str, int], ...]
    memory_kinds: tuple[tuple[str | None, ...], tuple[str | None, ...]] | None


class Program:
    """A traced call.

    Attributes:
      arguments: the leaves of the call's arguments, in jax's order.
      jaxpr: of the traced function, without static arguments.
      record: which policies were applied while tracing.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        platform: str | None = None,
        optimizer_state: Named = None,
        parameters: Named = None,
    ) -> None:
        """Trace the call.

        Args:
          optimizer_state, parameters: see `jaxmem.trace.training_state.told`.
          platform: "gpu" or "tpu" if the program is for an absent accelerator.

        Raises:
          TypeError: an argument is not an array; the message names its path.
          ValueError: arguments lie on different meshes.
          TypeError, ValueError: see `jaxmem.trace.training_state.told`.
          CompileError: tracing needs cuDNN, which is not installed.
        """
        if platform is not None:
            args, kwargs = _without_callbacks((args, kwargs))
        self.fn, self.args, self.kwargs, self.platform = fn, args, kwargs, platform
        check_keywords(fn, kwargs)
        donated = _numbers("donate_argnums", donate_argnums, len(args))
        static = _numbers("static_argnums", static_argnums, len(args))
        if not _is_jitted(fn):
            _check_arrays(fn, args, kwargs, static)
        try:
            with recording(platform) as record:
                self.jitted, self.traced = _traced(fn, args, kwargs, donated, static)
        except (TypeError, ValueError):
            # A function jitted elsewhere may have static arguments that are not known
            # here; only if jax rejects the call is an argument that is no array at fault.
            _check_arrays(fn, args, kwargs, static)
            raise
        except RuntimeError as error:
            if "cudnn" not in str(error).casefold():
                raise
            raise CompileError(
                f"the program needs cuDNN, which was not found ({error}): "
                'pip install "nvidia-cudnn-cu13"; where that is not found (as under '
                "JAX_PLATFORMS=cpu), put the folder of libcudnn on LD_LIBRARY_PATH"
            ) from None
        self.record: Record = record
        self.jaxpr = self.traced.jaxpr
        self.arguments = self._arguments(static, optimizer_state, parameters)

    def _arguments(
        self, static: set[int], optimizer_state: Named, parameters: Named
    ) -> list[Argument]:
        in_args, in_kwargs = self.traced.args_info
        positions = [k for k in range(len(self.args)) if k not in static]
        if len(positions) != len(in_args):  # others are static in a function jitted elsewhere
            positions = _dynamic_positions(self.args, in_args)
        infos = named_leaves(self.fn, in_args, in_kwargs, positions)
        given = [self.args[k] for k in positions] + [self.kwargs[k] for k in sorted(in_kwargs)]
        kinds = [_memory_kind(leaf) for tree in given for leaf in jax.tree.leaves(tree)]
        splits = [_split(leaf) for tree in given for leaf in jax.tree.leaves(tree)]
        arrays = (leaf for tree in given for leaf in jax.tree.leaves(tree))
        _check_meshes({name: leaf for (name, _), leaf in zip(infos, arrays, strict=True)})
        states = [leaf for tree in given for leaf in state_leaves(tree)]
        places = [*positions, *[None] * len(in_kwargs)]
        whose = [
            place for place, tree in zip(places, given, strict=True) for _ in jax.tree.leaves(tree)
        ]
        leaves = [
            Leaf(name, place, tuple(info.shape), state)
            for (name, info), place, state in zip(infos, whose, states, strict=True)
        ]
        found = told(leaves, len(self.args), optimizer_state, parameters)
        return [
            Argument(
                name=name,
                shape=tuple(info.shape),
                dtype=str(info.dtype),
                bytes=math.prod(info.shape) * info.dtype.itemsize,
                donated=info.donated,
                memory_kind=kind,
                field=field,
                is_parameter=is_parameter,
                disk_bytes=state.disk_bytes,
                split=split,
            )
            for (name, info), kind, field, is_parameter, state, split in zip(
                infos, kinds, found.fields, found.parameters, states, splits, strict=True
            )
        ]

    def exported(self, platform: str, device: str) -> Exported:
        """The program in portable form.

        Args:
          platform: as jax calls it: "cuda" or "tpu".
          device: and the kind of the accelerator, which kernels of Triton are lowered for.

        Raises:
          CompileError: the program calls back into Python, or jax cannot export it otherwise.
        """
        if lines := dict.fromkeys(_callbacks(self.jaxpr)):
            raise CompileError(
                f"the program calls back into Python ({', '.join(lines)}), which another process "
                "cannot compile for an absent accelerator; take jax.debug.print and callbacks out "
                'of it, or pass target="local"'
            )
        with self._lowering_for(platform, device):
            found = self._export(platform)
        kept = tuple(found.module_kept_var_idx)
        return Exported(
            blob=bytes(_flat(found).serialize()),
            module=found.mlir_module(),
            kept=kept,
            donate=tuple(k for k, index in enumerate(kept) if self.arguments[index].donated),
            devices=found.nr_devices,
            mesh=self._mesh() if found.nr_devices > 1 else None,
            axes=self.axes(getattr(found, "_in_named_shardings", ())),
            memory_kinds=self._memory_kinds(kept, len(found.out_avals)),
        )

    def _lowering_for(self, platform: str, device: str) -> contextlib.AbstractContextManager[Any]:
        """jax told which GPU is meant, as since 0.12 it lowers kernels of Triton for one it knows.

        On a mesh it is told by that (`Target.mesh`).
        """
        names = (eqn.primitive.name for eqn in _jax.all_equations(self.jaxpr.jaxpr))
        if platform != "cuda" or self.axes() or "pallas_call" not in names:
            return contextlib.nullcontext()
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=_jax.absent_gpu(device))
        return jax.sharding.use_abstract_mesh(mesh)

    def _export(self, platform: str) -> Any:
        with _jax.exported_in_rows() as call:
            return self._exported(platform, [export.DisabledSafetyCheck.custom_call(call)])

    def _exported(self, platform: str, checks: list[export.DisabledSafetyCheck]) -> Any:
        while True:
            try:
                with recording(self.platform, self.record):
                    return export.export(self.jitted, platforms=[platform], disabled_checks=checks)(
                        *self.args, **self.kwargs
                    )
            except (NotImplementedError, RuntimeError) as error:
                message = f"jax cannot lower the program for {platform}: {error}"
                raise CompileError(message) from error
            except ValueError as error:
                # Custom calls are safe here: the worker's compiler is of the same version.
                new = [export.DisabledSafetyCheck.custom_call(t) for t in _refused_calls(error)]
                if not new or all(check in checks for check in new):
                    raise CompileError(f"jax cannot export the program: {error}") from error
                checks += new

    def axes(self, shardings: Sequence[Any] = ()) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes of the mesh that the program is sharded over; () for none.

        Args:
          shardings: of the arguments, where they are not arrays' own.
        """
        named = (_axes(value) for value in (*shardings, *_own_shardings(self.jaxpr)))
        return self._mesh() or next(filter(None, named), ())

    def _mesh(self) -> tuple[tuple[str, int], ...]:
        """The mesh that arguments are sharded over."""
        for leaf in jax.tree.leaves((self.args, self.kwargs)):
            mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
            if mesh is not None and mesh.size > 1:
                return tuple(mesh.shape.items())
        mesh = jax.sharding.get_abstract_mesh()
        return tuple(mesh.shape.items())

    def _memory_kinds(self, kept: Sequence[int], num_out: int) -> Any:
        ins = tuple(self.arguments[index].memory_kind for index in kept)
        if all(kind is None for kind in ins):
            return None
        return ins, (None,) * num_out


# ---------------------------------------------------------------- implementation


def _flat(exported: Any) -> Any:
    """With flat arguments and results, and without unused arguments.

    The worker calls it within another jit, which would count them as used.
    """
    kept = exported.module_kept_var_idx

    def only(given: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(given[index] for index in kept)

    parts = ("in_avals", "in_shardings_hlo", "_in_named_shardings")
    return dataclasses.replace(
        exported,
        **{part: only(getattr(exported, part)) for part in parts if getattr(exported, part, None)},
        module_kept_var_idx=tuple(range(len(kept))),
        in_tree=jax.tree.structure(((0,) * len(kept), {})),
        out_tree=jax.tree.structure((0,) * len(exported.out_avals)),
    )


def _refused_calls(error: ValueError) -> list[str]:
    text = str(error)
    if "custom call" not in text:
        return []
    # jax quotes the operations ("stablehlo.custom_call @target(…") or the targets alone.
    return [a or b for a, b in re.findall(r"custom_call @([\w$.]+)|'([\w$.]+)'", text)]


def _callbacks(closed: Any) -> Iterator[str]:
    for eqn in _jax.all_equations(closed.jaxpr):
        name = eqn.primitive.name
        if "callback" in name or name == "debug_print":
            yield source_line(eqn) or name


def _own_shardings(closed: Any) -> Iterator[Any]:
    """The shardings and meshes that the equations of a program have."""
    for eqn in _jax.all_equations(closed.jaxpr):
        yield from (eqn.params.get("mesh"), eqn.params.get("sharding"))
        yield from eqn.params.get("in_shardings", ())


def _axes(value: Any) -> tuple[tuple[str, int], ...]:
    """Of the mesh that a value is or has, if that is of several devices."""
    mesh = getattr(value, "mesh", value)
    is_mesh = isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh)
    return tuple(mesh.shape.items()) if is_mesh and mesh.size > 1 else ()


def _without_callbacks(tree: Any) -> Any:
    """Arguments in which arrays on disk are compiled as arrays in host memory, as is reported."""

    def is_on_disk(node: Any) -> bool:
        return hasattr(node, "bytes_on_disk")

    return jax.tree.map(
        lambda node: node.in_host_memory() if is_on_disk(node) else node, tree, is_leaf=is_on_disk
    )


def _memory_kind(leaf: Any) -> str | None:
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind if kind is not None and "host" in kind else None


def _check_meshes(leaves: Mapping[str, Any]) -> None:
    """Raise where arguments lie on different meshes.

    Raises:
      ValueError: they do; the message says which.
    """
    known: dict[Any, str] = {}
    for name, leaf in leaves.items():
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is not None and mesh.size > 1:
            known.setdefault(tuple(mesh.shape.items()), name)
    if len(known) > 1:
        (first, name), (second, other), *_ = known.items()
        axes = [", ".join(f"{axis}={size}" for axis, size in one) for one in (first, second)]
        raise ValueError(
            f"argument '{name}' lies on a mesh with the axes {axes[0]}, and argument '{other}' on "
            f"one with {axes[1]}; a program runs over one mesh: give all of them shardings of the "
            "same one"
        )


def _split(leaf: Any) -> tuple[tuple[str, ...], ...] | None:
    """The axes that each dimension is split over, by a `NamedSharding`."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    if not isinstance(spec, jax.sharding.PartitionSpec):
        return None
    parts = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    axes = [tuple(str(axis) for axis in part) for part in parts]
    return tuple(axes + [()] * (len(leaf.shape) - len(axes)))


def _dynamic_positions(args: Sequence[Any], traced: Sequence[Any]) -> list[int]:
    """The position in the call of each traced argument; the trace has no static ones."""
    positions, k = [], 0
    for tree in traced:
        while k < len(args) - 1 and not _matches(args[k], tree):
            k += 1
        positions.append(k)
        k += 1
    return positions


def _matches(arg: Any, infos: Any) -> bool:
    if jax.tree.structure(arg) != jax.tree.structure(infos):
        return False
    pairs = zip(jax.tree.leaves(arg), jax.tree.leaves(infos), strict=True)
    return all(
        getattr(leaf, "shape", ()) == info.shape and _traceable(leaf) for leaf, info in pairs
    )


def _check_arrays(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], static: set[int]
) -> None:
    positions = [k for k in range(len(args)) if k not in static]
    for name, leaf in named_leaves(fn, [args[k] for k in positions], kwargs, positions):
        if not _traceable(leaf):
            raise TypeError(
                f"argument '{name}' is not an array but {leaf!r} of type "
                f"{type(leaf).__name__}; give its position in static_argnums=, bind it with "
                "functools.partial, or pass an array or a jax.ShapeDtypeStruct"
            )


def _traceable(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _is_jitted(fn: Any) -> bool:
    if not (callable(getattr(fn, "lower", None)) and callable(getattr(fn, "trace", None))):
        return False
    if type(fn).__module__.startswith("flax."):
        raise TypeError(
            f"{type(fn).__name__} of flax is no function of arrays alone; pass the function that "
            "it wraps, on what nnx.split gives (graph definition bound by functools.partial, state "
            "as an argument), or under jax.jit"
        )
    return True


def _traced(
    fn: Any, args: Sequence[Any], kwargs: dict[str, Any], donated: set[int], static: set[int]
) -> tuple[Any, Any]:
    """The function jitted, and its trace."""
    if _is_jitted(fn):
        traced = fn.trace(*args, **kwargs)
        if not donated and not static:
            return fn, traced
        # A jit around a jit: the outer one must repeat the donations of the inner.
        in_args, _ = traced.args_info
        if len(in_args) == len(args):
            own = (k for k, tree in enumerate(in_args) if _is_donated(tree))
            donated = donated.union(own)
    jitted = jax.jit(fn, donate_argnums=sorted(donated), static_argnums=sorted(static))
    return jitted, jitted.trace(*args, **kwargs)


def _is_donated(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(leaf.donated for leaf in leaves)


def _numbers(name: str, numbers: Any, count: int) -> set[int]:
    try:
        several = list(numbers) if np.iterable(numbers) else [numbers]
        places = [operator.index(number) for number in several]
    except TypeError:
        raise TypeError(
            f"{name} takes positions of arguments, whole numbers, got {numbers!r}"
        ) from None
    return {k + count if k < 0 else k for k in places}
