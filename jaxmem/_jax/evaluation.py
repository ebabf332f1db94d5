"""Jaxprs evaluated equation by equation, keeping source lines and name stacks."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.extend.core.primitives import jit_p

from jaxmem._jax.jaxprs import constrains, in_checkpoint, is_literal
from jaxmem._jax.private import current_name_stack, user_context
from jaxmem._jax.tracing import trace
from jaxmem._jax.types import Eqn


def without_jit(eqn: Eqn, operands: list[Any]) -> list[Any] | None:
    """For `evaluate`: the inside of what `jax.jit` made, if it constrains no shardings."""
    if eqn.primitive is not jit_p or constrains(eqn):
        return None
    return evaluate(eqn.params["jaxpr"], operands, without_jit)


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr with the calls that `without_jit` looks into gone; itself if it has none."""
    if not any(eqn.primitive is jit_p and not constrains(eqn) for eqn in closed.jaxpr.eqns):
        return closed
    return trace(lambda *flat: evaluate(closed, flat, without_jit), closed.in_avals)


def without_consts(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """A jaxpr that takes its constants as its first operands, and these."""
    consts = list(closed.consts)
    if not consts:
        return closed, consts
    count = len(consts)
    avals = [*(var.aval for var in closed.jaxpr.constvars), *closed.in_avals]

    def run(*flat: Any) -> list[Any]:
        return evaluate(ClosedJaxpr(closed.jaxpr, flat[:count]), flat[count:])

    return trace(run, avals), consts


def with_consts(closed: ClosedJaxpr, values: Mapping[int, Any]) -> ClosedJaxpr:
    """The other way round: a jaxpr with these of its operands, by place, as its constants."""
    jaxpr = closed.jaxpr
    places = sorted(values)
    rest = [var for at, var in enumerate(jaxpr.invars) if at not in values]
    info = jaxpr.debug_info.with_unknown_names()
    constvars = [*jaxpr.constvars, *(jaxpr.invars[at] for at in places)]
    return ClosedJaxpr(
        jaxpr.replace(constvars=constvars, invars=rest, debug_info=info),
        [*closed.consts, *(values[at] for at in places)],
    )


def without_checkpoint(eqn: Eqn, operands: list[Any]) -> list[Any] | None:
    """For `evaluate`: the inside of what `jax.checkpoint` made."""
    inner = in_checkpoint(eqn)
    return None if inner is None else evaluate(inner, operands)


def evaluate(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    special: Callable[[Eqn, list[Any]], list[Any] | None] | None = None,
    only: frozenset[int] | None = None,
    given: Mapping[Any, Any] | None = None,
    outs: Sequence[Any] | None = None,
    each: Callable[[int, Sequence[Any]], Sequence[Any]] | None = None,
) -> list[Any]:
    """Evaluate a jaxpr; outputs that depend on equations left out come back as None.

    Args:
      closed: the jaxpr.
      args: its flat arguments; None where no equation in `only` needs one.
      special: called with each equation and its operands; returns the results,
        or None for the equation to be evaluated as it stands, on the operands that it leaves.
      only: indices of the equations to evaluate; None for all.
      given: variables whose values are known already.
      outs: the atoms to return; None for the jaxpr's own results.
      each: called with the index of each equation and its results; returns what to take
        for them.
    """
    jaxpr = closed.jaxpr
    wanted = jaxpr.outvars if outs is None else outs
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    known = given or {}
    env.update(known)

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env.get(atom)

    last_use = _last_use(jaxpr, only, wanted)
    for index, eqn in enumerate(jaxpr.eqns):
        if only is not None and index not in only:
            continue
        operands = [read(atom) for atom in eqn.invars]
        with _where_it_stood(eqn):
            found = special(eqn, operands) if special else None
            found = _bound(eqn, operands) if found is None else found
            if each is not None:
                found = each(index, found)
        env.update(zip(eqn.outvars, found, strict=True))
        if known:  # one of several results may be known
            env.update((var, known[var]) for var in eqn.outvars if var in known)
        for atom in last_use.get(index, ()):
            env.pop(atom, None)
    return [read(atom) for atom in wanted]


def evaluate_each(
    eqns: Sequence[Eqn],
    given: Mapping[Any, Any],
    special: Callable[[Eqn, list[Any]], list[Any] | None] | None = None,
) -> dict[Any, Any]:
    """What equations make, one after the other, from values that are given.

    Args:
      special: as for `evaluate`.
    """
    made: dict[Any, Any] = {}
    for eqn in eqns:
        with _where_it_stood(eqn):
            operands = [
                a.val if is_literal(a) else made[a] if a in made else given[a] for a in eqn.invars
            ]
            found = special(eqn, operands) if special else None
            found = _bound(eqn, operands) if found is None else found
            made.update(zip(eqn.outvars, found, strict=True))
    return made


@contextlib.contextmanager
def _where_it_stood(eqn: Eqn) -> Iterator[None]:
    """In the user's line, scopes and mode that an equation was traced in."""
    stack = current_name_stack() + eqn.source_info.name_stack
    with (
        user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def bound(eqn: Eqn, *operands: Any) -> list[Any]:
    """The results of an equation on other operands."""
    return _bound(eqn, operands)


def bound_with(eqn: Eqn, params: Mapping[str, Any], *operands: Any) -> list[Any]:
    """The same with some of its parameters replaced."""
    return _bound(eqn, operands, params)


def _bound(eqn: Eqn, operands: Sequence[Any], other: Mapping[str, Any] | None = None) -> list[Any]:
    params = {**eqn.params, **other} if other else eqn.params
    found = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return found if eqn.primitive.multiple_results else [found]


def _last_use(
    jaxpr: Any, only: frozenset[int] | None, wanted: Sequence[Any]
) -> dict[int, list[Any]]:
    """Values that no later equation reads, by equation; dropped, so that arrays are freed."""
    seen = {atom for atom in wanted if not is_literal(atom)}
    last: dict[int, list[Any]] = {}
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        if only is not None and index not in only:
            continue
        for atom in jaxpr.eqns[index].invars:
            if not is_literal(atom) and atom not in seen:
                seen.add(atom)
                last.setdefault(index, []).append(atom)
    return last
