"""One stage of unrolled code: what of it can be kept, and what that takes."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxmem import _jax
from jaxmem.estimate.compiler import Compiler
from jaxmem.estimate.reversal import given_bytes, reversal_peak, without_checkpoint
from jaxmem.estimate.roofline import Roofline
from jaxmem.estimate.values import graph_of, unnamed_places
from jaxmem.solve.chain import Option, Stage
from jaxmem.solve.keep import Keep, at_other_prices, menu
from jaxmem.solve.problem import Graph
from jaxmem.trace.layer import Layer, nbytes
from jaxmem.unrolled.descent import descended

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """What of one stage can be kept, the same for all that compute the same.

    Attributes:
      layer: the segment as a layer.
      graph: as its solver saw it.
      keeps: the options; None for everything.
      places: of the values on the device that each option keeps.
      stage: for the chain.
      compiler: see `jaxmem.estimate.roofline.Roofline`.
      calls_for_products: see `jaxmem.estimate.reversal.reversal_peak`.
    """

    layer: Layer
    graph: Graph
    keeps: tuple[Keep | None, ...]
    places: tuple[tuple[int, ...], ...]
    stage: Stage
    compiler: Compiler
    calls_for_products: bool = False
    _more: dict[Any, int] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def extra_work_bytes(self, option: int, live_to_end: frozenset[int]) -> int:
        """Working space on top of an option's, where these of its values stay: others hold them.

        Args:
          live_to_end: their places.
        """
        if (option, live_to_end) not in self._more:
            keep, size = self.keeps[option], self.stage.options[option]
            sent = keep.offloaded if keep else ()
            layer = self.layer.keeping(self.places[option], sent)
            values = [self.layer.values[place] for place in live_to_end]
            needed, _ = reversal_peak(
                layer,
                self.compiler,
                live_to_end=values,
                barriers=keep is not None,
                calls_for_products=self.calls_for_products,
            )
            work = needed - size.tape_bytes - self.stage.gradient_bytes
            self._more[option, live_to_end] = max(work - size.work_bytes, 0)
        return self._more[option, live_to_end]


# ---------------------------------------------------------------- API


def segment_of(
    layer: Layer,
    roofline: Roofline,
    offload: bool,
    points: int,
    looks: int = 0,
    apart: float = 0.0,
    calls_for_products: bool = False,
) -> Segment:
    """The ways to keep what the backward pass of a segment needs, with what each takes.

    Args:
      points: how many are looked for between the corners of their convex hull.
      looks: how many more, by what is live at the peak.
      apart: by how many bytes those differ that are worth a look: what is live at the peak of each
        takes far longer to say than what it keeps.
      calls_for_products: see `jaxmem.estimate.reversal.reversal_peak`.
    """
    graph = graph_of(layer, roofline, offload, in_loop=False)
    names = {
        place
        for place, var in enumerate(layer.values)
        if (eqn := layer.made_by(var)) is None or _jax.name_given_by(eqn) is not None
    }
    _, carry, _ = layer.body.split_in(layer.linearised.jaxpr.invars)
    unnamed, results = unnamed_places(layer), list(filter(_jax.is_var, layer.results))
    outs = {*results, *(layer.values[unnamed[layer.places[var]]] for var in results)}
    # The next stage holds its input in most plans, so that keeping a result is often free.
    sizes = tuple(
        size // 2 if layer.values[place] in outs else size for place, size in enumerate(graph.bytes)
    )
    graph = dataclasses.replace(graph, keepable=graph.keepable & names, bytes=sizes)
    as_it_stands = without_checkpoint(layer, graph, 1, roofline.compiler)
    found = _apart(menu(graph, points=points), apart)
    if roofline.flops_only:
        # Where elementwise work is free, what keeps more of it and so needs less room while it is
        # reversed does not stand out: those choices are found by their time.
        timed = graph_of(
            layer, dataclasses.replace(roofline, flops_only=False), offload, in_loop=False
        )
        timed = dataclasses.replace(timed, keepable=graph.keepable, bytes=sizes)
        found += _apart(at_other_prices(graph, found, timed, points), apart)
    compiler = roofline.compiler
    peak = functools.partial(
        reversal_peak, compiler=compiler, calls_for_products=calls_for_products
    )

    @functools.cache
    def moment(keep: Keep) -> tuple[int, frozenset[Any]]:
        return peak(layer.keeping(keep.kept, keep.offloaded))

    if looks:
        found += descended(layer, graph, found, moment, looks)
    options = [keep for keep in found if keep.bytes < as_it_stands.bytes]

    out_bytes = sum(nbytes(atom.aval) for atom in layer.results)
    gradient_bytes = given_bytes(layer, compiler) if compiler.fuses_operands else out_bytes

    def option(keep: Keep, seconds: float, reversal: int) -> Option:
        values = [layer.values[place] for place in keep.kept]
        tape_bytes = sum(nbytes(var.aval) for var in values)
        return Option(
            tape_bytes=tape_bytes,
            seconds=max(seconds, 0.0),
            # The tape and the gradient are counted there until they are used, not to the end.
            work_bytes=max(reversal - tape_bytes - gradient_bytes, 0),
            input_bytes=sum(nbytes(var.aval) for var in values if var in carry),
            output_bytes=sum(nbytes(var.aval) for var in values if var in outs),
            result_seconds=_result_seconds(graph, keep),
        )

    whole = layer.keeping(as_it_stands.kept, as_it_stands.offloaded)
    choices = [
        option(as_it_stands, 0.0, peak(whole, barriers=False)[0]),
        *(option(keep, keep.seconds, moment(keep)[0]) for keep in options),
    ]
    stage = Stage(
        seconds=sum(operation.seconds for operation in graph.operations),
        carry_bytes=out_bytes,
        options=tuple(choices),
        gradient_bytes=gradient_bytes,
    )
    places = tuple(keep.kept for keep in (as_it_stands, *options))
    return Segment(layer, graph, (None, *options), places, stage, compiler, calls_for_products)


# ---------------------------------------------------------------- implementation


def _apart(keeps: Sequence[Keep], bytes: float) -> list[Keep]:
    """Of those that keep about as much, the fastest; and the one that keeps least."""
    if not (keeps and bytes):
        return list(keeps)
    found: dict[int, Keep] = {}
    for keep in sorted(keeps, key=lambda keep: keep.seconds):
        found.setdefault(int(keep.bytes / bytes), keep)
    least = min(keeps, key=lambda keep: (keep.bytes, keep.seconds))
    return [keep for keep in keeps if keep is least or keep in found.values()]


def _result_seconds(graph: Graph, keep: Keep) -> float:
    """Of one evaluation, what makes none of the values that are kept."""
    needed, seconds = {*keep.kept, *keep.offloaded}, 0.0
    for operation in reversed(graph.operations):
        if needed.intersection(operation.outputs):
            needed.update(operation.inputs)
        else:
            seconds += operation.seconds
    return seconds
