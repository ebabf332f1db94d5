"""What `fit` found: the step under its plan, the certificate, and why it looks as it does."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from jaxmem._util.text import change, columns, duration, size
from jaxmem.fitting.decisions import ValueDecision
from jaxmem.fitting.regions import Region, StackRegion
from jaxmem.fitting.step_plan import StepPlan, following
from jaxmem.report.report import MemoryReport
from jaxmem.solve.stacks import Candidate

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """A region with the candidate that was taken for it."""

    region: Region
    candidate: Candidate


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a plan looks as it does; `print` it for tables.

    Attributes:
      rows: the decision of each value that counts, stack by stack.
      predicted_bytes: predicted by the solver, moved by what other plans of the step compiled to;
        if no other was, before any compiler had spoken.
      compiled_bytes: what the compiler says.
      extra_seconds: what is recomputed, kept or moved costs so much, by the roofline; in a
        pipeline, also by how much its stages wait longer than in the fastest of its ways.
      gap: by how much, relative to `extra_seconds`, a layer's choice could still be better.
      closed: whether next to nothing of the budget is unused, or the next faster plan was compiled
        and seen not to fit.
      partition: the mesh axis over which the plan stores carries split, "" for none.
      microbatches, schedule: of pipelines that leave them open; 0 and "" where there are none.
    """

    rows: tuple[ValueDecision, ...]
    predicted_bytes: int
    compiled_bytes: int
    extra_seconds: float
    gap: float
    closed: bool
    heads: tuple[tuple[str, str, int], ...]  # with how many of the rows are of each
    partition: str = ""
    microbatches: int = 0
    schedule: str = ""

    def __str__(self) -> str:
        parts = []
        if self.partition:
            parts.append(
                f"carries are stored split over the mesh axis {self.partition!r}, and gathered by "
                "what reads them"
            )
        if self.microbatches:
            parts.append(f"{self.microbatches} microbatches in the pipeline, {self.schedule}")
        rows = iter(self.rows)
        for stack, head, count in self.heads:
            parts.append(f"{stack}\n{head}")
            own = list(itertools.islice(rows, count))
            for part in dict.fromkeys((row.stack, row.layers) for row in own):
                if part[0] != stack:
                    parts.append(f"  {part[0].removeprefix(stack).strip(', ')}")
                parts += _lines([row for row in own if (row.stack, row.layers) == part])
        off = self.predicted_bytes / self.compiled_bytes - 1
        parts.append(
            f"predicted {size(self.predicted_bytes)}, compiled {size(self.compiled_bytes)} "
            f"({change(off)}); about {duration(self.extra_seconds)} a step to recompute and keep; "
            f"optimality gap {self.gap:.1%}"
        )
        if not self.closed:
            parts.append(
                "the compiles allowed did not suffice to see the next faster plan fail: a larger "
                "max_compiles= may find a faster one"
            )
        return "\n".join(parts)


class Fitted:
    """A step under the plan that `jaxmem.fit` found.

    Attributes:
      step: the jitted step, with the same arguments and results.
      plan: to save, and to apply elsewhere with `jaxmem.use_plan`.
      report: of the compiled program: the certificate.
      budget: bytes.
      compiles: how often the compiler was asked.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.remat_auto
    ... def model(weights, h):
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()
    >>> arrays = jnp.ones((64, 16, 16)), jnp.ones((4096, 16))
    >>> fitted = jaxmem.fit(jax.grad(model), *arrays, budget="6MiB", progress=False)
    >>> fitted.report.required_bytes <= fitted.budget, fitted.compiles <= 8
    (True, True)
    >>> fitted.step(*arrays).shape
    (64, 16, 16)
    >>> fitted.explain().compiled_bytes == fitted.report.required_bytes
    True
    """

    def __init__(
        self,
        function: Callable[..., Any],
        plan: StepPlan,
        report: MemoryReport,
        planned: tuple[Planned, ...],
        budget: int,
        predicted_bytes: int,
        closed: bool,
        compiles: int,
    ) -> None:
        self.plan, self.report, self.budget, self.compiles = plan, report, budget, compiles
        self._function, self._planned = function, planned
        self._predicted, self._closed = predicted_bytes, closed

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The step, compiled under the plan at its first call."""
        with following(self.plan):
            return self._function(*args, **kwargs)

    __call__ = step

    def explain(self) -> Explanation:
        """What becomes of each value, in the user's names and lines, and how good the plan is."""
        planned = [p for p in self._planned if p.region.uses.times]
        rows = [p.region.decisions(p.candidate) for p in planned]
        gap = max((p.region.gap(p.candidate) for p in planned), default=0.0)
        return Explanation(
            heads=tuple(
                (p.region.where, _head(p), len(own)) for p, own in zip(planned, rows, strict=True)
            ),
            rows=tuple(itertools.chain.from_iterable(rows)),
            predicted_bytes=self._predicted,
            compiled_bytes=self.report.required_bytes,
            extra_seconds=sum(p.region.uses.times * p.candidate.seconds for p in planned),
            gap=gap,
            closed=self._closed,
            partition=self.plan.partition,
            microbatches=self.plan.microbatches,
            schedule=self.plan.schedule,
        )

    def __repr__(self) -> str:
        return (
            f"<Fitted: {size(self.report.required_bytes)} of a budget of {size(self.budget)} on "
            f"{self.report.target}, after {self.compiles} compiles>"
        )


# ---------------------------------------------------------------- implementation

# Less than this share of what is recomputed, or of the largest value, is not listed.
_CHEAP = 0.01


def _head(planned: Planned) -> str:
    plan = planned.region.plan(planned.candidate).plan
    text = str(plan).split("\n", 1)[0]
    times = planned.region.uses.times
    if times == 1:
        return f"  {text}"
    if isinstance(planned.region, StackRegion):
        return f"  {text}; {times} such stacks"
    if not planned.candidate.seconds:
        return f"  {text}, each of {times} times"
    what = "the function with the scan" if planned.region.uses.iterations else "what calls it"
    return f"  {text}, each of {times} times; to plan each by itself, decorate {what}"


def _lines(rows: list[ValueDecision]) -> list[str]:
    """A table of rows that count, and in a line what the others come to, run by run."""
    whole = sum(row.seconds for row in rows if row.decision == "recompute") or 1.0
    most = max((row.bytes for row in rows), default=0)
    cells, rest = [], []
    for row in rows:
        cheap = (
            row.seconds < _CHEAP * whole
            if row.decision == "recompute"
            else (row.bytes < _CHEAP * most)
        )
        if cheap:
            rest.append(row)
            continue
        cells.append(
            [
                f"{row.layers} ×",
                row.decision,
                size(row.bytes),
                duration(row.seconds),
                row.shape,
                row.name,
                row.source,
            ]
        )
    text = [columns(cells, right=[0, 2, 3], indent="    ")] if cells else []
    if again := [row for row in rest if row.decision == "recompute"]:
        seconds = sum(row.layers * row.seconds for row in again)
        text.append(f"    and {len(again)} cheap values recomputed, {duration(seconds)} in all")
    if small := [row for row in rest if row.decision != "recompute"]:
        total = sum(row.layers * row.bytes for row in small)
        text.append(f"    and {len(small)} small values kept, {size(total)} in all")
    return text
