"""What a step has live where its regions' forward pass ends and their backward pass begins.

The loss of a model stands there, which is often the largest array of all: logits in float32,
their softmax, its gradient.  No plan changes that, and every plan has it next to all that it keeps.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.estimate.liveness import peak_live_bytes
from jaxmem.estimate.roofline import Roofline
from jaxmem.fitting.uses import Way, scopes_in, way_of
from jaxmem.trace.layer import nbytes


@dataclasses.dataclass(frozen=True)
class Turn:
    """Bytes live between the forward and the backward pass of the last region of a step.

    Attributes:
      bytes: at the peak, of what is computed.
      given_bytes: what it reads of what was computed before, the results of regions.
    """

    bytes: int = 0
    given_bytes: int = 0


def turn_of(closed: ClosedJaxpr, scopes: Collection[str], roofline: Roofline) -> Turn:
    """Where a step turns; nothing where there is no such place, as in a loop over microbatches.

    Args:
      closed: the jaxpr of a step.
      scopes: the names of the scopes of its regions.
    """
    jaxpr = closed.jaxpr
    while True:
        ways = [_ways(eqn, scopes, None) for eqn in jaxpr.eqns]
        both = [eqn for eqn, found in zip(jaxpr.eqns, ways, strict=True) if len(found) == 2]
        if not both:
            break
        inner = [sub.jaxpr for sub in _jax.all_subjaxprs(both[-1])]
        if _jax.is_scan(both[-1]) or len(inner) != 1:
            return Turn()
        jaxpr = inner[0]
    back = next((at for at, found in enumerate(ways) if "back" in found), None)
    there = next((at for at in range(back or 0)[::-1] if "there" in ways[at]), None)
    if back is None or there is None or back == there + 1:
        return Turn()
    before = {var for eqn in jaxpr.eqns[: there + 1] for var in eqn.outvars}
    between, called = _jax.flattened(jaxpr.eqns[there + 1 : back])
    between = _simplified(between)
    reads = dict.fromkeys(a for eqn in between for a in eqn.invars if _jax.is_var(a))
    made = {var for eqn in between for var in eqn.outvars}
    given = [var for var in reads if var not in made]
    later = {a for eqn in jaxpr.eqns[back:] for a in eqn.invars if _jax.is_var(a)}
    later.update(filter(_jax.is_var, jaxpr.outvars))
    outs = (called.get(var, var) for var in later)
    results = {atom for atom in outs if _jax.is_var(atom) and atom in made}
    held = [var for var in given if var in before]
    peak = peak_live_bytes(
        _jax.piece_of(jaxpr, between, given, results),
        held=held,
        fuses_operands=roofline.fuses_operands,
        calls_libraries=roofline.calls_libraries,
    )
    return Turn(peak, sum(nbytes(var.aval) for var in held))


# ---------------------------------------------------------------- implementation


def _simplified(eqns: Sequence[Any]) -> list[Any]:
    """Equations as XLA's simplifier leaves them: what is scattered into zeros goes into the sum.

    So it is with the gradient of the logits that labels pick.
    """
    zeros: set[Any] = set()
    scattered: dict[Any, Any] = {}
    found: list[Any] = []
    for eqn in eqns:
        name = eqn.primitive.name
        if name == "broadcast_in_dim" and _jax.is_literal(value := eqn.invars[0]):
            zeros.update(eqn.outvars if not np.any(value.val) else ())
        if name == "scatter-add" and eqn.invars[0] in zeros:
            scattered[eqn.outvars[0]] = eqn
            continue
        into = [atom for atom in eqn.invars if _jax.is_var(atom) and atom in scattered]
        if len(into) == 1 and name in ("add", "add_any"):
            other = next(atom for atom in eqn.invars if atom is not into[0])
            scatter = scattered.pop(into[0])
            eqn = _jax.renamed(scatter, [other, *scatter.invars[1:]], eqn.outvars)
        waiting = [atom for atom in dict.fromkeys(into) if atom in scattered]
        found += [*(scattered.pop(atom) for atom in waiting), eqn]
    return [*found, *scattered.values()]


def _ways(eqn: Any, scopes: Collection[str], way: Way) -> set[Way]:
    """On which ways an equation, or one in it, is of a region."""
    stack = str(eqn.source_info.name_stack)
    way = way_of(stack, way)
    found: set[Way] = {way} if way and scopes_in(stack, scopes) else set()
    for sub in _jax.all_subjaxprs(eqn):
        for inner in sub.jaxpr.eqns:
            found |= _ways(inner, scopes, way)
            if len(found) == 2:
                return found
    return found
