"""`fit`: the least recomputation with which a whole step fits a memory budget.

The step is traced once to see what can be planned.  Solvers turn that into a Pareto front of
plans, from everything kept down to the least memory that any plan needs; the front does
not depend on the budget.  Then the compiler of the target is asked for the real bytes of a
few candidates, and the fastest one that fits is the answer, with the compiled program's report as
its certificate.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem import targets
from jaxmem._util.text import parse_size, size
from jaxmem.errors import BudgetError, JaxmemWarning, check_flags, check_positive, warn
from jaxmem.fitting.compile_request import CompileRequest, rematerialised
from jaxmem.fitting.fitted import Fitted
from jaxmem.fitting.progress import Progress
from jaxmem.fitting.shortfall import shortfall
from jaxmem.fitting.step_problem import Cost, build_problem
from jaxmem.report.report import MemoryReport
from jaxmem.solve.search import search


def fit(
    step: Callable[..., Any],
    *args: Any,
    budget: int | str,
    target: "str | targets.Target" = "local",
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    allow_offload: bool = False,
    cost: Cost = "roofline",
    max_compiles: int = 6,
    compiler_options: dict[str, Any] | None = None,
    timeout: float = 900.0,
    cache: bool = True,
    progress: bool = True,
    **kwargs: Any,
) -> Fitted:
    """The fastest plan for the decorated stacks of a step with which it fits a memory budget.

    All regions under a decorator of jaxmem are planned (`jaxmem.remat_auto`, or any other,
    whose policy then holds only where no plan does): which values of each layer are kept,
    which are recomputed, how stacks are cut.  The budget is for the whole device, and
    kept if the compiled program's `required_bytes` is within it.  The larger the budget, the
    less is recomputed.  Regions that compute the same (one block, called again and again) have
    the same plan: decorate what calls them to have each planned by itself.  In code without a scan
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
        "measured" on the attached device, or "flops" of matrix products alone.
      max_compiles: how often the step may be compiled; where fewer do not suffice to see the next
        faster plan fail, the answer may be slower than need be, and `.explain()` says so.
      compiler_options: passed to the compiler.
      timeout: seconds after which one compile for a named target is stopped.
      cache: whether to read and write compiled figures on disk (for named targets).
      progress: whether to say on stderr what each compile came to.
      **kwargs: arrays, passed on to `step` by name.

    Returns:
      The step under its plan (`.step`, or call it), `.plan` to save, `.report`, `.explain()`.

    Raises:
      jaxmem.BudgetError: no plan is within the budget; the message says the least that was
        reached, what fills it, and what would help.
      ValueError: nothing in the step is decorated, or nothing decorated is differentiated; the
        budget is no size.
      jaxmem.CompileError: as for `jaxmem.memory_report`.

    Warns:
      jaxmem.JaxmemWarning: the plan is within the budget, and the device has less.
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
    ask = CompileRequest(
        step, args, kwargs, target, donate_argnums, static_argnums, compiler_options, timeout, cache
    )
    reports: dict[int, MemoryReport] = {}
    with Progress(progress, max_compiles) as say:
        problem = build_problem(ask, allow_offload, cost)
        say.planned(max_compiles, f"budget {size(budget)}")

        def compiled(candidate: int) -> int:
            reports[candidate] = problem.report(ask, candidate)
            needed = reports[candidate].required_bytes
            verdict = "fits" if needed <= budget else f"{size(needed - budget)} too much"
            if needed <= budget and rematerialised(reports[candidate]):
                verdict = "fits, as the compiler itself computes more of it again"
                needed = budget + 1  # as it was asked for it is too large
            say(
                f"fit: plan {candidate + 1} of {len(problem.front)} needs {size(needed)} "
                f"(predicted {size(problem.predicted[candidate])}): {verdict}"
            )
            return needed

        found = search(problem.predicted, budget, compiled, max_compiles)
    seen = {candidate: reports[candidate].required_bytes for candidate in found.seen}
    best = _best(found.candidate, reports, budget)
    if best is None:
        least = min(seen, key=lambda candidate: seen[candidate])
        text = shortfall(reports[least], budget, problem, least, ask, allow_offload)
        raise BudgetError(text, budget, seen[least], reports[least])
    if reports[best].fits is False:
        warn(
            f"fit: the plan is within the budget of {size(budget)}, which is more than the device "
            f"has: {reports[best].verdict}",
            JaxmemWarning,
        )
    return Fitted(
        problem.program.jitted,
        problem.plan(best),
        reports[best],
        problem.planned(best),
        budget,
        problem.prediction(best, seen),
        found.closed,
        len(seen),
    )


# ---------------------------------------------------------------- implementation


def _best(found: int | None, reports: dict[int, MemoryReport], budget: int) -> int | None:
    """The candidate found, or one that fits thanks to the compiler, if that has fewer FLOPs."""
    others = [
        candidate
        for candidate, report in reports.items()
        if report.required_bytes <= budget and rematerialised(report)
    ]
    known = others if found is None else [found, *others]
    return min(
        known, key=lambda candidate: (reports[candidate].matmul_flops or 0, candidate), default=None
    )
