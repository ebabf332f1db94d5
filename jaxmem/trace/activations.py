"""The shapes of what a forward pass computes from data.

A cotangent has the shape of its value.  So a value of the backward pass that has the shape of a
parameter, where no activation has it, is the gradient of that parameter: whatever the compiler has
made of the operations.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax

# Lengths of axes of more than one element, ascending: what transposing and reshaping by axes of
# one leave alone.
Form = tuple[int, ...]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Activations:
    """Forms of values that depend on data.

    Attributes:
      computed: in the forward pass of a gradient.
      scanned: arguments, and what a scan of the forward pass goes over: of those the backward pass
        may stack cotangents.
    """

    computed: frozenset[Form]
    scanned: frozenset[Form]


# ---------------------------------------------------------------- API


def form(shape: Sequence[int]) -> Form:
    """
    >>> form((1, 1024, 512)) == form((512, 1024, 1))
    True
    """
    return tuple(sorted(length for length in shape if length != 1))


def activations(closed: ClosedJaxpr, is_data: Sequence[bool]) -> Activations:
    """The forms of activations in a traced program.

    Args:
      is_data: whether each argument is: neither a parameter nor of an optimizer's state.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: (jnp.tanh(x @ w.astype("float16").astype("float32")) ** 2).sum()
    >>> closed = jax.make_jaxpr(jax.grad(loss))(jnp.ones((3, 4)), jnp.ones((8, 3)))
    >>> sorted(activations(closed, [False, True]).computed)
    [(), (4, 8)]
    """
    walk = _Walk()
    jaxpr = closed.jaxpr
    known = dict.fromkeys(jaxpr.constvars, True)
    known |= dict(zip(jaxpr.invars, is_data, strict=True))
    walk.scanned |= {form(var.aval.shape) for var, data in known.items() if data}
    walk.through(jaxpr, known, "")
    return Activations(frozenset(walk.computed), frozenset(walk.scanned))


# ---------------------------------------------------------------- implementation


def _is_forward(scope: str) -> bool:
    return "jvp(" in scope and "transpose(" not in scope


class _Walk:
    """Which variables depend on data; forms are noted on the way."""

    def __init__(self) -> None:
        self.computed: set[Form] = set()
        self.scanned: set[Form] = set()

    def through(self, jaxpr: Any, known: dict[Any, bool], scope: str) -> list[bool]:
        """Whether the results of a jaxpr depend on data, of which `known` says what does."""

        def depends(atom: Any) -> bool:
            return not _jax.is_literal(atom) and known[atom]

        for eqn in jaxpr.eqns:
            given = [depends(atom) for atom in eqn.invars]
            inner = f"{scope}/{eqn.source_info.name_stack}"
            results = self._of(eqn, given, inner)
            for var, result in zip(eqn.outvars, results, strict=True):
                known[var] = result
                if result and _is_forward(inner):
                    self.computed.add(form(getattr(var.aval, "shape", ())))
        return [depends(atom) for atom in jaxpr.outvars]

    def _of(self, eqn: Any, given: list[bool], scope: str) -> list[bool]:
        if _jax.is_scan(eqn):
            return self._of_scan(eqn, given, scope)
        subs = _jax.all_subjaxprs(eqn)
        for sub in subs:
            same = len(sub.jaxpr.invars) == len(given)
            inside = given if same else [any(given)] * len(sub.jaxpr.invars)
            results = self._inside(sub, inside, scope)
            if same and len(subs) == 1 and len(results) == len(eqn.outvars):
                return results
        return [any(given)] * len(eqn.outvars)

    def _of_scan(self, eqn: Any, given: list[bool], scope: str) -> list[bool]:
        parts = _jax.scan_parts(eqn)
        end = parts.num_consts + parts.num_carry
        for atom, depends in zip(eqn.invars[end:], given[end:], strict=True):
            if depends and _is_forward(scope):
                self.scanned.add(form(atom.aval.shape))
        while True:
            results = self._inside(parts.body, given, scope)
            again = list(given)
            for k, depends in enumerate(results[: parts.num_carry], start=parts.num_consts):
                again[k] = again[k] or depends
            if again == given:
                return results
            given = again

    def _inside(self, closed: Any, given: Sequence[bool], scope: str) -> list[bool]:
        known = dict.fromkeys(closed.jaxpr.constvars, True)
        known |= dict(zip(closed.jaxpr.invars, given, strict=True))
        return self.through(closed.jaxpr, known, scope)
