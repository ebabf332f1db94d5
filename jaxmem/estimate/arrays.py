"""Which values of a traced program are arrays in memory, as compilers are taken to fuse it.

What kernels make and take is, and what is reduced; chains of elementwise operations are computed
inside of what reads them.  Where matrix products compute their operands themselves (on TPUs), what
only they read is not in memory either.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _jax
from jaxmem.estimate.compiler import ANY, Compiler
from jaxmem.estimate.counting import flops, kind_of
from jaxmem.layers.pooling import operands_pooled
from jaxmem.trace.layer import nbytes

# ---------------------------------------------------------------- API


def in_memory(jaxpr: Any, compiler: Compiler = ANY, of_products: Collection[Any] = ()) -> set[Any]:
    """The values that a compiler has in memory at all: what kernels make and take.

    Args:
      compiler, of_products: see `jaxmem.estimate.liveness.peak_live`.
    """
    taken = read_by_kernels(jaxpr, compiler.pools_inside)
    if compiler.fuses_operands:
        taken -= _Ends(jaxpr, compiler, of_products).inside_of_products
    found = {*jaxpr.invars, *jaxpr.constvars, *taken}
    if compiler.gathers_stored:
        found |= read_by_gathers(jaxpr)
    found |= reduced_in_few_blocks(jaxpr, compiler.processors)
    for eqn in jaxpr.eqns:
        kind = kind_in(eqn)
        if kind in ("kernel", "reduction"):
            found.update(eqn.outvars)
        if kind == "view" and any(_jax.is_var(a) and a in found for a in eqn.invars[:1]):
            found.update(eqn.outvars)
    return found


def read_by_kernels(jaxpr: Any, pools_inside: bool = False) -> set[Any]:
    """What kernels take, and what that is a view of.

    Args:
      pools_inside: whether poolings compute what they pool, and do not take it.
    """
    found: set[Any] = set()
    views = views_in(jaxpr)
    for eqn in jaxpr.eqns:
        if kind_in(eqn) == "kernel":
            pooled = operands_pooled(eqn) if pools_inside else ()
            for place, atom in enumerate(eqn.invars):
                if _jax.is_var(atom) and place not in pooled:
                    found.update(behind_views(atom, views))
    return found


def reduced_in_few_blocks(jaxpr: Any, processors: int) -> set[Any]:
    """What columns are reduced from, and is more than a cast, where that is done in few blocks.

    A GPU's block reduces `_COLUMNS` columns.  Where rows are more than `_ROWS`, XLA has several
    blocks reduce parts of them.
    """
    several = (eqn for eqn in jaxpr.eqns if processors and kind_in(eqn) == "reduction")
    reductions = [eqn for eqn in several if _blocks_of_columns(eqn) in range(1, processors)]
    if not reductions:
        return set()
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    return {eqn.invars[0] for eqn in reductions if _is_computed(eqn.invars[0], makers)}


def read_by_gathers(jaxpr: Any) -> set[Any]:
    """What gathers read elements of, and what that is a view of."""
    views = views_in(jaxpr)
    read = (eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "gather")
    return {var for atom in read if _jax.is_var(atom) for var in behind_views(atom, views)}


def read_turned(jaxpr: Any) -> set[Any]:
    """Values that kernels take in another order of axes only, so that they have a copy of them.

    Such are operands of products whose batch axes are not the leading ones: queries and keys of
    several heads.
    """
    turned: set[Any] = set()
    straight: set[Any] = set()
    views = views_in(jaxpr)
    for eqn in jaxpr.eqns:
        if kind_in(eqn) == "kernel":
            for atom, as_it_lies in zip(eqn.invars, in_order(eqn), strict=True):
                if _jax.is_var(atom):
                    (straight if as_it_lies else turned).update(behind_views(atom, views))
            straight.update(eqn.outvars)
    return turned - straight


def in_order(eqn: Any) -> list[bool]:
    """For each operand of a kernel, whether it is read as it lies."""
    if eqn.primitive.name != "dot_general":
        return [True] * len(eqn.invars)
    return [axes == tuple(range(len(axes))) for axes in eqn.params["dimension_numbers"][1]]


def layout_copies(jaxpr: Any) -> set[Any]:
    """Inputs from which what kernels read transposed follows, element by element.

    On TPUs a transposition is a layout: of the chain behind it, and so of all that it reads.
    """
    sources: dict[Any, frozenset[Any]] = {}
    views = views_in(jaxpr)
    turned: set[Any] = set()
    found: set[Any] = set()
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        kind = kind_in(eqn)
        atoms = list(filter(_jax.is_var, eqn.invars))
        if eqn.primitive.name == "transpose":
            turned.update(eqn.outvars)
        if kind in ("fused", "view"):
            behind = frozenset().union(*(sources.get(atom, frozenset([atom])) for atom in atoms))
            sources.update((var, behind) for var in eqn.outvars)
        if kind == "kernel":
            for atom in atoms:
                *passed, base = behind_views(atom, views)
                if turned.intersection(passed) and base not in inputs:
                    behind = sources.get(base, frozenset())
                    found.update(v for v in behind & inputs if v.aval.size == base.aval.size)
    return found


def rounded_where_made(jaxpr: Any, inputs: Collection[Any], compiler: Compiler) -> set[Any]:
    """Of inputs that matrix products made, those stored rounded, or what follows in their place."""
    rounded = read_rounded(jaxpr, compiler)
    behind = _Ends(jaxpr, compiler, inputs).behind_products if rounded else {}
    return {var for var in inputs if behind.get(var, var) in rounded}


def read_rounded(jaxpr: Any, compiler: Compiler) -> set[Any]:
    """Values in float32 that nothing reads but matrix products of default precision, and casts.

    Where these products round what they read to bfloat16 that is what such values are stored as,
    through loops as well.
    """
    if not compiler.rounds_operands:
        return set()
    exact = set(filter(_jax.is_var, jaxpr.outvars))
    read: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        atoms = set(filter(_jax.is_var, eqn.invars))
        read |= atoms
        if flops.is_matmul(eqn) and _is_default(eqn.params.get("precision")):
            continue
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16:
            continue
        seen_through = kind_in(eqn) == "view" and not is_barrier(eqn)
        if seen_through and not exact.intersection(eqn.outvars):
            continue
        exact |= atoms
    return {var for var in read - exact if getattr(var.aval, "dtype", None) == jnp.float32}


def copied_parts(jaxpr: Any) -> set[Any]:
    """Parts of a whole (a concatenation's gradient) that are copied, as reductions read them."""
    parts: set[Any] = set()
    views: dict[Any, Any] = {}
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        atoms = list(filter(_jax.is_var, eqn.invars))
        if eqn.primitive.name == "split":
            parts.update(eqn.outvars)
        elif kind_in(eqn) == "view" and atoms:
            views.update((var, atoms[0]) for var in eqn.outvars)
        elif kind_in(eqn) == "reduction":
            found.update(behind_views(atom, views)[-1] for atom in atoms)
    return found & parts


def bytes_of_rows(jaxpr: Any, stored: Collection[Any]) -> dict[Any, int]:
    """Of values that rows are reduced to, and what follows from these alone, bytes of the rows.

    Where one kernel reduces rows and computes from them and from that (a softmax, a norm), it reads
    them once; where somebody else is given what they are reduced to, a kernel of its own reads them
    for it.

    Args:
      stored: what is in memory, see `in_memory`.
    """
    behind: dict[Any, frozenset[Any]] = {}
    found: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        kind = kind_in(eqn)
        atoms = list(filter(_jax.is_var, eqn.invars))
        read = union(behind.get(atom, frozenset([atom])) for atom in atoms)
        if kind == "reduction" and reduces_rows(eqn):
            size = sum(nbytes(var.aval) for var in read if var not in found)
            found.update((var, size) for var in eqn.outvars)
        elif kind in ("fused", "view"):
            if atoms and all(atom in found for atom in atoms) and not _is_spread(eqn):
                found.update((var, max(found[atom] for atom in atoms)) for var in eqn.outvars)
            behind.update((var, read) for var in eqn.outvars if var not in stored)
    return found


def reduces_rows(eqn: Any) -> bool:
    """Whether a reduction is along the last axis."""
    axes = eqn.params.get("axes", ())
    return bool(axes) and max(axes) == eqn.invars[0].aval.ndim - 1


def is_barrier(eqn: Any) -> bool:
    """Whether an operation hands values on, and lets no compiler see through it."""
    return eqn.primitive.name == "optimization_barrier"


def leading_on(eqns: Sequence[Any]) -> set[Any]:
    """What kernels and sums follow from."""
    found: set[Any] = set()
    for eqn in reversed(eqns):
        if kind_of(eqn) in ("kernel", "reduction") or not found.isdisjoint(eqn.outvars):
            found.update(filter(_jax.is_var, eqn.invars))
    return found


def kind_in(eqn: Any) -> str:
    """`kind_of` an operation; what a gather reads is computed where it is read, and only that."""
    return "fused" if eqn.primitive.name == "gather" else kind_of(eqn)


def union(several: Iterable[frozenset[Any]]) -> frozenset[Any]:
    """All of several sets, of which most are empty, or the same one."""
    found = _NONE
    for one in several:
        if one and one is not found:
            found = found | one if found else one
    return found


def views_in(jaxpr: Any) -> dict[Any, Any]:
    """What each value is a view of, of those that are one."""
    return {
        var: eqn.invars[0]
        for eqn in jaxpr.eqns
        if kind_in(eqn) == "view" and eqn.invars and _jax.is_var(eqn.invars[0])
        for var in eqn.outvars
    }


def behind_views(atom: Any, views: dict[Any, Any]) -> list[Any]:
    """A value, what that is a view of, and so on."""
    found = [atom]
    while found[-1] in views:
        found.append(views[found[-1]])
    return found


# ---------------------------------------------------------------- implementation

# What a block of XLA's reduces at once, of columns, and of rows without splitting the reduction.
_COLUMNS, _ROWS = 32, 4096


def _blocks_of_columns(eqn: Any) -> int:
    """How many blocks reduce columns, each all rows of its own; 0 where it is done otherwise."""
    given, made = eqn.invars[0].aval, eqn.outvars[0].aval
    last = len(given.shape) - 1
    if not (made.shape and made.size) or last in eqn.params.get("axes", (last,)):
        return 0
    columns = given.shape[last]
    in_one_go = 1 < given.size // made.size <= _ROWS
    return made.size // columns * -(-columns // _COLUMNS) if in_one_go else 0


def _is_computed(var: Any, makers: Mapping[Any, Any]) -> bool:
    """Whether a value is made by elementwise operations of which one has several operands."""
    while (eqn := makers.get(var)) is not None and kind_in(eqn) in ("fused", "view"):
        atoms = {atom for atom in eqn.invars if _jax.is_var(atom) and atom.aval.shape}
        if len(atoms) != 1:
            return len(atoms) > 1
        (var,) = atoms
    return False


def _is_spread(eqn: Any) -> bool:
    """Whether an operation makes more elements than it reads."""
    most = max((a.aval.size for a in eqn.invars if _jax.is_var(a)), default=0)
    return any(var.aval.size > most for var in eqn.outvars)


_NONE: frozenset[Any] = frozenset()


class _Ends:
    """Where chains of elementwise operations start and end.

    Attributes:
      inside_of_products: what matrix products that read it compute themselves: the ends that
        nothing else reads, but for the values of `behind_products`.
      behind_products: for the result of a product from which one end only follows, that end,
        which the product makes in the place of its result, and sums up as well if need be.
    """

    def __init__(self, jaxpr: Any, compiler: Compiler, of_products: Collection[Any] = ()) -> None:
        self._sources: dict[Any, frozenset[Any]] = {}
        self._ends: dict[Any, set[Any]] = {}
        self._views: dict[Any, Any] = {}
        # What was summed up, wholly, before a value could be computed.
        summed: dict[Any, frozenset[Any]] = {}
        by_products: set[Any] = set()
        by_others: set[Any] = set()
        products = set(of_products)
        for eqn in jaxpr.eqns:
            kind = kind_in(eqn)
            atoms = list(filter(_jax.is_var, eqn.invars))
            behind = union(map(self._behind, atoms))
            before = union(summed.get(atom, _NONE) for atom in atoms)
            if kind == "reduction":
                summed.update((var, before | behind) for var in eqn.outvars)
                by_others.update(behind_views(atom, self._views)[-1] for atom in atoms)
            elif kind in ("fused", "view") and not is_barrier(eqn):
                self._sources.update((var, behind) for var in eqn.outvars)
                summed.update((var, before) for var in eqn.outvars)
                if kind == "view" and atoms:
                    self._views.update((var, atoms[0]) for var in eqn.outvars)
            elif flops.is_matmul(eqn):
                products.update(eqn.outvars)
                by_products.update(map(self._end, atoms))
            else:
                by_others.update(map(self._end, atoms))
        by_others.update(map(self._end, filter(_jax.is_var, jaxpr.outvars)))
        only = by_products - by_others
        self.behind_products = {
            source: end
            for source in (products if compiler.fuses_results else ())
            for end in self._ends.get(source, ())
            if self._ends[source] == {end} and end in only and end.aval.size == source.aval.size
            if source not in summed.get(end, ())
        }
        inside = only.intersection(self._sources).difference(self.behind_products.values())
        views = (var for var in self._views if behind_views(var, self._views)[-1] in inside)
        self.inside_of_products = inside.union(views)

    def _end(self, atom: Any) -> Any:
        """Take note that a chain ends here; what it is that is stored, if anything is."""
        base = behind_views(atom, self._views)[-1]
        for source in self._behind(base):
            self._ends.setdefault(source, set()).add(base)
        return base

    def _behind(self, atom: Any) -> frozenset[Any]:
        return self._sources.get(atom, frozenset([atom]))


def _is_default(precision: Any) -> bool:
    several = precision if isinstance(precision, tuple) else (precision,)
    return all(one in (None, lax.Precision.DEFAULT) for one in several)
