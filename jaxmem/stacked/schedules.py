"""A plan's schedule as a pair of functions that know nothing of derivatives."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.plans.plan import Plan
from jaxmem.policies import Keep
from jaxmem.solve import segment_lengths
from jaxmem.stacked import kept, periodic, revolve
from jaxmem.stacked.forms import Form
from jaxmem.stacked.state import Cotangents, Into
from jaxmem.trace.layer import Layer


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a plan that jax's own scan cannot express is carried out.

    Attributes:
      forward: operands -> (results, kept), kept any pytree of arrays.
      backward: (operands, kept, cotangents of carry, of ys, `Into`) -> `Cotangents`.
      lengths: the cut for the nested form, where plain jax has to do.
    """

    forward: Callable[[Sequence[Any]], tuple[list[Any], Any]]
    backward: Callable[[Sequence[Any], Any, Sequence[Any], Sequence[Any], Into], Cotangents]
    lengths: tuple[int, ...]


def schedule_for(
    plan: Plan, form: Form, layer: Layer, outs: Sequence[bool] | None = None
) -> Schedule | None:
    """The schedule of a plan.

    Args:
      outs: which results have cotangents, if it is for a backward pass in which not all of
        those do that the layer is differentiated for; of what the forward pass kept, such a
        pass uses what it can.

    Returns:
      None if what was kept is not enough for such a backward pass.
    """
    if plan.kind in ("keep", "none"):
        runs = [
            (count, layer if keep is None else layer.keeping(keep.values, keep.offload))
            for count, keep in plan.runs or ((plan.length, None),)
        ]
        if outs is not None:
            runs = [(count, run.narrowed(outs, stored=True)) for count, run in runs]
        if any(run is None for _, run in runs):
            return None
        return Schedule(
            lambda args: kept.forward(form, runs, args),  # pyright: ignore[reportArgumentType]
            lambda args, values, *cts: kept.backward(form, runs, args, values, *cts),  # pyright: ignore[reportArgumentType]
            segment_lengths(plan.length),
        )
    if isinstance(plan.layer, Keep):
        layer = layer.keeping(plan.layer.values, plan.layer.offload)
    if outs is not None:
        narrow = layer.narrowed(outs)
        if narrow is None:
            return None
        layer = narrow
    if plan.kind == "revolve":
        taped = outs is None  # the tape that it keeps is the whole layer's
        return Schedule(
            lambda args: revolve.forward(form, layer, plan.slots, args),
            lambda args, kept, *cts: revolve.backward(
                form, layer, plan.slots, args, kept if taped else (kept[0], None), *cts
            ),
            segment_lengths(plan.length),
        )
    lengths = plan.lengths or (1,)
    return Schedule(
        lambda args: periodic.forward(form, layer, lengths, args),
        lambda args, kept, *cts: periodic.backward(form, layer, lengths, args, kept, *cts),
        lengths,
    )
