"""Softmaxes and norms among operations: rows, what these are reduced to, and both taken together.

XLA for GPUs makes one kernel of them: of a softmax's maximum, exponential, sum and quotient, which
reads the rows and writes what becomes of them.  If any of it is wanted outside, it makes several.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxmem import _jax
from jaxmem.estimate.arrays import kind_in, reduces_rows
from jaxmem.trace.layer import nbytes

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class _From:
    """What a value follows from.

    Attributes:
      rows: what a kernel made, or an input.
      begin: the first of the reductions of these that it follows from, too; None if it does not.
      adds: whether a sum is among them.
      end: the last value before it that follows from rows and from what they are reduced to.
    """

    rows: Any
    begin: int | None = None
    adds: bool = False
    end: Any = None


# ---------------------------------------------------------------- API


class Normalised:
    """The softmaxes and norms among operations.

    Attributes:
      reduced: what their rows are reduced to, and what follows from that alone.
      inside: places between operations where one of them is begun and not done.
    """

    def __init__(self, eqns: Sequence[Any]) -> None:
        self._whole: dict[Any, _From] = {}  # of values as large as the rows that they follow from
        self._mixed: set[Any] = set()  # what follows from several, none of them the rows
        self._spread: set[Any] = set()  # what repeats something smaller, or nothing at all
        self._sums: dict[Any, _From] = {}  # of what follows from reductions alone
        self._ends: dict[Any, tuple[int, int]] = {}  # where each begins, and is done
        for at, eqn in enumerate(eqns):
            self._add(at, eqn)
        of = {self._whole[end].rows for end in self._ends}
        self.reduced = {var for var, source in self._sums.items() if source.rows in of}
        self.inside = {k for first, last in self._ends.values() for k in range(first + 1, last + 1)}

    def _add(self, at: int, eqn: Any) -> None:
        kind, atoms = kind_in(eqn), list(filter(_jax.is_var, eqn.invars))
        if kind == "reduction" and reduces_rows(eqn):
            length = atoms[0].aval.shape[-1]
            if not isinstance(length, int) or length % _ALIGNED:
                return
            # Scores and a bias of their size: a softmax would be three kernels, a norm two.
            if eqn.primitive.name == "reduce_max":
                self._mixed.discard(atoms[0])
            if atoms[0] in self._mixed:
                return
            source = self._whole.get(atoms[0], _From(atoms[0]))
            begin = at if source.begin is None else source.begin
            adds = source.adds or eqn.primitive.name == "reduce_sum"
            source = dataclasses.replace(source, begin=begin, adds=adds)
            self._sums.update(dict.fromkeys(eqn.outvars, source))
        elif kind in ("fused", "view"):
            self._add_elementwise(at, eqn, atoms)

    def _add_elementwise(self, at: int, eqn: Any, atoms: Sequence[Any]) -> None:
        sums = [self._sums[atom] for atom in atoms if atom in self._sums]
        others = [atom for atom in atoms if atom not in self._sums and atom not in self._spread]
        whole = [self._whole.get(atom, _From(atom)) for atom in others]
        if not whole:
            if len({source.rows for source in sums}) == 1:
                self._sums.update(dict.fromkeys(eqn.outvars, _joined(sums)))
            elif not sums:
                self._spread.update(eqn.outvars)
            return
        if not sums and sum(map(_size, atoms)) < max(map(_size, eqn.outvars)):
            self._spread.update(eqn.outvars)
            return
        rows = _largest(source.rows for source in whole)
        sized = rows is not None and all(_size(rows) == _size(var) for var in eqn.outvars)
        if rows in self._mixed or not sized:
            self._mixed.update(eqn.outvars)
            return
        own = [source for source in whole if source.rows is rows]
        taken = [source for source in sums if source.rows is rows]
        source = _joined([*own, *taken])
        if taken and source.adds:
            for one in own:
                self._ends.pop(one.end, None)
            source = dataclasses.replace(source, end=eqn.outvars[0])
            self._ends[eqn.outvars[0]] = source.begin or 0, at
        self._whole.update(dict.fromkeys(eqn.outvars, source))


# ---------------------------------------------------------------- implementation

# Products of 16 bits are padded to multiples of so many, and softmaxes of what is cut out of them
# are several kernels anyway.
_ALIGNED = 8


def _joined(sources: Sequence[_From]) -> _From:
    begins = [source.begin for source in sources if source.begin is not None]
    ends = [source.end for source in sources if source.end is not None]
    return _From(
        sources[0].rows,
        min(begins, default=None),
        any(source.adds for source in sources),
        ends[-1] if ends else None,
    )


def _size(var: Any) -> int:
    """How many elements a value has; a dimension that is a symbol counts as 1, as for `nbytes`."""
    return math.prod(d for d in getattr(var.aval, "shape", ()) if isinstance(d, int))


def _largest(several: Iterable[Any]) -> Any:
    """The one of most bytes, None if there is no one."""
    sizes = {var: nbytes(var.aval) for var in several}
    most = [var for var, size in sizes.items() if size == max(sizes.values())]
    return most[0] if len(most) == 1 else None
