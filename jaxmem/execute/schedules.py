"""A plan's schedule as a pair of functions that know nothing of derivatives."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.execute import periodic, revolve
from jaxmem.execute.forms import Form
from jaxmem.execute.state import Cotangents
from jaxmem.layer import Layer
from jaxmem.plan import Plan
from jaxmem.solve import segment_lengths


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a plan that jax's own scan cannot express is carried out.

    Attributes:
      forward: operands -> (results, kept), kept any pytree of arrays.
      backward: (operands, kept, cotangents of carry, of ys) -> `Cotangents`.
      lengths: the cut for the nested form, where plain jax has to do.
    """

    forward: Callable[[Sequence[Any]], tuple[list[Any], Any]]
    backward: Callable[[Sequence[Any], Any, Sequence[Any], Sequence[Any]], Cotangents]
    lengths: tuple[int, ...]


def schedule_for(plan: Plan, form: Form, layer: Layer) -> Schedule:
    """The schedule of a periodic, full or revolve plan."""
    if plan.kind == "periodic":
        module, how, lengths = periodic, plan.lengths, plan.lengths
    elif plan.kind == "full":
        module, how, lengths = periodic, (1,), (1,)
    else:
        module, how, lengths = revolve, plan.slots, segment_lengths(plan.length)
    return Schedule(
        lambda args: module.forward(form, layer, how, args),  # pyright: ignore[reportArgumentType]
        lambda args, kept, ct_carry, ct_ys: module.backward(
            form,
            layer,
            how,
            args,
            kept,
            ct_carry,
            ct_ys,  # pyright: ignore[reportArgumentType]
        ),
        lengths,
    )
