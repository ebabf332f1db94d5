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
from jaxmem.pipeline.function import Output, Results
from jaxmem.plans.plan import Plan
from jaxmem.policies import NoRemat, Policy
from jaxmem.rewrite.apply import as_stack
from jaxmem.trace import find
from jaxmem.trace.find import LayerStack, Where
from jaxmem.trace.layer import Body

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class State:
    """A leaf that goes from microbatch to microbatch.

    Attributes:
      number: its operand.
      out: the flat result that is its new value.
      kind: "before", "layers" or "after", see `jaxmem.pipeline.states`; "same" if it is passed on
        as it is.
      x, y: of "layers", which stacked input and output of the layers they are.
    """

    number: int
    out: int
    kind: str
    x: int = -1
    y: int = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A function around one stack.

    Attributes:
      closed: from flat operands to flat results.
      own: numbers of the operands that are each microbatch's own: of the batch, keys, states.
      results: what the flat results are.
      at: index of the stack's equation.
      info: the stack.
      body: its layer.
      length, reverse, unroll: of its scan.
      policy: that it has already.
      states: what goes from microbatch to microbatch.
    """

    closed: ClosedJaxpr
    own: frozenset[int]
    results: Results
    at: int
    info: LayerStack
    body: Body
    length: int
    reverse: bool
    unroll: Any
    policy: Policy | Plan | None
    states: tuple[State, ...] = ()

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
        own = {var for k, var in enumerate(self.closed.jaxpr.invars) if k in self.own}
        shared = set(self.closed.jaxpr.invars) - own
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

    @functools.cached_property
    def is_state(self) -> list[bool]:
        """Of each stacked input, whether it is a state that each layer has for itself."""
        places = {state.x for state in self.of_kind("layers")}
        return [k in places for k in range(len(self.xs))]

    @property
    def own_xs(self) -> list[Any]:
        """Those that are each microbatch's own, such as keys, or constants."""
        flags = zip(self.is_parameter, self.is_state, strict=True)
        return [x for x, flag in zip(self.xs, flags, strict=True) if not any(flag)]

    @functools.cached_property
    def used_ys(self) -> list[bool]:
        """Of each y, whether anything after the stack reads it."""
        outs = self._results_after
        used = {atom for at in self._after for atom in self.closed.jaxpr.eqns[at].invars
                if _jax.is_var(atom)}  # fmt: skip
        used.update(atom for atom in self._atoms(outs) if _jax.is_var(atom))
        return [y in used for y in self._ys]

    @functools.cached_property
    def _after(self) -> frozenset[int]:
        return self._made_after(self._results_after)

    def _made_after(self, outs: Iterable[int]) -> frozenset[int]:
        return _jax.needed(self.closed, self._atoms(outs), False, set(self.eqn.outvars))

    def _atoms(self, outs: Iterable[int]) -> list[Any]:
        return [self.closed.jaxpr.outvars[out] for out in outs]

    @property
    def _ys(self) -> list[Any]:
        return self.body.split_out(self.eqn.outvars)[1]

    # ------------------------------------------------------------ what is beside the loss

    def of_kind(self, kind: str) -> list[State]:
        """The states that are there."""
        return [state for state in self.states if state.kind == kind]

    @functools.cached_property
    def outputs_of_layers(self) -> dict[int, int]:
        """Auxiliary outputs that are a y as it is, and the y: rows of layers stay on their stage.

        One entry per row of the batch they cannot have.
        """
        found = {}
        for number, output in enumerate(self.results.outputs):
            atoms = self._atoms(output.outs)
            ys = [k for k, y in enumerate(self._ys) if y is atoms[0]]
            if len(atoms) == 1 and ys and output.mode != "concat":
                found[number] = ys[0]
        return found

    @functools.cached_property
    def kept_ys(self) -> list[int]:
        """Those ys that stay on the stage of their layers."""
        return sorted({*self.outputs_of_layers.values(), *(s.y for s in self.of_kind("layers"))})

    @functools.cached_property
    def outputs_after(self) -> list[Output]:
        """Auxiliary outputs that are made after the layers."""
        kept = self.outputs_of_layers
        return [one for number, one in enumerate(self.results.outputs) if number not in kept]

    @functools.cached_property
    def outs_after(self) -> list[int]:
        """Results next to the loss that are made after the layers: states and outputs."""
        states = [state.out for state in self.of_kind("after")]
        return [*states, *(out for output in self.outputs_after for out in output.outs)]

    @functools.cached_property
    def _results_after(self) -> list[int]:
        return [*range(self.results.losses), *self.outs_after]

    @property
    def has_more(self) -> bool:
        """Whether there is anything beside the loss that stages make."""
        return bool(self.results.outputs or self.of_kind("layers") or self.of_kind("after"))

    def weight(self, operands: Sequence[Any], size: int) -> Any:
        """What auxiliary outputs of a microbatch count, of so many rows."""
        if self.results.weight is None:
            return size
        return self.evaluate(operands, self._atoms([self.results.weight]))[0]

    # ------------------------------------------------------------ parts

    def evaluate(self, operands: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
        """Values from before the stack."""
        only = _jax.needed(self.closed, atoms, False)
        found = _jax.evaluate(self.closed, operands, only=only, outs=atoms)
        return [_jax.as_array(out, atom.aval) for out, atom in zip(found, atoms, strict=True)]

    def after(
        self,
        operands: Sequence[Any],
        carry: Sequence[Any],
        ys: Sequence[Any],
        outs: Sequence[int],
    ) -> list[Any]:
        """These results, from what leaves the last layer; ys that nobody reads may be None."""
        given = dict(zip(self.eqn.outvars, [*carry, *ys], strict=True))
        atoms, only = self._atoms(outs), self._made_after(outs)
        found = _jax.evaluate(self.closed, operands, only=only, given=given, outs=atoms)
        return [_jax.as_array(out, atom.aval) for out, atom in zip(found, atoms, strict=True)]

    def depends(self, outs: Iterable[int]) -> bool:
        """Whether these results depend on what the layers compute."""
        return self.at in _jax.needed(self.closed, self._atoms(outs), False)

    def reads(self, atoms: Sequence[Any]) -> set[int]:
        """Numbers of the operands that these values from before the stack depend on."""
        return self._read(_jax.needed(self.closed, atoms, False), atoms)

    @property
    def read_after(self) -> set[int]:
        """Numbers of the operands that are read after the stack."""
        return self._read(self._after, self._atoms(self._results_after))

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


def cut(
    closed: ClosedJaxpr,
    own: frozenset[int],
    results: Results,
    where: Where | None,
    label: str,
) -> Cut:
    """A function, cut at its stack.

    Args:
      closed: inlined, and without constants.
      own: numbers of the operands that are of the batch, or keys.
      results: what its results are.
      where: which of several stacks; an index, or a predicate on `LayerStack`.
      label: what the function is called in messages.

    Raises:
      ValueError: there is no stack, or there are several, or it is inside another call.
    """
    stacks = find.find(closed).stacks
    if not stacks:
        raise ValueError(
            f"no layer stack in {label}: a pipeline is made of a jax.lax.scan over layers, and "
            "there is none; scan the layers with jax.lax.scan, nn.scan, nnx.scan or jaxmem.scan"
        )
    if where is not None:
        chosen = [
            pair for pair in stacks
            if (where(pair[0]) if callable(where) else pair[0].index == where)
        ]  # fmt: skip
    else:
        chosen = stacks
    if len(chosen) != 1:
        listing = "\n".join(f"  {info}" for info, _ in stacks)
        what = (
            f"{label} has {len(stacks)} layer stacks, and one is split over the stages"
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
    return Cut(closed, own, results, places[0], info, *parts, policy)
