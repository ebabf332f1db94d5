"""The loss of one microbatch, cut at its layer stack: what is before, the layers, what is after.

Each part is evaluated from the function's own operands, so that a value which two parts read, such
as a mask, is computed in both: stages pass on nothing but the carry.  Stacked inputs that do not
depend on the microbatch are the layers' parameters; they are made once, outside of the pipeline.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.plans.plan import Plan
from jaxmem.policies import NoRemat, Policy
from jaxmem.rewrite.apply import as_stack
from jaxmem.trace import find
from jaxmem.trace.find import LayerStack, Where
from jaxmem.trace.layer import Body

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A function around one stack.

    Attributes:
      closed: from flat operands, those that all microbatches share first, to flat results.
      num_shared: how many these are.
      at: index of the stack's equation.
      info: the stack.
      body: its layer.
      length, reverse, unroll: of its scan.
      policy: that it has already.
    """

    closed: ClosedJaxpr
    num_shared: int
    at: int
    info: LayerStack
    body: Body
    length: int
    reverse: bool
    unroll: Any
    policy: Policy | Plan | None

    # ------------------------------------------------------------ values

    @property
    def eqn(self) -> Any:
        """The equation of the stack."""
        return self.closed.jaxpr.eqns[self.at]

    @property
    def consts(self) -> list[Any]:
        """What all layers read."""
        return self.body.split_in(self.eqn.invars)[0]

    @property
    def carry(self) -> list[Any]:
        """What enters the first layer."""
        return self.body.split_in(self.eqn.invars)[1]

    @functools.cached_property
    def xs(self) -> list[Any]:
        """Stacked inputs."""
        return self.body.split_in(self.eqn.invars)[2]

    @functools.cached_property
    def is_parameter(self) -> list[bool]:
        """Of each stacked input, whether it is made of what all microbatches share."""
        shared = set(self.closed.jaxpr.invars[: self.num_shared])
        own = set(self.closed.jaxpr.invars[self.num_shared :])
        for eqn in self.closed.jaxpr.eqns[: self.at]:
            read = {atom for atom in eqn.invars if _jax.is_var(atom)}
            if read & own:
                own.update(eqn.outvars)
            elif read & shared:
                shared.update(eqn.outvars)
        return [_jax.is_var(x) and x in shared and x not in own for x in self.xs]

    @property
    def parameters(self) -> list[Any]:
        """Those stacked inputs that are parameters."""
        return [x for x, flag in zip(self.xs, self.is_parameter, strict=True) if flag]

    @property
    def own_xs(self) -> list[Any]:
        """Those that are each microbatch's own, such as keys, or constants."""
        return [x for x, flag in zip(self.xs, self.is_parameter, strict=True) if not flag]

    @functools.cached_property
    def used_ys(self) -> list[bool]:
        """Of each y, whether anything after the stack reads it."""
        used = {atom for at in self._after for atom in self.closed.jaxpr.eqns[at].invars
                if _jax.is_var(atom)}  # fmt: skip
        used.update(atom for atom in self.closed.jaxpr.outvars if _jax.is_var(atom))
        return [y in used for y in self.body.split_out(self.eqn.outvars)[1]]

    @functools.cached_property
    def _after(self) -> frozenset[int]:
        return _jax.needed(self.closed, self.closed.jaxpr.outvars, False, set(self.eqn.outvars))

    # ------------------------------------------------------------ parts

    def evaluate(self, operands: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
        """Values from before the stack."""
        only = _jax.needed(self.closed, atoms, False)
        found = _jax.evaluate(self.closed, operands, only=only, outs=atoms)
        return [_jax.as_array(out, atom.aval) for out, atom in zip(found, atoms, strict=True)]

    def after(self, operands: Sequence[Any], carry: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
        """The results, from what leaves the last layer; ys that nobody reads may be None."""
        given = dict(zip(self.eqn.outvars, [*carry, *ys], strict=True))
        outs = self.closed.jaxpr.outvars
        found = _jax.evaluate(self.closed, operands, only=self._after, given=given, outs=outs)
        return [_jax.as_array(out, aval) for out, aval in zip(
            found, self.closed.out_avals, strict=True)]  # fmt: skip

    def depends(self, outs: Iterable[int]) -> bool:
        """Whether these results depend on what the layers compute."""
        atoms = [self.closed.jaxpr.outvars[at] for at in outs]
        return self.at in _jax.needed(self.closed, atoms, False)

    def reads(self, atoms: Sequence[Any]) -> set[int]:
        """Numbers of the operands that these values from before the stack depend on."""
        return self._read(_jax.needed(self.closed, atoms, False), atoms)

    @property
    def read_after(self) -> set[int]:
        """Numbers of the operands that are read after the stack."""
        return self._read(self._after, self.closed.jaxpr.outvars)

    @functools.cached_property
    def read(self) -> set[int]:
        """Numbers of the operands that are read on stages: not those of stacked parameters."""
        return self.reads([*self.consts, *self.own_xs, *self.carry]) | self.read_after

    def _read(self, eqns: Iterable[int], atoms: Sequence[Any]) -> set[int]:
        numbers = {var: number for number, var in enumerate(self.closed.jaxpr.invars)}
        read = [atom for at in eqns for atom in self.closed.jaxpr.eqns[at].invars]
        return {numbers[atom] for atom in [*read, *atoms] if _jax.is_var(atom) and atom in numbers}

    def part(self, of: Callable[..., Any]) -> ClosedJaxpr:
        """A function of the operands as a jaxpr, for looking at."""
        return _jax.trace(of, self.closed.in_avals)


# ---------------------------------------------------------------- API


def cut(closed: ClosedJaxpr, num_shared: int, where: Where | None, label: str) -> Cut:
    """A function, cut at its stack.

    Args:
      closed: inlined, and without constants.
      where: which of several stacks; an index, or a predicate on `LayerStack`.
      label: what the function is called in messages.

    Raises:
      ValueError: there is no stack, or there are several, or it is inside another call.
    """
    found = find.find(closed).stacks
    if not found:
        raise ValueError(
            f"no layer stack in {label}: a pipeline is made of a jax.lax.scan over layers, and "
            "there is none; scan the layers with jax.lax.scan, nn.scan, nnx.scan or jaxmem.scan"
        )
    if where is not None:
        chosen = [
            pair for pair in found
            if (where(pair[0]) if callable(where) else pair[0].index == where)
        ]  # fmt: skip
    else:
        chosen = found
    if len(chosen) != 1:
        listing = "\n".join(f"  {info}" for info, _ in found)
        what = (
            f"{label} has {len(found)} layer stacks, and one is split over the stages"
            if where is None
            else f"where={where!r} chooses {len(chosen)} of the stacks of {label}"
        )
        raise ValueError(f"{what}; pass where=, the index of one of them:\n{listing}")
    info, eqn = chosen[0]
    places = [at for at, one in enumerate(closed.jaxpr.eqns) if one is eqn]
    if not places:
        raise ValueError(
            f"{info} is inside another call, such as jax.checkpoint or lax.cond, and cannot be "
            "split over stages there; call it outside (a pipeline recomputes its stages by itself, "
            "and layers by policy=)"
        )
    if _jax.is_stack(eqn):
        stack = eqn.params["stack"]
        form, policy = stack.form, stack.policy
    else:
        form, policy = as_stack(eqn, NoRemat()).form, None
    parts = form.body, form.length, form.reverse, form.unroll
    return Cut(closed, num_shared, places[0], info, *parts, policy)
