"""The shapes of what a forward pass computes from data.

A cotangent has the shape of its value.  So a value of the backward pass that has the shape of a
parameter, where no activation has it, is the gradient of that parameter: whatever the compiler has
made of the operations.
"""

import dataclasses
import functools
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
    """Forms of values that depend on data, with axes merged in all ways.

    Attributes:
      computed: by operations of the forward pass of a gradient, or used by them.
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


@functools.lru_cache(maxsize=4096)
def merged(whole: Form) -> frozenset[Form]:
    """The forms that a compiler may give a value, which merges axes for a product.

    >>> sorted(merged((2, 3, 5)))
    [(2, 3, 5), (2, 15), (3, 10), (5, 6), (30,)]
    """
    if len(whole) < 2 or len(whole) > _MOST_AXES:
        return frozenset({whole})
    first, *rest = whole
    found = set()
    for form_of_rest in merged(tuple(rest)):
        found.add(form((first, *form_of_rest)))
        for k, length in enumerate(form_of_rest):
            found.add(form((*form_of_rest[:k], first * length, *form_of_rest[k + 1 :])))
    return frozenset(found)


def activations(closed: ClosedJaxpr, is_data: Sequence[bool]) -> Activations:
    """The forms of activations in a traced program.

    Args:
      is_data: whether each argument is: neither a parameter nor of an optimizer's state.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: (jnp.tanh(x @ w.astype("float16").astype("float32")) ** 2).sum()
    >>> closed = jax.make_jaxpr(jax.grad(loss))(jnp.ones((3, 4)), jnp.ones((8, 3)))
    >>> sorted(activations(closed, [False, True]).computed)
    [(), (3, 8), (4, 8), (24,), (32,)]
    """
    walk = _Walk()
    jaxpr = closed.jaxpr
    known = dict.fromkeys(jaxpr.constvars, True)
    known |= dict(zip(jaxpr.invars, is_data, strict=True))
    walk.scanned |= {form(var.aval.shape) for var, data in known.items() if data}
    walk.through(jaxpr, known, "")
    computed, scanned = (
        frozenset(one for whole in forms for one in merged(whole))
        for forms in (walk.computed, walk.scanned)
    )
    return Activations(computed, scanned)


# ---------------------------------------------------------------- implementation

# Of seven axes there are 877 ways.
_MOST_AXES = 6


def _is_forward(scope: str) -> bool:
    return "jvp(" in scope and "transpose(" not in scope


def _computed(eqn: Any) -> Sequence[Any]:
    """Operands and results that have cotangents.

    Stacks for the backward pass, which a scan returns or an operation writes rows of, have none.
    """
    if _jax.all_subjaxprs(eqn) or _jax.name_given_by(eqn) is not None:
        return ()
    if eqn.primitive.name == "dynamic_update_slice":
        return eqn.invars[1:2]
    return [atom for atom in (*eqn.invars, *eqn.outvars) if hasattr(atom.aval, "shape")]


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
            known |= dict(zip(eqn.outvars, results, strict=True))
            if _is_forward(inner):
                self.computed |= {form(a.aval.shape) for a in _computed(eqn) if depends(a)}
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
