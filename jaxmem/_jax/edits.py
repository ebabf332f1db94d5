"""Jaxprs made of others, mostly for looking at."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Var
from jax.extend.core.primitives import jit_p

from jaxmem._jax.digests import exactly, place_named_by
from jaxmem._jax.jaxprs import all_subjaxprs, constrains, is_dropped, is_literal, is_var
from jaxmem._jax.types import Eqn


def with_equations(closed: ClosedJaxpr, eqns: Sequence[Eqn]) -> ClosedJaxpr:
    """A jaxpr with other equations, for looking at: it is not checked."""
    return ClosedJaxpr(closed.jaxpr.replace(eqns=list(eqns)), closed.consts)


def renamed(eqn: Eqn, ins: Sequence[Any], outs: Sequence[Any]) -> Eqn:
    """An equation with other operands and results."""
    return eqn.replace(invars=list(ins), outvars=list(outs))


def another(var: Any) -> Any:
    """A new variable of the type of this one."""
    return Var(var.aval)


def with_shape(var: Any, shape: Sequence[int]) -> Any:
    """A new variable of the type of this one, but for its shape."""
    kind = DropVar if isinstance(var, DropVar) else Var
    aval: Any = var.aval
    return kind(ShapedArray(tuple(shape), aval.dtype, aval.weak_type))


def reordered(closed: ClosedJaxpr, order: Sequence[int]) -> ClosedJaxpr:
    """A jaxpr with its equations in another order, in which each can run."""
    return with_equations(closed, [closed.jaxpr.eqns[at] for at in order])


def with_equal_once(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr that does once what it did several times to the same values, as compilers do.

    Under a name that a user gave each stays; of names for places in the code the first counts.
    What has no operands, or holds jaxprs, stays as it is.
    """
    eqns: list[Eqn] = []
    known: dict[Any, Eqn] = {}
    others: dict[Any, Any] = {}

    def first(atom: Any) -> Any:
        return others.get(atom, atom) if is_var(atom) else atom

    for eqn in closed.jaxpr.eqns:
        if any(is_var(atom) and atom in others for atom in eqn.invars):
            eqn = renamed(eqn, [*map(first, eqn.invars)], eqn.outvars)
        if _can_be_shared(eqn):
            held = None if place_named_by(eqn) is not None else exactly(eqn)
            operands = tuple(atom if is_var(atom) else None for atom in eqn.invars)
            types = tuple(var.aval for var in eqn.outvars)
            before = known.setdefault((eqn.primitive, operands, types, eqn.ctx, held), eqn)
            if before is not eqn:
                others.update(zip(eqn.outvars, before.outvars, strict=True))
                continue
        eqns.append(eqn)
    if not others:
        return closed
    outvars = list(map(first, closed.jaxpr.outvars))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=eqns, outvars=outvars), closed.consts)


def followed_by(
    first: ClosedJaxpr,
    only: Collection[int],
    second: ClosedJaxpr,
    atoms: Sequence[Any],
    given: Sequence[Any],
) -> ClosedJaxpr:
    """Some equations of one jaxpr, then another, for looking at: it is not checked or traced.

    Args:
      first, only: a jaxpr, and indices of the equations that are taken of it.
      second: what follows.
      atoms: of `first`, what the first inputs of `second` are.
      given: of `first`, what is an input; no equation that is taken makes it, then.
    """
    place = dict(zip(second.jaxpr.invars, atoms, strict=False))
    known = frozenset(given)

    def outer(several: Sequence[Any]) -> list[Any]:
        return [a if is_literal(a) else place.get(a, a) for a in several]

    def without_given(eqn: Eqn) -> Eqn:
        outs = [DropVar(v.aval) if v in known else v for v in eqn.outvars]
        return eqn.replace(outvars=outs) if known.intersection(eqn.outvars) else eqn

    jaxpr = second.jaxpr
    eqns = [
        *(without_given(first.jaxpr.eqns[at]) for at in sorted(only)),
        *(eqn.replace(invars=outer(eqn.invars)) for eqn in jaxpr.eqns),
    ]
    return ClosedJaxpr(
        Jaxpr(
            constvars=[*first.jaxpr.constvars, *jaxpr.constvars],
            invars=[*given, *jaxpr.invars[len(atoms) :]],
            outvars=outer(jaxpr.outvars),
            eqns=eqns,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        ),
        [*first.consts, *second.consts],
    )


def parted(closed: ClosedJaxpr, places: Collection[int]) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Some equations, which read nothing that the others make, and the others, as two jaxprs.

    The first gives what of its own the second reads, and that takes it behind its other inputs.
    """
    jaxpr, chosen = closed.jaxpr, frozenset(places)
    first = [eqn for at, eqn in enumerate(jaxpr.eqns) if at in chosen]
    others = [eqn for at, eqn in enumerate(jaxpr.eqns) if at not in chosen]
    made = {var for eqn in first for var in eqn.outvars}
    read = [atom for eqn in others for atom in eqn.invars]
    passed = [*dict.fromkeys(a for a in [*read, *jaxpr.outvars] if is_var(a) and a in made)]
    info = jaxpr.debug_info.with_unknown_names()
    return (
        ClosedJaxpr(jaxpr.replace(eqns=first, outvars=passed, debug_info=info), closed.consts),
        ClosedJaxpr(
            jaxpr.replace(eqns=others, invars=[*jaxpr.invars, *passed], debug_info=info),
            closed.consts,
        ),
    )


def piece_of(
    jaxpr: Any, eqns: Sequence[Eqn], invars: Sequence[Any], outvars: Collection[Any]
) -> ClosedJaxpr:
    """Some equations of a jaxpr, with what they read and make, for looking at."""
    made = (var for eqn in eqns for var in eqn.outvars if var in outvars)
    debug_info = jaxpr.debug_info.with_unknown_names()
    return ClosedJaxpr(Jaxpr((), list(invars), list(made), list(eqns), debug_info=debug_info), ())


def flattened(eqns: Sequence[Eqn]) -> tuple[list[Eqn], dict[Any, Any]]:
    """Equations with the insides of jits in their places, and what their results are called there.

    For looking at: nothing is traced.
    """
    found: list[Eqn] = []
    known: dict[Any, Any] = {}

    def inline(eqns: Sequence[Eqn], known: dict[Any, Any], fresh: bool) -> None:
        def outer(atom: Any) -> Any:
            return atom if is_literal(atom) else known.get(atom, atom)

        for eqn in eqns:
            ins = [outer(atom) for atom in eqn.invars]
            if eqn.primitive is jit_p and not constrains(eqn):
                inner = eqn.params["jaxpr"].jaxpr
                names = dict(zip(inner.invars, ins, strict=True))
                inline(inner.eqns, names, True)
                outs = (a if is_literal(a) else names.get(a, a) for a in inner.outvars)
                known.update(zip(eqn.outvars, outs, strict=True))
                continue
            outs = [another(var) for var in eqn.outvars] if fresh else list(eqn.outvars)
            known.update(zip(eqn.outvars, outs, strict=True))
            found.append(renamed(eqn, ins, outs))

    inline(eqns, known, False)
    return found, known


def as_program(eqn: Eqn) -> ClosedJaxpr:
    """A jaxpr of this one equation."""
    ins = list(dict.fromkeys(atom for atom in eqn.invars if is_var(atom)))
    empty = jax.make_jaxpr(lambda *args: args)(*(var.aval for var in ins))
    return ClosedJaxpr(empty.jaxpr.replace(invars=ins, outvars=eqn.outvars, eqns=[eqn]), ())


def differing_literals(eqns: Sequence[Eqn]) -> list[int]:
    """Operands of equal equations that are a number in each, and not the same in all."""
    return [
        place
        for place, several in enumerate(zip(*(eqn.invars for eqn in eqns), strict=True))
        if all(is_literal(atom) and not getattr(atom.aval, "weak_type", True) for atom in several)
        and len({_number_of(atom).tobytes() for atom in several}) > 1
    ]


def with_literals_as_inputs(
    closed: ClosedJaxpr, places: Mapping[int, Sequence[int]]
) -> tuple[ClosedJaxpr, dict[int, dict[Any, Any]]]:
    """A jaxpr that reads variables where it has numbers, and these by equation and variable.

    For evaluating with the variables given: they are no inputs of the jaxpr.

    Args:
      places: of equations, which of their operands.
    """
    eqns, numbers = list(closed.jaxpr.eqns), {}
    for at, operands in places.items():
        ins = list(eqns[at].invars)
        numbers[at] = {}
        for operand in operands:
            literal, var = ins[operand], another(ins[operand])
            numbers[at][var], ins[operand] = _number_of(literal), var
        eqns[at] = renamed(eqns[at], ins, eqns[at].outvars)
    return with_equations(closed, eqns), numbers


def _number_of(literal: Any) -> np.ndarray:
    """The value of a number that is written into a jaxpr, in its own type."""
    return np.asarray(literal.val, literal.aval.dtype)


def _can_be_shared(eqn: Eqn) -> bool:
    """Whether of equal operations one can stand for all."""
    plain = not (eqn.effects or all_subjaxprs(eqn) or any(map(is_dropped, eqn.outvars)))
    return plain and any(map(is_var, eqn.invars)) and eqn.primitive.name not in _EACH_ITS_OWN


# A barrier is there to keep things apart, and of these random numbers each draw is another.
_EACH_ITS_OWN = frozenset({"optimization_barrier", "rng_uniform"})
