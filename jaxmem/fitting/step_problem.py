"""What of a step that is run in one way can be planned, and its plans' Pareto front."""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import _jax, targets
from jaxmem.compile.program import Program
from jaxmem.errors import JaxmemWarning, NoStackWarning, warn
from jaxmem.estimate.compiler import Compiler
from jaxmem.estimate.compiler import of_platform as compiler_of
from jaxmem.estimate.measured import Measured
from jaxmem.estimate.operands import may_pad
from jaxmem.estimate.roofline import Roofline
from jaxmem.fitting.collector import Collector
from jaxmem.fitting.compile_request import Begun, CompileRequest
from jaxmem.fitting.fitted import Planned
from jaxmem.fitting.regions import Region, StackRegion, UnrolledRegion
from jaxmem.fitting.step_plan import StepPlan
from jaxmem.parallel import partition as parallel
from jaxmem.policies import PipelineChoice, PipelineNote, Scans
from jaxmem.report.advice import where_to_decorate
from jaxmem.report.report import MemoryReport
from jaxmem.solve.pareto import cost_of_part
from jaxmem.solve.search import expected
from jaxmem.solve.stacks import Candidate
from jaxmem.solve.steps import StepCandidate, pareto_front, thinned_front
from jaxmem.trace import context
from jaxmem.trace.layer import nbytes

Cost = Literal["roofline", "flops", "measured"]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class StepProblem:
    """What of a step can be planned, and the Pareto front of its plans.

    Attributes:
      program: the step as traced, everything kept.
      regions: its decorated stacks, in order.
      candidates: of each region, for one of the stacks that it is.
      front: plans of the step, fastest first.
      whole: all that `front` was taken from, some of which are nearly alike.
      by_layer: of the plans that recompute layers whole or keep all of them, those that no other
        such one beats, of another kind than the rest; `whole` has some of them.
      others: about what all else in the step needs.
      fixed: of `others`, arguments and results.
      everything: bytes of the step with everything kept.
      devices: over how many devices its arrays are spread.
      partition: the mesh axis over which carries are stored split, "" for none.
      choice: how its pipelines run that leave it open; None if there are none.
      pipelines: what was noted of its pipelines.
      scans: what scans are that can be taken for something else than stacks.
      in_loop: whether its gradient is taken in a loop, as over microbatches.
      tells_kinds: whether predicted seconds tell which of two kinds of plans is faster: known of
        XLA for GPUs, where products need not pad what they read.
      variants: the same step with carries split over other axes, with its pipelines run in
        other ways, or with scans as parts of the code around them, by `StepCandidate.variant`, this
        one first; none if there is no other.
    """

    program: Program
    regions: tuple[Region, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    front: tuple[StepCandidate, ...]
    whole: tuple[StepCandidate, ...]
    by_layer: tuple[StepCandidate, ...]
    others: int
    fixed: int
    everything: int
    devices: int
    target: str
    partition: str = ""
    choice: PipelineChoice | None = None
    pipelines: tuple[PipelineNote, ...] = ()
    scans: Scans = "stacks"
    in_loop: bool = False
    tells_kinds: bool = False
    variants: "tuple[StepProblem, ...]" = ()

    @property
    def predicted(self) -> list[int]:
        """Bytes of each candidate on one device, before any compiler has spoken."""
        return [self.others + candidate.bytes for candidate in self.front]

    @property
    def plain_seconds(self) -> float:
        """Of a forward and a backward pass of all regions, nothing recomputed."""
        return sum(
            region.uses.times * region.passes[0] * region.plain_seconds for region in self.regions
        )

    @property
    def kinds(self) -> list[str]:
        """Of each candidate."""
        return [candidate.kind for candidate in self.front]

    def in_full(self) -> "StepProblem":
        """The same with all plans on the front, also those that others are predicted to beat."""
        found = {*self.whole, *self.by_layer}
        front = sorted(found, key=lambda one: (one.seconds, -one.bytes, one.kind, one.picks))
        return dataclasses.replace(self, front=tuple(front))

    def plan(self, candidate: int) -> StepPlan:
        from jaxmem._util.version import __version__

        regions = tuple(
            planned.region.plan(planned.candidate) for planned in self.planned(candidate)
        )
        versions = (("jaxmem", __version__), ("jax", jax.__version__))
        own = self.variant(candidate)
        choice = own.choice or PipelineChoice(0, "")
        return StepPlan(
            regions,
            self.target,
            versions,
            own.partition,
            choice.microbatches,
            choice.schedule,
            own.scans,
        )

    def planned(self, candidate: int) -> tuple[Planned, ...]:
        own, picks = self.variant(candidate), self.front[candidate].picks
        return tuple(
            Planned(region, candidates[pick])
            for region, candidates, pick in zip(own.regions, own.candidates, picks, strict=True)
        )

    def variant(self, candidate: int) -> "StepProblem":
        """The way to run the step that a candidate is of."""
        return self.variants[self.front[candidate].variant] if self.variants else self

    def report(self, ask: CompileRequest, candidate: int) -> MemoryReport:
        return self.begin(ask, candidate).result()

    def begin(self, ask: CompileRequest, candidate: int) -> Begun:
        """The step under a plan, its report on the way."""
        return ask.begin(self.plan(candidate))

    def prediction(self, candidate: int, seen: Mapping[int, int]) -> int:
        """Bytes predicted for a candidate, given what the others that were compiled came to."""
        others = {other: size for other, size in seen.items() if other != candidate}
        return expected(candidate, self.predicted, others, self.kinds)


class NothingToPlan(ValueError):
    """Nothing in a step is decorated, or nothing of it is differentiated."""


@dataclasses.dataclass(frozen=True)
class Others:
    """Other ways to run a step.

    Attributes:
      axes: of its mesh, over which carries would better be split.
      choices: how its pipelines can be run.
      scans: what its scans can be taken for.
    """

    axes: list[str]
    choices: list[PipelineChoice]
    scans: list[Scans]


# ---------------------------------------------------------------- API


def one_way(
    ask: CompileRequest,
    allow_offload: bool,
    cost: Cost,
    partition: str = "",
    choice: PipelineChoice | None = None,
    scans: Scans = "stacks",
) -> tuple[StepProblem, Others]:
    """A step's problem as it is run in one way, and in which others it could be.

    Args:
      partition: the mesh axis over which carries are split.
      choice: how pipelines run that leave it open.
      scans: what scans are taken for that can be something else than stacks.

    Raises:
      NothingToPlan: nothing in the step is decorated and differentiated.
    """
    leaves = jax.tree.leaves((ask.args, ask.kwargs))
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    devices = parallel.devices(shardings)
    collector = Collector(
        roofline_of(ask.accelerator, cost), allow_offload, devices, partition, choice, scans
    )
    with context.instead(collector):
        program = ask.program()
    collector.count(program.jaxpr)
    parts = _parts(program, shardings) if devices > 1 else None
    collector.on_one_device(parts)
    step = program.jaxpr if parts is None else parts.closed
    regions = tuple(collector.regions.values())
    stages = [region for region in regions if isinstance(region, StackRegion) and region.is_stage]
    for region in stages if collector.pipelines else ():
        noted = collector.pipelines[-1]
        # Microbatches of two sizes have a region each, and about the same time for a pass.
        share = 1 / max(sum(bool(one.uses.times) for one in stages), 1)
        # Noted in forward passes, of which a gradient takes three.
        region.passes = noted.seconds / 3 * share, noted.again * share
    for region in regions:
        if isinstance(region, UnrolledRegion) and region.uses.iterations:
            warn(
                f"{region.where} is one layer of a scan of {region.uses.iterations}: all of them "
                "get the same plan, and the scan is not cut.  Decorate the function with the scan, "
                "or scan the layer with jaxmem.scan, jaxmem.linen.scan or jaxmem.nnx.scan",
                NoStackWarning,
            )
    if not regions:
        raise NothingToPlan(_nothing_to_plan(program))
    stacked = sum(
        region.of_one_device(region.param_bytes * region.uses.times, devices) for region in regions
    )
    turn = collector.turn(step)
    fixed, gradients = _others(program, step, stacked + (turn.summed_bytes or 0))
    several = sum(region.uses.times for region in regions) > 1
    # The region that is reversed first has the loss next to what it keeps.
    last = turn.bytes * devices // regions[-1].of_one_device(devices, devices)
    turns = [*[0] * (len(regions) - 1), last]
    in_products = collector.roofline.compiler.fuses_operands
    if in_products and turn.bytes and isinstance(regions[-1], UnrolledRegion):
        regions[-1].waits = regions[-1].uses.times > 1  # then a copy of it may come behind it
    # Sums over microbatches are there from the turn before.
    in_loop = turn.summed_bytes is not None
    made_here = 0 if in_loop else gradients
    fastest = [
        region.candidates(several, min(made_here, region.param_bytes), turn_bytes)
        for region, turn_bytes in zip(regions, turns, strict=True)
    ]
    by_layer = [
        region.candidates_by_layer(several, turn_bytes)
        for region, turn_bytes in zip(regions, turns, strict=True)
    ]
    candidates = tuple(
        (*first, *(one for one in more if one not in first))
        for first, more in zip(fastest, by_layer, strict=True)
    )
    unmade = _unmade(regions, made_here, devices)
    options = [
        [_several(candidate, region, devices, later) for candidate in own]
        for region, own, later in zip(regions, candidates, unmade, strict=True)
    ]
    # Of regions that compute the same the copies are made one after the other.
    copies = sum(region.of_one_device(region.param_copies, devices) for region in regions)
    others = fixed + gradients + copies
    counted_in: dict[Hashable, int] = {
        key: region.counted_bytes(several) for key, region in collector.regions.items()
    }
    others += sum(max(size - counted_in.get(key, 0), 0) for key, size in turn.passing.items())
    others += turn.waiting_bytes
    others += sum(noted.held_bytes for noted in collector.pipelines)
    # A stage adds to its gradients in each tick, one layer's at a time, of which there are copies.
    others += sum(
        region.of_one_device(region.param_bytes // region.length, devices) for region in stages
    )
    counted = several and isinstance(regions[-1], UnrolledRegion)  # what the last one gives
    # Stacks of gradients are made when the backward pass comes to their loops.
    ahead = turn.bytes - counted * turn.given_bytes - made_here - turn.waiting_bytes
    whole = pareto_front(options, turn_bytes=ahead, places=[range(len(own)) for own in fastest])
    layered: tuple[StepCandidate, ...] = ()
    if any(by_layer):
        places = [
            [all_.index(one) for one in own or first]
            for all_, own, first in zip(candidates, by_layer, fastest, strict=True)
        ]
        # Of two that need the same at the peak the one that keeps less is the safer.
        found = pareto_front(options, turn_bytes=ahead, places=places, costs=cost_of_part)
        layered = tuple(dataclasses.replace(one, kind=BY_LAYER) for one in found)
        known = {one.picks: one for one in layered}
        whole = tuple(known.get(one.picks, one) for one in whole)
    kept = [[_several(region.everything(several), region, devices)] for region in regions]
    everything = others + pareto_front(kept, turn_bytes=ahead)[0].bytes
    front = thinned_front(whole, others)
    name = "local" if ask.accelerator is None else ask.accelerator.name
    problem = StepProblem(
        program, regions, candidates, front, whole, layered, others, fixed, everything, devices,
        name, partition, choice or next(iter(collector.choices), None), tuple(collector.pipelines),
        scans, in_loop, _tells_kinds(collector.roofline.compiler, program),
    )  # fmt: skip
    least = round(_WORTH_SPLITTING * min(problem.predicted))
    axes = [] if partition else collector.splitting(least)
    return problem, Others(axes, collector.choices[1:], [*collector.other_scans])


def roofline_of(target: "targets.Target | None", cost: Cost) -> Roofline:
    """The speeds of a target; of an attached device that no row is known of, those of an H100.

    By which traffic is too cheap next to products for most others, a CPU above all: there it does
    not count.
    """
    named = target or targets.by_device_kind(jax.devices()[0].device_kind)
    known = named or targets.target("h100-80g")
    compiler = compiler_of(known.platform)
    if named is None:
        compiler = dataclasses.replace(compiler, stack_traffic=0)
    speeds = known.matrix_peak, known.bandwidth
    if cost == "measured":
        return Measured(*speeds, compiler=compiler, link=known.link)
    return Roofline(*speeds, flops_only=cost == "flops", compiler=compiler, link=known.link)


# ---------------------------------------------------------------- implementation

# Carries are looked at split where that spares this part of what the least plan needs.
_WORTH_SPLITTING = 0.02
# The kind of plans that recompute layers whole, or keep all of them.
BY_LAYER = "by layer"


def _tells_kinds(compiler: Compiler, program: Program) -> bool:
    equations = _jax.all_equations(program.jaxpr.jaxpr)
    return compiler.calls_libraries and not any(map(may_pad, equations))


def _unmade(regions: Sequence[Region], gradients: int, devices: int) -> list[int]:
    """Of so many bytes of gradients, those that are made when each region has been reversed."""
    own = [
        region.of_one_device(region.param_bytes * region.uses.times, devices) for region in regions
    ]
    share = gradients / max(sum(own), 1)
    return [int(share * size) for size in itertools.accumulate(own[:-1], initial=0)]


def _several(
    candidate: Candidate, region: Region, devices: int, unmade_bytes: int = 0
) -> Candidate:
    """A candidate for all regions that share it, one after the other, on one device.

    Args:
      unmade_bytes: of what is counted as if it were there all the time, what is made later than the
        peak of this region.  Arrays that jax's own scans fill are made ahead for several of them.
    """
    uses = region.uses
    size = candidate.bytes + uses.others * candidate.kept_bytes if uses.live else 0
    if region.is_plain(candidate):
        unmade_bytes = 0
    return Candidate(
        bytes=region.of_one_device(size, devices) - unmade_bytes,
        kept_bytes=region.of_one_device(uses.live * candidate.kept_bytes, devices),
        seconds=uses.times * region.passes[1] * candidate.seconds,
    )


def _others(program: Program, step: ClosedJaxpr, gradients: int) -> tuple[int, int]:
    """Bytes of arguments and results that take no argument's place; of gradients, none of these.

    Args:
      step: as one device runs it.
      gradients: bytes on one device.
    """
    # On a CPU the host's memory is the device's.
    apart = (program.platform or jax.default_backend()) != "cpu"
    flags = [not (apart and argument.memory_kind is not None) for argument in program.arguments]
    given = list(zip(program.arguments, map(nbytes, step.in_avals), flags, strict=True))
    outs = [aval for aval in step.out_avals if not (apart and _jax.is_on_host(aval))]
    arguments = sum(size for _, size, here in given if here)
    donated = sum(size for argument, size, here in given if here and argument.donated)
    results = max(sum(map(nbytes, outs)) - donated, 0)
    gradients -= program.record.updated_bytes
    return arguments + results, max(gradients - results, 0)


def _parts(program: Program, shardings: Sequence[Any]) -> parallel.Partition | None:
    """The step as one device runs it; None where jax does not tell, of which a warning tells."""
    try:
        known = _known(program, _jax.mesh_of(shardings))
        return parallel.partition(program.jaxpr, known, program.platform)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0]
        warn(
            "how the partitioner splits the step is not known, since jax cannot lower it apart "
            f"from its compilation ({why}): plans are predicted as if every value were split over "
            "all devices, and what they send each other were free; what compilers say is exact",
            JaxmemWarning,
        )
        return None


def _known(program: Program, mesh: Any) -> Sequence[Any]:
    """The shardings of the program's arguments, of which some are static in the call."""

    def sharding(split: Any) -> Any:
        if split is None:
            return None
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in split)))

    return [sharding(argument.split) for argument in program.arguments]


def _nothing_to_plan(program: Program) -> str:
    if getattr(jax.config, "jax_disable_jit", False):
        return (
            "under jax_disable_jit scans are Python loops, in which nothing can be planned; switch "
            "it off around jaxmem.fit"
        )
    if program.record.regions:
        return (
            "the step has decorated regions, and differentiates none of them, so that nothing is "
            "kept for a backward pass; pass the train step or a value_and_grad, with jax.grad "
            "around what is decorated (a decorator around jax.grad comes too late)"
        )
    hint = where_to_decorate(program, "remat_auto")
    return f"nothing in the step is decorated, so there is nothing to plan; {hint}"
