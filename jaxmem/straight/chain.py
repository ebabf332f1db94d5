"""Straight-line code as the chain that solvers know: links with options, and plans back again."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.layer import Layer, nbytes
from jaxmem.policies import Sqrt
from jaxmem.problem import Graph
from jaxmem.reversal import given_bytes, reversal_bytes, without_checkpoint
from jaxmem.roofline import Roofline
from jaxmem.solve.chain import Again, ChainTable, Kept, Link, Option, solve_chain
from jaxmem.solve.cover import settle
from jaxmem.solve.keep import Keep, menu
from jaxmem.straight.code import Code
from jaxmem.straight.plan import Piece, StraightPlan
from jaxmem.values import graph_of, unnamed_places

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """What of one link can be kept, the same for all that compute the same.

    Attributes:
      layer: the stretch as a layer.
      graph: as its solver saw it.
      keeps: the options; None for everything.
      link: for the chain.
    """

    layer: Layer
    graph: Graph
    keeps: tuple[Keep | None, ...]
    link: Link


class Chain:
    """Code cut into links, each with its options, and several of them as one with options too.

    What stands at a cut is held or computed again with all that leads to it; looked at together,
    two links may drop it where it follows cheaply from what either keeps.

    Attributes:
      code, cuts: what was cut, and where.
      stretches: of each link, by its number and that behind it, and of several as one.
      table: the plans that no other beats in bytes and seconds.

    Args:
      points: how many options of a link are looked for besides the corners of its hull, which
        are quickly found.
    """

    def __init__(
        self, code: Code, roofline: Roofline, offload: bool = False, points: int = 4
    ) -> None:
        self.code, self.cuts = code, code.cuts()
        known: dict[str, Stretch] = {}
        self.stretches: dict[tuple[int, int], Stretch] = {}
        links: dict[tuple[int, int], Link] = {}
        for first, after in _widths(len(self)):
            layer = code.layer(self.cuts[first], self.cuts[after])
            if layer.digest not in known:
                known[layer.digest] = _stretch(layer, roofline, offload, points)
            stretch = self.stretches[first, after] = known[layer.digest]
            # Of what passes the link by, the gradient is there too while it is reversed.
            given = code.alive_bytes(self.cuts[after])
            passing = given - stretch.link.carry_bytes
            links[first, after] = dataclasses.replace(
                stretch.link,
                carry_bytes=given,
                gradient_bytes=stretch.link.gradient_bytes + passing,
            )
        single = [links.pop((k, k + 1)) for k in range(len(self))]
        self.table: ChainTable = solve_chain(single, slots=200, carried=self._carried, wide=links)

    def __len__(self) -> int:
        """How many links there are."""
        return len(self.cuts) - 1

    def stretch(self, kept: Kept) -> Stretch:
        """What is kept."""
        return self.stretches[kept.link, kept.after]

    def plan(self, steps: Sequence[Kept | Again]) -> StraightPlan:
        """A plan of the chain as one of the code."""
        return StraightPlan(len(self.code), _joined([self._piece(step) for step in steps]))

    # ------------------------------------------------------------ implementation

    def _piece(self, step: Kept | Again) -> Piece:
        if isinstance(step, Again):
            inner = _joined([self._piece(one) for one in step.inner])
            return Piece(self.cuts[step.first], self.cuts[step.last], inner=inner)
        first, last = self.cuts[step.link], self.cuts[step.after]
        stretch = self.stretch(step)
        keep = stretch.keeps[step.option]
        if keep is None:
            return Piece(first, last)
        kept = _operations(stretch.layer, keep.kept)
        sent = _operations(stretch.layer, keep.offloaded)
        # Names are given by place in the code, and a stretch met before stood elsewhere.
        shift = first - _first(stretch.layer)
        return Piece(first, last, tuple(k + shift for k in kept), tuple(k + shift for k in sent))

    def _carried(self, i: int, j: int) -> int:
        """What the input of link j adds where that of link i is held."""
        held = set(self.code.alive[self.cuts[i]])
        return sum(nbytes(v.aval) for v in self.code.alive[self.cuts[j]] if v not in held)


# ---------------------------------------------------------------- API

# What a policy that knows no target goes by: an H100.
_ANY = Roofline(matrix_peak=989e12, bandwidth=3.35e12)
# Fewer stretches than this are no chain to cut.
_FEWEST = 4


def by_sqrt(closed: ClosedJaxpr, policy: Sqrt) -> tuple[Code, StraightPlan] | None:
    """Code with the plan of fewest bytes that computes nothing more than `levels` times again.

    Where there is no scan this is what cutting into segments comes to, sizes looked at.
    None if it is too short for that: a layer on its own, say.
    """
    code = Code(closed)
    if len(code.cuts()) - 1 < _FEWEST:
        return None
    chain = Chain(code, _ANY, points=0)
    forward = sum(chain.stretches[k, k + 1].link.seconds for k in range(len(chain)))
    within = [
        size for size, seconds in chain.table.frontier() if seconds <= policy.levels * forward
    ]
    best = chain.table.plan(min(within)) if within else None
    return None if best is None else (code, chain.plan(best.steps))


# ---------------------------------------------------------------- implementation


def _widths(count: int) -> list[tuple[int, int]]:
    """First and after of each of so many links; of two, four, eight ... as one, and of all."""
    found = {(0, count)}
    width = 1
    while width < count:
        found.update((k, min(k + width, count)) for k in range(0, count, width))
        width *= 2
    return sorted(found, key=lambda one: (one[1] - one[0], one))


def _stretch(layer: Layer, roofline: Roofline, offload: bool, points: int) -> Stretch:
    graph = graph_of(layer, roofline, offload)
    names = {
        place
        for place, var in enumerate(layer.values)
        if (eqn := layer.made_by(var)) is None or _jax.name_given_by(eqn) is not None
    }
    _, carry, _ = layer.body.split_in(layer.linearised.jaxpr.invars)
    results = layer.linearised.jaxpr.outvars[: len(layer.body.jaxpr.out_avals)]
    unnamed = unnamed_places(layer)
    outs = {*results, *(layer.values[unnamed[place]] for place in _places(layer, results))}
    # The next link holds its input in most plans, so that keeping a result is often free.
    sizes = tuple(
        size // 2 if layer.values[place] in outs else size for place, size in enumerate(graph.bytes)
    )
    graph = dataclasses.replace(graph, keepable=graph.keepable & names, bytes=sizes)
    as_it_stands = without_checkpoint(layer, graph, 1, roofline.fuses_operands)
    found = list(menu(graph, points=points))
    if roofline.flops_only:
        # Where elementwise work is free, what keeps more of it and so needs less room while it is
        # reversed does not stand out: those choices are found by their time.
        timed = graph_of(layer, dataclasses.replace(roofline, flops_only=False), offload)
        timed = dataclasses.replace(timed, keepable=graph.keepable, bytes=sizes)
        others = [(keep.kept, keep.offloaded) for keep in menu(timed, points=points)]
        known = {(keep.kept, keep.offloaded) for keep in found}
        again = [settle(graph, *map(frozenset, other)) for other in others if other not in known]
        found += [keep for keep in again if keep is not None]
    options = [keep for keep in found if keep.bytes < as_it_stands.bytes]

    out_bytes = sum(nbytes(aval) for aval in layer.body.jaxpr.out_avals)
    gradient_bytes = given_bytes(layer) if roofline.fuses_operands else out_bytes

    def option(keep: Keep, seconds: float) -> Option:
        values = [layer.values[place] for place in keep.kept]
        tape_bytes = sum(nbytes(var.aval) for var in values)
        as_kept = layer.keeping(keep.kept, keep.offloaded)
        reversal = reversal_bytes(as_kept, roofline.fuses_operands)
        return Option(
            tape_bytes=tape_bytes,
            seconds=max(seconds, 0.0),
            # The tape and the gradient are counted there until they are used, not to the end.
            work_bytes=max(reversal - tape_bytes - gradient_bytes, 0),
            input_bytes=sum(nbytes(var.aval) for var in values if var in carry),
            output_bytes=sum(nbytes(var.aval) for var in values if var in outs),
        )

    choices = [option(as_it_stands, 0.0), *(option(keep, keep.seconds) for keep in options)]
    link = Link(
        seconds=sum(operation.seconds for operation in graph.operations),
        carry_bytes=out_bytes,
        options=tuple(choices),
        gradient_bytes=gradient_bytes,
    )
    return Stretch(layer, graph, (None, *options), link)


def _places(layer: Layer, atoms: Sequence[Any]) -> list[int]:
    wanted = {atom for atom in atoms if _jax.is_var(atom)}
    return [place for place, var in enumerate(layer.values) if var in wanted]


def _operations(layer: Layer, places: Sequence[int]) -> list[int]:
    """The operations of the code whose results these values are; inputs are kept anyway."""
    makers = (layer.made_by(layer.values[place]) for place in places)
    found = {_jax.place_named_by(eqn) for eqn in makers if eqn is not None}
    return sorted(place for place in found if place is not None)


def _first(layer: Layer) -> int:
    """The place in the code of the first operation of a stretch."""
    named = map(_jax.place_named_by, layer.linearised.jaxpr.eqns)
    return min(place for place in named if place is not None)


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Neighbours that keep everything as one piece."""
    found: list[Piece] = []
    for piece in pieces:
        plain = piece.keep is None and not piece.inner
        if found and plain and found[-1].keep is None and not found[-1].inner:
            found[-1] = Piece(found[-1].first, piece.last)
        else:
            found.append(piece)
    return tuple(found)
