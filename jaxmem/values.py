"""One layer as the solvers see it: its values, what makes them, what its backward reads.

Every value that a layer computes can be kept, those that only the derivative needs among
them, so that the cheap tricks are found rather than known: the output of a `tanh` in place
of what it is the derivative of, the bfloat16 that a float32 was made from, the seed of a
mask in place of the mask.
"""

import dataclasses
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.alive import in_memory, peak_alive, read_by_kernels
from jaxmem.counting import kind_of
from jaxmem.layer import Layer, free_values, nbytes
from jaxmem.problem import Graph, Operation
from jaxmem.roofline import Roofline
from jaxmem.solve.keep import Keep, menu
from jaxmem.source import source_line

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class LayerValue:
    """What a reader is told of one value of a layer.

    Attributes:
      place: its number among the layer's values.
      name: its `checkpoint_name`, or the operation that makes it, or "input".
      source: the user's line.
      shape: "bfloat16[8,1024,1024]".
      bytes: in one layer.
      seconds: of the operation that makes it.
    """

    place: int
    name: str
    source: str
    shape: str
    bytes: int
    seconds: float


# ---------------------------------------------------------------- API


def graph_of(layer: Layer, roofline: Roofline, offload: bool = False) -> Graph:
    """The values of a layer and their makers, indices being places in `layer.values`."""
    places = {var: place for place, var in enumerate(layer.values)}
    sizes = [_bytes(var) for var in layer.values]
    stored = in_memory(layer.linearised.jaxpr)
    free = frozenset(places[var] for var in free_values(layer) if var in places)
    operations = [
        Operation(
            inputs=tuple(sorted({places[a] for a in eqn.invars if _jax.is_var(a)})),
            outputs=tuple(places[var] for var in eqn.outvars),
            seconds=roofline.operation(eqn),
        )
        for eqn in layer.linearised.jaxpr.eqns
    ]
    return Graph(
        bytes=tuple(sizes),
        operations=tuple(operations),
        free=free,
        wanted=frozenset(places[a] for a in layer.residuals if _jax.is_var(a)),
        keepable=frozenset(range(len(sizes))) - free,
        keep_seconds=tuple(
            roofline.kept(size, var in stored)
            for var, size in zip(layer.values, sizes, strict=True)
        ),
        host_seconds=tuple(map(roofline.sent, sizes)) if offload else None,
    )


def described(layer: Layer, place: int, roofline: Roofline) -> LayerValue:
    """What to tell a reader of one of a layer's values."""
    var = layer.values[place]
    made_by = layer.made_by(var)
    given = None if made_by is None else _jax.name_given_by(made_by)
    if made_by is not None and _jax.place_named_by(made_by) is not None:
        inner = made_by.invars[0]
        before = layer.made_by(inner) if _jax.is_var(inner) else None
        given = None if before is None else before.primitive.name
        made_by = before or made_by
    name = "input" if made_by is None else given or made_by.primitive.name
    aval = var.aval
    return LayerValue(
        place=place,
        name=name,
        source="" if made_by is None else source_line(made_by),
        shape=f"{aval.dtype}[{','.join(map(str, aval.shape))}]",
        bytes=_bytes(var),
        seconds=0.0 if made_by is None else roofline.operation(made_by),
    )


def working_bytes(layer: Layer, rounds_operands: bool = False) -> int:
    """About what one layer's backward pass has alive besides its tape and parameters.

    Values are taken to die at their last use in the order in which they are traced, and
    elementwise chains not to be in memory unless a kernel reads them.  In a loop over layers
    the tape is stacked, and of those of its values that kernels read each layer's is copied.
    """
    closed, first, last = _pullback(layer)
    tape = closed.jaxpr.invars[first:last]
    copied = set(tape) & read_by_kernels(closed.jaxpr)
    return peak_alive(closed, copied=copied, rounds_operands=rounds_operands)


def reversal_bytes(layer: Layer, rounds_operands: bool = False) -> int:
    """About the most that is alive while a layer outside of loops is reversed.

    Its tape and the gradient of its results among it, each till its last use.
    """
    closed, first, _ = _pullback(layer)
    held = closed.jaxpr.invars[first:]
    return peak_alive(closed, held=held, rounds_operands=rounds_operands)


def loose_bytes(layer: Layer, graph: Graph, rounds_operands: bool = False) -> int:
    """About what the backward pass of a single layer, in no loop, has alive with its tape.

    Of the tape only what a compiler cannot fuse is stored, and each value till its last use.
    """
    closed, first, last = _pullback(layer.keeping(without_checkpoint(layer, graph).kept))
    held = closed.jaxpr.invars[first:last]
    return peak_alive(closed, held=held, rounds_operands=rounds_operands)


def without_checkpoint(layer: Layer, graph: Graph) -> Keep:
    """What is in memory of code that is under no checkpoint.

    Outside of loops a compiler computes again by itself, inside of what reads it, whatever is
    elementwise and cheap; so kept is the least from which all follows by such operations.
    """
    unnamed = unnamed_places(layer)
    operations = tuple(
        Operation(
            inputs=tuple(sorted({unnamed[place] for place in one.inputs})),
            outputs=one.outputs,
            seconds=0.0 if _is_repeated(eqn) else one.seconds,
        )
        for one, eqn in zip(graph.operations, layer.linearised.jaxpr.eqns, strict=True)
        if _jax.name_given_by(eqn) is None
    )
    everywhere = frozenset(range(len(graph.bytes)))
    plain = Graph(
        bytes=graph.bytes,
        operations=operations,
        free=graph.free,
        wanted=frozenset(unnamed[place] for place in graph.wanted),
        keepable=everywhere - graph.free,
        keep_seconds=(0.0,) * len(graph.bytes),
    )
    return menu(plain, points=0)[0]


def unnamed_places(layer: Layer) -> list[int]:
    """For each value's place, that of the value which it is but for its name."""
    places = {var: place for place, var in enumerate(layer.values)}
    found = list(range(len(layer.values)))
    for eqn in layer.linearised.jaxpr.eqns:
        if _jax.name_given_by(eqn) is not None and _jax.is_var(eqn.invars[0]):
            found[places[eqn.outvars[0]]] = found[places[eqn.invars[0]]]
    return found


# ---------------------------------------------------------------- implementation

# What compilers do not compute twice to spare memory, elementwise though it is.
_EXPENSIVE = frozenset(
    name
    for line in (
        "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp",
        "exp2 expm1 lgamma log log1p logistic pow rem rsqrt sin sinh sqrt tan tanh",
    )
    for name in line.split()
)


def _is_repeated(eqn: Any) -> bool:
    """Whether a compiler computes it in each of those that read it."""
    return kind_of(eqn) in ("fused", "view") and eqn.primitive.name not in _EXPENSIVE


def _bytes(var: Any) -> int:
    return nbytes(var.aval) if hasattr(var.aval, "shape") else 0


def _pullback(layer: Layer) -> tuple[ClosedJaxpr, int, int]:
    """The backward pass of one layer: (consts, x, tape, cotangents) -> cotangents.

    And between which of its inputs the tape is.
    """
    body = layer.body
    consts, _, x = body.split_in(body.jaxpr.in_avals)
    tape = [layer.values[place].aval for place in layer.kept if place is not None]
    outs = [
        aval.to_tangent_aval()
        for aval, wrt in zip(body.jaxpr.out_avals, layer.wrt.outs, strict=True)
        if wrt
    ]
    num_carry = sum(layer.wrt.outs[: body.num_carry])
    ends = [len(consts), len(consts) + len(x), len(consts) + len(x) + len(tape)]

    def run(*flat: Any) -> Any:
        cts = flat[ends[2] :]
        return layer.pullback(
            flat[: ends[0]],
            flat[ends[0] : ends[1]],
            flat[ends[1] : ends[2]],
            cts[:num_carry],
            cts[num_carry:],
        )

    traced = _jax.trace(lambda *flat: jax.tree.leaves(run(*flat)), [*consts, *x, *tape, *outs])
    return _jax.inlined(traced), ends[1], ends[2]
