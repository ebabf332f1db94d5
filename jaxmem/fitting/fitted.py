"""What `fit` found: the step under its plan, the certificate, and why it looks as it does."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jaxmem.fitting.holes import Hole
from jaxmem.fitting.step_plan import StepPlan, use_plan
from jaxmem.report import MemoryReport
from jaxmem.solve.stacks import Candidate
from jaxmem.text import columns, size

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """A hole with the candidate that was taken for it."""

    hole: Hole
    candidate: Candidate


@dataclasses.dataclass(frozen=True)
class ValueFate:
    """What becomes of one value of a layer.

    Attributes:
      stack: the stack that it is of.
      layers: in how many of its layers.
      fate: "kept" for the backward pass, sent to the "host", or "computed again".
      name: its `checkpoint_name`, or the operation that makes it; "carry" for the layer's input.
      source: the user's line.
      shape: "bfloat16[8,1024,1024]".
      bytes: in one layer.
      seconds: in one layer, of the operation that makes it, by the roofline.
    """

    stack: str
    layers: int
    fate: Literal["kept", "host", "computed again"]
    name: str
    source: str
    shape: str
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a plan looks as it does; `print` it for tables.

    Attributes:
      rows: the fate of each value that counts, stack by stack.
      predicted_bytes: foretold by the solver, moved by what other plans of the step compiled to;
        if no other was, before any compiler had spoken.
      compiled_bytes: what the compiler says.
      extra_seconds: what is computed again or moved costs so much, by the roofline.
      gap: by how much, relative to `extra_seconds`, a layer's choice could still be better.
      closed: whether the next faster plan was compiled and seen not to fit.
    """

    rows: tuple[ValueFate, ...]
    predicted_bytes: int
    compiled_bytes: int
    extra_seconds: float
    gap: float
    closed: bool
    heads: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        parts = []
        for stack, head in self.heads:
            parts.append(f"{stack}\n{head}")
            rows = [row for row in self.rows if row.stack == stack]
            cells = [
                [
                    f"{row.layers} ×",
                    row.fate,
                    size(row.bytes),
                    _time(row.seconds),
                    row.shape,
                    row.name,
                    row.source,
                ]
                for row in rows
            ]
            if cells:
                parts.append(columns(cells, right=[0, 2, 3]))
        off = self.predicted_bytes / self.compiled_bytes - 1
        parts.append(
            f"predicted {size(self.predicted_bytes)}, compiled {size(self.compiled_bytes)} "
            f"({off:+.1%}); about {_time(self.extra_seconds)} of extra work a step; optimality "
            f"gap {self.gap:.1%}"
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
        with use_plan(self.plan):
            return self._function(*args, **kwargs)

    __call__ = step

    def explain(self) -> Explanation:
        """What becomes of each value, in the user's names and lines, and how good the plan is."""
        rows, heads, gap = [], [], 0.0
        for planned in self._planned:
            hole = planned.hole
            heads.append((hole.where, _head(planned)))
            for count, choice in _layers(planned):
                keep = hole.keeps[choice]
                rows += _fates(hole, count, choice)
                gap = max(gap, 0.0 if keep is None else keep.gap)
        return Explanation(
            rows=tuple(rows),
            predicted_bytes=self._predicted,
            compiled_bytes=self.report.required_bytes,
            extra_seconds=sum(p.hole.times * p.candidate.seconds for p in self._planned),
            gap=gap,
            closed=self._closed,
            heads=tuple(heads),
        )

    def __repr__(self) -> str:
        return (
            f"<Fitted: {size(self.report.required_bytes)} of a budget of {size(self.budget)} on "
            f"{self.report.target}, after {self.compiles} compiles>"
        )


# ---------------------------------------------------------------- implementation

# Values that are less than this share of a layer's bytes and seconds are not listed.
_SHOWN = 0.005


def _layers(planned: Planned) -> tuple[tuple[int, int], ...]:
    """Pairs of a number of layers and their choice."""
    candidate = planned.candidate
    if candidate.kind == "keep":
        return candidate.runs
    return ((planned.hole.length, candidate.choice),)


def _head(planned: Planned) -> str:
    plan = planned.hole.plan(planned.candidate).plan
    text = str(plan).split("\n", 1)[0]
    times = planned.hole.times
    return f"  {text}" + (f"; {times} such stacks" if times > 1 else "")


def _fates(hole: Hole, layers: int, choice: int) -> list[ValueFate]:
    keep = hole.keeps[choice]
    if keep is None:
        return []
    graph = hole.graph
    most_bytes, most_seconds = max(graph.bytes), hole.forward_seconds
    fates: dict[int, Literal["kept", "host", "computed again"]] = {}
    for operation in keep.again:
        for place in graph.operations[operation].outputs:
            fates[place] = "computed again"
    fates |= dict.fromkeys(keep.kept, "kept")
    fates |= dict.fromkeys(keep.offloaded, "host")
    found = []
    for place in sorted(fates):
        value = hole.values[place]
        if value.bytes < _SHOWN * most_bytes and value.seconds < _SHOWN * most_seconds:
            continue
        found.append(
            ValueFate(
                hole.where, layers, fates[place], value.name, value.source, value.shape,
                value.bytes, value.seconds,
            )
        )  # fmt: skip
    return found


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
