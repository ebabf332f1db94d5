"""What is live while one layer is reversed, as a compiler is taken to order and fuse it."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, primitives

from jaxmem import _jax
from jaxmem.estimate.arrays import (
    in_memory,
    layout_copies,
    leading_on,
    read_by_kernels,
    read_rounded,
    rounded_where_made,
)
from jaxmem.estimate.backward import Backward, backward_of
from jaxmem.estimate.compiler import ANY, Compiler
from jaxmem.estimate.counting import kind_of
from jaxmem.estimate.liveness import (
    by_library,
    copied_to_swap,
    peak_live,
    peak_live_bytes,
    rows_reduced,
)
from jaxmem.estimate.stacks import copied_in_front, gathered_across, read_transposed
from jaxmem.estimate.values import unnamed_places
from jaxmem.solve.keep import Keep, fastest
from jaxmem.solve.problem import Graph, Operation
from jaxmem.solve.stacks import Loose
from jaxmem.trace.layer import Layer, nbytes

# ---------------------------------------------------------------- API


def working_bytes(layer: Layer, compiler: Compiler = ANY) -> int:
    """About what one layer's backward pass has live on top of its residuals and parameters.

    Values are taken to die at their last use in the order in which they are traced, and
    elementwise chains not to be in memory unless a kernel reads them.  In a loop over layers
    the tape is stacked, and of those of its values that kernels read each layer's is copied.
    """
    backward = backward_of(layer)
    copied = read_by_kernels(backward.closed.jaxpr).intersection(backward.tape)
    return _least_live(backward.closed, compiler, copied=copied)


def layout_copy_bytes(layer: Layer, compiler: Compiler = ANY) -> int:
    """How much more that is in a loop, for copies of the tape in the layout that products want.

    Which the layer of a loop takes from one array of all layers' tapes, in a layout of its own.
    """
    backward = backward_of(layer)
    turned = (
        layout_copies(backward.closed.jaxpr).intersection(backward.tape)
        if compiler.copies_layouts
        else ()
    )
    if not turned:
        return 0
    copied = read_by_kernels(backward.closed.jaxpr).intersection(backward.tape).union(turned)
    more = peak_live_bytes(backward.closed, copied=copied, compiler=compiler, layout_copies=turned)
    return more - working_bytes(layer, compiler)


def tape_bytes(layer: Layer, compiler: Compiler = ANY) -> int:
    """What the device stores of each layer in a loop over layers."""
    backward = backward_of(layer)
    here = backward.tape[: len(backward.tape) - layer.on_host]
    turned = _turned(layer, backward.closed.jaxpr, compiler).intersection(here)
    stored = sum(_stored(here, read_rounded(backward.closed.jaxpr, compiler)))
    return stored + sum(nbytes(var.aval) for var in turned)


def stack_copy_bytes(layer: Layer, compiler: Compiler = ANY) -> int:
    """Of what a loop over layers keeps of each, how much is copied at once in front of it.

    The stacks are copied one after the other, and each is gone then.
    """
    if not compiler.turns_stacks:
        return 0
    backward = backward_of(layer)
    here = backward.tape[: len(backward.tape) - layer.on_host]
    # Of what is counted in two orders anyway there is no third copy.
    copied = copied_in_front(backward.closed.jaxpr, here)
    copied -= _turned(layer, backward.closed.jaxpr, compiler)
    return max((nbytes(var.aval) for var in copied), default=0)


def value_bytes(layer: Layer, compiler: Compiler = ANY) -> tuple[int, ...]:
    """What a loop over layers would store of each of a layer's values, whatever else it keeps."""
    if not compiler.rounds_operands:
        turned = _turned(layer, layer.both_ways.jaxpr, compiler)
        return tuple(nbytes(var.aval) * (2 if var in turned else 1) for var in layer.values)
    results = filter(_jax.is_var, layer.results)
    rounded = read_rounded(layer.both_ways.jaxpr, compiler).difference(results)
    return tuple(_stored(layer.values, rounded))


def param_copies(layer: Layer, length: int, compiler: Compiler = ANY) -> int:
    """Bytes of the copies that are made, in front of a loop, of all layers' parameters.

    And of whatever else the loop reads that is the same for all layers, or is stacked.
    """
    backward = backward_of(layer)
    rounded = read_rounded(backward.closed.jaxpr, compiler)
    of_all = [var for var in backward.consts if var in rounded]
    of_each = [var for var in backward.xs if var in rounded - layer.only_cast()]
    if compiler.turns_stacks:
        turned = gathered_across(layer.linearised.jaxpr, backward.xs)
        return length * sum(nbytes(var.aval) for var in turned)
    return sum(_stored(of_all, rounded)) + length * sum(_stored(of_each, rounded))


def reversal_peak(
    layer: Layer,
    compiler: Compiler = ANY,
    live_to_end: Collection[Any] = (),
    barriers: bool = True,
    calls_for_products: bool = False,
) -> tuple[int, frozenset[Any]]:
    """About the most bytes live while a layer outside of loops is reversed, and what is then.

    Its tape and the gradient of its results among it, each till its last use; of these, which are.

    Args:
      live_to_end: what of the tape is live to the end: others hold it, too.
      barriers: whether there are any, as there are where something is recomputed.
      calls_for_products: whether the program is one that they are for, where compilers do that.
    """
    calls = calls_for_products and compiler.calls_for_products
    backward = backward_of(layer, interleaved=True)
    closed = _as_scheduled(backward, barriers) if compiler.swaps_operands else backward.closed
    if barriers:  # what is elementwise is computed for each that reads it, from behind one
        compiler = dataclasses.replace(compiler, merges_readers=False)
    held = [*backward.tape, *backward.gradients]
    # What others hand over they may read, too, and not rounded; so do barriers.
    waiting = {var for step in backward.steps for var in step.waits}
    rounded = _rounded_gradients(backward, compiler) - waiting
    return peak_live(
        closed,
        held=held,
        compiler=compiler,
        exact=set(held) - rounded,
        of_products=rounded,
        live_to_end=live_to_end,
        of_calls=[var for var in backward.tape if _by_library(layer, var, calls)],
        fenced=backward.fenced if barriers else (),
        reduces_pairs=True,
        calls_for_products=calls,
    )


def given_bytes(layer: Layer, compiler: Compiler) -> int:
    """Of the gradients that a layer is given, where matrix products make them."""
    backward = backward_of(layer)
    return sum(_stored(backward.gradients, _rounded_gradients(backward, compiler)))


def loose_bytes(layer: Layer, graph: Graph, compiler: Compiler = ANY) -> Loose:
    """About what the backward pass of a single layer, in no loop, has live with its tape.

    Of the tape only what a compiler cannot fuse is stored, and each value till its last use.
    """
    # Where products compute their operands, a gelu is computed there as well, its tanh included.
    expensive = 1 if compiler.fuses_operands else 0
    plain = without_checkpoint(layer, graph, expensive, compiler)
    backward = backward_of(layer.keeping(plain.kept))
    reduced = rows_reduced(layer.linearised, backward.tape, compiler)
    live = _least_live(backward.closed, compiler, held=backward.tape, reduced=reduced)
    # On TPUs the tape alone made the reference transformer's plans take one compilation more.
    tape = live if compiler.fuses_operands else sum(nbytes(var.aval) for var in backward.tape)
    return Loose(live, tape)


def freed_early(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same, with kernels that no other one waits for as soon as what they read is there.

    Such are the gradients of parameters: often they are the last to read something large.
    """
    eqns = closed.jaxpr.eqns
    waited_for = leading_on(eqns)
    leaves = {
        at
        for at, eqn in enumerate(eqns)
        if kind_of(eqn) == "kernel" and waited_for.isdisjoint(eqn.outvars)
    }
    made = {var: at for at, eqn in enumerate(eqns) for var in eqn.outvars}

    def place(at: int) -> tuple[int, int]:
        if at not in leaves:
            return at, -1
        return max((made.get(a, -1) for a in filter(_jax.is_var, eqns[at].invars)), default=-1), at

    return _jax.with_equations(closed, [eqns[at] for at in sorted(range(len(eqns)), key=place)])


def without_checkpoint(
    layer: Layer, graph: Graph, expensive: int = 0, compiler: Compiler = ANY
) -> Keep:
    """What is in memory of code that is under no checkpoint.

    Kept is what kernels read on the way there and on the way back, casts of parameters among it
    where the compiler finds that both are equal.  What only the way back needs, masks and counts,
    is computed there.  All else that is elementwise a compiler recomputes by itself, outside of
    loops, inside of what reads it, if the operations between what is in memory and that cost at
    most `expensive` (see `_EXPENSIVE`); so of the rest kept is the least from which it follows by
    such operations.  In unrolled code the exponential of a silu is recomputed; the one layer
    outside of its loop is predicted better with none, but on TPUs.
    """
    unnamed = unnamed_places(layer)
    stored = _in_memory(layer, compiler)
    anyway = frozenset(unnamed[at] for at in _read_by_kernels_both_ways(layer, stored)) - graph.free
    if compiler.holds_casts:
        anyway |= _casts_read_both_ways(layer)
    late = _for_the_way_back(layer) if compiler.delays else frozenset()
    repeated = _repeated(layer.linearised.jaxpr, stored, expensive, compiler) | late
    operations = tuple(
        Operation(
            inputs=tuple(sorted({unnamed[place] for place in one.inputs})),
            outputs=one.outputs,
            seconds=0.0 if at in repeated else one.seconds,
        )
        for at, (one, eqn) in enumerate(
            zip(graph.operations, layer.linearised.jaxpr.eqns, strict=True)
        )
        if _jax.name_given_by(eqn) is None
    )
    made_late = frozenset(place for at in late for place in graph.operations[at].outputs)
    plain = Graph(
        bytes=graph.bytes,
        operations=operations,
        free=graph.free | anyway,
        wanted=frozenset(unnamed[place] for place in graph.wanted),
        keepable=frozenset(range(len(graph.bytes))) - made_late - graph.free - anyway,
        keep_seconds=(0.0,) * len(graph.bytes),
    )
    rest = fastest(plain)
    size = rest.bytes + sum(graph.bytes[place] for place in anyway)
    return dataclasses.replace(rest, kept=tuple(sorted({*rest.kept, *anyway})), bytes=size)


# ---------------------------------------------------------------- implementation

# What elementwise operations cost that are not cheap: 1 takes about as long as to write an array of
# 16 bits and to read it.
_EXPENSIVE: dict[str, float] = {
    name: cost
    for cost, names in (
        (0.25, "rsqrt sqrt"),
        (0.75, "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div exp exp2 expm1"),
        (0.75, "lgamma log log1p logistic pow rem sin sinh tan"),
        (2, "tanh"),
        (3, "erf erfc erf_inv"),
    )
    for name in names.split()
}
_RANDOM = {"random_bits": 9, "threefry2x32": 9}


def _by_library(layer: Layer, var: Any, products: bool) -> bool:
    """Whether a GPU's library made a value on the way there."""
    eqn = layer.made_by(var)
    while eqn is not None and _jax.name_given_by(eqn) is not None:
        eqn = layer.made_by(eqn.invars[0])
    return eqn is not None and by_library(eqn, products)


def _as_scheduled(backward: Backward, barriers: bool) -> ClosedJaxpr:
    """A backward pass in the order in which XLA puts it where operands are swapped.

    To have the gradient of a kernel first spares what it reads; but where copies are made for it,
    the other that reads the same gradient comes first, unless a barrier keeps that back.
    """
    eqns = list(backward.closed.jaxpr.eqns)
    free = (step.operation for step in backward.steps if not (barriers and step.first))
    for at in [at for at in free if copied_to_swap(eqns[at])]:
        made = set(eqns[at].outvars)
        for later in range(at + 1, len(eqns)):
            if made.intersection(filter(_jax.is_var, eqns[later].invars)):
                break
            if eqns[at].invars[1] in eqns[later].invars and by_library(eqns[later]):
                eqns[at:later], eqns[later] = eqns[at + 1 : later + 1], eqns[at]
                break
    return _jax.with_equations(backward.closed, eqns)


def _least_live(closed: ClosedJaxpr, compiler: Compiler, **how: Any) -> int:
    """The bytes live at the peak of a backward pass, in the order that a compiler gives it."""
    orders = [closed, freed_early(closed)] if compiler.frees_early else [closed]
    return min(peak_live_bytes(one, compiler=compiler, **how) for one in orders)


def _turned(layer: Layer, jaxpr: Any, compiler: Compiler) -> set[Any]:
    """What is kept of all layers in two orders of axes."""
    return read_transposed(jaxpr, layer.linearised.jaxpr) if compiler.turns_stacks else set()


def _stored(values: Sequence[Any], rounded: Collection[Any]) -> list[int]:
    return [nbytes(var.aval) // (2 if var in rounded else 1) for var in values]


def _in_memory(layer: Layer, compiler: Compiler) -> set[Any]:
    """What is in memory of a layer whose both ways stand in one program, for a while at least."""
    closed = layer.both_ways if compiler.fuses_operands else layer.linearised
    return in_memory(closed.jaxpr, compiler)


def _rounded_gradients(backward: Backward, compiler: Compiler) -> set[Any]:
    return rounded_where_made(backward.closed.jaxpr, backward.gradients, compiler)


def _read_by_kernels_both_ways(layer: Layer, stored: Collection[Any]) -> set[int]:
    """Places of what is in memory once it was computed, and is wanted so by the backward pass."""
    wanted = read_by_kernels(backward_of(layer).closed.jaxpr).intersection(stored)
    return {place for place in layer.kept if place is not None and layer.values[place] in wanted}


def _casts_read_both_ways(layer: Layer) -> set[int]:
    """Places of parameters that are cast, transposed or not, for kernels of both passes."""
    jaxpr, unnamed = layer.linearised.jaxpr, unnamed_places(layer)
    given = {*jaxpr.constvars, *layer.body.split_in(jaxpr.invars)[0]}
    cast: set[int] = set()
    for eqn in jaxpr.eqns:
        is_cast = eqn.primitive.name == "convert_element_type"
        follows = all(_jax.is_var(atom) and atom in given for atom in eqn.invars)
        if follows and (is_cast or kind_of(eqn) == "view"):
            given.update(eqn.outvars)
            cast.update(layer.places[var] for var in eqn.outvars if is_cast)
    backward = backward_of(layer).closed.jaxpr
    read_back = read_by_kernels(backward)
    # The gradient of what a convolution reads is one with its kernel reversed, which XLA does not
    # make: it has the library do that.
    reversals = (eqn for eqn in backward.eqns if eqn.primitive is primitives.rev_p)
    read_back.update(eqn.invars[0] for eqn in reversals if read_back.issuperset(eqn.outvars))
    read = read_by_kernels(jaxpr) & read_back
    return cast.intersection(unnamed[layer.places[var]] for var in read if var in layer.places)


def _for_the_way_back(layer: Layer) -> frozenset[int]:
    """Places of the operations of which only the backward pass reads the results.

    Even where such a result is smaller than what it is made of (a mask), compilers compute it in
    the backward pass, fused into what reads it if they can, so that it is not kept.  Kernels are
    not among these: what a product reads might be gone by then.
    """
    closed = layer.linearised
    ahead = _jax.needed(closed, layer.results, keep_effects=True)
    return frozenset(
        at
        for at, eqn in enumerate(closed.jaxpr.eqns)
        if at not in ahead and kind_of(eqn) != "kernel"
    )


def _repeated(jaxpr: Any, stored: Collection[Any], expensive: int, compiler: Compiler) -> set[int]:
    """Places of the operations that a compiler does again inside of those that read them.

    XLA for GPUs weighs what they take against the bytes: the tanh of a gelu is kept in bfloat16,
    and not in float32.  A mean is made with its sum there.  XLA for TPUs counts operations, and
    makes random numbers again.
    """
    known = _EXPENSIVE if compiler.counts_operations else _EXPENSIVE | _RANDOM
    # Which operations that are not cheap are done again for a value that is not in memory.
    behind: dict[Any, frozenset[int]] = {}
    # What reductions make, and what is made of one alone: a mean, which the same kernel makes.
    reduced: set[Any] = set()
    found = set()
    for at, eqn in enumerate(jaxpr.eqns):
        atoms = {*filter(_jax.is_var, eqn.invars)}
        again = frozenset().union(*(behind.get(atom, ()) for atom in atoms))
        with_sum = kind_of(eqn) == "reduction" or (len(atoms) == 1 and atoms <= reduced)
        if with_sum and not compiler.counts_operations:
            reduced.update(eqn.outvars)
        elif eqn.primitive.name in known:
            again |= {at}
        costs = [known[jaxpr.eqns[one].primitive.name] for one in again]
        cost = len(costs) if compiler.counts_operations else sum(costs) * 2 / _width(eqn)
        if kind_of(eqn) in ("fused", "view") and cost <= expensive:
            found.add(at)
            behind.update((var, again) for var in eqn.outvars if var not in stored)
    return found


def _width(eqn: Any) -> int:
    """Bytes of an element of what an operation makes."""
    types = (getattr(var.aval, "dtype", None) for var in eqn.outvars)
    # Of what has no derivative (float0) they are none.
    return max((getattr(dtype, "itemsize", 1) for dtype in types), default=1) or 1
