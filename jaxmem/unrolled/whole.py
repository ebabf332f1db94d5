"""Plans that recompute layers whole, or keep all of them: of each run the last ones are kept.

With none kept that is what models have for an option of their own, a `jax.checkpoint` around each
layer.  What such a layer needs while it is reversed is its own tape, predicted better than that of
one that keeps single values.  The dynamic program knows these plans, and passes them by where
others are predicted to need less of what it sees, which the loss is no part of.  Here one layer
after the other is kept, the one that spares the most seconds for the bytes that are live at the
peak, whatever that is.  The last layers are reversed first: what they keep is gone by then.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from jaxmem.solve.stages import ChainPlan, Kept, Merged, Recomputed, Steps
from jaxmem.unrolled.runs import Run

P = TypeVar("P", bound=ChainPlan)

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Stages that are recomputed together, or kept.

    Attributes:
      run: the number of the run that it is a layer of; None for code outside of these.
    """

    whole: Recomputed
    kept: tuple[Kept, ...]
    run: int | None


# ---------------------------------------------------------------- API


def whole_layers(
    cuts: Sequence[int],
    runs: Sequence[Run],
    merged: Merged,
    held: Callable[[Steps], P],
    needed: Callable[[P], int],
) -> Iterator[P]:
    """Plans in which layers, and stages outside of layers, are recomputed whole or kept.

    From all of them recomputed on, one more is kept at a time; all that are looked at on the way
    are among these.

    Args:
      cuts: the operations at which stages begin, and the end.
      runs: of operations.
      merged: see `jaxmem.solve.chain.solve_chain`.
      held: the plan of these steps.
      needed: what it has live at its peak, with the loss.
    """
    if not runs:
        return
    units = _units(cuts, runs, merged)

    def plan(kept: frozenset[int]) -> P:
        each = (unit.kept if k in kept else (unit.whole,) for k, unit in enumerate(units))
        return held(tuple(itertools.chain.from_iterable(each)))

    kept: frozenset[int] = frozenset()
    yield (best := plan(kept))
    while len(kept) < len(units) - 1:
        several = {k: plan(kept | {k}) for k in _next(units, kept)}
        yield from several.values()
        k = _most_spared(best, several, needed)
        kept, best = kept | {k}, several[k]


# ---------------------------------------------------------------- implementation


def _units(cuts: Sequence[int], runs: Sequence[Run], merged: Merged) -> list[_Unit]:
    """All stages, those of one layer together."""
    layers = {place: number for number, run in enumerate(runs) for place in run.places[:-1]}
    inside = {place for run in runs for place in range(run.first + 1, run.after)}
    begins = [at for at in cuts[:-1] if at in layers or at not in inside]
    numbers = {at: number for number, at in enumerate(cuts)}
    found = []
    for begin, end in itertools.pairwise([*begins, cuts[-1]]):
        first, after = numbers[begin], numbers[end]
        kept = tuple(Kept(number, 0) for number in range(first, after))
        inner = (Kept(first, 0, after - first),) if (first, after) in merged else kept
        found.append(_Unit(Recomputed(first, after, inner), kept, layers.get(begin)))
    return found


def _next(units: Sequence[_Unit], kept: frozenset[int]) -> list[int]:
    """What could be kept as well: of each run the last layer that is not."""
    last: dict[int, int] = {}
    for k, unit in enumerate(units):
        if k not in kept:
            last[-1 - k if unit.run is None else unit.run] = k
    return list(last.values())


def _most_spared(before: P, several: Mapping[int, P], needed: Callable[[P], int]) -> int:
    """Which plan spares the most seconds for each byte more; of those that need none, seconds."""

    def rate(k: int) -> tuple[float, float]:
        spared, more = before.seconds - several[k].seconds, needed(several[k]) - needed(before)
        return (spared / more if more > 0 else math.inf), spared

    return max(several, key=rate)
