"""One layer as the solvers see it: its values, what makes them, what its backward reads.

Every value that a layer computes can be kept, those that only the derivative needs among
them, so that the cheap tricks are found rather than known: the output of a `tanh` in place
of what it is the derivative of, the bfloat16 that a float32 was made from, the seed of a
mask in place of the mask.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from jaxmem import _jax
from jaxmem.estimate.arrays import bytes_of_rows, in_memory, read_turned
from jaxmem.estimate.normalised import Normalised
from jaxmem.estimate.operands import bytes_for_kernels
from jaxmem.estimate.roofline import Roofline
from jaxmem.solve.problem import Graph, Operation
from jaxmem.trace.layer import Layer, free_values, nbytes
from jaxmem.trace.source import source_line

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class LayerValue:
    """What a reader is told of one value of a layer.

    Attributes:
      place: its number among the layer's values.
      unnamed: that of the value that it is but for its name.
      name: its `checkpoint_name`, or the operation that makes it, or "input".
      source: the user's line.
      shape: "bfloat16[8,1024,1024]".
      bytes: in one layer.
      seconds: of the operation that makes it.
    """

    place: int
    unnamed: int
    name: str
    source: str
    shape: str
    bytes: int
    seconds: float


# ---------------------------------------------------------------- API


def graph_of(
    layer: Layer, roofline: Roofline, offload: bool = False, in_loop: bool = True
) -> Graph:
    """The values of a layer and their makers, indices being places in `layer.values`.

    Args:
      in_loop: whether what is kept is written into the stacks of a loop; else it may be in memory
        anyway, and what it is made of as well.
    """
    places = layer.places
    sizes = [nbytes(var.aval) for var in layer.values]
    jaxpr = layer.linearised.jaxpr
    stored = in_memory(jaxpr, roofline.compiler)
    if roofline.compiler.turns_operands and not in_loop:
        stored -= read_turned(jaxpr)
    rows, moved = _traffic(layer, stored, roofline, in_loop)

    def price(var: Any, size: int) -> float:
        if in_loop:
            return roofline.stacked(size, var in stored, rows.get(var, 0))
        return roofline.kept(size, var in stored) + roofline.moved(rows.get(var, 0))

    def made(eqn: Any) -> float:
        again = sum(moved.get(var, 0) for var in eqn.outvars)
        return roofline.operation(eqn) + roofline.moved(again)

    free = frozenset(places[var] for var in free_values(layer) if var in places)
    operations = [
        Operation(
            inputs=tuple(sorted({places[a] for a in eqn.invars if _jax.is_var(a)})),
            outputs=tuple(places[var] for var in eqn.outvars),
            seconds=made(eqn),
        )
        for eqn in jaxpr.eqns
    ]
    return Graph(
        bytes=tuple(sizes),
        operations=tuple(operations),
        free=free,
        wanted=frozenset(places[a] for a in layer.residuals if _jax.is_var(a)),
        keepable=frozenset(range(len(sizes))) - free,
        keep_seconds=tuple(map(price, layer.values, sizes)),
        host_seconds=tuple(map(roofline.sent, sizes)) if offload else None,
    )


def described(layer: Layer, roofline: Roofline) -> tuple[LayerValue, ...]:
    """What to tell a reader of each of a layer's values."""
    unnamed = unnamed_places(layer)
    return tuple(
        _described(layer, place, unnamed[place], roofline) for place in range(len(layer.values))
    )


def unnamed_places(layer: Layer) -> list[int]:
    """For each value's place, that of the value which it is but for its name."""
    places = layer.places
    found = list(range(len(layer.values)))
    for eqn in layer.linearised.jaxpr.eqns:
        if _jax.name_given_by(eqn) is not None and _jax.is_var(eqn.invars[0]):
            found[places[eqn.outvars[0]]] = found[places[eqn.invars[0]]]
    return found


def _traffic(
    layer: Layer, stored: Collection[Any], roofline: Roofline, in_loop: bool
) -> tuple[dict[Any, int], dict[Any, int]]:
    """Bytes that are read once more for what is kept, and moved for what is computed again."""
    if not roofline.counts_traffic:
        return {}, {}
    jaxpr = layer.linearised.jaxpr
    rows = bytes_of_rows(jaxpr, stored) if roofline.compiler.reduces_inside else {}
    if in_loop:
        return rows, {}
    reduced = Normalised(jaxpr.eqns).reduced
    rows = {var: size for var, size in rows.items() if var in reduced}
    # Products that compute what they read themselves have nothing written for them.
    return rows, {} if roofline.compiler.fuses_operands else bytes_for_kernels(layer, stored)


def _described(layer: Layer, place: int, unnamed: int, roofline: Roofline) -> LayerValue:
    var = layer.values[place]
    made_by = layer.made_by(var)
    given = None if made_by is None else _jax.name_given_by(made_by)
    if made_by is not None and _jax.place_named_by(made_by) is not None:
        inner = made_by.invars[0]
        before = layer.made_by(inner) if _jax.is_var(inner) else None
        given = None if before is None else _jax.name_given_by(before) or _operation(before)
        made_by = before or made_by
    name = "input" if made_by is None else given or _operation(made_by)
    aval = var.aval
    return LayerValue(
        place=place,
        unnamed=unnamed,
        name=name,
        source="" if made_by is None else source_line(made_by),
        shape=f"{aval.dtype}[{','.join(map(str, aval.shape))}]",
        bytes=nbytes(var.aval),
        seconds=0.0 if made_by is None else roofline.operation(made_by),
    )


def _operation(eqn: Any) -> str:
    """What an operation is called; of a call for a single one, that."""
    called = _jax.in_call(eqn)
    if called is not None and len(called.jaxpr.eqns) == 1:
        return _operation(called.jaxpr.eqns[0])
    return eqn.primitive.name
