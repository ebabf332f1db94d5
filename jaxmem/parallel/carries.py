"""Carries that are stored split over a mesh axis over which they would be whole (ZeRO-R).

Rajbhandari et al. 2020 (arXiv 1910.02054, section 6.1) split the activations that tensor-parallel
devices each keep, and gather them for the backward pass; Korthikanti et al. 2022 (arXiv 2205.05198)
leave them split between the products, as sequence parallelism, so that the all-reduce behind a
layer becomes a reduce-scatter behind it and an all-gather in the next: the same bytes are sent.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem import _jax
from jaxmem.trace.layer import Body

Axes = str | tuple[str, ...]

# ---------------------------------------------------------------- API


@dataclasses.dataclass(frozen=True)
class SplitCarries:
    """The carries of a stack, split over mesh axes between its layers.

    Attributes:
      body: the layer, from split carries to split carries.
      places: of each carry when it is split; None for what stays as it is.
      whole: of each carry otherwise, where the types say it (Explicit axes).
    """

    body: Body
    places: Sequence[Any]
    whole: Sequence[Any]

    @classmethod
    def of(cls, body: Body, axes: Axes, called: str) -> "SplitCarries":
        """A layer's.

        Args:
          called: what the stack is called in messages.

        Raises:
          ValueError: there is no mesh, it lacks the axis, or no carry can be divided over it.
        """
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        consts, avals, xs = body.split_in(body.jaxpr.in_avals)
        places = _places(avals, axes, called)
        whole = [
            aval.sharding if _is_explicit(place) else None
            for aval, place in zip(avals, places, strict=True)
        ]
        split = cls(body, places, whole)

        def run(*flat: Any) -> list[Any]:
            consts, carry, x = body.split_in(flat)
            flat = (*consts, *split.gathered(split.placed(carry)), *x)
            carry, y = body.split_out(_jax.evaluate(body.jaxpr, flat))
            return [*split.placed(carry), *y]

        types = [
            aval.update(sharding=place) if _is_explicit(place) else aval
            for aval, place in zip(avals, places, strict=True)
        ]
        traced = _jax.trace(run, [*consts, *types, *xs])
        return dataclasses.replace(split, body=Body(traced, body.num_consts, body.num_carry))

    @staticmethod
    def can_split(body: Body, axis: str) -> bool:
        """Whether a mesh axis splits any of the carries of a stack with this layer."""
        try:
            return bool(_places(body.split_in(body.jaxpr.in_avals)[1], (axis,), "a stack"))
        except ValueError:
            return False

    def placed(self, carry: Sequence[Any]) -> list[Any]:
        """Carries, split."""
        return [
            value if place is None else _constrained(value, place)
            for value, place in zip(carry, self.places, strict=True)
        ]

    def gathered(self, carry: Sequence[Any]) -> list[Any]:
        """Carries of the types that they have elsewhere; on Auto axes what reads them gathers."""
        return [
            value if place is None else _constrained(value, place)
            for value, place in zip(carry, self.whole, strict=True)
        ]


def check_axes(axes: Any) -> None:
    """Raise where this is no name of a mesh axis, nor a tuple of such.

    Raises:
      TypeError: it is none.
    """
    several = axes if isinstance(axes, tuple) else (axes,)
    if axes is not None and not (several and all(isinstance(axis, str) for axis in several)):
        raise TypeError(
            f"partition takes the name of a mesh axis or a tuple of names, got {axes!r}; pass "
            'partition="tensor"'
        )


# ---------------------------------------------------------------- implementation


def _places(avals: Sequence[Any], axes: tuple[str, ...], called: str) -> list[Any]:
    """Where each carry belongs, None for what is too small or does not divide."""
    meshes = [aval.sharding.mesh for aval in avals if getattr(aval, "sharding", None) is not None]
    mesh = next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())
    named = ", ".join(map(repr, axes))
    if mesh.empty:
        raise ValueError(
            f"partition={named}: {called} is traced without a mesh; pass arguments that lie on one "
            "(jax.device_put(x, NamedSharding(mesh, ...))), or set one with jax.set_mesh(mesh)"
        )
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(
            f"partition={missing[0]!r}: the mesh of {called} has the axes "
            f"{', '.join(map(repr, mesh.axis_names))}; pass one of these"
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if manual := [axis for axis in axes if kinds[axis] == AxisType.Manual]:
        raise ValueError(
            f"partition={manual[0]!r}: {called} is inside of a jax.shard_map over this axis, where "
            "each device has arrays of its own; leave the axis out of its axis_names=, or split "
            "the carry in the function"
        )
    places = [_place(aval, axes, mesh) for aval in avals]
    if all(place is None for place in places):
        shapes = ", ".join(aval.str_short() for aval in avals) or "no arrays"
        count = math.prod(mesh.shape[axis] for axis in axes)
        raise ValueError(
            f"partition={named}: none of the carries of {called} ({shapes}) has a dimension that "
            f"its {count} devices divide, or all are split over them already; pass another "
            "axis, or pad the batch"
        )
    return places


def _place(aval: Any, axes: tuple[str, ...], mesh: Any) -> Any:
    """A carry's sharding: its first dimension behind the batch that the devices divide is split."""
    count = math.prod(mesh.shape[axis] for axis in axes)
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    taken = list(spec)
    rank = len(getattr(aval, "shape", ()))
    dims = [
        dim
        for dim in ([*range(1, rank), 0] if rank else ())
        if aval.shape[dim] % count == 0 and not (dim < len(taken) and taken[dim])
    ]
    used = {axis for axis in taken if isinstance(axis, str)}.union(
        *(axes_of for axes_of in taken if isinstance(axes_of, tuple))
    )
    if used.intersection(axes):
        return None  # it is split over them already
    if not dims or not jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact):
        return None
    entries: list[Any] = [taken[dim] if dim < len(taken) else None for dim in range(rank)]
    if not _jax.types_tell(mesh):
        entries = [PartitionSpec.UNCONSTRAINED] * rank
    entries[dims[0]] = axes[0] if len(axes) == 1 else axes
    return NamedSharding(mesh, PartitionSpec(*entries))


def _is_explicit(place: Any) -> bool:
    return place is not None and _jax.types_tell(place.mesh)


def _constrained(value: Any, place: Any) -> Any:
    if _is_explicit(place):
        return jax.sharding.reshard(value, place)
    return lax.with_sharding_constraint(value, place)
