"""Equations and jaxprs, read: the parts of scans, calls and checkpoints in any release of jax."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal
from jax.extend.core.primitives import jit_p, remat_p, scan_p

from jaxmem._jax.primitives import is_stack
from jaxmem._jax.private import RefEffect, ordered_effects, remat_allowed_effects
from jaxmem._jax.types import Eqn

# The name scope of checkpoints that a policy put around layers.
PLANNED = "jaxmem_policy"

# That of checkpoints that a plan put around pieces of code without a scan.
PIECE = "jaxmem_piece"

# jax's own name scope of what `jax.checkpoint` recomputes.
RECOMPUTED = "rematted_computation"


@dataclasses.dataclass(frozen=True)
class Scan:
    """The parts of a scan equation; operands are consts, carry, xs, results carry, ys."""

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any


def scan_parts(eqn: Eqn) -> Scan:
    """What a `scan` equation holds, whatever the release calls it."""
    params = eqn.params
    if "num_carry" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:  # jax 0.11 on
        consts, carry, _ = params["ft_in"].unpack()
        num_consts, num_carry = len(consts), len(carry)
    return Scan(
        body=params["jaxpr"],
        num_consts=num_consts,
        num_carry=num_carry,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )


def is_scan(eqn: Eqn) -> bool:
    """Whether an equation is a `lax.scan`."""
    return eqn.primitive is scan_p


def is_jit(eqn: Eqn) -> bool:
    """Whether an equation is a call that `jax.jit` made."""
    return eqn.primitive is jit_p


def as_closed(jaxpr: Any) -> ClosedJaxpr:
    """A jaxpr from an equation's parameters, closed (some primitives hold them open)."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def all_subjaxprs(eqn: Eqn) -> list[ClosedJaxpr]:
    """Every jaxpr in an equation's parameters."""
    subs = [
        as_closed(item)
        for value in eqn.params.values()
        for item in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(item, Jaxpr | ClosedJaxpr)
    ]
    if not subs and (inner := in_checkpoint(eqn)) is not None:
        subs.append(inner)
    if is_stack(eqn):
        subs.append(eqn.params["stack"].form.body.jaxpr)
    return subs


def all_equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """Those of a jaxpr, each followed by what is in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in all_subjaxprs(eqn):
            yield from all_equations(sub.jaxpr)


def name_given_by(eqn: Eqn) -> str | None:
    """The name, if this is an equation made by `checkpoint_name`."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    new = _carried_by(eqn, "CheckpointName")
    return None if new is None else new.name


def _carried_by(eqn: Eqn, kind: str) -> Any:
    """What jax has for an operation under the flag jax_remat3: a value in a general primitive."""
    for value in eqn.params.values():
        if type(value).__name__ == kind:
            return value
    return None


def checkpointed_by(eqn: Eqn) -> tuple[Any] | None:
    """(policy,), if this is an equation made by `jax.checkpoint`."""
    if eqn.primitive is remat_p:
        return (eqn.params["policy"],)
    new = _carried_by(eqn, "RematTraced")
    return None if new is None else (new.policy,)


def in_checkpoint(eqn: Eqn) -> ClosedJaxpr | None:
    """What is computed in an equation made by `jax.checkpoint`; None if this is none."""
    if eqn.primitive is remat_p:
        return as_closed(eqn.params["jaxpr"])
    new = _carried_by(eqn, "RematTraced")
    return None if new is None else as_closed(new.jaxpr)


def in_call(eqn: Eqn) -> ClosedJaxpr | None:
    """What a mere call computes: a `jax.jit`, or a function with a derivative of its own.

    None if this is neither, or constrains shardings.
    """
    if eqn.primitive is jit_p:
        return None if constrains(eqn) else eqn.params["jaxpr"]
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return as_closed(eqn.params["call_jaxpr"])
    return None


def constrains(eqn: Eqn) -> bool:
    """Whether a call that `jax.jit` made constrains shardings."""
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def is_literal(atom: Any) -> bool:
    """Whether an operand is a constant written into the jaxpr, not a variable."""
    return isinstance(atom, Literal)


def is_var(atom: Any) -> bool:
    """Whether an operand is a variable, not a constant written into the jaxpr."""
    return not isinstance(atom, Literal)


def is_dropped(var: Any) -> bool:
    """Whether nobody reads this result of an equation."""
    return isinstance(var, DropVar)


def needed(
    closed: ClosedJaxpr, outs: Iterable[Any], keep_effects: bool, given: Collection[Any] = ()
) -> frozenset[int]:
    """Indices of the equations that these atoms depend on, where those `given` are known."""
    jaxpr = closed.jaxpr
    wanted = {atom for atom in outs if not is_literal(atom) and atom not in given}
    found = set()
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[index]
        if any(var in wanted for var in eqn.outvars) or (keep_effects and eqn.effects):
            found.add(index)
            wanted.update(a for a in eqn.invars if not is_literal(a) and a not in given)
    return frozenset(found)


def can_be_recomputed(closed: ClosedJaxpr) -> bool:
    """Whether running this twice is harmless.

    jax's own list of what may be recomputed has ordered effects and writes to
    Refs on it, which then happen twice.
    """
    return not any(
        isinstance(effect, RefEffect)
        or ordered_effects.contains(effect)
        or not remat_allowed_effects.contains(effect)
        for effect in closed.effects
    )


def is_planned(eqn: Eqn) -> bool:
    """Whether an equation is a stack that has its policy already, as a scan or bound to it."""
    if not is_scan(eqn):
        return is_stack(eqn)
    return any(
        checkpointed_by(inner) is not None and PLANNED in str(inner.source_info.name_stack)
        for inner in eqn.params["jaxpr"].jaxpr.eqns
    )
