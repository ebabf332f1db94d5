"""How many bytes of a traced program are live at once, as compilers are taken to fuse it.

Values die at their last use, in the order in which they are traced.  What is elementwise and in
memory at all (`jaxmem.estimate.arrays`) is written over an array of its size that is read there for
the last time.
"""

import dataclasses
import math
import types
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.estimate.arrays import (
    copied_parts,
    in_memory,
    is_barrier,
    kind_in,
    read_rounded,
    read_turned,
    reduced_in_few_blocks,
    reduces_rows,
    union,
)
from jaxmem.estimate.compiler import ANY, Compiler
from jaxmem.estimate.counting import kind_of
from jaxmem.layers.pooling import placing_bytes
from jaxmem.trace.layer import nbytes

# ---------------------------------------------------------------- API


def peak_live_bytes(closed: ClosedJaxpr, **how: Any) -> int:
    """The most bytes live at once, of what is computed; see `peak_live`."""
    return peak_live(closed, **how)[0]


def peak_live(
    closed: ClosedJaxpr,
    copied: Collection[Any] = (),
    held: Sequence[Any] = (),
    compiler: Compiler = ANY,
    layout_copies: Collection[Any] = (),
    exact: Collection[Any] = (),
    of_products: Collection[Any] = (),
    live_to_end: Collection[Any] = (),
    of_calls: Collection[Any] = (),
    fenced: Collection[Any] = (),
    reduced: Mapping[Any, frozenset[Any]] = types.MappingProxyType({}),
    reduces_pairs: bool = False,
    calls_for_products: bool = False,
) -> tuple[int, frozenset[Any]]:
    """The most bytes live at once, of what is computed, and which of `held` are then.

    Args:
      copied: inputs that are copied when they are first read.
      held: inputs that are live from the start till they are last read.
      compiler: what it does to these bytes.
      layout_copies: of `copied`, what is copied once more, to another layout.
      exact: inputs that are not stored rounded.
      of_products: inputs that matrix products made; such a product may as well compute what
        follows from the input, and make that in its place.
      live_to_end: of `held`, what is live to the end, since others read it later.
      of_calls: inputs that calls into a library made.
      fenced: values that go through a barrier that is not in the program.
      reduced: of inputs, those whose rows were reduced for them in this program, see
        `rows_reduced`.
      reduces_pairs: whether what is reduced may follow from two arrays, neither of which is written
        over then: in a softmax's derivative the rows and the gradient.  So it is in XLA for GPUs,
        and known of code outside of loops; with it the leanest plan of a scanned transformer would
        be predicted 18 % too large.
      calls_for_products: whether products are calls into a library, too.
    """
    jaxpr = closed.jaxpr
    rounded = read_rounded(jaxpr, compiler).difference(exact)
    stored = in_memory(jaxpr, compiler, of_products)
    parts = copied_parts(jaxpr) if compiler.copies_parts else ()
    lives = _Lives(closed, held, stored, rounded, parts, compiler, reduces_pairs)
    lives.reduce(reduced)
    waiting = set(copied)
    if compiler.holds_fenced:
        lives.never_over(fenced)
    if compiler.calls_libraries:
        lives.never_over(of_calls)
    for at, eqn in enumerate(jaxpr.eqns):
        if compiler.calls_libraries:
            lives.run_by_gpu(at, eqn, calls_for_products)
        if compiler.looks_inside:
            lives.work(at, _inside_bytes(eqn, compiler))
        for atom in eqn.invars:
            if _jax.is_var(atom) and atom in waiting:
                waiting.discard(atom)
                lives.make(atom, at)
                if atom in layout_copies:
                    lives.work(at, lives.bytes(atom))
        lives.evaluate(at, eqn)
    for atom in filter(_jax.is_var, jaxpr.outvars):
        lives.read(atom, len(jaxpr.eqns))
    for var in live_to_end:
        lives.read(var, len(jaxpr.eqns))
    return lives.peak()


def rows_reduced(
    closed: ClosedJaxpr, kept: Sequence[Any], compiler: Compiler
) -> dict[Any, frozenset[Any]]:
    """Of what is kept, the arrays whose rows were reduced for it, where that is done inside.

    Args:
      kept: values of the program, which are in memory.
      compiler: see `peak_live`.
    """
    stored = {*in_memory(closed.jaxpr, compiler), *kept}
    lives = _Lives(closed, (), stored, (), (), compiler)
    for at, eqn in enumerate(closed.jaxpr.eqns):
        lives.evaluate(at, eqn)
    return lives.reduced(kept)


def by_library(eqn: Any, products: bool = False) -> bool:
    """Whether GPUs call a library (cuDNN, cuBLAS) for an operation.

    The call returns a workspace, too, and XLA lets an operation write over an array only if that is
    the whole result of what made it.

    Args:
      products: whether they do for products of matrices.
    """
    name = eqn.primitive.name
    return name == "conv_general_dilated" or (products and name == "dot_general")


def copied_to_swap(eqn: Any) -> int:
    """Bytes that a library's convolution takes in addition, to be done with its operands swapped.

    On GPUs XLA swaps them where the kernel is the larger in space (its pass is named
    `ConvOperandSwapper`): for the gradient of a kernel behind which images are larger than before,
    by their padding.  Both are copied, one after the other, each in its time in the place of what
    it is made of.
    """
    if not by_library(eqn):
        return 0
    sides = eqn.params["dimension_numbers"]
    image, kernel = (atom.aval for atom in eqn.invars)
    if eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1:
        return 0
    over = math.prod(image.shape[side] for side in sides.lhs_spec[2:])
    if math.prod(kernel.shape[side] for side in sides.rhs_spec[2:]) <= over:
        return 0
    return max(nbytes(image), nbytes(kernel))


# ---------------------------------------------------------------- implementation

_NONE: frozenset[Any] = frozenset()


def _inside_bytes(eqn: Any, compiler: Compiler) -> int:
    """Bytes live inside of a loop or of a `jax.checkpoint`, next to what it reads and makes."""
    if kind_of(eqn) != "kernel":
        return 0
    if _jax.in_checkpoint(eqn) is None and eqn.primitive.name not in ("scan", "while", "cond"):
        return 0
    return max(_computed_in(sub, compiler) for sub in _jax.all_subjaxprs(eqn))


def _computed_in(closed: ClosedJaxpr, compiler: Compiler) -> int:
    known = _COMPUTED_IN.setdefault(closed.jaxpr, {})
    if compiler not in known:
        # What a library does inside of a loop is not looked at.
        inner = dataclasses.replace(compiler, calls_libraries=False)
        peak = peak_live_bytes(_jax.inlined(closed), compiler=inner)
        known[compiler] = max(peak - sum(map(nbytes, closed.out_avals)), 0)
    return known[compiler]


# The same loop stands in a layer's forward pass and in all the ways to reverse it.
_COMPUTED_IN: weakref.WeakKeyDictionary[Any, dict[Compiler, int]] = weakref.WeakKeyDictionary()


class _Lives:
    """From when to when each array of a program is in memory."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        held: Sequence[Any],
        stored: Collection[Any],
        rounded: Collection[Any],
        cut_out: Collection[Any],
        compiler: Compiler,
        reduces_pairs: bool = False,
    ) -> None:
        jaxpr = closed.jaxpr
        self._compiler, self._reduces_pairs = compiler, reduces_pairs
        self._rounded = rounded
        self._cut_out = cut_out
        self._stored = {*filter(_jax.is_var, jaxpr.outvars), *stored}
        self._columns = reduced_in_few_blocks(jaxpr, compiler.processors)
        self._length = len(jaxpr.eqns)
        # Which arrays in memory have to be live for a value to be read.
        self._behind: dict[Any, frozenset[Any]] = {}
        self._made: dict[Any, int] = {}
        self._last: dict[Any, int] = {}
        self._readers: dict[Any, set[int]] = {}
        # Which arrays' rows were reduced for a value, and which elementwise results it needs.
        self._reduced: dict[Any, frozenset[Any]] = {}
        self._since: dict[Any, frozenset[Any]] = {}
        # What kernels have copies of, in another order of axes; and reductions, with their sizes.
        self._turned = read_turned(jaxpr) if compiler.merges_readers else set()
        self._reductions: list[tuple[int, Any, int]] = []
        # Of inputs and of what is in memory but the results of matrix products, what each value is
        # or is computed from; and what each operation reads.
        self._sources: dict[Any, frozenset[Any]] = {}
        self._read_at: dict[int, frozenset[Any]] = {}
        # Operations that may write over what they read, with what each makes, and over what of it
        # they do not, since they reduce its rows.
        self._over: list[tuple[int, frozenset[Any], list[Any], frozenset[Any]]] = []
        # What is not written over: through a barrier compilers do not see that something is read
        # for the last time.
        self._passed: set[Any] = set()
        # What follows from a concatenation by operations that are fused: no element of it lies
        # where that lies which it is made of.
        self._joined: set[Any] = set()
        # What operations have to themselves; and poolings that are reversed in two steps, with what
        # was pooled, what is made of it, and what either step has to itself.
        self._work: list[tuple[int, int]] = []
        self._pooled: list[tuple[int, frozenset[Any], Any, int, int]] = []
        self._held = frozenset(held)
        for var in held:
            self.make(var, 0)

    def make(self, var: Any, at: int) -> None:
        """An array is in memory from here on."""
        self._made[var] = self._last[var] = at
        self._behind[var] = frozenset([var])

    def work(self, at: int, bytes: int) -> None:
        """So much more is in memory here alone."""
        if bytes:
            self._work.append((at, bytes))

    def reduce(self, known: Mapping[Any, frozenset[Any]]) -> None:
        """For these values rows were reduced before."""
        self._reduced.update(known)

    def reduced(self, values: Sequence[Any]) -> dict[Any, frozenset[Any]]:
        """Which of the values' rows were reduced for each."""
        return {
            var: rows
            for var in values
            if (rows := self._reduced.get(var, frozenset()).intersection(values))
        }

    def never_over(self, made: Collection[Any]) -> None:
        """Nothing is written over these."""
        self._passed.update(made)

    def run_by_gpu(self, at: int, eqn: Any, products: bool) -> None:
        """Working space of an operation, and whether its results are a library's."""
        if by_library(eqn, products):
            self.never_over(eqn.outvars)
            self.work(at, copied_to_swap(eqn) if self._compiler.swaps_operands else 0)
        elif (placing := placing_bytes(eqn)) is not None:
            self._pooled.append((at, self._behind_of(eqn.invars[1]), eqn.outvars[0], *placing))

    def read(self, atom: Any, at: int) -> frozenset[Any]:
        """What is behind a value is live until here at least."""
        behind = self._behind_of(atom)
        self._last.update(dict.fromkeys(behind, at))
        return behind

    def evaluate(self, at: int, eqn: Any) -> None:
        """Take note of what one operation reads and makes."""
        if is_barrier(eqn):
            for atom, var in zip(eqn.invars, eqn.outvars, strict=True):
                self._pass(at, atom, var)
            return
        kind = kind_in(eqn)
        made = [
            var
            for var in eqn.outvars
            if kind in ("kernel", "reduction")
            or (var in self._stored and kind != "view")
            or var in self._cut_out
        ]
        behind = union(self._behind_of(atom) for atom in eqn.invars)
        for var in eqn.outvars:
            self._behind[var] = behind
        if made:
            self._last.update(dict.fromkeys(behind, at))
            for var in behind:
                self._readers.setdefault(var, set()).add(at)
        # What is held from the start is there wherever it is read, be that inside of another.
        self._last.update(dict.fromkeys(behind & self._held, at))
        for var in made:
            self.make(var, at)
        if reduced := self._reduced_for(eqn, kind, behind):
            self._reduced.update((var, reduced) for var in eqn.outvars)
        fused = made and (kind == "fused" or eqn.primitive.name.startswith("scatter"))
        joined = eqn.primitive.name == "concatenate"
        if self._joined and not joined:
            joined = any(_jax.is_var(atom) and atom in self._joined for atom in eqn.invars)
        if joined and not made:
            self._joined.update(eqn.outvars)
        if self._compiler.merges_readers:
            atoms = list(filter(_jax.is_var, eqn.invars))
            self._read_at[at] = read = union(map(self._sources_of, atoms))
            in_memory = frozenset() if eqn.primitive.name == "dot_general" else frozenset(made)
            self._sources.update((var, in_memory if made else read) for var in eqn.outvars)
            since = union(self._since.get(atom, _NONE) for atom in atoms)
            noted = fused or kind == "reduction"
            self._since.update((var, since.union(made if noted else ())) for var in eqn.outvars)
            if kind == "reduction":
                self._reductions.append((at, eqn.outvars[0], eqn.invars[0].aval.size))
        if fused and not joined:
            self._over.append((at, behind, made, reduced))

    def peak(self) -> tuple[int, frozenset[Any]]:
        """The most bytes live at once, and what of that is held from the start."""
        shared = self._merge() | self._merge_columns()
        changes = [0] * (self._length + 2)
        for var, at in self._made.items():
            changes[at] += self.bytes(var)
            changes[self._last[var] + 1] -= self.bytes(var)
        work = list(self._work)
        for at, behind, var, first, later in self._pooled:
            # What was pooled is gone in the second step, if nothing else reads it.
            gone = sum(self.bytes(source) for source in behind if self._last[source] == at)
            work.append((at, max(first - self.bytes(var), later - gone)))
        for at, bytes in work:
            changes[at] += bytes
            changes[at + 1] -= bytes
        for at, behind, made, reduced in self._over:
            behind -= reduced
            over = (var for var in behind if var not in self._passed and var not in shared)
            ends = [self.bytes(var) for var in over if self._last[var] == at]
            for var in made:
                if var in self._rounded:
                    self._round_at_once(var, behind, at, changes)
                elif self._compiler.writes_in_place and self.bytes(var) in ends:
                    ends.remove(self.bytes(var))
                    changes[at] -= self.bytes(var)
                    changes[at + 1] += self.bytes(var)
        live = peak = when = 0
        for at, change in enumerate(changes):
            live += change
            if live > peak:
                peak, when = live, at
        return peak, frozenset(var for var in self._held if self._last[var] >= when)

    def _reduced_for(self, eqn: Any, kind: str, behind: frozenset[Any]) -> frozenset[Any]:
        """Of what is behind an operation, what one kernel reduces and computes it from."""
        if not self._compiler.reduces_inside or kind == "kernel":
            return frozenset()
        atoms = filter(_jax.is_var, eqn.invars)
        before = union(self._reduced.get(atom, _NONE) for atom in atoms)
        if kind != "reduction" or not reduces_rows(eqn):
            return before
        rows = [var for var in behind if var.aval.size == eqn.invars[0].aval.size]
        return before.union(rows) if len(rows) == 1 or self._reduces_pairs else before

    def _merge(self) -> set[Any]:
        """Have operations done in one kernel with a later one; what these read is returned.

        Both are elementwise, and read the same array; the later one does not need the other's
        result, which is made with its own.  XLA looks for such behind each array but the results of
        matrix products, so that they have to read something else together, too, if these are one:
        what its rows were reduced to.  What is done together with a reduction is not with what
        needs that, but may be there as long.
        """
        shared: set[Any] = set()
        if not self._compiler.merges_readers:
            return shared
        for later, (at, behind, made, _) in enumerate(self._over):
            for before, others, earlier, rows in self._over[:later]:
                if rows and not self._turned.isdisjoint(earlier):
                    # What products read in another order of axes is computed once more for them,
                    # behind the later one.
                    continue
                sizes = {var.aval.size for var in (*earlier, *made)}
                seen = self._read_at[at] & self._read_at[before]
                both = {var for var in behind & others | seen if {var.aval.size} == sizes}
                if both and seen and not self._needs(made, earlier):
                    if not self._needs(made, self._done_with(before, earlier)):
                        shared |= both
                    for var in earlier:
                        self._last[var] = max(self._last[var], at)
        return shared

    def _merge_columns(self) -> set[Any]:
        """Have what reductions read of the same arrays made in one kernel; those arrays."""
        shared: set[Any] = set()
        made = [(at, behind, var) for at, behind, (var, *_), _ in self._over]
        made = [one for one in made if one[2] in self._columns]
        for later, (at, behind, _) in enumerate(made):
            for _, others, earlier in made[:later]:
                if both := behind & others:
                    shared |= both
                    self._last[earlier] = max(self._last[earlier], at)
        return shared

    def _done_with(self, at: int, made: Sequence[Any]) -> set[Any]:
        """The reductions that one kernel does as it computes these.

        Nothing is, for what it is to lie in another order of axes in the end.
        """
        if not self._turned.isdisjoint(made):
            return set()
        sizes = {var.aval.size for var in made}
        return {
            var
            for other, var, size in self._reductions
            if size in sizes and self._read_at[other] & self._read_at[at]
            if not self._needs([var], made) and not self._needs(made, [var])
        }

    def _needs(self, made: Iterable[Any], earlier: Collection[Any]) -> bool:
        return any(self._since.get(var, frozenset()).intersection(earlier) for var in made)

    def _round_at_once(self, var: Any, behind: frozenset[Any], at: int, changes: list[int]) -> None:
        """What is computed from the result of one product is computed, and rounded, there."""
        # In the order in which they are made: that of a set goes by addresses, and plans with it.
        for source in sorted(behind, key=lambda var: self._made.get(var, -1)):
            if self._readers[source] == {at} and nbytes(source.aval) == nbytes(var.aval):
                whole, half = self.bytes(source), self.bytes(var)
                changes[self._made[source]] += half - whole
                changes[at] -= half
                changes[at + 1] += whole
                return

    def _pass(self, at: int, atom: Any, var: Any) -> None:
        """A value is itself behind a barrier, but a part of something larger is a copy there."""
        behind = self._behind_of(atom)
        self._behind[var] = behind
        self._passed.update(behind)
        if sum(map(self.bytes, behind)) > self.bytes(var):
            self.read(atom, at)
            self.make(var, at)

    def _sources_of(self, atom: Any) -> frozenset[Any]:
        return self._sources.get(atom, frozenset([atom] if atom.aval.size > 1 else ()))

    def _behind_of(self, atom: Any) -> frozenset[Any]:
        return self._behind.get(atom, _NONE) if _jax.is_var(atom) else _NONE

    def bytes(self, var: Any) -> int:
        """What a value takes in memory."""
        return nbytes(var.aval) // (2 if var in self._rounded else 1)
