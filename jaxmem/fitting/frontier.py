"""`frontier`: what memory costs in recomputation, for one step, proved by the compiler.

The Pareto front of plans that `fit` searches is compiled at a few candidates spread evenly over its
range, by factors of bytes.  A front goes by predictions, so that a plan may turn out to be
worse in truth than its neighbour: such points are kept, and marked.
"""

import csv
import dataclasses
import io
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem import targets
from jaxmem._util.files import write_whole
from jaxmem._util.shown import picture
from jaxmem._util.text import change, columns, duration, size
from jaxmem.errors import check_flags, check_positive
from jaxmem.fitting.compile_request import (
    Begun,
    CompileRequest,
    rematerialised,
    tell_of_failures,
)
from jaxmem.fitting.progress import Progress
from jaxmem.fitting.step_plan import StepPlan
from jaxmem.fitting.step_problem import Cost, StepProblem
from jaxmem.fitting.ways import build_problem
from jaxmem.report.report import MemoryReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """One plan of a step, compiled.

    Attributes:
      predicted_bytes: required bytes as predicted before this plan was compiled, from what those
        compiled before it came to.
      extra_seconds: what is recomputed, kept or moved costs so much, by the roofline.
      pareto: whether no other point needs neither more bytes nor more seconds, and less of one.
      plan: for `jaxmem.use_plan`.
      report: of the compiled program.
    """

    predicted_bytes: int
    extra_seconds: float
    pareto: bool
    plan: StepPlan
    report: MemoryReport

    @property
    def required_bytes(self) -> int:
        """Of the compiled program, on one device."""
        return self.report.required_bytes

    @property
    def temp_bytes(self) -> int:
        """Of these, what is neither an argument nor a result."""
        return self.report.temp_bytes

    @property
    def matmul_flops(self) -> int | None:
        """Matmul FLOPs of the compiled program, None where its text is not to be had."""
        return self.report.matmul_flops

    @property
    def recompute_overhead(self) -> float | None:
        """The same over that of the model, less one."""
        return self.report.recompute_overhead


@dataclasses.dataclass(frozen=True, repr=False)
class Frontier:
    """Memory against recomputation of one step on one target; `print` it.

    Attributes:
      points: from everything kept to the least memory.
    """

    points: tuple[FrontierPoint, ...]

    @property
    def target(self) -> str:
        return self.points[0].report.target

    @property
    def capacity_bytes(self) -> int | None:
        """What one device has, None where unknown."""
        return self.points[0].report.capacity_bytes

    @property
    def pareto(self) -> tuple[FrontierPoint, ...]:
        """The points that no other one beats."""
        return tuple(point for point in self.points if point.pareto)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row for each point; the file is there whole or not at all."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["target", *_COLUMNS])
        for point in self.points:
            writer.writerow([self.target, *(getattr(point, column) for column in _COLUMNS)])
        write_whole(Path(path), text.getvalue().encode())

    def plot(self, path: str | os.PathLike[str] | None = None, **options: Any) -> "Figure":
        """Draw memory against recomputation.

        Args:
          path: where to write it, as PNG or SVG by its ending; None for nowhere.
          **options: see `jaxmem.show.frontier.plot_frontier`.

        Raises:
          ImportError: matplotlib is not installed; says what to type.
          ValueError: the file is neither PNG nor SVG.
        """
        return picture(self, "plot", path, options)

    def __str__(self) -> str:
        head = (
            "required",
            "temporaries",
            "predicted",
            "off",
            "recompute",
            "extra time",
            "fits",
            "",
        )
        lines = [list(head), *(_cells(point) for point in self.points)]
        parts = [
            f"Memory against recomputation on {self.target}: {len(self.points)} plans, compiled",
            columns(lines, right=range(6)),
        ]
        if len(self.pareto) < len(self.points):
            parts.append("dominated: another plan needs no more memory and no more time")
        return "\n".join(parts)

    def __repr__(self) -> str:
        return f"<Frontier of {len(self.points)} plans for {self.target}>"


_COLUMNS = (
    "required_bytes",
    "temp_bytes",
    "predicted_bytes",
    "matmul_flops",
    "recompute_overhead",
    "extra_seconds",
    "pareto",
)

# ---------------------------------------------------------------- API


def frontier(
    step: Callable[..., Any],
    *args: Any,
    target: "str | targets.Target" = "local",
    points: int = 8,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    allow_offload: bool = False,
    cost: Cost = "roofline",
    compiler_options: dict[str, Any] | None = None,
    timeout: float = 900.0,
    cache: bool = True,
    workers: int = 2,
    progress: bool = True,
    **kwargs: Any,
) -> Frontier:
    """What the plans of `jaxmem.fit` need and cost, from the fastest one to the least memory.

    Each point is a compilation.  The answer to "which budget is worth it?", where `fit`
    answers "what is fastest within this one?".

    Args:
      step: as for `jaxmem.fit`.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      target: as for `jaxmem.fit`.
      points: how many plans to compile, at least 2; fewer if the step has no more.
      donate_argnums: as for `jax.jit`.
      static_argnums: as for `jax.jit`.
      allow_offload: whether values may be sent to host memory.
      cost: as for `jaxmem.fit`.
      compiler_options: passed to the compiler.
      timeout: seconds after which one compile for a named target is stopped.
      cache: whether to read and write compiled figures on disk (for named targets).
      workers: how many plans may be compiled at once for a named target.
      progress: whether to say on stderr what each compile came to.
      **kwargs: arrays, passed on to `step` by name.

    Raises:
      ValueError: nothing in the step can be planned (see `jaxmem.fit`); `points` is below 2.
      jaxmem.CompileError: as for `jaxmem.fit`.

    Warns:
      jaxmem.JaxmemWarning: plans are missing, for which the compiler failed.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.remat_auto
    ... def model(weights, h):
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()
    >>> weights, h = (jax.ShapeDtypeStruct(s, "float32") for s in ((64, 16, 16), (4096, 16)))
    >>> found = jaxmem.frontier(jax.grad(model), weights, h, points=3, progress=False)
    >>> most, middle, least = found.points
    >>> most.required_bytes > middle.required_bytes > least.required_bytes
    True
    >>> most.matmul_flops < least.matmul_flops
    True
    """
    check_flags(allow_offload=allow_offload, cache=cache, progress=progress)
    points, workers = check_positive("points", points), check_positive("workers", workers)
    if points < 2:
        raise ValueError(
            f"frontier: points={points}, but its two ends are two points; for a single plan use "
            "jaxmem.fit with a budget"
        )
    ask = CompileRequest(
        step, args, kwargs, target, donate_argnums, static_argnums, compiler_options, timeout, cache
    )
    reports: dict[int, MemoryReport] = {}
    predicted: dict[int, int] = {}
    failed: list[targets.CompileError] = []
    with Progress(progress, points) as say:
        problem = build_problem(ask, allow_offload, cost)
        chosen = spread(problem.predicted, points)
        say.planned(len(chosen), "frontier")
        order = _ends_first(chosen)
        compiled = _compiled(problem, ask, order, workers, failed)
        for number, (candidate, report) in enumerate(compiled, 1):
            seen = {other: report.required_bytes for other, report in reports.items()}
            predicted[candidate] = problem.prediction(candidate, seen)
            reports[candidate] = report
            needs = size(reports[candidate].required_bytes)
            expected = size(predicted[candidate])
            say(f"frontier: {number} of {len(chosen)} needs {needs} (predicted {expected})")
    tell_of_failures("frontier", failed, len(reports), "another number of points has other plans")
    chosen = [candidate for candidate in chosen if candidate in reports]
    # Where the compiler recomputes more by itself, the plan's seconds are not the program's.
    costs = [
        (
            report.required_bytes,
            math.inf if rematerialised(report) else problem.front[candidate].seconds,
        )
        for candidate, report in ((candidate, reports[candidate]) for candidate in chosen)
    ]
    return Frontier(
        tuple(
            FrontierPoint(
                predicted_bytes=predicted[candidate],
                extra_seconds=problem.front[candidate].seconds,
                pareto=not any(_beats(other, mine) for other in costs),
                plan=problem.plan(candidate),
                report=reports[candidate],
            )
            for candidate, mine in zip(chosen, costs, strict=True)
        )
    )


def spread(sizes: Sequence[int], points: int) -> list[int]:
    """Places of so many sizes, evenly spread by factors, both ends among them.

    Args:
      sizes: falling.

    >>> spread([800, 790, 780, 400, 200, 190, 100], 4)
    [0, 3, 4, 6]
    >>> spread([800, 100], 4)
    [0, 1]
    """
    if len(sizes) <= points:
        return list(range(len(sizes)))
    logs = [math.log(max(size, 1)) for size in sizes]
    last = len(sizes) - 1
    taken = {0, last}
    for k in range(1, points - 1):
        want = logs[0] + (logs[last] - logs[0]) * k / (points - 1)
        free = (place for place in range(last) if place not in taken)
        taken.add(min(free, key=lambda place: abs(logs[place] - want)))
    return sorted(taken)


# ---------------------------------------------------------------- implementation


def _ends_first(chosen: Sequence[int]) -> list[int]:
    """The ends, then the middle of the widest gap, and so on: later ones are predicted best."""
    order = [0, len(chosen) - 1] if len(chosen) > 1 else [0]
    while len(order) < len(chosen):
        done = sorted(order)
        low, high = max(itertools.pairwise(done), key=lambda gap: gap[1] - gap[0])
        order.append((low + high) // 2)
    return [chosen[place] for place in order]


def _compiled(
    problem: StepProblem,
    ask: CompileRequest,
    order: Sequence[int],
    workers: int,
    failed: list["targets.CompileError"],
) -> Iterator[tuple[int, MemoryReport]]:
    """Reports of candidates, in this order; while one is compiled the next ones are begun.

    Args:
      failed: is given why the compiler failed for candidates, which are passed over.
    """
    left = list(order)
    begun: dict[int, Begun] = {}

    def begin() -> None:
        begun[left[0]] = problem.begin(ask, left[0])
        left.pop(0)

    try:
        for candidate in order:
            if candidate not in begun:
                begin()
            while left and len(begun) < workers and not begun[candidate].answered(0):
                begin()
            try:
                report = begun.pop(candidate).result()
            except targets.CompileError as error:
                if not error.is_defect:
                    raise
                failed.append(error)
            else:
                yield candidate, report
    finally:
        for rest in begun.values():
            rest.stop()


def _beats(other: tuple[int, float], mine: tuple[int, float]) -> bool:
    return other != mine and all(a <= b for a, b in zip(other, mine, strict=True))


def _cells(point: FrontierPoint) -> list[str]:
    overhead = point.recompute_overhead
    off = point.predicted_bytes / point.required_bytes - 1
    return [
        size(point.required_bytes),
        size(point.temp_bytes),
        size(point.predicted_bytes),
        change(off),
        "?" if overhead is None else change(overhead),
        duration(point.extra_seconds),
        {True: "fits", False: "too large", None: "?"}[point.report.fits],
        "" if point.pareto else "dominated",
    ]
