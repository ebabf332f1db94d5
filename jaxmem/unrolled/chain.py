"""Unrolled code as the chain that solvers know: stages with options, and plans back again."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.estimate.arrays import in_memory
from jaxmem.estimate.operands import may_pad
from jaxmem.estimate.reversal import tape_bytes
from jaxmem.estimate.roofline import Roofline
from jaxmem.estimate.values import unnamed_places
from jaxmem.policies import Sqrt
from jaxmem.solve.chain import (
    ChainPlan,
    ChainTable,
    Kept,
    Recomputed,
    Stage,
    Steps,
    peak_bytes,
    solve_chain,
)
from jaxmem.solve.pareto import cost, cost_of_part, pareto_optimal
from jaxmem.solve.stages import extra_seconds, kept_in
from jaxmem.trace.layer import Layer, nbytes
from jaxmem.unrolled.code import Code
from jaxmem.unrolled.gradients import TERMS
from jaxmem.unrolled.plan import Piece, UnrolledPlan
from jaxmem.unrolled.segment import Segment, segment_of
from jaxmem.unrolled.whole import whole_layers

# How many ways to keep what several stages of short code need as one segment are looked at.
_LOOKS = 200
# So many operations are looked at together, of two stages or of all; of another number so many.
_TOGETHER = 450
_SEVERAL = 250

# What is kept of all equal stages together differs by this part of what all stages have in memory,
# or is not worth a look.
_RESOLVED = 500
# Parameters are cast in the order of the code if their casts are one part in so many of what a plan
# needs, or more: what is computed in front of a stage and in it is not done in one kernel then.
_MANY_CASTS = 8

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class HeldPlan(ChainPlan):
    """A plan of a chain, and what it holds when the forward pass is done.

    Attributes:
      kept_bytes: of `bytes`, so much.
    """

    kept_bytes: int = 0


class Chain:
    """Code cut into stages, each with its options, and several of them as one with options too.

    What stands at a cut is held or recomputed with all that leads to it; looked at together,
    two stages may drop it where it follows cheaply from what either keeps.

    Attributes:
      code, cuts: what was cut, and where.
      segments: of each stage, by its number and that behind it, and of several as one.
      found: plans, among them all that no other one known beats in bytes and seconds.

    Args:
      points: how many options of a stage are looked for between the corners of its convex
        hull, which are quickly found.
    """

    def __init__(
        self, code: Code, roofline: Roofline, offload: bool = False, points: int = 4
    ) -> None:
        self.code, self.cuts = code, code.cuts()
        self._compiler = roofline.compiler
        known: dict[Hashable, Segment] = {}
        self.segments: dict[tuple[int, int], Segment] = {}
        self._begins: dict[Segment, int] = {}
        stages: dict[tuple[int, int], Stage] = {}
        widths = self._widths()
        is_short = (0, len(self)) in widths
        keys = {span: code.equal(self.cuts[span[0]], self.cuts[span[1]]) for span in widths}
        equal = Counter(keys.values())
        stored = in_memory(code.closed.jaxpr, self._compiler).difference(code.given)
        apart = sum(map(code.bytes, stored)) / _RESOLVED
        calls = any(map(may_pad, code.closed.jaxpr.eqns))
        for first, after in widths:
            span = self.cuts[first], self.cuts[after]
            if (key := keys[first, after]) not in known:
                # On TPUs, of which less is known, in a hurry, and with loops, where it was never
                # worth its time, the menu has to do.  So it does for long code.
                in_a_hurry = roofline.compiler.fuses_operands or not points or code.has_loops(*span)
                several = after - first > 1 or len(self) == 1
                thorough = is_short and several and not in_a_hurry
                looks = _LOOKS if thorough else 0
                known[key] = segment_of(
                    code.layer(*span), roofline, offload, points, looks, apart / equal[key], calls
                )
                self._begins[known[key]] = span[0]
            segment = self.segments[first, after] = known[key]
            # Of what passes the stage by, the gradient is there too while it is reversed.
            given = code.live_bytes(self.cuts[after])
            passing = given - segment.stage.carry_bytes + self._tied_bytes(first, after)
            passing += self._added_bytes(*span)
            stages[first, after] = dataclasses.replace(
                segment.stage,
                carry_bytes=given,
                gradient_bytes=segment.stage.gradient_bytes + passing,
            )
        single = [stages.pop((k, k + 1)) for k in range(len(self))]
        self._single, self._merged = single, stages
        self._shared_bytes = code.shared_bytes()
        self._known_stored: dict[Kept, dict[int, Any]] = {}
        self._known_waiting: dict[int, int] = {}
        self._by_layer: dict[tuple[bool, bool, int], list[HeldPlan]] = {}
        table = solve_chain(single, slots=200, carried=self._carried, merged=stages)
        self.found = tuple(self._reestimated(table))

    def __len__(self) -> int:
        """How many stages there are."""
        return len(self.cuts) - 1

    @functools.cached_property
    def result_bytes(self) -> int:
        """What the code makes for others."""
        return sum(map(self.code.bytes, self._results))

    @functools.cached_property
    def _results(self) -> set[Any]:
        return set(filter(_jax.is_var, self.code.closed.jaxpr.outvars)) - self.code.given

    def segment(self, kept: Kept) -> Segment:
        """What is kept."""
        return self.segments[kept.stage, kept.after]

    def plans(
        self, several: bool = False, stacked: bool = False, turn_bytes: int = 0
    ) -> list[HeldPlan]:
        """Plans that no other one known beats in bytes and seconds, fastest first.

        Args:
          several: whether this is one of several pieces of code, one after the other.  Of these all
            of one can be recomputed, too, from what the one before it gives; and of two plans
            the one that holds less is not beaten.
          stacked: whether these are the layers of a scan.
          turn_bytes: live next to what is kept, where the backward pass begins: of two plans the
            one that keeps less is not beaten.
        """
        ways = list(self.found)
        if several:
            ways += [self._again(plan) for plan in self.found]
        plans = [self._held(plan, several, stacked) for plan in ways]
        plans += self.plans_by_layer(several, stacked, turn_bytes)
        return pareto_optimal(plans, cost_of_part if several or turn_bytes else cost)

    def plans_by_layer(
        self, several: bool = False, stacked: bool = False, turn_bytes: int = 0
    ) -> list[HeldPlan]:
        """Of those that recompute layers whole or keep all of them, what no other such one beats.

        `plans` has those of these that no plan beats.
        """
        key = several, stacked, turn_bytes
        if key not in self._by_layer:

            def needed(plan: HeldPlan) -> int:
                return max(plan.bytes, plan.kept_bytes + turn_bytes)

            chain = self.cuts, self.code.runs, self._single, self._merged
            held = functools.partial(self.held, several=several, stacked=stacked)
            found = whole_layers(*chain, held, needed)
            # Of two that need the same at the peak the one that keeps less is the safer.
            self._by_layer[key] = pareto_optimal(found, cost_of_part)
        return list(self._by_layer[key])

    def held(self, steps: Steps, several: bool = False, stacked: bool = False) -> HeldPlan:
        """The plan of these steps, with what it needs and holds; see `plans`."""
        seconds = extra_seconds(steps, self._single, self._merged)
        return self._held(ChainPlan(self._needed(steps), seconds, steps), several, stacked)

    def plan(self, steps: Sequence[Kept | Recomputed], waits: bool = True) -> UnrolledPlan:
        """A plan of the chain as one of the code.

        Args:
          waits: see `UnrolledPlan`.
        """
        pieces = _joined([self._piece(step) for step in steps])
        casts = sum(map(self.code.gradient_bytes, self.code.casts.only))
        orders_casts = casts * _MANY_CASTS >= self._needed(tuple(steps))
        return UnrolledPlan(len(self.code), pieces, waits, orders_casts)

    # ------------------------------------------------------------ implementation

    @functools.cached_property
    def _tied(self) -> list[tuple[int, int, int]]:
        """Of parameters that several stages read: first and last of these, and gradient bytes."""
        readers: dict[Any, list[int]] = {}
        inputs = {*self.code.closed.jaxpr.invars}
        for k, (at, end) in enumerate(itertools.pairwise(self.cuts)):
            for var in inputs.intersection(self.code.reads(at, end)):
                readers.setdefault(var, []).append(k)
        several = ((var, ks) for var, ks in readers.items() if len(ks) > 1)
        reached = ((var, ks) for var, ks in several if _jax.has_tangent(var.aval))
        return [(ks[0], ks[-1], self._between(var, len(ks))) for var, ks in reached]

    def _between(self, var: Any, readers: int) -> int:
        """Bytes of the gradient of a parameter that is still to be added to: a sum is not cast."""
        return self.code.gradient_bytes(var) if readers == 2 else self.code.bytes(var)

    def _tied_bytes(self, first: int, after: int) -> int:
        """Of the gradients of parameters that stages behind these read, and those in front too."""
        return sum(size for low, high, size in self._tied if low < after <= high)

    def _added_bytes(self, first: int, last: int) -> int:
        """Of gradients of matrices that operations first..last-1 read, terms to be added to others.

        One is counted with its sum as it is added.
        """
        times = self.code.times_read(first, last).items()
        return sum(
            max(min(count, TERMS) - 2, 0) * self.code.gradient_bytes(var) for var, count in times
        )

    def _widths(self) -> list[tuple[int, int]]:
        """First and after of each stage; of two, four, eight ... as one, and of all.

        If they have not too many operations: what is looked at together takes a time that grows
        faster than its length.
        """
        count, cuts = len(self), self.cuts
        found = {(k, k + 1) for k in range(count)}
        spans, width = {(0, count)}, 2
        while width < count:
            spans.update((k, min(k + width, count)) for k in range(0, count, width))
            width *= 2
        for first, after in spans:
            few = after - first == 2 or after - first == count
            if cuts[after] - cuts[first] <= (_TOGETHER if few else _SEVERAL):
                found.add((first, after))
        return sorted(found, key=lambda one: (one[1] - one[0], one))

    def _piece(self, step: Kept | Recomputed) -> Piece:
        if isinstance(step, Recomputed):
            first, last = self.cuts[step.first], self.cuts[step.last]
            inner = tuple(map(self._piece, step.inner))
            # Next to others each is reversed by itself, as it is estimated: else the compiler of
            # GPUs computes what a matrix's gradient reads with what is needed later, and holds it.
            if all(piece.is_kept_whole for piece in inner):
                inner = (Piece(first, last),)
            return Piece(first, last, inner=inner)
        first, last = self.cuts[step.stage], self.cuts[step.after]
        segment = self.segment(step)
        keep = segment.keeps[step.option]
        if keep is None:
            return Piece(first, last)
        kept = _operations(segment.layer, keep.kept)
        sent = _operations(segment.layer, keep.offloaded)
        # Names are given by place in the code, and a segment met before stood elsewhere.
        shift = first - self._begins[segment]
        return Piece(first, last, tuple(k + shift for k in kept), tuple(k + shift for k in sent))

    def _again(self, plan: ChainPlan) -> ChainPlan:
        """All of it recomputed, from what it is given, and then under this plan."""
        steps = (Recomputed(0, len(self), plan.steps),)
        seconds = extra_seconds(steps, self._single, self._merged)
        return ChainPlan(self._needed(steps), seconds, steps)

    def _held(self, plan: ChainPlan, several: bool, stacked: bool) -> HeldPlan:
        """A plan with what it holds.

        Args:
          several: whether the results are the inputs of another such piece of code.
          stacked: whether these are the layers of a scan, which stacks what they hold.
        """
        given, results = self.code.given, self._results
        held: set[Any] = set()
        # Of one that was before; what reads the results of the last one counts them.
        kept = given_bytes = self.result_bytes if several else 0
        for step in plan.steps:
            if isinstance(step, Recomputed):
                held |= set(self.code.reads(self.cuts[step.first], self.cuts[step.last]))
                continue
            segment = self.segment(step)
            if stacked and segment.keeps[step.option] is None:
                kept += tape_bytes(segment.layer, segment.compiler)
                continue
            stored, values = self._stored(step), segment.layer.values
            held |= set(stored.values())
            inner = (place for place in segment.places[step.option] if place not in stored)
            kept += sum(nbytes(values[place].aval) for place in inner)
        kept += sum(map(self.code.bytes, held - given - results))
        shared_bytes, gradient_bytes = self._shared_bytes
        kept += shared_bytes
        given_bytes += shared_bytes + gradient_bytes
        return HeldPlan(plan.bytes + given_bytes, plan.seconds, plan.steps, kept)

    def _reestimated(self, table: ChainTable) -> Iterator[ChainPlan]:
        """The plans of a table, with what each needs as it will be run."""
        plans = [plan for size, _ in table.frontier() if (plan := table.plan(size)) is not None]
        if whole := self._merged.get((0, len(self))):
            # In the table plans in several parts, which only now turn out to need more, beat these.
            options = enumerate(whole.options)
            plans += [ChainPlan(0, one.seconds, (Kept(0, k, len(self)),)) for k, one in options]
        for plan in plans:
            yield dataclasses.replace(plan, bytes=max(plan.bytes, self._needed(plan.steps)))

    def _needed(self, steps: Steps) -> int:
        """Bytes live at the peak, with what the dynamic program does not see."""
        more: dict[Kept, int] = {}
        self._add_more(steps, frozenset(), more)
        self._add_waiting(steps, more)
        needed = peak_bytes(steps, self._single, self._carried, self._merged, more)
        if all(isinstance(step, Kept) and step.option == 0 for step in steps):
            needed = max(needed, self._needed_in_one_piece())
        return needed

    def _needed_in_one_piece(self) -> int:
        """At least so much if all is kept: no barrier parts the backward pass.

        Neither are parts of a gradient cut out of the whole, nor are those that a matrix's is a sum
        of added up before the last is there.
        """
        stage = self._merged.get((0, len(self))) if len(self) > 1 else self._single[0]
        whole = stage.options[0].tape_bytes + stage.options[0].work_bytes if stage else 0
        times = self.code.times_read(0, len(self.code)).items()
        terms = [count * self.code.gradient_bytes(var) for var, count in times]
        return max(whole + stage.gradient_bytes if stage else 0, max(terms, default=0))

    def _add_more(self, steps: Steps, held: frozenset[Any], more: dict[Kept, int]) -> None:
        """While a stage is reversed, those of its inputs stay that others before it hold."""
        for step in steps:
            if isinstance(step, Recomputed):
                self._add_more(step.inner, held, more)
                held |= set(self.code.reads(self.cuts[step.first], self.cuts[step.last]))
                continue
            segment, stored = self.segment(step), self._stored(step)
            live_to_end = frozenset(place for place, var in stored.items() if var in held)
            if live_to_end:
                more[step] = segment.extra_work_bytes(step.option, live_to_end)
            held |= set(stored.values())

    def _add_waiting(self, steps: Steps, more: dict[Kept, int]) -> None:
        """While others are reversed, gradients wait of what comes first, if that is kept whole.

        Those of its matrices are made in one go, but for TPUs (`jaxmem.unrolled.run`).
        """
        kept: list[Kept] = []
        for step in reversed(steps):
            if not isinstance(step, Kept) or step.option:
                break
            kept.append(step)
        if not kept or len(kept) == len(steps) or self._compiler.fuses_operands:
            return
        first = kept[-1].stage
        if not self.code.has_layer(self.cuts[first], self.cuts[-1]):
            waiting = self._waiting_bytes(first)
            for other in kept_in(steps[: -len(kept)]):
                more[other] = more.get(other, 0) + waiting

    def _waiting_bytes(self, first: int) -> int:
        """Of matrices that are read from a stage on, and not before, the gradients that wait.

        XLA updates parameters in their order: no other waits for those in front of the first one
        whose gradient comes later.
        """
        if first not in self._known_waiting:
            inputs = [var for var in self.code.closed.jaxpr.invars if _jax.has_tangent(var.aval)]
            before = set(self.code.reads(0, self.cuts[first]))
            read = set(self.code.reads(self.cuts[first], self.cuts[-1])) - before
            behind = itertools.dropwhile(lambda var: var not in before, inputs)
            waiting = [var for var in behind if var in read and len(var.aval.shape) > 1]
            self._known_waiting[first] = sum(map(self.code.gradient_bytes, waiting))
        return self._known_waiting[first]

    def _stored(self, kept: Kept) -> dict[int, Any]:
        """Of the values that are kept, by place, those that others read or made."""
        if kept not in self._known_stored:
            self._known_stored[kept] = self._among_live(kept)
        return self._known_stored[kept]

    def _among_live(self, kept: Kept) -> dict[int, Any]:
        first, last = self.cuts[kept.stage], self.cuts[kept.after]
        segment = self.segment(kept)
        layer, unnamed = segment.layer, unnamed_places(segment.layer)
        reads, _ = self.code.ordered_reads(first, last)
        gives = self.code.gives(first, last)
        seen: dict[int, Any] = dict(enumerate(reads))
        for atom, var in zip(layer.results, gives, strict=True):
            if _jax.is_var(atom):
                seen[unnamed[layer.places[atom]]] = var
        places = segment.places[kept.option]
        return {place: seen[unnamed[place]] for place in places if unnamed[place] in seen}

    def _carried(self, i: int, j: int) -> int:
        """What the input of stage j adds where that of stage i is held."""
        held = set(self.code.live[self.cuts[i]])
        return sum(self.code.bytes(v) for v in self.code.live[self.cuts[j]] if v not in held)


# ---------------------------------------------------------------- API

# What a policy that knows no target goes by: an H100.
_ANY = Roofline(matrix_peak=989e12, bandwidth=3.35e12)
# Fewer segments than this are no chain to cut.
_FEWEST = 4


def by_sqrt(closed: ClosedJaxpr, policy: Sqrt) -> tuple[Code, UnrolledPlan] | None:
    """Code with the plan of fewest bytes that computes nothing more than `levels` times again.

    Where there is no scan this is what cutting into segments comes to, sizes looked at.
    None if it is too short for that: a layer on its own, say.
    """
    code = Code(closed)
    if len(code.cuts()) - 1 < _FEWEST:
        return None
    key = code.digest, policy.levels
    if key not in _PLANNED:
        while len(_PLANNED) >= _MOST_PLANNED:
            _PLANNED.pop(next(iter(_PLANNED)), None)
        _PLANNED[key] = _sqrt_plan(code, policy.levels)
    plan = _PLANNED[key]
    return None if plan is None else (code, plan)


# ---------------------------------------------------------------- implementation


# One step traces a function several times, and planning it takes far longer than tracing it does.
# Known by what the code is, without the code: that may hold arrays.
_PLANNED: dict[tuple[str, int], UnrolledPlan | None] = {}
_MOST_PLANNED = 64


def _sqrt_plan(code: Code, levels: int) -> UnrolledPlan | None:
    chain = Chain(code, _ANY, points=0)
    forward = sum(chain.segments[k, k + 1].stage.seconds for k in range(len(chain)))
    within = [plan for plan in chain.plans() if plan.seconds <= levels * forward]
    return chain.plan(within[-1].steps) if within else None


def _operations(layer: Layer, places: Sequence[int]) -> list[int]:
    """The operations of the code whose results these values are; inputs are kept anyway."""
    makers = (layer.made_by(layer.values[place]) for place in places)
    found = {_jax.place_named_by(eqn) for eqn in makers if eqn is not None}
    return sorted(place for place in found if place is not None)


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Neighbours that keep everything as one piece."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.is_kept_whole and found[-1].is_kept_whole:
            found[-1] = Piece(found[-1].first, piece.last)
        else:
            found.append(piece)
    return tuple(found)
