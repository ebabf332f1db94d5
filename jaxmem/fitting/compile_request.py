"""A step, its arguments, and what it is to be compiled for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem import targets
from jaxmem.compile.program import Program
from jaxmem.errors import JaxmemWarning, warn
from jaxmem.fitting.step_plan import StepPlan, following
from jaxmem.report.memory import PendingReport
from jaxmem.report.report import MemoryReport


def rematerialised(report: MemoryReport) -> bool:
    """Whether the compiler itself recomputes, more than it was asked to: it lacks memory."""
    return any(lint.kind == "compiler-remat" for lint in report.lints)


def tell_of_failures(
    who: str, failed: Sequence["targets.CompileError"], compiled: int, remedy: str
) -> None:
    """Warn of plans for which the compiler failed, and which were passed over.

    Args:
      who: asked for them.
      failed: why, of each.
      compiled: how many plans it did not fail for.
      remedy: what to do.

    Raises:
      CompileError: it failed for all.
    """
    if not failed:
        return
    if not compiled:
        raise failed[0]
    why = str(failed[0]).splitlines()[0]
    warn(
        f"{who} passed over {len(failed)} of {len(failed) + compiled} plans, for which the "
        f"compiler failed ({why}); {remedy}",
        JaxmemWarning,
    )


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """A step and its arguments, and for what it is to be compiled."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: "str | targets.Target"
    donate_argnums: int | Sequence[int]
    static_argnums: int | Sequence[int]
    compiler_options: dict[str, Any] | None
    timeout: float
    cache: bool

    @property
    def accelerator(self) -> "targets.Target | None":
        """What it is for, None for the attached backend."""
        return None if self.target == "local" else targets.target(self.target)

    def program(self) -> Program:
        absent = self.accelerator
        if absent is not None:
            targets.warm_up(absent)
        platform = None if absent is None else absent.platform
        return Program(
            self.step, self.args, self.kwargs, self.donate_argnums, self.static_argnums, platform
        )

    def begin(self, plan: StepPlan) -> "Begun":
        """The step under a plan, traced, and being compiled if that is for a named target."""
        with following(plan):
            return Begun(
                plan,
                PendingReport(
                    fn=self.step,
                    args=self.args,
                    kwargs=self.kwargs,
                    target=self.target,
                    donate_argnums=self.donate_argnums,
                    static_argnums=self.static_argnums,
                    compiler_options=self.compiler_options,
                    timeout=self.timeout,
                    cache=self.cache,
                ),
            )


@dataclasses.dataclass(frozen=True)
class Begun:
    """A step under a plan whose report is on its way."""

    plan: StepPlan
    pending: PendingReport

    def answered(self, seconds: float) -> bool:
        """Whether `result` need not wait for a compiler, after waiting for at most so long."""
        return self.pending.answered(seconds)

    def stop(self) -> None:
        """End the compiler: nobody wants the report."""
        self.pending.stop()

    def result(self) -> MemoryReport:
        """The report; asked for once."""
        with following(self.plan):
            return self.pending.result()
