"""The mesh that an array lies on, compared with another."""

from typing import Any

import jax
from jax.core import Tracer

# ---------------------------------------------------------------- API


def is_silent(leaf: Any, mesh: Any) -> bool:
    """Whether an array does not tell how it is split over axes that the compiler sees to."""
    auto = jax.sharding.AxisType.Auto
    return isinstance(leaf, Tracer) and any(kind == auto for kind in mesh.axis_types)


def check_same(name: str, own: Any, mesh: Any) -> None:
    """That the mesh of the array of this name is that of ZeRO.

    Raises:
      ValueError: it is another.
    """
    same = dict(own.shape) == dict(mesh.shape)
    if same and not any(isinstance(m, jax.sharding.AbstractMesh) for m in (own, mesh)):
        same = own.devices.tolist() == mesh.devices.tolist()
    if not same:
        what = "the same axes over other devices"
        if dict(own.shape) != dict(mesh.shape):
            what = f"{dict(own.shape)}, not {dict(mesh.shape)}"
        raise ValueError(
            f"{name} lies on another mesh than that of Zero ({what}); make both with one mesh, or "
            "move the array first: jax.device_put(params, zero.params(types of params))"
        )
