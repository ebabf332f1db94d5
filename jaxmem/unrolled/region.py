"""A decorated region without a stack, under a policy that plans it once it is differentiated.

As a stack of one layer it is mapped as a whole by `vmap`, so that what is planned is what runs, and
is told from what is only evaluated.
"""

import dataclasses
from collections.abc import Sequence
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
    """

    policy: ByLayer
    label: str

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
        inside = context.is_inside_layer()  # of a stack with a plan
        return self.derivative(self.run if inside else self._planned, wrt, args, tangents)

    def _planned(self, args: Sequence[Any]) -> list[Any]:
        return self._stacked(self.policy.run_unrolled(self.form.body.jaxpr, args, self.label))

    def _stacked(self, outs: Sequence[Any]) -> list[Any]:
        avals = self.form.body.jaxpr.out_avals
        return [_jax.as_array(out, aval)[None] for out, aval in zip(outs, avals, strict=True)]


def run_region(closed: ClosedJaxpr, args: Sequence[Any], policy: ByLayer, label: str) -> list[Any]:
    """The results of code, planned by its policy when and if they are differentiated."""
    if context.is_inside_layer() or context.is_inside_region():
        return _jax.evaluate(closed, args)
    open_, consts = _jax.without_consts(closed)
    body = Body(open_, len(consts) + len(args), 0)
    region = SingleLayer(form=Form(body, 1, interleaved=True), policy=policy, label=label)
    return [out[0] for out in _jax.bind_stack(region, [*consts, *args])]
