"""Advice for a program that does not fit: the next policy that would fit, found by compiling."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from jaxmem import targets
from jaxmem._util.text import size
from jaxmem.compile.program import Program
from jaxmem.errors import JaxmemWarning
from jaxmem.policies import parse
from jaxmem.report.report import MemoryReport, Suggestion
from jaxmem.trace import find

# From the least recomputation to the most.
_CANDIDATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dots", {}),
    ("full", {}),
    ("sqrt", {}),
    ("sqrt", {"levels": 2}),
    ("revolve", {}),
    ("offload", {}),
)

CompileUnder = Callable[[str, dict[str, Any]], MemoryReport]

# ---------------------------------------------------------------- API


def advise(
    report: MemoryReport, program: Program, compile_under: CompileUnder | None
) -> MemoryReport:
    """The report of a program that does not fit, with what to do about it.

    Args:
      report: of the program as it is.
      program: what was traced.
      compile_under: compiles it with every decorated stack under another policy; None to
        try nothing.
    """
    if _others(report) > (report.capacity_bytes or 0):
        return dataclasses.replace(report, advice=_ALONE)
    if not program.record.regions:
        return dataclasses.replace(report, advice=where_to_decorate(program))
    if compile_under is None:
        return dataclasses.replace(report, advice="")
    used = {str(policy) for policy, _ in program.record.plans}
    best: MemoryReport | None = None
    for name, options in _CANDIDATES:
        if used == {str(parse(name, **options))}:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", JaxmemWarning)
                tried = compile_under(name, options)
        except (targets.CompileError, ValueError):
            continue  # a policy that cannot be applied is no reason not to try the next
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
    """Bytes of everything except temporaries."""
    return report.argument_bytes + report.output_bytes - report.alias_bytes


def _written(name: str, options: dict[str, Any]) -> str:
    inner = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"@jaxmem.remat_{name}" + (f"({inner})" if inner else "")


def _nothing_fits(report: MemoryReport, best: MemoryReport | None) -> str:
    what = "what remains is a smaller batch, gradient accumulation or more devices"
    if best is None or best.required_bytes >= report.required_bytes:
        return f"no other policy needs less; {what}"
    return (
        f"{best.advice} needs the least of all policies, {size(best.required_bytes)}, still too "
        f"much; {what}"
    )


def where_to_decorate(program: Program, decorator: str = "remat_sqrt") -> str:
    """Where in the user's code to put a decorator."""
    stacks = [info for info, _ in find.find(program.jaxpr).stacks]
    if not stacks and decorator == "remat_auto":
        return (
            "decorate the model, a function or a module, with @jaxmem.remat_auto: the best plans "
            "are those of scans over layers, but code without a scan is planned as well"
        )
    if not stacks:
        return (
            "no layer stack was found; scan over the layers (jax.lax.scan, nn.scan, nnx.scan, "
            f"jaxmem.scan) and decorate the code that scans with @jaxmem.{decorator}"
        )
    longest = max(stacks, key=lambda info: info.length)
    return (
        f"decorate the code that scans over the {longest.length} layers ({longest.source}) with "
        f"@jaxmem.{decorator}"
    )
