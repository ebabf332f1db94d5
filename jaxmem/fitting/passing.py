"""What code leaves for the backward pass outside of the regions that are planned.

No plan changes it: what is computed between decorated blocks, and what a `jax.checkpoint` of the
user's around a decorated block keeps, the input of that block.
"""

import collections
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from jaxmem import _jax
from jaxmem.estimate.arrays import in_memory
from jaxmem.estimate.counting import kind_of
from jaxmem.fitting.uses import scopes_in, way_of
from jaxmem.trace.layer import nbytes


def passing_bytes(
    jaxpr: Any, ahead: int, back: int, regions: Mapping[str, Hashable]
) -> collections.Counter[Hashable]:
    """Bytes made by the operations ahead that others read from `back` on, by who made them.

    Args:
      ahead, back: how many operations are ahead, and where the backward pass begins.
      regions: what stands in the scope of each name; equal where it is alike.  What no region made
        is found under None.
    """
    stored = in_memory(jaxpr)
    made: dict[Any, set[str]] = {}
    base: dict[Any, Any] = {}
    given = set(jaxpr.invars)
    for eqn in jaxpr.eqns[:ahead]:
        stack = str(eqn.source_info.name_stack)
        if not any(_jax.is_var(atom) and atom in given for atom in eqn.invars):
            continue  # of constants alone, such as a mask, which is made where it is read
        given.update(eqn.outvars)
        if way_of(stack, None) == "back":
            continue  # the gradient that a region is given is counted there
        source = _looked_at(eqn)
        for var in eqn.outvars:
            if source is None:
                made[var] = _scopes(eqn, regions)
            else:
                base[var] = base.get(source, source)
    found: dict[Any, set[str]] = {}
    between = {a for eqn in jaxpr.eqns[ahead:back] for a in eqn.invars if _jax.is_var(a)}
    read = {base.get(atom, atom) for atom in between}
    for eqn in jaxpr.eqns[back:]:
        own = _scopes(eqn, regions)
        for atom in filter(_jax.is_var, eqn.invars):
            var = base.get(atom, atom)
            is_stored = atom in stored or var in stored
            if var in made and is_stored and var not in read and not own & made[var]:
                found[var] = made[var]
    sizes: collections.Counter[Hashable] = collections.Counter()
    for var, scopes in found.items():
        sizes[regions[min(scopes)] if scopes else None] += nbytes(var.aval)
    return sizes


# ---------------------------------------------------------------- implementation


def _scopes(eqn: Any, regions: Collection[str]) -> set[str]:
    """Those that an operation is in, and those in it: a scan's residuals are its regions'.

    To a checkpoint that is reversed no region in it has left anything.
    """
    found = scopes_in(str(eqn.source_info.name_stack), regions)
    if _jax.in_checkpoint(eqn) is None:
        for sub in _jax.all_subjaxprs(eqn):
            found.update(*(_scopes(inner, regions) for inner in sub.jaxpr.eqns))
    return found


def _looked_at(eqn: Any) -> Any:
    """What an operation is but another look at, if it is."""
    sources = list(filter(_jax.is_var, eqn.invars))
    if len(sources) != 1 or len(eqn.outvars) != 1:
        return None
    same = kind_of(eqn) == "view" or eqn.primitive.name == "broadcast_in_dim"
    return sources[0] if same and _size(eqn.outvars[0]) == _size(sources[0]) else None


def _size(var: Any) -> int | None:
    return getattr(var.aval, "size", None)  # a token has none
