"""Unrolled code: a traced function as a chain of segments, cut where little is live.

A Python loop over layers, a U-net, towers that meet again: no scan, only operations in an
order.  At each place between two operations some values are live, made before and read
after.  Where these are few bytes (bottlenecks, where a single value is), the chain is cut.
What passes by, such as the skip connections of a U-net, is live at all the cuts that it
crosses, and counts once.  Where equal layers follow each other (`runs`) the cuts are between
these, and a segment is taken apart once for all that are equal.
"""

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.estimate.counting import kind_of
from jaxmem.estimate.counting.flops import matmul_flops
from jaxmem.estimate.normalised import Normalised
from jaxmem.layers.lookups import reversed_late
from jaxmem.layers.pooling import reversed_by_places
from jaxmem.parallel.messages import Spec
from jaxmem.parallel.partition import Partition
from jaxmem.trace.context import platform
from jaxmem.trace.layer import Body, Layer, NoReverseMode, Wrt, cheap_values, nbytes
from jaxmem.unrolled.casts import Casts
from jaxmem.unrolled.gradients import TERMS, InParts, of_a_kind_together, with_gradients_together
from jaxmem.unrolled.runs import Run, find_runs

# ---------------------------------------------------------------- API


class Code:
    """A traced function, its operations in an order that is good to cut.

    Attributes:
      closed: the jaxpr, jits looked into; what follows from parameters alone is computed
        right in front of what first reads it.
      live: for each place between operations, from before the first to after the last, the
        values that are made before and read after it.
      casts: of parameters.
      runs: equal layers, one after the other.
      given: what is there for each segment that reads it: inputs, constants, and what the layers
        of a run share (a mask, the result of an encoder), which is held till all of them are
        reversed.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        inlined = _jax.inlined(closed)
        jaxpr = inlined.jaxpr
        self._cheap = cheap_values(jaxpr, [*jaxpr.constvars, *jaxpr.invars])
        self.closed = _jax.reordered(inlined, _late(inlined, self._cheap))
        self.eqns: Sequence[Any] = self.closed.jaxpr.eqns
        self.live = self._live()
        self._inputs = frozenset([*self.closed.jaxpr.invars, *self.closed.jaxpr.constvars])
        self.casts = Casts(self.eqns, self.closed.jaxpr.outvars, self._inputs)
        self._makers = {var: at for at, eqn in enumerate(self.eqns) for var in eqn.outvars}
        reads = [atom for eqn in self.eqns for atom in eqn.invars]
        self._readers = Counter(filter(_jax.is_var, [*reads, *self.closed.jaxpr.outvars]))
        self._known_reads: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._known_bodies: dict[Hashable, tuple[Body, int]] = {}
        self.known_layers: dict[Hashable, tuple[Any, Layer]] = {}
        self._parts: Partition | None = None
        self._specs: Mapping[Any, Spec | None] = {}

    def on_one_device(self, parts: Partition, specs: Mapping[Any, Spec | None]) -> "Code":
        """The same code, whose bytes and layers are those that one device of a mesh has.

        Args:
          specs: how its values are split.
        """
        other = copy.copy(self)  # plans know operations by their place in it
        for name in ("runs", "given"):
            other.__dict__.pop(name, None)
        other._parts, other._specs = parts, specs
        return other

    def __len__(self) -> int:
        return len(self.eqns)

    @functools.cached_property
    def _kinds(self) -> list[str]:
        return [_jax.operation_digest(eqn) for eqn in self.eqns]

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        count = range(len(self) + 1)
        sizes = [sum(self.bytes(var) for var in self.live[at]) for at in count]
        work = itertools.accumulate(
            map(matmul_flops, self.eqns), lambda before, own: own or before, initial=0
        )
        found = find_runs(self._kinds, sizes, self._equal_in_run, work=list(work))
        return tuple(filter(self._is_of_layers, found))

    @functools.cached_property
    def _opened(self) -> tuple[ClosedJaxpr, dict[int, dict[Any, Any]]]:
        """The code with inputs for the numbers that are written into layers of runs, each its own.

        As the rate at which a layer is dropped, that grows with its depth: without them layers are
        traced once.  And the numbers, by operation and name.
        """
        places: dict[int, list[int]] = {}
        for run in self.runs:
            for offset in range(run.size):
                several = [self.eqns[at + offset] for at in run.places[:-1]]
                for operand in _jax.differing_literals(several):
                    for at in run.places[:-1]:
                        places.setdefault(at + offset, []).append(operand)
        return _jax.with_literals_as_inputs(self.closed, places)

    @functools.cached_property
    def given(self) -> frozenset[Any]:
        return self._inputs.union(*map(self._shared, self.runs))

    @functools.cached_property
    def digest(self) -> str:
        """What tells this code from other: types and operations."""
        return _jax.digest(self.closed)

    @property
    def has_reverse_mode(self) -> bool:
        """Whether jax can transpose all of it."""
        try:
            return self.layer(0, len(self)).has_reverse_mode
        except NoReverseMode:
            return False

    @property
    def shared(self) -> list[Any]:
        """What is given and made here: what layers of runs share."""
        return [var for var in self.given if var in self._makers]

    def shared_bytes(self) -> tuple[int, int]:
        """Of what layers of runs share: its own, and those of its gradients."""
        reached = {var for var in self._inputs if _jax.has_tangent(var.aval)}
        for eqn in self.eqns if self.shared else ():
            if any(_jax.is_var(atom) and atom in reached for atom in eqn.invars):
                reached.update(var for var in eqn.outvars if _jax.has_tangent(var.aval))
        sizes = [(self.bytes(var), var in reached) for var in self.shared]
        return sum(size for size, _ in sizes), sum(size for size, with_one in sizes if with_one)

    def bytes(self, var: Any) -> int:
        """Bytes of a value."""
        if self._parts is None:
            return nbytes(var.aval)
        return self._parts.bytes(var, self._specs.get(var))

    def live_bytes(self, at: int) -> int:
        """Bytes live at a place, of what is not given."""
        return sum(self.bytes(var) for var in self.live[at] if var not in self.given)

    def equal(self, first: int, last: int, exact: bool = False) -> Hashable:
        """What is equal for operations first..last-1 where they are, and what they work on.

        Args:
          exact: whether all that is written into the code, or held by it, has to be equal as
            well, so that one can run in the place of the other.
        """
        return self._equal(first, last, self.given, exact)

    def cuts(self, most: int = 48) -> list[int]:
        """Places to cut at, among them 0 and the end; at most so many segments, or layers of runs.

        Layers are cut inside, each in the same places, where there are few.
        """
        count = len(self)
        sizes = [self.live_bytes(at) for at in range(count + 1)]
        made = [sum(map(self.bytes, eqn.outvars)) for eqn in self.eqns]
        total = [0]
        for size in made:
            total.append(total[-1] + size)
        window = total[-1] / 24
        kernels = any(kind_of(eqn) == "kernel" for eqn in self.eqns)
        halves = Normalised(self.eqns).inside
        good, low, high = [], 0, 0
        for at in range(1, count):
            while total[at] - total[low] > window:
                low += 1
            while high < count and total[high] - total[at] <= window:
                high += 1
            near = min(sizes[max(low, 1) : min(high, count - 1) + 1])
            # Behind an operation that is fused with what it reads, not in front of it.
            fused = kind_of(self.eqns[at]) in ("fused", "view") and sizes[at + 1] <= sizes[at]
            if at in halves:
                continue
            if sizes[at] <= 1.05 * near and not (fused and kernels) and not self._parts_cast(at):
                good.append(at)
        good = _spread(good, total, sizes, total[-1] / (4 * most))
        found = {run.after for run in self.runs}
        for run in self.runs:  # several layers of a long one are a segment
            found.update(run.places[: -1 : -(-run.count // _LONG)])
        others = [at for at in good if not any(run.first <= at <= run.after for run in self.runs)]
        if len(others) > most - 1:
            others = [others[round(k * (len(others) - 1) / (most - 2))] for k in range(most - 1)]
        found.update([0, *others, count])
        for run in sorted(self.runs, key=lambda run: run.count):
            inner = [at for at in good if run.first < at < run.first + run.size]
            within = {
                at + shift for at in inner for shift in range(0, run.size * run.count, run.size)
            }
            if len(found) + len(within) <= most + 1:
                found |= within
        return sorted(found)

    def reads(self, first: int, last: int) -> list[Any]:
        """What operations first..last-1 read and do not make."""
        if (first, last) in self._known_reads:
            return list(self._known_reads[first, last])
        made: set[Any] = set()
        found: dict[Any, None] = {}
        for eqn in self.eqns[first:last]:
            for atom in eqn.invars:
                if _jax.is_var(atom) and atom not in made:
                    found[atom] = None
            made.update(eqn.outvars)
        self._known_reads[first, last] = tuple(found)
        return list(found)

    def gradient_bytes(self, var: Any) -> int:
        """Of an input's gradient: of a matrix that is only cast, in what it is cast to."""
        own: int = var.aval.dtype.itemsize
        return self.bytes(var) * self.casts.only.get(var, own) // own

    def gives(self, first: int, last: int) -> list[Any]:
        """What operations first..last-1 make and others, or the caller, read."""
        return [var for var in self.live[last] if first <= self._makers[var] < last]

    def has_loops(self, first: int, last: int) -> bool:
        """Whether scans through which gradients go are among operations first..last-1."""
        scans = filter(_jax.is_scan, self.eqns[first:last])
        return any(_jax.has_tangent(var.aval) for eqn in scans for var in eqn.outvars)

    def has_layer(self, first: int, last: int) -> bool:
        """Whether a whole layer of a run is among operations first..last-1."""
        return any(
            first <= begin and end <= last
            for run in self.runs
            for begin, end in itertools.pairwise(run.places)
        )

    @functools.cached_property
    def summed(self) -> frozenset[Any]:
        """The matrices given whose gradients are sums of more than `TERMS`, each of all of it.

        Of slices of a stack each has its part, and no room is taken up by what is zero.
        """
        own = {var for var in self._inputs if len(var.aval.shape) > 1}
        own = {var for var in own if self._readers[var] > TERMS}
        sliced = (eqn.invars for eqn in self.eqns if eqn.primitive.name in _SLICES)
        own.difference_update(filter(_jax.is_var, itertools.chain.from_iterable(sliced)))
        return frozenset(filter(lambda var: _jax.has_tangent(var.aval), own))

    def times_read(self, first: int, last: int) -> dict[Any, int]:
        """By how many of operations first..last-1 each of the `summed` is read that any reads."""
        reads = (set(filter(_jax.is_var, eqn.invars)) for eqn in self.eqns[first:last])
        return Counter(var for read in reads for var in read & self.summed) if self.summed else {}

    def run(
        self,
        first: int,
        last: int,
        values: Sequence[Any],
        together: bool = False,
        sums: bool = False,
    ) -> list[Any]:
        """Evaluate a segment from what it `reads` to what it `gives`.

        Args:
          together: whether the gradients of matrices that it casts are made in one go with those of
            what others made for it.
          sums: whether what gradients are sums of is added up as it is made.
        """
        given = dict(zip(self.reads(first, last), values, strict=True))
        if together:
            given |= self._with_casts(first, last, given)
        in_parts = InParts(self._readers, self.summed) if sums else None
        return self._run(self.closed, first, last, given, in_parts)

    def traced(self, first: int, last: int, reads: Sequence[Any]) -> ClosedJaxpr:
        """A segment as a jaxpr, from what it `reads` in this order to what it `gives`.

        Args:
          reads: with any of its `numbers`, for which there are inputs then.
        """
        several = set(reads).intersection(self.numbers(first, last))
        closed = self._opened[0] if several else self.closed

        def run(*flat: Any) -> list[Any]:
            given = dict(zip(reads, flat, strict=True))
            return self._run(closed, first, last, given, InParts(self._readers))

        return _jax.trace(run, [var.aval for var in reads])

    def ordered_reads(self, first: int, last: int) -> tuple[list[Any], int]:
        """What a segment reads, what is given first, and how much of it is."""
        reads = sorted(self.reads(first, last), key=lambda var: var not in self.given)
        return reads, sum(var in self.given for var in reads)

    def body(self, first: int, last: int) -> tuple[Body, int]:
        """A segment as the layer of a stack of one, given all that it `reads`, and its start.

        And given its `numbers`.  One for all that are equal: with the place in the code of its own
        first operation.
        """
        key = self.equal(first, last, exact=True)
        if key not in self._known_bodies:
            reads, numbers = self.reads(first, last), self.numbers(first, last)
            traced = self.traced(first, last, [*reads, *numbers])
            self._known_bodies[key] = Body(traced, len(reads) + len(numbers), 0), first
        return self._known_bodies[key]

    def numbers(self, first: int, last: int) -> dict[Any, Any]:
        """What a `body` takes that is written into the code and differs from layer to layer."""
        _, known = self._opened
        return dict(pair for at in range(first, last) if at in known for pair in known[at].items())

    def layer(self, first: int, last: int) -> Layer:
        """A segment as a layer: parameters and what else is given first, then what is live.

        Of code on one device of a mesh it is for looking at.
        """
        reads, num_consts = self.ordered_reads(first, last)
        traced = self.traced(first, last, reads)
        constants = self.closed.jaxpr.constvars
        wrt = Wrt(
            tuple(_jax.has_tangent(var.aval) and var not in constants for var in reads),
            tuple(_jax.has_tangent(aval) for aval in traced.out_avals),
        )
        layer = Layer(Body(traced, num_consts, len(reads) - num_consts), wrt)
        if self._parts is None:
            return layer
        operands, results = (
            [self._specs.get(var) for var in several]
            for several in (reads, self.gives(first, last))
        )
        return self._parts.layer(layer, operands, results)

    # ------------------------------------------------------------ implementation

    def _parts_cast(self, at: int) -> bool:
        """Whether a cut would part what follows from inputs alone, as a cast does, from its reader.

        Which does not itself follow from inputs alone.
        """
        made, reader = self.eqns[at - 1].outvars, self.eqns[at]
        if self._cheap.issuperset(reader.outvars) or not self._cheap.issuperset(made):
            return False
        return not set(made).isdisjoint(filter(_jax.is_var, reader.invars))

    def _with_casts(self, first: int, last: int, given: Mapping[Any, Any]) -> dict[Any, Any]:
        """Of a segment, what others made for it and its casts of matrices."""
        made = [var for var in given if var in self._makers and _jax.has_tangent(var.aval)]
        casts = [eqn.outvars[0] for eqn in self.eqns[first:last] if eqn in self.casts]
        before = _jax.needed(self.closed, casts, keep_effects=False, given=[*given])
        found = _jax.evaluate(
            self.closed,
            [None] * len(self.closed.jaxpr.invars),
            only=frozenset(before),
            given=given,
            outs=casts,
            each=_named,
        )
        fenced = of_a_kind_together([given[var] for var in made], (), found)
        return dict(zip([*made, *casts], fenced, strict=True))

    def _run(
        self,
        closed: ClosedJaxpr,
        first: int,
        last: int,
        given: Mapping[Any, Any],
        in_parts: InParts | None,
    ) -> list[Any]:
        # What is given is there, be it made in the segment.
        places = (at for at in range(first, last) if not given.keys() & self.eqns[at].outvars)
        return _jax.evaluate(
            closed,
            [None] * len(closed.jaxpr.invars),
            special=functools.partial(self._reversed_otherwise, in_parts),
            only=frozenset(places),
            given=given,
            outs=self.gives(first, last),
            each=self._with_own_gradient,
        )

    def _reversed_otherwise(
        self, in_parts: InParts | None, eqn: Any, operands: list[Any]
    ) -> list[Any] | None:
        """What an operation makes, if it is reversed with less memory than by jax's own rule."""
        if in_parts is not None:
            operands[:] = in_parts(eqn, operands)
        if (found := reversed_by_places(eqn, operands)) is not None:
            return found
        is_late = platform() != "tpu" and self._has_own_gradient(eqn.invars)
        return reversed_late(eqn, operands) if is_late else None

    def _with_own_gradient(self, place: int, outs: Sequence[Any]) -> list[Any]:
        """What an operation makes, named.

        A matrix that is cast has its gradient made before that is cast back, but for TPUs, whose
        products give what is cast already.
        """
        outs = _named(place, outs)
        if platform() != "tpu" and self.eqns[place] in self.casts:
            return with_gradients_together(outs)
        return outs

    def _has_own_gradient(self, atoms: Sequence[Any]) -> bool:
        """Whether what an operation reads first gets its gradient from it, by itself.

        Where others read it too, the compiler adds to the gradient from there instead of zeros; but
        not to a parameter's, which stands behind a barrier (`run._together`).
        """
        first = [atom for atom in atoms[:1] if _jax.is_var(atom)]
        return all(self._readers[var] == 1 or var in self._inputs for var in first)

    def _equal_in_run(self, first: int, last: int, start: int) -> Hashable:
        """The same in a run that begins at `start`, and of which it is not known what is shared.

        Of what was made before the run, the layers behind the first one read it, too.
        """
        passing = (var for var in self.live[last] if self._makers.get(var, start) < start)
        return self._equal(first, last, self._inputs.union(passing), exact=False)

    def _equal(self, first: int, last: int, given: frozenset[Any], exact: bool) -> Hashable:
        numbers: dict[Any, int] = {}
        rows: list[Hashable] = []
        eqns = self._opened[0].jaxpr.eqns if exact else self.eqns
        for eqn in eqns[first:last]:
            ins = []
            for atom in eqn.invars:
                if not _jax.is_var(atom):
                    ins.append(None)
                    continue
                if atom not in numbers:
                    numbers[atom] = len(numbers)
                    rows.append(("given" if atom in given else "read", numbers[atom]))
                ins.append(numbers[atom])
            for var in eqn.outvars:
                numbers[var] = len(numbers)
            rows.append(("done", *ins, *(numbers[var] for var in eqn.outvars)))
            if exact:
                rows.append(_jax.exactly(eqn))
        gives = tuple(numbers[var] for var in self.gives(first, last))
        return tuple(self._kinds[first:last]), tuple(rows), gives

    def _is_of_layers(self, run: Run) -> bool:
        """Whether each works on what the one before it made, and is more than elementwise."""
        first, second, after = run.places[:3]
        works = any(kind_of(eqn) == "kernel" for eqn in self.eqns[first:second])
        return works and any(first <= self._makers.get(v, -1) for v in self.reads(second, after))

    def _shared(self, run: Run) -> list[Any]:
        """What was made before a run, and several of its layers read."""
        readers = Counter(
            var
            for first, last in itertools.pairwise(run.places)
            for var in self.reads(first, last)
            if self._makers.get(var, run.first) < run.first
        )
        return [var for var, count in readers.items() if count > 1]

    def _live(self) -> list[list[Any]]:
        jaxpr = self.closed.jaxpr
        last_read: dict[Any, int] = {}
        for at, eqn in enumerate(self.eqns):
            last_read.update((a, at) for a in eqn.invars if _jax.is_var(a))
        last_read.update((a, len(self.eqns)) for a in jaxpr.outvars if _jax.is_var(a))
        live: list[list[Any]] = [[]]
        for at, eqn in enumerate(self.eqns):
            here = [var for var in live[-1] if last_read[var] > at]
            here += [var for var in eqn.outvars if last_read.get(var, -1) > at]
            live.append(here)
        return live


# ---------------------------------------------------------------- implementation

# A run is cut into no more segments than this.
_LONG = 64
# What reads a part of what it is given.
_SLICES = ("slice", "dynamic_slice", "split")


def _named(place: int, outs: Sequence[Any]) -> list[Any]:
    return [_jax.named(out, _jax.place_name(place)) if _is_array(out) else out for out in outs]


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.dtype != jax.dtypes.float0


def _late(closed: ClosedJaxpr, cheap: Collection[Any]) -> list[int]:
    """The order of the equations with those that read only parameters as late as can be.

    Args:
      cheap: what follows cheaply from inputs alone.
    """
    jaxpr = closed.jaxpr
    makers = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    order: list[int] = []
    placed: set[int] = set()

    def place(at: int) -> None:
        if at in placed:
            return
        placed.add(at)
        for atom in jaxpr.eqns[at].invars:
            if _jax.is_var(atom) and atom in makers:
                place(makers[atom])
        order.append(at)

    for at, eqn in enumerate(jaxpr.eqns):
        if eqn.effects or not all(var in cheap for var in eqn.outvars):
            place(at)
    for at in range(len(jaxpr.eqns)):
        place(at)
    return order


def _spread(
    places: list[int], total: Sequence[int], sizes: Sequence[int], least: float
) -> list[int]:
    """Of places so near to each other that next to nothing is made between, the smallest."""
    found: list[int] = []
    for at in places:
        if found and total[at] - total[found[-1]] < least:
            if sizes[at] <= sizes[found[-1]]:
                found[-1] = at
        else:
            found.append(at)
    return found
