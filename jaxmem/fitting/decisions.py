"""What becomes of each value of a layer under a plan, in the user's names and lines."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxmem.estimate.values import LayerValue
from jaxmem.solve.keep import Keep
from jaxmem.solve.problem import Graph

Decision = Literal["keep", "offload", "recompute"]


@dataclasses.dataclass(frozen=True)
class ValueDecision:
    """What becomes of one value of a layer.

    Attributes:
      stack: the stack that it is of.
      layers: in how many of its layers.
      decision: "keep" it for the backward pass, "offload" it to the host, or "recompute" it.
      name: its `checkpoint_name`, or the operation that makes it; "input" for what the layer
        is given.
      source: the user's line.
      shape: "bfloat16[8,1024,1024]".
      bytes: in one layer.
      seconds: in one layer, of the operation that makes it, by the roofline.
    """

    stack: str
    layers: int
    decision: Decision
    name: str
    source: str
    shape: str
    bytes: int
    seconds: float


def decisions(
    stack: str, layers: int, keep: Keep | None, graph: Graph, values: Sequence[LayerValue]
) -> list[ValueDecision]:
    """The decision on each value that the backward pass needs, in the layer's order.

    Args:
      keep: None where the whole layer is recomputed.
    """
    recomputed = range(len(graph.operations)) if keep is None else keep.recomputed
    decision: dict[int, Decision] = {}
    for operation in recomputed:
        decision.update(dict.fromkeys(graph.operations[operation].outputs, "recompute"))
    if keep is not None:
        decision.update(dict.fromkeys(keep.kept, "keep"))
        decision.update(dict.fromkeys(keep.offloaded, "offload"))
    # What is given stays, whatever it is called.
    given = {value.place for value in values if value.name == "input"}
    decision = {
        place: what
        for place, what in decision.items()
        if what != "recompute" or values[place].unnamed not in given
    }
    # A value under a name is the same array: it is told of once, by its name.
    told: dict[int, int] = {}
    for place in sorted(decision):
        same = told.setdefault(values[place].unnamed, place)
        if decision[same] == "recompute":
            told[values[place].unnamed] = place
    return [
        ValueDecision(
            stack=stack,
            layers=layers,
            decision=decision[place],
            name=values[place].name,
            source=values[place].source,
            shape=values[place].shape,
            bytes=values[place].bytes,
            seconds=values[values[place].unnamed].seconds,
        )
        for place in sorted(told.values())
    ]
