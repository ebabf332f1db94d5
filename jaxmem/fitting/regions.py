"""What of a step can be planned: its decorated regions, and the plans that there are for each.

A region is met when it is differentiated: only then is anything kept for a backward pass, and is
it known what that reads.  Options are found right there, where the axes of a `shard_map` around it
are known.  Regions that compute the same are one `Region`, with one plan.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem import _jax
from jaxmem.estimate.compiler import Compiler
from jaxmem.estimate.reversal import (
    layout_copy_bytes,
    loose_bytes,
    param_copies,
    stack_copy_bytes,
    tape_bytes,
    value_bytes,
    working_bytes,
)
from jaxmem.estimate.roofline import Roofline
from jaxmem.estimate.values import LayerValue, described, graph_of
from jaxmem.fitting.decisions import ValueDecision, decisions
from jaxmem.fitting.step_plan import RegionPlan, input_types
from jaxmem.fitting.uses import ONCE, Uses
from jaxmem.plans.plan import Plan
from jaxmem.policies import Keep as KeepPolicy
from jaxmem.solve.chain import Kept, Recomputed, Steps
from jaxmem.solve.keep import Keep, at_other_prices, menu
from jaxmem.solve.problem import Graph
from jaxmem.solve.stacks import Candidate, Choice, Loose, candidates, revolved
from jaxmem.solve.stages import kept_in
from jaxmem.trace.layer import Layer, nbytes
from jaxmem.unrolled import Chain, Code, HeldPlan

# ---------------------------------------------------------------- types


@dataclasses.dataclass(eq=False, kw_only=True)
class Region:
    """A region that can be planned.

    Attributes:
      digest, inputs, where: see `RegionPlan`.
      param_bytes: of gradients that have to be there all at once: stacked, or summed over layers.
      param_copies: bytes of copies of parameters that a compiler makes for its loops.
      plain_seconds: of a forward and a backward pass of one such stack, nothing recomputed.
      passes: how often a step waits for as long, and for what is recomputed, in a pipeline.
      uses: the regions of the step that this is.
      shards: on how many devices it runs side by side, each with arrays of its own.
      is_local: whether all bytes and seconds are of one device of a mesh; else they are of those
        that share its arrays, together.
    """

    digest: str
    inputs: tuple[str, ...]
    where: str
    param_bytes: int
    param_copies: int = 0
    plain_seconds: float = 0.0
    passes: tuple[float, float] = (1.0, 1.0)
    uses: Uses = ONCE
    shards: int = dataclasses.field(default_factory=_jax.shards)
    is_local: bool = False

    def __post_init__(self) -> None:
        # Where each device of the mesh has arrays of its own, these are of one.
        self.is_local |= self.shards > 1 and self.shards == _jax.mesh_devices()

    def of_one_device(self, size: int, devices: int) -> int:
        """So many bytes of this region as those of one of so many devices."""
        return size if self.is_local else size * self.shards // devices

    def candidates(
        self, several: bool, later_bytes: int, turn_bytes: int = 0
    ) -> tuple[Candidate, ...]:
        """The plans that are worth a look, fastest first.

        Args:
          several: whether the step has other regions, or this one several times.
          later_bytes: of gradients that are counted elsewhere, as there all the time, and are made
            when the backward pass comes to the first loop.
          turn_bytes: live next to what is kept, where the backward pass begins.
        """
        raise NotImplementedError

    def everything(self, several: bool) -> Candidate:
        """The plan that keeps everything.

        Args:
          several: as above.
        """
        raise NotImplementedError

    def candidates_by_layer(self, several: bool, turn_bytes: int = 0) -> tuple[Candidate, ...]:
        """Of those that recompute layers whole or keep all of them, what no other such one beats.

        Args:
          several, turn_bytes: as above.
        """
        return ()

    def counted_bytes(self, several: bool) -> int:
        """Of the results of the regions that this is, what `candidates` counts as kept."""
        return 0

    def is_plain(self, candidate: Candidate) -> bool:
        """Whether a candidate is a scan as jax itself reverses it."""
        return False

    def plan(self, candidate: Candidate) -> RegionPlan:
        """A candidate as the plan that is applied."""
        raise NotImplementedError

    def decisions(self, candidate: Candidate) -> list[ValueDecision]:
        """What becomes of the values of its layers."""
        raise NotImplementedError

    def gap(self, candidate: Candidate) -> float:
        """How much better, relative to its seconds, a layer's choice could still be."""
        raise NotImplementedError


@dataclasses.dataclass(eq=False, kw_only=True)
class StackRegion(Region):
    """A stack of equal layers.

    Attributes:
      length: number of layers.
      keeps: the options of a layer, what is kept of it in each; None for everything.
      choices: their bytes and seconds.
      carry_bytes, forward_seconds, loose, round_seconds: see `jaxmem.solve.stacks.candidates`.
      values: the layer's values, by place, as a reader is told of them.
      graph: the layer as the solver saw it.
      is_stage: whether it is a stage of a pipeline: in each tick several loops would have copies of
        their layers' parameters, so that all layers keep the same.
      carries: where in `values` what is passed from layer to layer is.
    """

    length: int
    keeps: tuple[Keep | None, ...]
    choices: tuple[Choice, ...]
    carry_bytes: int
    forward_seconds: float
    loose: Loose
    values: tuple[LayerValue, ...]
    graph: Graph
    is_stage: bool = False
    carries: frozenset[int] = frozenset()
    round_seconds: float = 0.0

    def candidates(
        self, several: bool, later_bytes: int, turn_bytes: int = 0
    ) -> tuple[Candidate, ...]:
        # Where there are others, what it keeps counts more than what it needs while it is reversed.
        ways = {0, max(self.uses.others, 1)} if several else {0}
        found = {
            one
            for others in ways
            for turn in {0, turn_bytes}
            for one in candidates(
                *self._sizes, later_bytes, others, turn, self.is_stage, self.round_seconds
            )
        }
        return tuple(sorted(found, key=lambda one: (one.seconds, -one.bytes, one.kept_bytes)))

    def everything(self, several: bool) -> Candidate:
        length, carry_bytes, seconds, choices, loose = self._sizes
        return candidates(length, carry_bytes, seconds, choices[:1], loose, alike=True)[0]

    def candidates_by_layer(self, several: bool, turn_bytes: int = 0) -> tuple[Candidate, ...]:
        if self.is_stage:
            return ()
        return tuple(revolved(*self._sizes, self.round_seconds))[::-1]

    def is_plain(self, candidate: Candidate) -> bool:
        return self._plan(candidate).kind == "none"

    def plan(self, candidate: Candidate) -> RegionPlan:
        return RegionPlan(self.digest, self.inputs, self.where, self._plan(candidate))

    def decisions(self, candidate: Candidate) -> list[ValueDecision]:
        return [
            decision
            for count, choice in self._layers(candidate)
            if (keep := self.keeps[choice]) is not None
            for decision in decisions(
                self.where, self.uses.times * count, keep, self.graph, self.values
            )
        ]

    def gap(self, candidate: Candidate) -> float:
        keeps = (self.keeps[choice] for _, choice in self._layers(candidate))
        return max((keep.gap for keep in keeps if keep is not None), default=0.0)

    @property
    def seconds_again(self) -> float:
        """Of all that these layers compute from what enters each."""
        whole = [one.seconds for k, one in enumerate(self.choices) if self._is_whole(k)]
        return self.uses.times * self.length * min(whole, default=self.forward_seconds)

    @property
    def _sizes(self) -> tuple[int, int, float, tuple[Choice, ...], Loose | None]:
        """What `jaxmem.solve.stacks` is told first of a stack."""
        # In a scan a single layer is in a loop, too.
        loose = None if self.uses.iterations else self.loose
        return self.length, self.carry_bytes, self.forward_seconds, self.choices, loose

    def _layers(self, candidate: Candidate) -> Sequence[tuple[int, int]]:
        """Pairs of a number of layers and their choice."""
        if candidate.kind == "keep":
            return candidate.runs
        return ((self.length, candidate.choice),)

    def _plan(self, candidate: Candidate) -> Plan:
        if candidate.kind == "revolve":
            return Plan.revolve(self.length, candidate.slots)
        if candidate.kind == "periodic":
            return Plan.cut(self.length, candidate.lengths, self._policy(candidate.choice))
        if self.is_stage and all(self._is_whole(choice) for _, choice in candidate.runs):
            return Plan.full(self.length)
        return Plan.keep([(count, self._policy(choice)) for count, choice in candidate.runs])

    def _is_whole(self, choice: int) -> bool:
        """Whether a layer is recomputed from what enters it."""
        keep = self.keeps[choice]
        return keep is not None and not keep.offloaded and self.carries.issuperset(keep.kept)

    def _policy(self, choice: int) -> KeepPolicy | None:
        keep, size = self.keeps[choice], self.choices[choice].bytes
        return keep and KeepPolicy(keep.kept, keep.offloaded, size, self.digest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnrolledCandidate(Candidate):
    """One plan for code without a stack."""

    plan: HeldPlan


@dataclasses.dataclass(eq=False, kw_only=True)
class UnrolledRegion(Region):
    """Code without a stack.

    Attributes:
      chain: the code, cut into stages.
      values: of each segment, by its layer's digest, the values by place.
      waits: see `jaxmem.unrolled.plan.UnrolledPlan`.
    """

    chain: Chain
    values: dict[str, tuple[LayerValue, ...]]
    waits: bool = True

    def candidates(
        self, several: bool, later_bytes: int, turn_bytes: int = 0
    ) -> tuple[Candidate, ...]:
        return _unrolled(self.chain.plans(several, self.uses.stacked, turn_bytes))

    def everything(self, several: bool) -> Candidate:
        steps = tuple(Kept(number, 0) for number in range(len(self.chain)))
        return _unrolled([self.chain.held(steps, several, self.uses.stacked)])[0]

    def candidates_by_layer(self, several: bool, turn_bytes: int = 0) -> tuple[Candidate, ...]:
        return _unrolled(self.chain.plans_by_layer(several, self.uses.stacked, turn_bytes))

    def counted_bytes(self, several: bool) -> int:
        return self.uses.live * self.chain.result_bytes if several else 0

    def plan(self, candidate: Candidate) -> RegionPlan:
        plan = self.chain.plan(_steps(candidate), self.waits)
        return RegionPlan(self.digest, self.inputs, self.where, plan)

    def decisions(self, candidate: Candidate) -> list[ValueDecision]:
        steps, found = _steps(candidate), []
        for several, keep in [*self._kept_in_part(steps), *self._again_whole(steps)]:
            segment = self.chain.segment(several[0])
            where = f"{self.where}, {self._called(several)}"
            values = self.values[segment.layer.digest]
            found += decisions(where, self.uses.times * len(several), keep, segment.graph, values)
        return found

    def _called(self, several: Sequence[Kept]) -> str:
        """Which parts of the code these are: layers of a run, if they are such."""
        cuts, code = self.chain.cuts, self.chain.code
        spans = [(cuts[kept.stage], cuts[max(kept.after, kept.stage + 1)]) for kept in several]
        for run in code.runs:
            places = run.places
            if all(first in places and last in places for first, last in spans):
                layers = [(places.index(first), places.index(last)) for first, last in spans]
                return f"layers {_ranges(layers)} of {run.count} equal ones"
        parts = [(kept.stage, max(kept.after, kept.stage + 1)) for kept in several]
        return f"parts {_ranges(parts)} of {len(self.chain)}"

    def _kept_in_part(self, steps: Steps) -> Iterator[tuple[list[Kept], Keep]]:
        alike: dict[tuple[int, int], list[Kept]] = {}
        for kept in kept_in(steps):
            alike.setdefault((id(self.chain.segment(kept)), kept.option), []).append(kept)
        for several in alike.values():
            keep = self.chain.segment(several[0]).keeps[several[0].option]
            if keep is not None:
                yield several, keep

    def _again_whole(self, steps: Steps) -> Iterator[tuple[list[Kept], Keep | None]]:
        """Each stage as often as it is."""
        alike: dict[int, list[Kept]] = {}
        for number in _again(steps):
            stage = Kept(number, 0)
            alike.setdefault(id(self.chain.segment(stage)), []).append(stage)
        for several in alike.values():
            yield several, None

    def gap(self, candidate: Candidate) -> float:
        keeps = (self.chain.segment(kept).keeps[kept.option] for kept in kept_in(_steps(candidate)))
        return max((keep.gap for keep in keeps if keep is not None), default=0.0)


# ---------------------------------------------------------------- API


def stack_region(
    stack: Any, layer: Layer, local: Layer, roofline: Roofline, offload: bool
) -> StackRegion:
    """A stack as a region, with the options of its layer.

    Args:
      local: the layer as one device of a mesh runs it, which bytes and seconds are of.
    """
    length = stack.form.length
    compiler = roofline.compiler
    graph = graph_of(local, roofline, offload)
    graph = dataclasses.replace(graph, bytes=value_bytes(local, compiler))
    options = list(menu(graph))
    everything_seconds = 0.0  # the program as it stands: nothing has fewer FLOPs
    if roofline.counts_traffic:
        everything_seconds = sum(graph.keep_seconds[value] for value in graph.wanted - graph.free)
        # Of choices that hardly differ in time some need far less room than others.
        by_flops = graph_of(local, dataclasses.replace(roofline, flops_only=True), offload)
        by_flops = dataclasses.replace(by_flops, bytes=graph.bytes)
        options += at_other_prices(graph, options, by_flops)
    everything = _choice(local, everything_seconds, compiler)
    others = [
        (keep, _choice(local.keeping(keep.kept, keep.offloaded), keep.seconds, compiler))
        for keep in options
    ]
    worth = [one for one in others if one[1].bytes < everything.bytes or one[0].offloaded]
    forward_seconds = sum(operation.seconds for operation in graph.operations)
    backward_seconds = sum(map(roofline.operation, local.transposed.jaxpr.eqns))
    consts, _, x = local.body.split_in([var.aval for var in local.linearised.jaxpr.invars])

    def differentiated(avals: Sequence[Any], wrt: Sequence[bool]) -> int:
        return sum(nbytes(aval) for aval, one in zip(avals, wrt, strict=True) if one)

    return StackRegion(
        digest=layer.digest,
        inputs=input_types(layer),
        where=called(stack),
        length=length,
        keeps=(None, *(keep for keep, _ in worth)),
        choices=(everything, *(choice for _, choice in worth)),
        carry_bytes=local.problem(length).carry_bytes,
        forward_seconds=forward_seconds,
        plain_seconds=length * (forward_seconds + backward_seconds),
        loose=loose_bytes(local, graph, compiler),
        values=described(local, roofline),
        graph=graph,
        is_stage=stack.is_stage,
        carries=frozenset(
            layer.places[var]
            for var in layer.body.split_in(layer.linearised.jaxpr.invars)[1]
            if var in layer.places
        ),
        # What all layers read has a sum of gradients, which the backward loop carries.
        param_bytes=length * differentiated(x, layer.wrt_x)
        + differentiated(consts, layer.wrt_consts),
        param_copies=param_copies(local, length, compiler),
        # Where products compute their operands themselves, these are arrays for once.
        round_seconds=everything_seconds if compiler.fuses_operands else 0.0,
    )


def called(stack: Any) -> str:
    """What a stack is called, and the line that made it."""
    return str(stack.info) if stack.info else f"a stack of {stack.form.length} layers"


def _choice(layer: Layer, seconds: float, compiler: Compiler) -> Choice:
    return Choice(
        bytes=tape_bytes(layer, compiler),
        seconds=seconds,
        work_bytes=working_bytes(layer, compiler),
        loop_bytes=layout_copy_bytes(layer, compiler),
        copy_bytes=stack_copy_bytes(layer, compiler),
    )


def unrolled_region(code: Code, label: str, roofline: Roofline, offload: bool) -> UnrolledRegion:
    """Code without a stack as a region, cut into stages with their options."""
    chain = Chain(code, roofline, offload)
    known: dict[str, tuple[LayerValue, ...]] = {}
    for segment in chain.segments.values():
        layer = segment.layer
        if layer.digest not in known:
            known[layer.digest] = described(layer, roofline)
    return UnrolledRegion(
        digest=code.digest,
        inputs=tuple(aval.str_short() for aval in code.closed.in_avals),
        where=re.sub(r"\(.*[/\\]", "(", label),  # the file's name alone
        param_bytes=0,  # one by one such gradients go into their update
        # A gradient takes about three times as long as what it is of.
        plain_seconds=3 * sum(chain.segments[k, k + 1].stage.seconds for k in range(len(chain))),
        chain=chain,
        values=known,
    )


# ---------------------------------------------------------------- implementation


def _unrolled(plans: Sequence[HeldPlan]) -> tuple[UnrolledCandidate, ...]:
    return tuple(
        UnrolledCandidate(plan.bytes, plan.seconds, kept_bytes=plan.kept_bytes, plan=plan)
        for plan in plans
    )


def _steps(candidate: Candidate) -> Steps:
    assert isinstance(candidate, UnrolledCandidate)
    return candidate.plan.steps


def _again(steps: Sequence[Kept | Recomputed]) -> Iterator[int]:
    """The stages that are recomputed whole, each as often as it is."""
    for step in steps:
        if isinstance(step, Recomputed):
            yield from range(step.first, step.last)
            yield from _again(step.inner)


def _ranges(spans: Sequence[tuple[int, int]]) -> str:
    """Numbers from 1 on of what is in these spans, neighbours as one: "1-3, 7".

    >>> _ranges([(0, 1), (1, 2), (2, 3), (6, 7)])
    '1-3, 7'
    """
    joined: list[list[int]] = []
    for first, last in sorted(set(spans)):
        if joined and joined[-1][1] == first:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    return ", ".join(str(a + 1) if b == a + 1 else f"{a + 1}-{b}" for a, b in joined)
