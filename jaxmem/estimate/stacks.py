"""Stacks of all layers' values of which XLA for GPUs makes a copy in front of a loop.

It chooses how an array that a loop reads lies in memory by what reads its rows, all rows alike.
Where the array was written otherwise, it is copied as a whole.
"""

from collections.abc import Collection
from typing import Any

from jaxmem import _jax
from jaxmem.estimate.arrays import in_order
from jaxmem.estimate.counting import flops, kind_of
from jaxmem.parallel.messages import per_device

# ---------------------------------------------------------------- API


def read_transposed(jaxpr: Any, forward: Any) -> set[Any]:
    """Of products' results, those that everything reads transposed, element by element.

    A product writes its result as it lies; what reads it could do so in any order.

    Args:
      jaxpr: a layer's backward pass.
      forward: its forward pass, in which they are made.
    """
    made: set[Any] = set()
    for eqn in forward.eqns:
        named = _jax.name_given_by(eqn) is not None and eqn.invars[0] in made
        if flops.is_matmul(eqn) or named:
            made.update(eqn.outvars)
    readers: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for atom in filter(_jax.is_var, eqn.invars):
            readers.setdefault(atom, []).append(eqn)

    def is_turned(var: Any) -> bool:
        return bool(readers.get(var)) and all(map(turns, readers[var]))

    def turns(eqn: Any) -> bool:
        if eqn.primitive.name == "transpose":
            return True
        return kind_of(eqn) in ("fused", "view") and all(
            _is_alike(out, eqn) and is_turned(out) for out in eqn.outvars
        )

    return {var for var in made if is_turned(var)}


def copied_in_front(jaxpr: Any, kept: Collection[Any]) -> set[Any]:
    """Of what is kept, that of which all readers want another order of axes.

    They read it transposed, element by element, or are products whose batch axes do not lead.  To
    those that sum it up any order is right.  In front of the loop the stack is copied, and gone.

    Args:
      jaxpr: a layer's backward pass.
    """
    readers: dict[Any, list[tuple[Any, int]]] = {}
    for eqn in jaxpr.eqns:
        for at, atom in enumerate(eqn.invars):
            if _jax.is_var(atom):
                readers.setdefault(atom, []).append((eqn, at))

    def wants(var: Any) -> set[str]:
        return set().union(*(wish(*reader) for reader in readers.get(var, ())))

    def wish(eqn: Any, at: int) -> set[str]:
        kind = kind_of(eqn)
        if eqn.primitive.name == "transpose":
            return {"another order"}
        if kind == "reduction":
            return set()
        shape = eqn.invars[at].aval.shape
        if kind in ("fused", "view") and all(out.aval.shape == shape for out in eqn.outvars):
            return set().union(*map(wants, eqn.outvars))
        return {"its order"} if in_order(eqn)[at] else {"another order"}

    return {var for var in kept if wants(var) == {"another order"}}


def gathered_across(jaxpr: Any, rows: Collection[Any]) -> set[Any]:
    """Of rows of stacked parameters, those whose parts are gathered along a later axis than 0.

    Devices send what lies together: parts of a later axis are put behind each other first.
    """
    source = {var: var for var in rows}
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        atoms = [atom for atom in eqn.invars if _jax.is_var(atom)]
        for message in per_device(eqn).messages:
            if message.kind == "all-gather" and message.operand < len(eqn.invars):
                var = eqn.invars[message.operand]
                if _jax.is_var(var) and var in source and any(message.dims):
                    found.add(source[var])
        if eqn.primitive.name == "convert_element_type" and atoms and atoms[0] in source:
            source.update((out, source[atoms[0]]) for out in eqn.outvars)
    return found


# ---------------------------------------------------------------- implementation


def _is_alike(out: Any, eqn: Any) -> bool:
    """Whether a result is of the shape of what it is made of, element by element."""
    shapes = {atom.aval.shape for atom in eqn.invars if _jax.is_var(atom) and atom.aval.shape}
    return shapes == {out.aval.shape}
