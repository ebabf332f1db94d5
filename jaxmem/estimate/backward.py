"""The backward pass of one layer, operation by operation.

First what is recomputed, from the tape, then what pulls the gradients back.  In a loop over
layers that order does: one layer's values are few.  Of many operations outside of loops each has
to wait until the gradient comes by that needs it, since what is recomputed early is live
till then; and what is elementwise is computed for each that reads it, since one that was computed
for the first is live till the last.  Compilers do not see to that, so barriers do.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, primitives

from jaxmem import _jax
from jaxmem.estimate.arrays import behind_views, views_in
from jaxmem.estimate.counting import kind_of
from jaxmem.estimate.interleaved import BackwardStep, interleave
from jaxmem.trace.context import platform
from jaxmem.trace.layer import Layer, nbytes

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward pass of a layer: (consts, xs, tape, gradients of results) -> gradients.

    Attributes:
      closed: its operations.
      consts, xs, tape, gradients: its inputs.
      steps: its operations in groups, if it is interleaved; what follows the last one belongs to
        none.
    """

    closed: ClosedJaxpr
    consts: list[Any]
    xs: list[Any]
    tape: list[Any]
    gradients: list[Any]
    steps: tuple[BackwardStep, ...] = ()

    @property
    def fenced(self) -> set[Any]:
        """Values that go through a barrier, see `interleaved_pullback`."""
        found: set[Any] = set()
        for step in self.steps:
            found.update(step.reads, step.waits, step.first)
            if step.first:
                found.update(self.closed.jaxpr.eqns[step.operation].outvars)
        return found


# ---------------------------------------------------------------- API


def backward_of(layer: Layer, interleaved: bool = False) -> Backward:
    """The backward pass of a layer.

    Args:
      interleaved: whether what is recomputed stands right in front of what reads it, several
        times if need be, and not in front of everything.
    """
    forward, reverse = layer.linearised, layer.transposed
    tape = [layer.values[place] for place in layer.kept if place is not None]
    again = _jax.needed(forward, layer.residuals, keep_effects=False, given=tape)
    consts, _, xs = layer.body.split_in(forward.jaxpr.invars)
    closed = _jax.followed_by(forward, again, reverse, layer.residuals, [*consts, *xs, *tape])
    gradients = reverse.jaxpr.invars[len(layer.residuals) :]
    if not interleaved:
        return Backward(closed, consts, xs, tape, gradients)
    closed, steps = interleave(closed, len(again), gradients, _computed_late(layer, tape))
    return Backward(closed, consts, xs, tape, gradients, steps)


def interleaved_pullback(
    layer: Layer,
    consts: Sequence[Any],
    x: Sequence[Any],
    tape: Sequence[Any],
    ct_carry: Sequence[Any],
    ct_y: Sequence[Any],
    waits: bool = True,
    casts_wait: bool = False,
) -> tuple[list[Any], list[Any], list[Any]]:
    """As `Layer.pullback`; what is recomputed waits for the gradient that needs it.

    So do the arrays that loops fill: each has its own (`jaxmem._jax.loops`).

    Args:
      waits: for those of the layer's results, too.
      casts_wait: whether casts of what is given do, however little they make.
    """
    backward = backward_of(layer, interleaved=True)
    closed = backward.closed
    pairs = zip(layer.kept, tape, strict=True)
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(backward.consts, consts, strict=True))
    values.update(zip(backward.xs, x, strict=True))
    values.update((layer.values[place], value) for place, value in pairs if place is not None)
    values.update(zip(backward.gradients, [*ct_carry, *ct_y], strict=True))
    # What is read to recompute is taken from behind a barrier: a compiler would else find
    # that it has the results already.  What reads it later takes it from there as well, so that it
    # is one array, with one copy in another layout; but for parameters, which are there anyway.
    behind: dict[Any, Any] = {}
    late = _late_parameters(backward, values) if casts_wait else {}
    special = _jax.with_own_arrays(closed)
    parameters = {*closed.jaxpr.constvars, *backward.consts, *backward.xs}
    for step in backward.steps:
        if step.anew:
            behind.clear()
        if step.recomputed:
            again = [closed.jaxpr.eqns[at] for at in step.recomputed]
            given = [late.get(var, values[var]) for var in step.reads]
            first = [var for var in step.waits if waits or var not in backward.gradients]
            fenced, later = tied([values[var] for var in first], given)
            values.update(zip(first, fenced, strict=True))
            behind.update(zip(step.reads, later, strict=True))
            values.update((var, behind[var]) for var in step.reads if var not in parameters)
            with jax.named_scope(_jax.RECOMPUTED):
                found = _jax.evaluate_each(again, behind, special)
            # What is no kernel's is read in this step and not behind a barrier.
            behind.update(found)
            values.update(found)
        eqn = closed.jaxpr.eqns[step.operation]
        values.update(_jax.evaluate_each([eqn], values, special))
        if step.first:
            outs = [var for var in eqn.outvars if not _jax.is_dropped(var)]
            done, later = tied([values[var] for var in outs], [values[var] for var in step.first])
            values.update(zip([*outs, *step.first], [*done, *later], strict=True))
    done = backward.steps[-1].operation + 1 if backward.steps else 0
    values.update(_jax.evaluate_each(closed.jaxpr.eqns[done:], values, special))
    return layer.by_role(a.val if _jax.is_literal(a) else values[a] for a in closed.jaxpr.outvars)


def tied(first: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Both, behind a barrier: the values are there only once the first are.

    What of a barrier's results nobody reads XLA takes out of it, so that all are to be used.  What
    goes through one varies, under `shard_map`, over all mesh axes that any of it varies over:
    values of a kind have one together, with those of `first` that are of that kind.
    """
    found, before = list(values), list(first)
    if not first and platform() == "tpu":
        # XLA for TPUs takes a barrier behind one fusion that makes all of its operands for having
        # as many results as that, and refuses the program where the fusion makes more later.
        return [], [lax.optimization_barrier(_jax.row_major(value)) for value in values]
    for kind in dict.fromkeys(map(_jax.varying, values)):
        places = [place for place, value in enumerate(values) if _jax.varying(value) == kind]
        same = [place for place, value in enumerate(before) if _jax.varying(value) == kind]
        several = [*(before[place] for place in same), *(values[place] for place in places)]
        fenced = lax.optimization_barrier(list(map(_jax.row_major, several)))
        for place, value in zip(same, fenced[: len(same)], strict=True):
            before[place] = value
        for place, value in zip(places, fenced[len(same) :], strict=True):
            found[place] = value
    return before, found


# ---------------------------------------------------------------- implementation


def _late_parameters(backward: Backward, values: dict[Any, Any]) -> dict[Any, Any]:
    """What is given and cast to recompute, by variable, once the largest gradient is there.

    A cast makes little, and so waits for none of them: the compiler of GPUs at times puts what
    needs least room first, and would cast all parameters before the forward pass.
    """
    readers: dict[Any, set[Any]] = {}
    for step in backward.steps:
        for eqn in (backward.closed.jaxpr.eqns[at] for at in step.recomputed):
            for atom in filter(_jax.is_var, eqn.invars):
                readers.setdefault(atom, set()).add(eqn.primitive)
    casts = {primitives.convert_element_type_p}
    own = [var for var in (*backward.consts, *backward.xs) if readers.get(var) == casts]
    own = [var for var in own if len(var.aval.shape) > 1]
    if platform() == "tpu" or not own or not backward.gradients:
        return {}
    first = max(backward.gradients, key=lambda var: nbytes(var.aval))
    (values[first],), later = tied([values[first]], [values[var] for var in own])
    return dict(zip(own, later, strict=True))


def _computed_late(layer: Layer, tape: Iterable[Any]) -> list[Any]:
    """What of a tape is elementwise, so that compilers compute it where it is read.

    If a product reads it that nothing waits for, as the gradient of a matrix, that is late, and
    what it is computed from is live till then.
    """
    views = views_in(layer.linearised.jaxpr)
    makers = ((var, layer.made_by(behind_views(var, views)[-1])) for var in tape)
    return [var for var, eqn in makers if eqn is not None and kind_of(eqn) == "fused"]
