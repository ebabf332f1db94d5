"""Compilation for experiments: options for programs that are not run, a plan of `fit` as a row."""

import dataclasses
from typing import Any

import jaxmem
from jaxmem.fitting.compile_request import CompileRequest

# Bytes and matmul FLOPs are final before machine code is generated, which is slowest on a CPU.
QUICK = {"xla_backend_optimization_level": 0}

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Planned:
    """The result of `fit`.

    Attributes:
      report: of the plan, or of the least that was reached where none is within the budget.
      fits: whether one is.
      predicted_bytes, compiles: required bytes as predicted, and how often the compiler was asked;
        None where none is.
    """

    report: jaxmem.MemoryReport
    fits: bool
    predicted_bytes: int | None = None
    compiles: int | None = None


# ---------------------------------------------------------------- API


def compiling(target: str, timeout: float, small: bool) -> dict[str, Any]:
    """Keywords for what compiles one program; `small` ones are only to be seen to work."""
    quick = QUICK if small else None
    return {"target": target, "timeout": timeout, "compiler_options": quick}


def request(job: jaxmem.Job, target: str, timeout: float) -> CompileRequest:
    """A job and its target, as `fit` asks the compiler."""
    return CompileRequest(
        job.step, job.args, dict(job.kwargs), target, job.donate_argnums, (), None, timeout, True
    )


def planned(job: jaxmem.Job, budget: int, **options: Any) -> Planned:
    """A job within a budget; `options` are those of `jaxmem.fit`."""
    try:
        fitted = jaxmem.fit(
            job.step, *job.args, budget=budget, donate_argnums=job.donate_argnums, progress=False,
            **options,
        )  # fmt: skip
    except jaxmem.BudgetError as error:
        return Planned(error.report, fits=False)
    return Planned(fitted.report, True, fitted.explain().predicted_bytes, fitted.compiles)


def is_recomputed_by_compiler(report: jaxmem.MemoryReport) -> bool:
    """Whether the compiler recomputes by itself as well."""
    return any(lint.kind == "compiler-remat" for lint in report.lints)
