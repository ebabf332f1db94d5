"""The microbatches of one size: the function on one of them, cut, and the program that is run."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmem import _jax
from jaxmem.accumulate.call import Call
from jaxmem.accumulate.split import Group, Split
from jaxmem.pipeline.auto import resolved
from jaxmem.pipeline.choices import chunk_sizes, policy_of
from jaxmem.pipeline.cut import Cut, cut
from jaxmem.pipeline.device import Program
from jaxmem.pipeline.function import Operands, called, traced
from jaxmem.pipeline.options import Options, manual_axes
from jaxmem.pipeline.schedule import PipelineSchedule
from jaxmem.pipeline.stage import Stages
from jaxmem.pipeline.states import with_states

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The microbatches of one size.

    Attributes:
      group: which they are.
      program: what is run.
      consts: operands of the program that the function closes over.
      outside: the same function as it is outside of the mapped axis, for what is computed there.
    """

    group: Group
    program: Program
    consts: list[Any]
    outside: Callable[[], Cut]


# ---------------------------------------------------------------- API


def inside(mesh: Any, axis: str) -> contextlib.AbstractContextManager[Any]:
    """What is traced where it is open may run on the stages: types of arrays tell the mesh."""
    abstract = getattr(mesh, "abstract_mesh", mesh)
    manual = {axis: jax.sharding.AxisType.Manual}
    return jax.sharding.use_abstract_mesh(abstract.update_axis_types(manual))


def parts_of(
    options: Options, fun: Callable[..., Any], mesh: Any, args: Any, kwargs: Any
) -> tuple[Call, list[Part]]:
    """A call taken apart, and its microbatches.

    Raises:
      TypeError, ValueError: the call cannot be run in stages.
    """
    call = called(options, fun, args, kwargs)
    stages, rows = mesh.shape[options.axis], call.split.rows
    options = resolved(options, stages, rows, mesh.size // stages)
    assert options.microbatches is not None
    call = dataclasses.replace(call, split=Split.of(rows, options.microbatches))
    return call, [_part(options, call, group, mesh) for group in call.split.groups]


# ---------------------------------------------------------------- implementation


def _part(options: Options, call: Call, group: Group, mesh: Any) -> Part:
    assert options.schedule is not None
    stages = mesh.shape[options.axis]
    label = getattr(call.fun, "__name__", "the function")

    def found() -> tuple[Cut, list[Any]]:
        closed, consts, results = traced(call, options.aux, options.has_aux, group.size, label)
        if not _jax.can_be_recomputed(closed):
            raise ValueError(
                f"{label} has side effects that must not happen twice, and a pipeline "
                "recomputes its stages; move them out, or use jax.debug.callback or "
                "jax.pure_callback"
            )
        operands = Operands(call)
        places = {path: len(consts) + k for k, path in enumerate(operands.paths)}
        for path, _ in results.changed:
            if path not in places:
                raise ValueError(
                    f"{call.names[path]} is of the batch, or a random key, and cannot go from "
                    "microbatch to microbatch as well; pass it as an argument of its own"
                )
        changed = [(places[path], out, call.names[path]) for path, out in results.changed]
        first = len(consts) + len(operands.shared)
        own = frozenset(range(first, len(closed.in_avals)))
        function = cut(closed, own, results, options.where, label)
        return with_states(function, changed, label), consts

    with inside(mesh, options.axis):
        function, consts = found()
        policy = policy_of(options, function)
        sizes = chunk_sizes(options, function, stages)
    others = set(mesh.axis_names) - {options.axis, *manual_axes(mesh)}
    branches = all(mesh.shape[axis] == 1 for axis in others)
    if not (branches or options.recompute):
        raise ValueError(
            f"recompute=False is for a mesh of stages alone, and this one is {dict(mesh.shape)}"
            f"; leave recompute= out, or pass a mesh whose axes but {options.axis!r} have one "
            "device"
        )
    program = Program(
        Stages(function, sizes, policy, branches),
        options.axis,
        PipelineSchedule.of(options.schedule, stages, group.count, options.chunks),
        group.first,
        call.split.microbatches,
        group.size,
        options.recompute,
        options.accumulator_dtype,
        branches,
    )
    return Part(group, program, consts, functools.cache(lambda: found()[0]))
