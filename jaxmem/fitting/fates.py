"""What becomes of each value of a layer under a plan, in the user's names and lines."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxmem.problem import Graph
from jaxmem.solve.keep import Keep
from jaxmem.values import LayerValue

Fate = Literal["kept", "host", "computed again"]


@dataclasses.dataclass(frozen=True)
class ValueFate:
    """What becomes of one value of a layer.

    Attributes:
      stack: the stack that it is of.
      layers: in how many of its layers.
      fate: "kept" for the backward pass, sent to the "host", or "computed again".
      name: its `checkpoint_name`, or the operation that makes it; "input" for what the layer
        is given.
      source: the user's line.
      shape: "bfloat16[8,1024,1024]".
      bytes: in one layer.
      seconds: in one layer, of the operation that makes it, by the roofline.
    """

    stack: str
    layers: int
    fate: Fate
    name: str
    source: str
    shape: str
    bytes: int
    seconds: float


def fates(
    stack: str, layers: int, keep: Keep | None, graph: Graph, values: Sequence[LayerValue]
) -> list[ValueFate]:
    """The fate of each value that is kept, moved, or computed again, in the layer's order.

    Args:
      keep: None where the whole layer is computed again.
    """
    again = range(len(graph.operations)) if keep is None else keep.again
    fate: dict[int, Fate] = {}
    for operation in again:
        fate.update(dict.fromkeys(graph.operations[operation].outputs, "computed again"))
    if keep is not None:
        fate.update(dict.fromkeys(keep.kept, "kept"))
        fate.update(dict.fromkeys(keep.offloaded, "host"))
    # What is given stays, whatever it is called.
    given = {value.place for value in values if value.name == "input"}
    fate = {
        place: what
        for place, what in fate.items()
        if what != "computed again" or values[place].unnamed not in given
    }
    # A value under a name is the same array: it is told of once, by its name.
    told: dict[int, int] = {}
    for place in sorted(fate):
        same = told.setdefault(values[place].unnamed, place)
        if fate[same] == "computed again":
            told[values[place].unnamed] = place
    return [
        ValueFate(
            stack=stack,
            layers=layers,
            fate=fate[place],
            name=values[place].name,
            source=values[place].source,
            shape=values[place].shape,
            bytes=values[place].bytes,
            seconds=values[values[place].unnamed].seconds,
        )
        for place in sorted(told.values())
    ]
