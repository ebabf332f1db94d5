"""What of a step can be planned: its decorated stacks, met while the step is traced.

A hole is met when its stack is differentiated, since only then is it known what its
backward pass reads.  Its options are found right there, where the axes of a `shard_map`
around it are known.  Stacks with the same layer and length are one hole, met several times.
"""

import dataclasses
from typing import Any

from jaxmem import _jax
from jaxmem.fitting.step_plan import HolePlan, input_types
from jaxmem.layer import Layer, nbytes
from jaxmem.plan import Plan
from jaxmem.policies import ByLayer
from jaxmem.policies import Keep as KeepPolicy
from jaxmem.problem import Graph
from jaxmem.roofline import Roofline
from jaxmem.solve.keep import Keep, menu
from jaxmem.solve.stacks import Candidate, Choice, candidates
from jaxmem.values import LayerValue, described, graph_of, working_bytes

# ---------------------------------------------------------------- types


@dataclasses.dataclass(eq=False)
class Hole:
    """A stack that can be planned, with its options.

    Attributes:
      digest, inputs, where: see `HolePlan`.
      length: number of layers.
      keeps: the options of a layer, what is kept of it in each; None for everything.
      choices: their bytes and seconds.
      candidates: the plans that no other beats in bytes and seconds, fastest first.
      values: the layer's values, by place, as a reader is told of them.
      graph: the layer as the solver saw it.
      forward_seconds: one evaluation of the layer, by the roofline.
      param_bytes: one layer's slice of the stacked inputs.
      stacks: those of the step that this is.
    """

    digest: str
    inputs: tuple[str, ...]
    where: str
    length: int
    keeps: tuple[Keep | None, ...]
    choices: tuple[Choice, ...]
    candidates: tuple[Candidate, ...]
    values: tuple[LayerValue, ...]
    graph: Graph
    forward_seconds: float
    param_bytes: int
    stacks: list[Any]

    @property
    def times(self) -> int:
        """How many stacks of the step this is."""
        return len(self.stacks)

    def plan(self, candidate: Candidate) -> HolePlan:
        """A candidate as the plan that is applied."""
        return HolePlan(self.digest, self.inputs, self.where, self._plan(candidate))

    def _plan(self, candidate: Candidate) -> Plan:
        if candidate.kind == "revolve":
            return Plan.revolve(self.length, candidate.slots)
        if candidate.kind == "periodic":
            return Plan.cut(self.length, candidate.lengths, self._policy(candidate.choice))
        return Plan.keep([(count, self._policy(choice)) for count, choice in candidate.runs])

    def _policy(self, choice: int) -> KeepPolicy | None:
        keep = self.keeps[choice]
        return keep and KeepPolicy(keep.kept, keep.offloaded, keep.bytes, self.digest)


@dataclasses.dataclass(frozen=True, eq=False)
class Collector(ByLayer):
    """The policy of every decorated region while its step is looked at: notes the holes."""

    roofline: Roofline
    offload: bool
    holes: dict[tuple[str, int], Hole] = dataclasses.field(default_factory=dict)

    def plan_for(self, stack: Any, layer: Layer) -> None:
        """Note a stack; it keeps everything."""
        key = layer.digest, stack.form.length
        if key not in self.holes:
            self.holes[key] = _hole(stack, layer, self.roofline, self.offload)
        elif not any(stack is known for known in self.holes[key].stacks):
            self.holes[key].stacks.append(stack)

    def __str__(self) -> str:
        return "looked at by jaxmem.fit"


# ---------------------------------------------------------------- implementation


def _hole(stack: Any, layer: Layer, roofline: Roofline, offload: bool) -> Hole:
    length = stack.form.length
    graph = graph_of(layer, roofline, offload)
    options = [keep for keep in menu(graph) if keep.bytes < _tape_bytes(layer) or keep.offloaded]
    # Keeping everything is the program as it stands: nothing is faster, whatever a
    # roofline says of the time that it takes to keep things.
    floor = min([0.0, *(keep.seconds for keep in options)])
    everything = Choice(_tape_bytes(layer), floor, working_bytes(layer))
    keeps = (None, *options)
    choices = (
        everything,
        *(
            Choice(
                keep.bytes,
                keep.seconds,
                working_bytes(layer.keeping(keep.kept, keep.offloaded)),
            )
            for keep in options
        ),
    )
    _, carry, x = layer.body.split_in(layer.body.jaxpr.in_avals)
    forward = sum(operation.seconds for operation in graph.operations)
    return Hole(
        digest=layer.digest,
        inputs=input_types(layer),
        where=str(stack.info) if stack.info else f"a stack of {length} layers",
        length=length,
        keeps=keeps,
        choices=choices,
        candidates=candidates(length, sum(map(nbytes, carry)), forward, choices),
        values=tuple(described(layer, place, roofline) for place in range(len(layer.values))),
        graph=graph,
        forward_seconds=forward,
        param_bytes=sum(map(nbytes, x)),
        stacks=[stack],
    )


def _tape_bytes(layer: Layer) -> int:
    tape = (layer.values[place] for place in layer.kept if place is not None)
    return sum(nbytes(var.aval) for var in tape if _jax.is_var(var))
