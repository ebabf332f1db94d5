"""Values whose gradients are made in one go, in a layout of their own, or added up early."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxmem import _jax
from jaxmem.trace.context import platform

# So many terms of a matrix's gradient may be there at once; where it has more they are added up.
TERMS = 4
# And so many of what layers join to each other.
_PARTS = 2


class InParts:
    """Operands of operations, so that the gradients of some are added up a few at a time.

    Compilers add all that a gradient is a sum of in one kernel otherwise, behind the last of it: of
    a matrix that each step of a recurrence reads there are as many as steps.  Adding each to the
    sum would move up to twice the bytes.

    So they do where each layer reads what is there and joins what it makes to that (DenseNet, Huang
    et al. 2017): what each has added to the gradient of all before it is held till the first of
    them is reversed.

    Args:
      readers: how many operations read each value.
      matrices: whose gradients these are.
    """

    def __init__(self, readers: Mapping[Any, int], matrices: Collection[Any] = ()) -> None:
        self._readers = readers
        self._matrices = frozenset(matrices)
        self._now: dict[Any, Any] = {}
        self._reads: Counter[Any] = Counter()
        # How many times something was joined to what a value begins with, or is.
        self._joined: dict[Any, int] = {}

    def __call__(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """The operands of the next operation."""
        found = list(operands)
        for at, atom in enumerate(eqn.invars):
            if not _jax.is_var(atom) or atom not in self._matrices:
                continue
            found[at] = self._now.setdefault(atom, operands[at])
            self._reads[atom] += 1
            if self._reads[atom] % TERMS == 0:
                # With the gradients that are pulled on from here, so that these wait for the sum.
                others = [
                    k
                    for k, other in enumerate(eqn.invars)
                    if _jax.is_var(other) and other is not atom and _jax.has_tangent(other.aval)
                ]
                fenced = of_a_kind_together([found[k] for k in others], [], [found[at]])
                for k, value in zip([*others, at], fenced, strict=True):
                    found[k] = value
                self._now[atom] = found[at]
        self._join(eqn, found)
        return found

    def _join(self, eqn: Any, found: list[Any]) -> None:
        """Have the gradients of what an operation joins added up, if it is its turn."""
        if eqn.primitive.name != "concatenate":
            return
        # What only the next of them reads has a gradient of one term.
        read = [atom for atom in eqn.invars if _jax.is_var(atom) and self._readers[atom] > 1]
        count = 1 + max((self._joined.get(atom, 0) for atom in read), default=0)
        self._joined[eqn.outvars[0]] = count
        # Of TPUs' compiler such nets need as much with it, and more time.
        if count > _PARTS and count % _PARTS == 0 and platform() != "tpu":
            moved = [k for k, atom in enumerate(eqn.invars) if _jax.has_tangent(atom.aval)]
            fenced = of_a_kind_together([found[k] for k in moved], (), ())
            for k, value in zip(moved, fenced, strict=True):
                found[k] = value


def of_a_kind_together(
    values: Sequence[Any], more: Sequence[Any], matrices: Sequence[Any]
) -> list[Any]:
    """All of these; the gradients of `values`, and of others that are like any, made in one go.

    Under `shard_map` those of a kind: all of a barrier varies over the same axes of the mesh.  Of
    matrices that are like none each has its gradient made by itself.
    """
    found = [*values, *more, *matrices]
    kinds = list(map(_jax.varying, found))
    alone, own = len(values) + len(more), dict.fromkeys(kinds[: len(values)])
    groups = [[place for place, kind in enumerate(kinds) if kind == one] for one in own]
    groups += [[place] for place in range(alone, len(found)) if kinds[place] not in own]
    for places in groups:
        if len(places) > 1 or places[0] >= alone:
            fenced = with_gradients_together([found[place] for place in places])
            for place, value in zip(places, fenced, strict=True):
                found[place] = value
    return found


@jax.custom_jvp
def with_gradients_together(values: list[Any]) -> list[Any]:
    """These values; in a backward pass none of their gradients is read before all are made."""
    return values


def _with_tangents_together(
    values: tuple[list[Any]], tangents: tuple[list[Any]]
) -> tuple[list[Any], list[Any]]:
    # Of the values themselves a barrier would only keep compilers from fusing them; and what is
    # not differentiated, as a frozen bias, would get a gradient.
    moving = [t for t in tangents[0] if not isinstance(t, SymbolicZero)]
    if len(moving) == 1 < len(tangents[0]):
        return values[0], tangents[0]  # nothing that it could be made together with
    fenced = iter(lax.optimization_barrier(moving))
    found = [t if isinstance(t, SymbolicZero) else next(fenced) for t in tangents[0]]
    return values[0], found


with_gradients_together.defjvp(_with_tangents_together, symbolic_zeros=True)
