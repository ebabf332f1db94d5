"""A net with everything kept, under hand-written checkpoints, and as `fit` plans it."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from tqdm import tqdm

import jaxmem
from budgets import nets, table
from budgets.nets import Net
from budgets.published import Published
from budgets.table import (
    CONVS,
    FIT,
    GREEDY,
    HAND,
    KEPT,
    LEAST,
    PARTS,
    SQRT,
    TIME,
    WORK,
    Cost,
    Row,
    asked,
    asked_bytes,
)
from common.compiling import Planned, compiling, is_recomputed_by_compiler, planned
from common.table import Table, versions

RESULTS = Path(__file__).parent.parent / "results"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """What the three scripts have in common."""

    target: str = "h100-80g"
    """What to compile for; "local" is the attached backend."""
    costs: tuple[Cost, ...] = (WORK, TIME)
    """What `fit` makes least: matmul FLOPs, or seconds by a roofline."""
    compiles: int = 6
    """How often `fit` may ask the compiler for one budget."""
    timeout: float = 1800.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where the table and the picture are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: a small net (with --target local on the attached backend)."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Makes the rows that are not there; each is on disk before the next is begun."""

    options: Options
    known: Table[Row]

    def shares(
        self, net: Net, published: Published, memories: Sequence[float], microbatches: int = 1
    ) -> list[Row]:
        """The rows of a net, everything kept first.

        Args:
          memories: of the published ones; `fit` is given their shares, and these bytes.
          microbatches: if not 1, `fit` is given the smallest share in so many as well.
        """
        kept = self.row(net, KEPT)
        budgets = {
            asked(memory, published): int(kept.required_bytes * published.share(memory))
            for memory in memories
        }
        wanted: dict[str, int | None] = {**budgets}
        if not self.options.small:
            # The same net may need less here before anything is done about it.
            wanted |= {asked_bytes(memory): int(memory * 1e9) for memory in memories}
            wanted[LEAST] = None
        asks: list[tuple[str, int | None, Cost]]
        asks = [(name, budget, cost) for name, budget in wanted.items() for cost in self._costs]
        rows = [kept]
        with tqdm(total=3 + len(asks), unit="row", disable=None) as bar:
            for kind in (HAND, CONVS, SQRT):
                bar.set_postfix_str(kind)
                rows.append(self.row(net, kind))
                bar.update()
            for name, budget, cost in asks:
                bar.set_postfix_str(f"{FIT} {name} {cost}")
                rows.append(self.row(net, FIT, name, budget, cost=cost))
                bar.update()
        if microbatches > 1:
            name, least = min(budgets.items(), key=lambda one: one[1])
            name = f"{microbatches}, {name}"
            rows.append(self.row(net, PARTS, name, least, microbatches, self._costs[0]))
        return rows

    @property
    def _costs(self) -> Sequence[Cost]:
        return self.options.costs

    def row(
        self,
        net: Net,
        kind: str,
        name: str = "",
        budget: int | None = None,
        number: int = 1,
        cost: Cost = "",
    ) -> Row:
        """The row of a program, compiled if it is not there.

        Args:
          budget: of `fit`; None for the least that any plan needs.
          number: of microbatches, or, of `GREEDY`, which of the cuts.
          cost: what `fit` makes least; "" of other kinds.
        """
        key = {"target": self.options.target, "program": net.program, "kind": kind, "name": name}
        key["cost"] = cost
        made_by = versions(self.options.target)
        if (found := self.known.find(made_by, **key)) is not None:
            return found
        if cost:
            made = self._planned(net, budget, number, cost)
        else:
            job = {
                KEPT: lambda: nets.job(net),
                HAND: lambda: nets.job(net, net.blocks),
                CONVS: lambda: nets.job(net, decorate=_keeping_convolutions),
                SQRT: lambda: nets.job(net, decorate=jaxmem.remat_sqrt),
                GREEDY: lambda: nets.job(net, cuts(net)[number]),
            }[kind]()
            made = Planned(job.report(suggest=False, **self._compiling), fits=True)
        report = made.report
        assert report.matmul_flops is not None
        assert report.model_matmul_flops is not None
        row = Row(
            **key,
            images=net.images.shape[0],
            budget_bytes=budget,
            fits=made.fits,
            predicted_bytes=made.predicted_bytes,
            compiles=made.compiles,
            required_bytes=report.required_bytes,
            temp_bytes=report.temp_bytes,
            matmul_flops=report.matmul_flops,
            model_matmul_flops=report.model_matmul_flops,
            estimated_seconds=report.estimated_seconds,
            compiler_remat=is_recomputed_by_compiler(report),
            versions=made_by,
        )
        self.known.add(row)
        return row

    @property
    def _compiling(self) -> dict[str, Any]:
        options = self.options
        return compiling(options.target, options.timeout, options.small)

    def _planned(
        self, net: Net, budget: int | None, microbatches: int, cost: Literal["flops", "roofline"]
    ) -> Planned:
        """What `fit` finds; without a budget the fastest within a thousandth of the least."""
        job = nets.job(net, decorate=jaxmem.remat_auto, microbatches=microbatches)
        options = {"cost": cost, "max_compiles": self.options.compiles, **self._compiling}
        found = planned(job, 1024 if budget is None else budget, **options)
        if budget is None and not found.fits:
            return planned(job, found.report.required_bytes * 1001 // 1000, **options)
        return found


# ---------------------------------------------------------------- API


def opened(options: Options, name: str) -> Study:
    """The study that resumes the table of this name."""
    known = table.table(options.results / f"{name}.csv")
    if options.again:
        known.drop(known.of(versions(options.target), target=options.target))
    return Study(options, known)


def cuts(net: Net) -> list[list[int]]:
    """How Chen's greedy algorithm (arXiv 1604.06174, algorithm 1) cuts a net.

    It goes along the layers and cuts where those since the last cut make more bytes than b.  All
    b are tried; what is found are numbers of layers of each segment, and what follows the last cut
    is in none.  Of those with as many segments stays the one of which the maps between segments
    and the largest segment are the fewest bytes together; these sums also say the order.
    """
    made = net.made()
    sums = {sum(made[a:b]) for a in range(len(made)) for b in range(a + 1, len(made) + 1)}
    found: dict[tuple[int, ...], int] = {}
    for most in sorted(sums):
        segments, since = [], 0
        for number, size in enumerate(made):
            since += size
            if since > most:
                segments.append(number + 1 - sum(segments))
                since = 0
        found.setdefault(tuple(segments), _predicted(made, segments))
    best: dict[int, list[int]] = {}
    for segments in sorted(found, key=lambda one: found[one]):
        best.setdefault(len(segments), list(segments))
    return list(best.values())


# ---------------------------------------------------------------- implementation


def _keeping_convolutions(forward: Callable[..., Any]) -> Callable[..., Any]:
    def kept(primitive: Any, *_: Any, **params: Any) -> bool:
        return primitive.name in ("conv_general_dilated", "dot_general")

    return jax.checkpoint(forward, policy=kept)


def _predicted(made: Sequence[int], segments: Sequence[int]) -> int:
    first, between, inside = 0, 0, []
    for number in [*segments, len(made) - sum(segments)]:
        own = made[first : first + number]
        inside.append(sum(own))
        between += own[-1] if own else 0
        first += number
    return between + max(inside)
