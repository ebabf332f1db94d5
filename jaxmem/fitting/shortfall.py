"""Why no plan is within a budget, and what would help, in words with numbers."""

import itertools
import math
from collections import Counter
from collections.abc import Collection
from typing import Any

import jax

from jaxmem._util.text import size
from jaxmem.fitting.regions import UnrolledRegion
from jaxmem.policies import PipelineChoice, PipelineNote
from jaxmem.report.lints import CPU_MERGES_RECOMPUTATION, where_it_does_not_fit
from jaxmem.report.report import MemoryReport


def shortfall(
    report: MemoryReport, budget: int, problem: Any, candidate: int, ask: Any, offload: bool
) -> str:
    """The message of a `BudgetError`.

    Args:
      report: of the least that was compiled.
      problem: the `Problem` that was solved, `candidate` that least plan of it.
      ask: the `CompileRequest`.
      offload: whether the host was allowed.
    """
    fixed = report.argument_bytes + report.output_bytes - report.alias_bytes
    gradients, kept = _gradients(problem.variant(candidate)), problem.front[candidate].kept_bytes
    working = max(problem.front[candidate].bytes - kept, 0)
    rest = report.temp_bytes - kept - working - gradients
    lines = [
        f"no plan brings the step within {size(budget)}: the least that was reached is "
        f"{size(report.required_bytes)}, {size(report.required_bytes - budget)} too much.  It is "
        "made of",
        f"  {size(report.argument_bytes):>10}  arguments{_largest(report)}",
    ]
    if report.output_bytes - report.alias_bytes > 0:
        lines.append(
            f"  {size(report.output_bytes - report.alias_bytes):>10}  results that take no "
            "argument's place"
        )
    lines.append(
        f"  {size(report.temp_bytes):>10}  temporaries: about {size(kept)} kept for the backward "
        f"pass, {size(working)} one layer's working set, up to {size(gradients)} gradients"
        + (f", {size(rest)} elsewhere" if rest > 0.2 * report.temp_bytes else "")
    )
    lines.append("What would help:")
    own = problem.variant(candidate)
    code = [region for region in own.regions if isinstance(region, UnrolledRegion)]
    notes = own.pipelines
    tried = {one.choice for one in problem.variants if one.choice is not None}
    pipelined = [_of_pipeline(note, tried) for note in notes]
    hints = _hints(report, budget, fixed, ask, offload, code, pipelined)
    return "\n".join([*lines, *(f"  - {hint}" for hint in hints)])


# ---------------------------------------------------------------- implementation


def _hints(
    report: MemoryReport,
    budget: int,
    fixed: int,
    ask: Any,
    offload: bool,
    code: list[UnrolledRegion],
    pipelined: list[list[str]],
) -> list[str]:
    hints = []
    own = report.output_bytes - report.alias_bytes
    if own > 0.02 * report.required_bytes and not report.alias_bytes:
        saved = min(own, report.argument_bytes)
        hints.append(
            "donate the parameters and the optimizer state (donate_argnums=...): up to "
            f"{size(saved)}"
        )
    share = (budget - fixed) / max(report.temp_bytes, 1)
    if share > 0:
        parts = math.ceil(1 / share)
        hints += itertools.chain.from_iterable(pipelined)
        if not pipelined:
            hints.append(
                f"accumulate the gradient over {parts} or more microbatches "
                f"(jaxmem.value_and_grad(loss, microbatches={parts})): temporaries must shrink to "
                f"{share:.0%}, and gradients do not shrink with the batch"
            )
        if rows := _batch(ask):
            fewer = math.floor(rows * share)
            if fewer:
                hints.append(f"a batch of about {fewer} in place of {rows}")
    else:
        hints.append(
            f"the arguments and results alone need {size(fixed)}: smaller parameters or optimizer "
            "state (bfloat16, adafactor), or more devices that share them"
        )
        hints += [own[-1] for own in pipelined]
    hints += [
        f"decorate the function with the scan that {region.where} is a layer of: now all its turns "
        "have the same plan, and the scan is not cut"
        if region.uses.iterations
        else f"decorate what calls {region.where} in its place: now its "
        f"{region.uses.times} calls have the same plan, and cannot be cut into segments"
        for region in code
        if region.uses.times > 1
    ]
    alone = [region for region in code if region.uses.times == 1]
    if len(alone) > 1:
        hints.append(
            f"decorate what calls {alone[0].where} and the others in their place: now each of "
            f"{len(alone)} pieces of code is planned by itself, and what one passes to the next is "
            "held"
        )
    if report.platform == "cpu" and not all(region.uses.iterations for region in code):
        hints.append(
            "name an accelerator as the target: of code outside of scans the cpu compiler "
            + (
                "finds again what it has computed before, so that no plan saves anything there"
                if CPU_MERGES_RECOMPUTATION
                else "keeps more than a plan does"
            )
        )
    hints += where_it_does_not_fit(report.lints)
    if not offload and report.platform != "cpu":
        hints.append("allow_offload=True, which lets values go to host memory")
    return hints


def _of_pipeline(note: PipelineNote, tried: Collection[PipelineChoice]) -> list[str]:
    """What makes the stages of a pipeline smaller; more of them last.

    Args:
      tried: ways to run it that `microbatches="auto"` or `schedule="auto"` stood for.
    """
    most = max([note.microbatches, *(one.microbatches for one in tried)])
    schedules = {note.schedule, *(one.schedule for one in tried)}
    hints = []
    if most < note.rows:
        more = min(2 * most, note.rows)
        if note.schedule == "interleaved":
            more -= more % note.stages
        also = f", of which {most} at most were tried" if tried else ""
        if more > most:
            hints.append(
                f"more microbatches in the pipeline than {note.microbatches}{also} "
                f"(jaxmem.pipeline(loss, microbatches={more})): the inputs of stages, and what a "
                "stage keeps while it is recomputed, shrink with them, the gradients do not"
            )
    if "1f1b" not in schedules:
        was = {"gpipe": f"of {note.microbatches} microbatches", "eager-1f1b": "of 2 S − 1"}
        held = was.get(note.schedule, "of (v + 1) S − 1 chunks")
        hints.append(
            f'schedule="1f1b", which holds the inputs of {note.stages} microbatches at most, and '
            f"{note.schedule!r} those {held}; they are {size(note.held_bytes)} now"
        )
    hints.append(
        f"more stages than {note.stages}: a mesh with more devices along their axis, on each of "
        "which there are fewer layers, with their gradients and optimizer state"
    )
    return hints


def _largest(report: MemoryReport) -> str:
    groups: Counter[str] = Counter()
    for name, count in report.arguments.items():
        groups[name.split("/")[0].split("[")[0]] += count
    named = [f"{name} {size(count)}" for name, count in groups.most_common(3) if count]
    return f" ({', '.join(named)})" if len(groups) > 1 and named else ""


def _gradients(problem: Any) -> int:
    """Bytes of the gradients of what the stacks read layer by layer."""
    each = (
        region.of_one_device(region.param_bytes * region.uses.times, problem.devices)
        for region in problem.regions
    )
    return sum(each)


def _batch(ask: Any) -> int | None:
    """The leading dimension that the arguments which are not donated share, if they do."""
    donated = ask.donate_argnums
    donated = {donated} if isinstance(donated, int) else set(donated)
    if not donated:
        return None
    leaves = [
        leaf
        for place, arg in enumerate(ask.args)
        if place not in donated
        for leaf in jax.tree.leaves(arg)
    ]
    sizes = Counter(leaf.shape[0] for leaf in leaves if len(getattr(leaf, "shape", ())) > 1)
    return next(iter(sizes)) if len(sizes) == 1 else None
