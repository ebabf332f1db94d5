"""`fit`: the fastest plan with which a whole step fits a memory budget.

The step is traced once to see what can be planned.  Solvers turn that into a Pareto front of
plans, from everything kept down to the least memory that any plan needs; the front does
not depend on the budget.  Then the compiler of the target is asked for the real bytes of a
few candidates, and the fastest one that fits is the answer, with the compiled program's report as
its certificate.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jaxmem import targets
from jaxmem._util.text import parse_size, size
from jaxmem.errors import (
    BudgetError,
    JaxmemWarning,
    check_flags,
    check_positive,
    check_seconds,
    warn,
)
from jaxmem.fitting.compile_request import (
    Begun,
    CompileRequest,
    rematerialised,
    tell_of_failures,
)
from jaxmem.fitting.fitted import Fitted
from jaxmem.fitting.progress import Progress
from jaxmem.fitting.shortfall import shortfall
from jaxmem.fitting.step_problem import BY_LAYER, Cost, StepProblem
from jaxmem.fitting.ways import build_problem
from jaxmem.report.report import MemoryReport
from jaxmem.solve.search import Searched, SearchResult, expected, search, upcoming
from jaxmem.solve.steps import StepCandidate
from jaxmem.targets import CompileError


def fit(
    step: Callable[..., Any],
    *args: Any,
    budget: int | str,
    target: "str | targets.Target" = "local",
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    allow_offload: bool = False,
    cost: Cost = "roofline",
    max_compiles: int = 8,
    max_seconds: float | None = None,
    compiler_options: dict[str, Any] | None = None,
    timeout: float = 900.0,
    cache: bool = True,
    workers: int = 2,
    progress: bool = True,
    **kwargs: Any,
) -> Fitted:
    """The fastest plan for the decorated stacks of a step with which it fits a memory budget.

    All regions under a decorator of jaxmem are planned (`jaxmem.remat_auto`, or any other,
    whose policy then holds only where no plan does): which values of each layer are kept,
    which are recomputed, how stacks are cut.  The budget is for the whole device, and
    kept if the compiled program's `required_bytes` is within it.  The larger the budget, the
    faster the plan.  Regions that compute the same (one block, called again and again) have
    the same plan: decorate what calls them to have each planned by itself.  Scans inside of layers
    that a Python loop calls (attention over chunks, recurrent layers) are planned both as stacks
    and as parts of these layers, and the better plan is taken.  In code without a scan
    max-poolings are reversed, on GPUs, by kernels that need less than XLA's own: to the same
    numbers.

    Args:
      step: a function that differentiates its stacks: a train step, a value_and_grad.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
      budget: bytes, or a text such as "40GiB".
      target: as for `jaxmem.memory_report`; "local" is the attached backend.
      donate_argnums: as for `jax.jit`.
      static_argnums: as for `jax.jit`.
      allow_offload: whether values may be sent to host memory.
      cost: what is made least: seconds by a "roofline" of the target, seconds of kernels
        "measured" on the attached device, or "flops", above all those of matrix products.  To
        keep takes time, too, where loops read and write it: for the least time less may be kept
        than there is room for.  For seconds, a plan that recomputes layers of code without a scan
        whole is compiled as well, if there is one that may be as fast, and the faster one by the
        roofline of what was compiled is taken: where single values are kept compilers fuse less.
      max_compiles: how often the step may be compiled; where fewer do not suffice to see the next
        faster plan fail, the answer may be slower than need be, and `.explain()` says so.
      max_seconds: after so many no further plan is compiled once one fits, and the best so far is
        the answer.
      compiler_options: passed to the compiler.
      timeout: seconds after which one compile for a named target is stopped.
      cache: whether to read and write compiled figures on disk (for named targets).
      workers: how many plans may be compiled at once for a named target: where one takes long, the
        plans that will likely be asked for next are begun meanwhile.  The answer is the same.
      progress: whether to say on stderr what each compile came to.
      **kwargs: arrays, passed on to `step` by name.

    Returns:
      The step under its plan (`.step`, or call it), `.plan` to save, `.report`, `.explain()`.

    Raises:
      jaxmem.BudgetError: no plan is within the budget; the message says the least that was
        reached, what fills it, and what would help.
      ValueError: nothing in the step is decorated, or nothing decorated is differentiated; the
        budget is no size.
      jaxmem.CompileError: as for `jaxmem.memory_report`, as long as no plan is known to fit; of a
        compiler that fails at something of its own, if it does so for every plan that is asked for.

    Warns:
      jaxmem.JaxmemWarning: the plan is within the budget, and the device has less; or the compiler
        failed for other plans, which were passed over.
      jaxmem.NoStackWarning: what is decorated is one layer of a scan: all get the same plan.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.remat_auto
    ... def model(weights, h):
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()
    >>> arrays = jnp.ones((64, 16, 16)), jnp.ones((4096, 16))
    >>> fitted = jaxmem.fit(jax.grad(model), *arrays, budget="6MiB", progress=False)
    >>> fitted.report.required_bytes <= 6 * 2**20
    True
    >>> gradient = fitted.step(*arrays)
    """
    if not callable(step):
        raise TypeError(
            f"fit takes a step and its arguments, got an object of type {type(step).__name__} as "
            "the step; pass fit(step, *args, budget=...), not fit(step(*args))"
        )
    check_flags(allow_offload=allow_offload, cache=cache, progress=progress)
    budget = parse_size(budget, "budget")
    max_compiles = check_positive("max_compiles", max_compiles)
    workers = check_positive("workers", workers)
    if max_seconds is not None:
        check_seconds("max_seconds", max_seconds)
    ask = CompileRequest(
        step, args, kwargs, target, donate_argnums, static_argnums, compiler_options, timeout, cache
    )
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    with Progress(progress, max_compiles) as say:
        say.doing("tracing the step, and planning what is decorated in it")
        built = build_problem(ask, allow_offload, cost)
        problem = built.in_full()
        apart = [problem.front.index(candidate) for candidate in built.front]
        say.planned(max_compiles, f"budget {size(budget)}")
        with _Tried(ask, budget, say, deadline, workers, cost != "flops") as tried:
            try:
                closed = _searched(problem, apart, tried, budget, max_compiles)
            except _OutOfTime:
                closed = False
    best, seen = tried.best(problem), tried.seen(problem)
    tell_of_failures(
        "fit", [*tried.refused.values()], len(tried.reports), "another budget asks for other plans"
    )
    if best is None:
        least = min(seen, key=lambda candidate: seen[candidate])
        report = tried.report(problem, least)
        text = shortfall(report, budget, problem, least, ask, allow_offload)
        raise BudgetError(text, budget, seen[least], report)
    report = tried.report(problem, best)
    if report.fits is False:
        warn(
            f"fit: the plan is within the budget of {size(budget)}, which is more than the device "
            f"has: {report.verdict}",
            JaxmemWarning,
        )
    return Fitted(
        problem.program.jitted,
        problem.plan(best),
        report,
        problem.planned(best),
        budget,
        problem.prediction(best, seen),
        closed,
        len(tried.reports) + len(tried.refused),
    )


# ---------------------------------------------------------------- implementation

# Seconds after which tracing a plan and compiling it take long.
_PATIENCE = 4.0
# So much of what a budget leaves for temporaries may stay unused, unless a plan that is expected to
# fit spares more than so much of a step's time, or of its matrix products where these are counted.
_UNUSED = 0.02
_SPARED = 0.002
_SPARED_FLOPS = 0.001
# So many plans of whole layers are asked for, till one of them fits; none that is predicted to take
# so much of a step's time more, if predictions tell these from others.
_CHALLENGES = 2
_DOUBT = 0.03


class _OutOfTime(Exception):
    """The seconds that a search may take are over, and a plan is known that fits."""


class _Tried:
    """What the compiler says of plans of one step, each asked for once; a context manager.

    Attributes:
      by_time: whether the fastest is wanted, and not the one with the fewest FLOPs.
      reports: in the order in which they were asked for.
      refused: of plans for which the compiler failed, why.
    """

    def __init__(
        self,
        ask: CompileRequest,
        budget: int,
        say: Progress,
        deadline: float | None,
        workers: int,
        by_time: bool,
    ) -> None:
        self.reports: dict[StepCandidate, MemoryReport] = {}
        self.refused: dict[StepCandidate, CompileError] = {}
        self._answers: dict[StepCandidate, int] = {}
        self._begun: dict[StepCandidate, Begun] = {}
        self._ask, self._budget, self._say, self._deadline = ask, budget, say, deadline
        self.by_time, self._workers = by_time, workers

    def __enter__(self) -> "_Tried":
        return self

    def __exit__(self, *exception: Any) -> None:
        for begun in self._begun.values():
            begun.stop()

    @property
    def is_timed(self) -> bool:
        """Whether the fastest is wanted, and compiled programs can be told apart by their seconds.

        Until one is compiled they are taken to be.
        """
        return self.by_time and all(map(_seconds, self.reports.values()))

    def run(self, problem: StepProblem, searched: Searched) -> SearchResult:
        """A search of this front, answered by the compiler."""
        return searched(lambda candidate: self.compiled(problem, candidate, searched))

    def report(self, problem: StepProblem, candidate: int) -> MemoryReport:
        return self.reports[problem.front[candidate]]

    def seen(self, problem: StepProblem) -> dict[int, int]:
        """Bytes of what was compiled of this front, in the order in which it was."""
        return _by_place(
            problem, {one: report.required_bytes for one, report in self.reports.items()}
        )

    def best(self, problem: StepProblem) -> int | None:
        """The fastest that fits, or one that fits by the compiler's help with less FLOPs.

        Of several kinds the compiled programs are compared, as predictions cannot be.
        """
        fits = [k for k, size in self.seen(problem).items() if size <= self._budget]
        helped = {k for k in fits if rematerialised(self.report(problem, k))}
        fastest: dict[str, int] = {}
        for k in sorted(set(fits) - helped):
            fastest.setdefault(problem.kinds[k], k)
        several = [*fastest.values()]
        if self.by_time:
            several.sort(key=lambda k: _seconds(self.report(problem, k)))
        known = [*several[:1], *helped]
        return min(
            known, key=lambda k: (self.report(problem, k).matmul_flops or 0, k), default=None
        )

    def compiled(self, problem: StepProblem, candidate: int, searched: Searched) -> int:
        """Bytes of a candidate, as a search is told.

        Once a plan is known to fit, no error of a compiler loses it.

        Args:
          searched: the search, whose next questions may be compiled meanwhile.
        """
        late = self._deadline is not None and time.monotonic() > self._deadline
        if late and self.best(problem) is not None:
            raise _OutOfTime
        budget, what = self._budget, f"plan {candidate + 1} of {len(problem.front)}"
        self._say.doing(f"compiling {what}")
        own = problem.front[candidate]
        try:
            report = self._reported(problem, candidate, searched)
        except CompileError as error:
            if self.best(problem) is None and not error.is_defect:
                raise
            self._begun.pop(own, None)
            self.refused[own] = error
            self._say(f"fit: {what} is passed over: {str(error).splitlines()[0]}")
            # As one that does not fit, from which next to nothing follows for others.
            self._answers[own] = max(problem.predicted[candidate], budget + 1)
            return self._answers[own]
        self.reports[own] = report
        required, told = report.required_bytes, self._told(report)
        verdict = "fits" if told <= budget else f"{size(required - budget)} too much"
        if required <= budget < told:
            verdict = "fits, as the compiler itself computes more of it again"
        self._say(
            f"fit: {what} needs {size(required)} "
            f"(predicted {size(problem.predicted[candidate])}): {verdict}"
        )
        self._answers[own] = told
        return told

    # ------------------------------------------------------------ implementation

    def _told(self, report: MemoryReport) -> int:
        """Bytes as a search is told: what fits by the compiler's help alone is too large as it is.

        A search would otherwise take it for the fastest.
        """
        needed = report.required_bytes
        return max(needed, self._budget + 1) if rematerialised(report) else needed

    def _reported(self, problem: StepProblem, candidate: int, searched: Searched) -> MemoryReport:
        own, start = problem.front[candidate], time.monotonic()
        if own not in self._begun:
            self._begun[own] = problem.begin(self._ask, candidate)
        # What takes long to trace takes long to compile.
        if not self._begun[own].answered(max(_PATIENCE - (time.monotonic() - start), 0.0)):
            self._look_ahead(problem, candidate, searched)
        report = self._begun[own].result()
        del self._begun[own]  # only now: all that are begun are stopped if anything is raised
        return report

    def _look_ahead(self, problem: StepProblem, candidate: int, searched: Searched) -> None:
        """Have what will likely be asked for next compiled meanwhile, and nothing else."""
        likely = [candidate]
        if self._workers > 1:
            told = _by_place(problem, self._answers)
            likely = upcoming(searched, problem.prediction, self._budget, told, self._workers)
        wanted = {problem.front[k]: k for k in likely}
        for one in self._begun.keys() - wanted.keys():
            self._begun.pop(one).stop()
        for one, k in wanted.items():
            if one not in self._begun:
                with suppress(CompileError):  # told of if it is asked for
                    self._begun[one] = problem.begin(self._ask, k)


def _by_place(problem: StepProblem, sizes: Mapping[StepCandidate, int]) -> dict[int, int]:
    """Bytes of candidates, in their order, by the places of those that are on this front."""
    places = {one: k for k, one in enumerate(problem.front)}
    return {places[one]: bytes for one, bytes in sizes.items() if one in places}


def _seconds(report: MemoryReport) -> float:
    """Of a compiled step; 0 where the speeds of what runs it are not known."""
    return (report.estimated_seconds or 0.0) + (report.communication_seconds or 0.0)


def _searched(
    problem: StepProblem, apart: Sequence[int], tried: _Tried, budget: int, most: int
) -> bool:
    """Ask the compiler; returns whether the best plan is seen to be the best.

    Args:
      apart: places of plans that differ well.
    """
    predicted, kinds = problem.predicted, problem.kinds
    enough = round(_UNUSED * max(budget - problem.fixed, 0))
    worth = (_SPARED if tried.by_time else _SPARED_FLOPS) * problem.plain_seconds

    def searched(compiled: Callable[[int], int]) -> SearchResult:
        found = search(
            predicted,
            budget,
            compiled,
            most,
            enough=enough,
            seconds=[candidate.seconds for candidate in problem.front],
            worth=worth,
            kinds=kinds,
            apart=apart,
        )
        if found.candidate and not kinds[found.candidate].startswith(BY_LAYER) and tried.is_timed:
            challenge(found.candidate, found.seen, compiled)
        return found

    def challenge(best: int, seen: Mapping[int, int], compiled: Callable[[int], int]) -> None:
        """Ask for the best plan of whole layers as well, if it may be as fast.

        Of layers that keep single values the time is predicted from their operations one by one.
        What compilers make of them is another matter: where products pad what they read, each array
        that goes through a barrier is cut out of the padded one, and padded again behind it.
        Layers that are recomputed whole are compiled as they stand.
        """
        told, asked = {**seen}, 0
        doubt = _DOUBT * problem.plain_seconds if problem.tells_kinds else math.inf
        most_seconds = problem.front[best].seconds + doubt
        for k in (k for k, kind in enumerate(kinds) if kind.startswith(BY_LAYER)):
            if k not in told:
                likely = expected(k, predicted, told, kinds) <= budget - enough // 2
                if not likely or asked == _CHALLENGES or len(told) >= most:
                    continue
                if problem.front[k].seconds > most_seconds:
                    return
                told[k], asked = compiled(k), asked + 1
            if told[k] <= budget:
                return

    return tried.run(problem, searched).closed
