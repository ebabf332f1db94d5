"""A decorated region without a stack, under a policy that plans it once it is differentiated.

As a stack of one layer it is mapped as a whole by `vmap`, so that what is planned is what runs, and
is told from what is only evaluated.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.policies import ByLayer
from jaxmem.stacked import Form
from jaxmem.stacked.stack import Stack
from jaxmem.trace import context
from jaxmem.trace.layer import Body


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SingleLayer(Stack):
    """A stack of one layer that is code.

    Attributes:
      policy: says how it runs where it is differentiated.
      label: what it is called in messages.
      num_closed_over: how many operands are what the code closed over, and no argument of it.
    """

    policy: ByLayer
    label: str
    num_closed_over: int

    @property
    def called(self) -> str:
        return self.label

    def run(self, args: Sequence[Any]) -> list[Any]:
        return self._stacked(_jax.evaluate(self.form.body.jaxpr, args))

    def jvp(
        self, args: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Results and their tangents; a tangent is None for zero."""
        wrt = self.wrt([t is not None for t in tangents])
        if context.is_inside_layer():  # of a stack with a plan
            return self.derivative(self.run, wrt, args, tangents)
        # No derivative is asked of what has none: a user's rule may not have one for what it
        # closes over.
        fixed = {at for at in range(self.num_closed_over) if tangents[at] is None}
        return self.derivative(functools.partial(self._planned, fixed), wrt, args, tangents)

    def _planned(self, fixed: Collection[int], args: Sequence[Any]) -> list[Any]:
        closed = self.form.body.jaxpr
        if fixed:
            closed = _jax.with_consts(closed, {at: args[at] for at in fixed})
        others = [arg for at, arg in enumerate(args) if at not in fixed]
        return self._stacked(self.policy.run_unrolled(closed, others, self.label))

    def _stacked(self, outs: Sequence[Any]) -> list[Any]:
        avals = self.form.body.jaxpr.out_avals
        return [_jax.as_array(out, aval)[None] for out, aval in zip(outs, avals, strict=True)]


def run_region(closed: ClosedJaxpr, args: Sequence[Any], policy: ByLayer, label: str) -> list[Any]:
    """The results of code, planned by its policy when and if they are differentiated."""
    if context.is_inside_layer() or context.is_inside_region():
        return _jax.evaluate(closed, args)
    open_, consts = _jax.without_consts(closed)
    body = Body(open_, len(consts) + len(args), 0)
    region = SingleLayer(
        form=Form(body, 1, interleaved=True),
        policy=policy,
        label=label,
        num_closed_over=len(consts),
    )
    return [out[0] for out in _jax.bind_stack(region, [*consts, *args])]
