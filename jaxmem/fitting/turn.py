"""What a step has live where its regions' forward pass ends and their backward pass begins.

The loss of a model stands there, which is often the largest array of all: logits in float32,
their softmax, its gradient.  No plan changes that, and every plan has it next to all that it keeps.
"""

import collections
import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.estimate.compiler import Compiler
from jaxmem.estimate.counting import kind_of
from jaxmem.estimate.liveness import peak_live_bytes
from jaxmem.estimate.roofline import Roofline
from jaxmem.fitting.passing import passing_bytes
from jaxmem.fitting.uses import Way, scopes_in, way_of
from jaxmem.parallel.messages import per_device
from jaxmem.trace.layer import nbytes


@dataclasses.dataclass(frozen=True)
class Turn:
    """Bytes live between the forward and the backward pass of the last region of a step.

    Attributes:
      bytes: at the peak, of what is computed.
      given_bytes: what it reads of what was computed before, the results of regions.
      passing: bytes that pass it by, see `jaxmem.fitting.passing`.
      waiting_bytes: of its results that are sums over devices, as each device has them, or what
        they are made of: they wait so for the end of the backward pass, when they are reduced.
      summed_bytes: of sums that gradients are added to in a loop that the turn is in, as over
        microbatches; None in no loop.
    """

    bytes: int = 0
    given_bytes: int = 0
    passing: Mapping[Hashable, int] = dataclasses.field(default_factory=dict)
    waiting_bytes: int = 0
    summed_bytes: int | None = None


def turn_of(
    closed: ClosedJaxpr,
    regions: Mapping[str, Hashable],
    roofline: Roofline,
    in_loops: bool = True,
) -> Turn:
    """Where a step turns, if there is such a place.

    In a loop over microbatches that is in each turn of the loop.

    Args:
      closed: the jaxpr of a step.
      regions: what stands in the scope of each name; equal where it is alike.
      in_loops: whether to look into a loop that has both passes.
    """
    jaxpr = closed.jaxpr
    way: Way = None
    passing: collections.Counter[Hashable] = collections.Counter()
    summed: int | None = None
    while True:
        ways = [_ways(eqn, regions, way) for eqn in jaxpr.eqns]
        both = [at for at, found in enumerate(ways) if len(found) == 2]
        if not both:
            break
        # Of blocks that are under a checkpoint each, the one that is reversed first.
        again = [at for at in both if _jax.in_checkpoint(jaxpr.eqns[at]) is not None]
        reversed_there = both[-1] in again
        at = again[0] if reversed_there else both[-1]
        eqn = jaxpr.eqns[at]
        inner = [sub.jaxpr for sub in _jax.all_subjaxprs(eqn)]
        if len(inner) != 1 or (_jax.is_scan(eqn) and not in_loops):
            return Turn()
        if _jax.is_scan(eqn):
            summed = (summed or 0) + _summed_bytes(jaxpr, eqn)
        passing += passing_bytes(jaxpr, at, at if reversed_there else at + 1, regions)
        jaxpr, way = inner[0], way_of(str(eqn.source_info.name_stack), way)
    back = next((at for at, found in enumerate(ways) if "back" in found), None)
    there = next((at for at in range(back or 0)[::-1] if "there" in ways[at]), None)
    if back is None or there is None:
        return Turn(passing=passing, summed_bytes=summed)
    passing += passing_bytes(jaxpr, there + 1, back, regions)
    if back == there + 1:
        return Turn(passing=passing, summed_bytes=summed)
    before = {var for eqn in jaxpr.eqns[: there + 1] for var in eqn.outvars}
    between, called = _jax.flattened(jaxpr.eqns[there + 1 : back])
    later = {a for eqn in jaxpr.eqns[back:] for a in eqn.invars if _jax.is_var(a)}
    later.update(filter(_jax.is_var, jaxpr.outvars))
    outs = {called.get(var, var) for var in later}
    between = _read_later(jaxpr, _simplified(between), outs)
    reads = dict.fromkeys(a for eqn in between for a in eqn.invars if _jax.is_var(a))
    made = {var for eqn in between for var in eqn.outvars}
    given = [var for var in reads if var not in made]
    results = {atom for atom in outs if _jax.is_var(atom) and atom in made}
    held = [var for var in given if var in before]
    peak = peak_live_bytes(
        _jax.piece_of(jaxpr, between, given, results),
        held=held,
        compiler=roofline.compiler,
    )
    given_bytes = sum(nbytes(var.aval) for var in held)
    waiting = _waiting(between, results, roofline.compiler)
    return Turn(peak, given_bytes, passing, waiting, summed)


# ---------------------------------------------------------------- implementation


def _summed_bytes(jaxpr: Any, eqn: Any) -> int:
    """Bytes of what a loop carries that is neither given to the program nor summed row by row.

    What a scan in the loop adds to, row by row, is counted as the gradient of a stack.
    """
    scan = _jax.scan_parts(eqn)
    body = scan.body.jaxpr
    inits = eqn.invars[scan.num_consts : scan.num_consts + scan.num_carry]
    given = {*jaxpr.invars, *jaxpr.constvars}
    by_rows = {var for one in body.eqns if _jax.is_scan(one) for var in one.outvars}
    return sum(
        nbytes(init.aval)
        for init, out in zip(inits, body.outvars[: scan.num_carry], strict=True)
        if not (_jax.is_var(init) and init in given) and not (_jax.is_var(out) and out in by_rows)
    )


def _waiting(eqns: Sequence[Any], results: set[Any], compiler: Compiler) -> int:
    """Bytes of sums over devices that are results, or are but for their type and order of axes.

    Or of the operands of the products that are summed, if the compiler has these wait.
    """
    sums: dict[Any, int] = {}
    for eqn in eqns:
        atoms = list(filter(_jax.is_var, eqn.invars))
        reduced = [
            message.bytes
            for message in per_device(eqn).messages
            if message.kind in ("reduce-scatter", "all-reduce")
        ]
        if reduced:
            late = compiler.sums_late and eqn.primitive.name == "dot_general"
            waiting = sum(nbytes(atom.aval) for atom in atoms) if late else sum(reduced)
            sums.update((var, waiting) for var in eqn.outvars)
        elif len(atoms) == 1 and atoms[0] in sums and kind_of(eqn) in ("fused", "view"):
            sums.update((var, sums[atoms[0]]) for var in eqn.outvars)
    return sum(size for var, size in sums.items() if var in results)


def _read_later(jaxpr: Any, eqns: list[Any], outs: Collection[Any]) -> list[Any]:
    """Equations without those for nothing: a loss whose gradient alone is wanted."""
    wanted = [atom for atom in outs if _jax.is_var(atom)]
    places = _jax.needed(_jax.piece_of(jaxpr, eqns, (), wanted), wanted, keep_effects=True)
    return [eqns[place] for place in sorted(places)]


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
