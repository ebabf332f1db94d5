"""Unrolled code: a traced function as a chain of segments, cut where little is live.

A Python loop over layers, a U-net, towers that meet again: no scan, only operations in an
order.  At each place between two operations some values are live, made before and read
after.  Where these are few bytes (bottlenecks, where a single value is), the chain is cut.
What passes by, such as the skip connections of a U-net, is live at all the cuts that it
crosses, and counts once.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.estimate.counting import kind_of
from jaxmem.layers.pooling import reversed_by_places
from jaxmem.trace.layer import Body, Layer, NoReverseMode, Wrt, cheap_values, nbytes

# ---------------------------------------------------------------- API


class Code:
    """A traced function, its operations in an order that is good to cut.

    Attributes:
      closed: the jaxpr, jits looked into; what follows from parameters alone is computed
        right in front of what first reads it.
      live: for each place between operations, from before the first to after the last, the
        values that are made before and read after it.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        inlined = _jax.inlined(closed)
        self.closed = _jax.reordered(inlined, _late(inlined))
        self.eqns: Sequence[Any] = self.closed.jaxpr.eqns
        self.live = self._live()

    def __len__(self) -> int:
        return len(self.eqns)

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

    def live_bytes(self, at: int) -> int:
        """Bytes live at a place, inputs of the function not counted."""
        return sum(nbytes(var.aval) for var in self.live[at])

    def cuts(self, most: int = 48) -> list[int]:
        """Places to cut at, among them 0 and the end; at most so many segments."""
        count = len(self)
        sizes = [self.live_bytes(at) for at in range(count + 1)]
        made = [sum(nbytes(var.aval) for var in eqn.outvars) for eqn in self.eqns]
        total = [0]
        for size in made:
            total.append(total[-1] + size)
        window = total[-1] / 24
        kernels = any(kind_of(eqn) == "kernel" for eqn in self.eqns)
        good, low, high = [], 0, 0
        for at in range(1, count):
            while total[at] - total[low] > window:
                low += 1
            while high < count and total[high] - total[at] <= window:
                high += 1
            near = min(sizes[max(low, 1) : min(high, count - 1) + 1])
            # Behind an operation that is fused with what it reads, not in front of it.
            fused = kind_of(self.eqns[at]) in ("fused", "view") and sizes[at + 1] <= sizes[at]
            if sizes[at] <= 1.05 * near and not (fused and kernels):
                good.append(at)
        good = _spread(good, total, sizes, total[-1] / (4 * most))
        if len(good) > most - 1:
            good = [good[round(k * (len(good) - 1) / (most - 2))] for k in range(most - 1)]
        return [0, *dict.fromkeys(good), count]

    def reads(self, first: int, last: int) -> list[Any]:
        """What operations first..last-1 read and do not make."""
        made: set[Any] = set()
        found: dict[Any, None] = {}
        for eqn in self.eqns[first:last]:
            for atom in eqn.invars:
                if _jax.is_var(atom) and atom not in made:
                    found[atom] = None
            made.update(eqn.outvars)
        return list(found)

    def gives(self, first: int, last: int) -> list[Any]:
        """What operations first..last-1 make and others, or the caller, read."""
        made = {var for eqn in self.eqns[first:last] for var in eqn.outvars}
        return [var for var in self.live[last] if var in made]

    def run(self, first: int, last: int, values: Sequence[Any]) -> list[Any]:
        """Evaluate a segment from what it `reads` to what it `gives`."""
        return _jax.evaluate(
            self.closed,
            [None] * len(self.closed.jaxpr.invars),
            special=reversed_by_places,
            only=frozenset(range(first, last)),
            given=dict(zip(self.reads(first, last), values, strict=True)),
            outs=self.gives(first, last),
            each=_named,
        )

    def traced(self, first: int, last: int, reads: Sequence[Any]) -> ClosedJaxpr:
        """A segment as a jaxpr, from what it `reads` in this order to what it `gives`."""
        order = self.reads(first, last)

        def run(*flat: Any) -> list[Any]:
            values = dict(zip(reads, flat, strict=True))
            return self.run(first, last, [values[var] for var in order])

        return _jax.trace(run, [var.aval for var in reads])

    def ordered_reads(self, first: int, last: int) -> tuple[list[Any], int]:
        """What a segment reads, inputs of the function first, and how many these are."""
        inputs = {*self.closed.jaxpr.invars, *self.closed.jaxpr.constvars}
        reads = sorted(self.reads(first, last), key=lambda var: var not in inputs)
        return reads, sum(var in inputs for var in reads)

    def layer(self, first: int, last: int) -> Layer:
        """A segment as a layer: parameters and inputs of the function first, then what is live."""
        reads, num_consts = self.ordered_reads(first, last)
        traced = self.traced(first, last, reads)
        wrt = Wrt(
            tuple(_jax.has_tangent(var.aval) for var in reads),
            tuple(_jax.has_tangent(aval) for aval in traced.out_avals),
        )
        return Layer(Body(traced, num_consts, len(reads) - num_consts), wrt)

    # ------------------------------------------------------------ implementation

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


def _named(place: int, outs: Sequence[Any]) -> list[Any]:
    return [_jax.named(out, _jax.place_name(place)) if _is_array(out) else out for out in outs]


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.dtype != jax.dtypes.float0


def _late(closed: ClosedJaxpr) -> list[int]:
    """The order of the equations with those that read only parameters as late as can be."""
    jaxpr = closed.jaxpr
    cheap = cheap_values(jaxpr, [*jaxpr.constvars, *jaxpr.invars])
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
