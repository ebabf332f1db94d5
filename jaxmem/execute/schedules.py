"""A plan's schedule as a pair of functions that know nothing of derivatives."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.execute import periodic, revolve
from jaxmem.execute.forms import Form
from jaxmem.execute.state import Cotangents, Into
from jaxmem.layer import Layer
from jaxmem.plan import Plan
from jaxmem.solve import segment_lengths


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


def schedule_for(plan: Plan, form: Form, layer: Layer, taped: bool = True) -> Schedule:
    """The schedule of a periodic, full or revolve plan.

    Args:
      taped: whether tapes that the forward pass kept are this layer's; otherwise
        only the carries that it kept are used.
    """
    if plan.kind == "revolve":
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
