"""Types of values: zeros, stacks, tangents, and what differs from device to device."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import AbstractValue, Tracer
from jax.extend.core import unmapped_aval

from jaxmem._jax.private import convert_element_type, zeros_like_aval

Eqn = Any

Aval = Any


def is_tracer(value: Any) -> bool:
    """Whether a value is of a function that is being traced, differentiated or mapped."""
    return isinstance(value, Tracer)


def as_array(value: Any, aval: Aval) -> Any:
    """A result as `jax.Array`; in a jaxpr scalars that are constant are none."""
    if isinstance(value, jax.Array):
        return value
    return convert_element_type(value, aval.dtype, weak_type=aval.weak_type)


def zeros_like(x: Any) -> Any:
    """Zeros of the cotangent type of an array, with its sharding and varying axes."""
    return zeros_of(jax.typeof(x))


def zeros_of(aval: Aval) -> Any:
    """The same, of an array of this type."""
    return _zeros(aval.to_ct_aval())


def stacked(aval: Aval, length: int) -> Aval:
    """The type of so many values of a type, stacked along a new leading axis."""
    return unmapped_aval(length, 0, aval)


def unfilled(aval: Aval, length: int) -> Any:
    """Room for so many values of a type, to be written before it is read."""
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.numpy.empty((length, *aval.shape), aval.dtype)
    return _zeros(stacked(aval, length))


def filled_with(scalar: Any, aval: Aval) -> Any:
    """An array of a type, each element of it this scalar."""
    scalar = convert_element_type(scalar, aval.dtype, weak_type=False)
    scalar = as_varying(scalar, varying(aval))
    return jax.lax.broadcast(scalar, aval.shape, out_sharding=_explicit_sharding(aval))


def with_dtype(value: Any, dtype: Any) -> Aval:
    """The type of an array, but for its dtype: its sharding and varying axes are the same."""
    return jax.typeof(value).update(dtype=jax.numpy.dtype(dtype), weak_type=False)


def varying(value: Any) -> frozenset[str]:
    """Mesh axes along which a value, or one of a type, differs from device to device.

    That is inside `shard_map`; nowhere else are there any.
    """
    aval = value if isinstance(value, AbstractValue) else jax.typeof(value)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", ()))


def as_varying(value: Any, axes: frozenset[str]) -> Any:
    """The same value, held for itself by each device along these mesh axes."""
    missing = tuple(sorted(axes - varying(value)))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def split(value: Any) -> tuple[Any, ...]:
    """Over which mesh axes each dimension of an array is split, as its type tells; None for none.

    Types tell of axes of type Explicit (`types_tell`).
    """
    return tuple(jax.typeof(value).sharding.spec)


def types_tell(mesh: Any) -> bool:
    """Whether types of arrays on a mesh tell how these are split: any of its axes is Explicit."""
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def split_so(value: Any, axes: Sequence[Any]) -> Any:
    """An array, on axes of type Explicit so many of its dimensions split over these."""
    sharding = jax.typeof(value).sharding
    if tuple(sharding.spec) == tuple(axes):
        return value
    place = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes))
    return jax.sharding.reshard(value, place)


def shards() -> int:
    """How many devices run what is traced now, each its own copy: those of a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in getattr(mesh, "manual_axes", ()))


def mesh_devices() -> int:
    """Of how many devices the mesh is that is set, or around what is traced now."""
    return jax.sharding.get_abstract_mesh().size


def has_tangent(aval: Aval) -> bool:
    """Whether values of this type can be differentiated at all."""
    return aval.to_tangent_aval().dtype != jax.dtypes.float0


def is_key(value: Any) -> bool:
    """Whether a value is an array of random keys."""
    return jax.numpy.issubdtype(getattr(value, "dtype", float), jax.dtypes.prng_key)


def absent_gpu(kind: str) -> Any:
    """The device of an abstract mesh of GPUs of this kind; None for releases that know of no GPUs.

    Triton's kernels are lowered, since jax 0.12, for a GPU that is known.
    """
    device = jax.sharding.AbstractDevice
    knows = any(field.name == "platform" for field in dataclasses.fields(device))
    return device(kind, None, platform="gpu") if knows else None


def _explicit_sharding(aval: Aval) -> Any:
    """The sharding of a type that tells it: of a mesh with axes of type Explicit."""
    wanted = getattr(aval, "sharding", None)
    axes = getattr(getattr(wanted, "mesh", None), "explicit_axes", ())
    return wanted if axes else None


def _zeros(aval: Aval) -> Any:
    """Zeros of a type.

    jax 0.11 types those on no mesh that are to be whole on every device of one, and then refuses to
    write an array that is on the mesh into them.
    """
    made = zeros_like_aval(aval)
    wanted = getattr(aval, "sharding", None)
    mesh = getattr(wanted, "mesh", None)
    if mesh is None or mesh.empty or jax.typeof(made).sharding.mesh == mesh:
        return made  # on no mesh: of a constant, whose zeros do as they are
    return jax.sharding.reshard(made, wanted)
