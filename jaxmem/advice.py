"""What to do about a program that does not fit: the next policy that would, found by compiling."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from jaxmem import find, targets
from jaxmem.errors import JaxmemWarning
from jaxmem.policies import parse
from jaxmem.program import Program
from jaxmem.report import MemoryReport, Suggestion
from jaxmem.text import size

# From the least recomputation to the most.
_LADDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dots", {}),
    ("full", {}),
    ("sqrt", {}),
    ("sqrt", {"levels": 2}),
    ("revolve", {}),
    ("offload", {}),
)

Again = Callable[[str, dict[str, Any]], MemoryReport]

# ---------------------------------------------------------------- API


def advise(report: MemoryReport, program: Program, again: Again | None) -> MemoryReport:
    """The report of a program that does not fit, with what to do about it.

    Args:
      report: of the program as it is.
      program: what was traced.
      again: compiles it with every decorated stack under another policy; None to
        try nothing.
    """
    if _others(report) > (report.capacity_bytes or 0):
        return dataclasses.replace(report, advice=_ALONE)
    if not program.record.regions:
        return dataclasses.replace(report, advice=where_to_decorate(program))
    if again is None:
        return dataclasses.replace(report, advice="")
    used = {str(policy) for policy, _ in program.record.plans}
    best: MemoryReport | None = None
    for name, options in _LADDER:
        if used == {str(parse(name, **options))}:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", JaxmemWarning)
                tried = again(name, options)
        except (targets.CompileError, ValueError):
            continue  # one policy that cannot be had is no reason not to try the next
        written = _written(name, options)
        if tried.fits:
            return dataclasses.replace(
                report,
                suggestion=Suggestion(written, tried.required_bytes),
                advice=f"{written} would, with {size(tried.required_bytes)}"
                + (f" ({needed})" if (needed := tried.allowance) else ""),
            )
        if best is None or tried.required_bytes < best.required_bytes:
            best = dataclasses.replace(tried, advice=written)
    return dataclasses.replace(report, advice=_nothing_fits(report, best))


# ---------------------------------------------------------------- implementation


_ALONE = (
    "arguments and results alone are too large, which no policy changes: donate them, shard them, "
    "or take a smaller dtype"
)


def _others(report: MemoryReport) -> int:
    """What is no temporary."""
    return report.argument_bytes + report.output_bytes - report.alias_bytes


def _written(name: str, options: dict[str, Any]) -> str:
    inner = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"@jaxmem.remat_{name}" + (f"({inner})" if inner else "")


def _nothing_fits(report: MemoryReport, best: MemoryReport | None) -> str:
    what = "a smaller batch, accumulation of gradients or more devices are left"
    if best is None or best.required_bytes >= report.required_bytes:
        return f"no other policy needs less; {what}"
    return (
        f"the least of all policies is {best.advice} with {size(best.required_bytes)}, still too "
        f"much; {what}"
    )


def where_to_decorate(program: Program, decorator: str = "remat_sqrt") -> str:
    """Where in the user's code a decorator belongs."""
    stacks = [info for info, _ in find.find(program.jaxpr).stacks]
    if not stacks and decorator == "remat_auto":
        return (
            "decorate the model, a function or a module, with @jaxmem.remat_auto: the best plans "
            "are those of scans over layers, but code without a scan is planned as well"
        )
    if not stacks:
        return (
            "no layer stack was found; scan over the layers (jax.lax.scan, nn.scan, nnx.scan, "
            f"jaxmem.scan) and decorate what scans with @jaxmem.{decorator}"
        )
    longest = max(stacks, key=lambda info: info.length)
    return (
        f"decorate what scans over the {longest.length} layers ({longest.source}) with "
        f"@jaxmem.{decorator}"
    )
