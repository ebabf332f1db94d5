"""Straight-line code as the chain that solvers know: links with options, and plans back again."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.layer import Layer, nbytes
from jaxmem.policies import Sqrt
from jaxmem.problem import Graph
from jaxmem.roofline import Roofline
from jaxmem.solve.chain import Again, ChainTable, Kept, Link, Option, solve_chain
from jaxmem.solve.keep import Keep, menu
from jaxmem.straight.code import Code
from jaxmem.straight.plan import Piece, StraightPlan
from jaxmem.values import graph_of, reversal_bytes, unnamed_places, without_checkpoint

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
    """Code cut into links, each with its options.

    Attributes:
      code, cuts: what was cut, and where.
      stretches: one for each link.
      table: the plans that no other beats in bytes and seconds.

    Args:
      stretch: a layer with its options.
    """

    def __init__(
        self, code: Code, cuts: Sequence[int], stretch: Callable[[Layer], Stretch]
    ) -> None:
        self.code, self.cuts = code, cuts
        self.stretches = [stretch(code.layer(first, last)) for first, last in self.spans]
        links = [
            dataclasses.replace(
                # Of what passes the link by, the gradient is there too while it is reversed.
                stretch.link,
                carry_bytes=self._given(last),
                gradient_bytes=self._given(last),
            )
            for stretch, (_, last) in zip(self.stretches, self.spans, strict=True)
        ]
        self.table: ChainTable = solve_chain(links, slots=200, carried=self._carried)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last operation of each link."""
        return list(zip(self.cuts, self.cuts[1:], strict=False))

    def plan(self, steps: Sequence[Kept | Again]) -> StraightPlan:
        """A plan of the chain as one of the code."""
        return StraightPlan(len(self.code), _joined([self._piece(step) for step in steps]))

    # ------------------------------------------------------------ implementation

    def _piece(self, step: Kept | Again) -> Piece:
        if isinstance(step, Again):
            inner = _joined([self._piece(one) for one in step.inner])
            return Piece(self.cuts[step.first], self.cuts[step.last], inner=inner)
        first, last = self.spans[step.link]
        stretch = self.stretches[step.link]
        keep = stretch.keeps[step.option]
        if keep is None:
            return Piece(first, last)
        kept = _operations(stretch.layer, keep.kept)
        sent = _operations(stretch.layer, keep.offloaded)
        # Names are given by place in the code, and a stretch met before stood elsewhere.
        shift = first - _first(stretch.layer)
        return Piece(first, last, tuple(k + shift for k in kept), tuple(k + shift for k in sent))

    def _given(self, at: int) -> int:
        return self.code.alive_bytes(at)

    def _carried(self, i: int, j: int) -> int:
        """What the input of link j adds where that of link i is held."""
        held = set(self.code.alive[self.cuts[i]])
        return sum(nbytes(v.aval) for v in self.code.alive[self.cuts[j]] if v not in held)


class Chains:
    """The same code cut finely and coarsely: the plans of all chains that no other plan beats.

    Between two links a value is held that a plan could do without, as it could without a norm's
    result where the convolution's before it is kept: for that both have to be in one link.  The
    fewer the links, on the other hand, the less there is to choose from.

    Attributes:
      chains: finest first.
    """

    def __init__(self, code: Code, roofline: Roofline, offload: bool = False) -> None:
        stretch = _stretches(roofline, offload, points=4)
        cuttings = dict.fromkeys(map(tuple, [code.cuts(), *map(code.cuts, _COARSER)]))
        self.chains = [Chain(code, cuts, stretch) for cuts in cuttings]
        most = max(size for size, _ in self.chains[0].table.frontier())
        points = [
            (size, seconds, number)
            for number, chain in enumerate(self.chains)
            for size, seconds in chain.table.frontier()
            if number == 0 or size >= _COARSE_SHARE * most
        ]
        self._best: dict[int, tuple[float, Chain]] = {}
        fastest = math.inf
        for size, seconds, number in sorted(points):
            if seconds < fastest * (1 - 1e-12):
                self._best[size], fastest = (seconds, self.chains[number]), seconds

    def frontier(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of the plans: more bytes and fewer seconds from one to the next."""
        return [(size, seconds) for size, (seconds, _) in self._best.items()]

    def steps(self, size: int) -> tuple[Chain, Sequence[Kept | Again]]:
        """The plan of so many bytes, one of the frontier's, and the chain that it is of."""
        _, chain = self._best[size]
        plan = chain.table.plan(size)
        assert plan is not None
        return chain, plan.steps


# ---------------------------------------------------------------- API

# How many links a chain has about, beside the finest, and from what share of the memory of
# everything kept on it is asked: less is mostly working space, of which a long link's is the
# least certain.
_COARSER = (16, 8)
_COARSE_SHARE = 0.5
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
    chain = Chain(code, code.cuts(), _stretches(_ANY, offload=False, points=0))
    forward = sum(stretch.link.seconds for stretch in chain.stretches)
    within = [
        size for size, seconds in chain.table.frontier() if seconds <= policy.levels * forward
    ]
    best = chain.table.plan(min(within)) if within else None
    return None if best is None else (code, chain.plan(best.steps))


# ---------------------------------------------------------------- implementation


def _stretches(roofline: Roofline, offload: bool, points: int) -> Callable[[Layer], Stretch]:
    """What finds the options of a layer, of those that compute the same only once.

    Args:
      points: how many options are looked for besides the corners of their hull; with none of
        them a link keeps all or as little as can be, which is quickly found.
    """
    known: dict[tuple[str, int], Stretch] = {}

    def stretch(layer: Layer) -> Stretch:
        # What is given to the function is there anyway, what another link gives is not.
        key = layer.digest, layer.body.num_consts
        if key not in known:
            known[key] = _stretch(layer, roofline, offload, points)
        return known[key]

    return stretch


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
    as_it_stands = without_checkpoint(layer, graph)
    options = [keep for keep in menu(graph, points=points) if keep.bytes < as_it_stands.bytes]
    if points == 0:
        options = options[-1:]

    out_bytes = sum(nbytes(aval) for aval in layer.body.jaxpr.out_avals)

    def option(keep: Keep, seconds: float) -> Option:
        values = [layer.values[place] for place in keep.kept]
        tape_bytes = sum(nbytes(var.aval) for var in values)
        as_kept = layer.keeping(keep.kept, keep.offloaded)
        reversal = reversal_bytes(as_kept, roofline.rounds_operands)
        return Option(
            tape_bytes=tape_bytes,
            seconds=max(seconds, 0.0),
            # The tape and the gradient are counted there until they are used, not to the end.
            work_bytes=max(reversal - tape_bytes - out_bytes, 0),
            input_bytes=sum(nbytes(var.aval) for var in values if var in carry),
            output_bytes=sum(nbytes(var.aval) for var in values if var in outs),
        )

    choices = [option(as_it_stands, 0.0), *(option(keep, keep.seconds) for keep in options)]
    link = Link(
        seconds=sum(operation.seconds for operation in graph.operations),
        carry_bytes=out_bytes,
        options=tuple(choices),
        gradient_bytes=out_bytes,
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
