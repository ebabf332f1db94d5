"""The options of `jaxmem.pipeline`, and what they cannot be."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmem import policies
from jaxmem.accumulate.combine import Spec
from jaxmem.accumulate.parts import Parts
from jaxmem.accumulate.trees import floating
from jaxmem.errors import check_flags, check_positive
from jaxmem.pipeline.schedule import NAMES
from jaxmem.plans.plan import Plan
from jaxmem.policies import Policy
from jaxmem.trace.find import Where

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Those of `pipeline`, checked; None for microbatches and a schedule that are "auto"."""

    axis: str
    microbatches: int | None
    schedule: str | None
    chunks: int
    policy: Policy | None
    layers: tuple[int, ...] | str | None
    recompute: bool
    where: Where | None
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    carry_argnums: tuple[int, ...]
    has_aux: bool
    aux: Spec
    accumulator_dtype: np.dtype | None
    mesh: Any

    @property
    def is_open(self) -> bool:
        """Whether a plan may say how microbatches go through the stages."""
        return self.microbatches is None or self.schedule is None


# ---------------------------------------------------------------- API


def checked(
    axis: Any, microbatches: Any, schedule: Any, chunks: Any, policy: Any, layers: Any,
    recompute: Any, where: Any, batch_argnums: Any, rng_argnums: Any, carry_argnums: Any,
    has_aux: Any, aux: Any, accumulator_dtype: Any, mesh: Any,
) -> Options:  # fmt: skip
    """Raises `TypeError` or `ValueError` for an option that cannot be."""
    if not isinstance(axis, str):
        raise TypeError(
            f'axis must be the name of one mesh axis, got {axis!r}; pass axis="stage", or the name '
            "that it has in your mesh"
        )
    count = None if microbatches == "auto" else check_positive("microbatches", microbatches)
    chunks = check_positive("chunks", chunks)
    if schedule not in (*NAMES, "auto"):
        raise ValueError(
            f"schedule={schedule!r} is not known; pass one of {', '.join(map(repr, NAMES))}, or "
            '"auto"'
        )
    schedule = None if schedule == "auto" else schedule
    check_flags(recompute=recompute)
    if not recompute and schedule not in (None, "gpipe"):
        raise ValueError(
            f'recompute=False keeps what all microbatches leave behind, which only "gpipe" can, '
            f'and schedule={schedule!r}; pass schedule="gpipe", or a policy that keeps more'
        )
    if isinstance(policy, Plan):
        raise TypeError(
            "policy takes a policy, which fits stages of every length, and a jaxmem.Plan fits one; "
            'pass policy="full" or another'
        )
    parsed = None if policy is None else policies.parse(policy)
    if layers is not None and layers != "cost":
        if isinstance(layers, str) or not isinstance(layers, Sequence):
            raise TypeError(
                f'layers must be sizes, such as (3, 4, 4, 3), or "cost", got {layers!r}'
            )
        layers = tuple(check_positive("layers", size) for size in layers)
    if mesh is not None:
        if not hasattr(mesh, "axis_names"):
            raise TypeError(
                f"mesh must be a jax.sharding.Mesh or AbstractMesh, got {mesh!r}; make one with "
                f"jax.make_mesh((4,), ({axis!r},))"
            )
        check_mesh(mesh, axis)

    check_flags(has_aux=has_aux)
    parts = Parts.checked(
        argnums=(), has_aux=has_aux, microbatches=1, aux=aux, batch_argnums=batch_argnums,
        rng_argnums=rng_argnums, carry_argnums=carry_argnums, batch_sharding=None,
        return_weight=False,
    )  # fmt: skip
    return Options(
        axis, count, schedule, chunks, parsed, layers, recompute, where, parts.batch_argnums,
        parts.rng_argnums, parts.carry_argnums, has_aux, parts.aux,
        floating("accumulator_dtype", accumulator_dtype), mesh,
    )  # fmt: skip


def manual_axes(mesh: Any) -> list[str]:
    """Axes of a mesh that a `shard_map` further out is over."""
    manual = jax.sharding.AxisType.Manual
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [axis for axis, kind in kinds if kind == manual]


def check_mesh(mesh: Any, axis: str) -> None:
    """Raises `ValueError` for a mesh without several devices along the axis."""
    if axis not in mesh.axis_names:
        raise ValueError(
            f"the stages of a pipeline lie along the axis {axis!r}, and the mesh has "
            f"{', '.join(map(repr, mesh.axis_names))}; pass one of these as axis=, or a mesh that "
            "has it"
        )
    if mesh.shape[axis] == 1:
        raise ValueError(
            f"the mesh {dict(mesh.shape)} has one device along {axis!r}, and a pipeline needs two "
            "stages at least; pass a larger mesh, or use jaxmem.value_and_grad(loss, "
            "microbatches=...)"
        )
