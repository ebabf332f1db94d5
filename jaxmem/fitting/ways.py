"""The Pareto front of a step's plans, in all ways to run it; no compiler is asked.

Carries can be stored split over an axis of a mesh, pipelines run in other ways, and scans be parts
of the code around them.  Each way is a problem of its own.
"""

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import jax

from jaxmem.errors import JaxmemWarning, OffloadWarning, warn
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.regions import StackRegion
from jaxmem.fitting.step_problem import Cost, NothingToPlan, StepProblem, one_way
from jaxmem.policies import Scans
from jaxmem.solve.pareto import cost as cost_of
from jaxmem.solve.pareto import cost_of_part, pareto_optimal
from jaxmem.solve.steps import StepCandidate, thinned_front

# ---------------------------------------------------------------- API


def build_problem(ask: CompileRequest, allow_offload: bool, cost: Cost) -> StepProblem:
    """Trace a step and solve for the Pareto front of its plans.

    On a mesh, where an axis could split what stacks carry from layer to layer and does not, for
    plans as well that store it split; for each way to run a pipeline that leaves it open; and where
    scans may be inside of layers, for plans of all the code.
    """
    if cost not in get_args(Cost):
        raise ValueError(f"cost must be one of {', '.join(get_args(Cost))}, got {cost!r}")
    if cost == "measured" and ask.accelerator is not None:
        raise ValueError(
            'cost="measured" runs operations on the attached device, and the target '
            f'{ask.accelerator.name} is asked for by name; pass target="local" on that machine, or '
            'cost="roofline"'
        )
    if allow_offload and ask.accelerator is None and jax.default_backend() == "cpu":
        warn(
            "fit: allow_offload does nothing for the cpu backend, the default here, on which "
            "device and host memory are one",
            OffloadWarning,
        )
        allow_offload = False
    with _uncollected():
        problem, others = one_way(ask, allow_offload, cost)
        variants = [problem]
        variants += (one_way(ask, allow_offload, cost, axis)[0] for axis in others.axes)
        for choice in others.choices:
            variants.append(one_way(ask, allow_offload, cost, choice=choice)[0])
        for scans in others.scans:
            variants += _as_code(ask, allow_offload, cost, scans)
        return _merged(variants) if len(variants) > 1 else problem


# ---------------------------------------------------------------- implementation

# In parts of a forward and a backward pass.
_LATER = 1e-6


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """While open, Python does not look for garbage.

    Planning makes a great many objects that stay, and to walk over them again and again took a
    tenth of its time; what of them is garbage came to 3 MiB.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _as_code(
    ask: CompileRequest, allow_offload: bool, cost: Cost, scans: Scans
) -> list[StepProblem]:
    """The step with scans as parts of the code around them; none where that cannot be planned."""
    try:
        # Of what differs from the first way nobody has to be told who gets a plan of that.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JaxmemWarning)
            return [one_way(ask, allow_offload, cost, scans=scans)[0]]
    except NothingToPlan:
        return []


def _merged(variants: Sequence[StepProblem]) -> StepProblem:
    """One problem of several ways to run the same step."""
    first = variants[0]
    plain = [own.plain_seconds for own in variants]
    for number, own in enumerate(variants):
        if own.scans != "stacks":
            plain[number] = plain[0] + _turns_again(first, own)
        elif own.choice == first.choice:
            plain[number] = max(plain[number], plain[0])  # that carries are split is not faster
    # With everything kept it is the same program, of which more is seen where all is looked at; but
    # in a loop gradients are added to sums otherwise.
    same = [own for own in variants if own is first or (own.scans == "parts" and not own.in_loop)]
    everything = max(own.everything for own in same)

    def of(number: int, one: StepCandidate) -> StepCandidate:
        own = variants[number]
        unseen = everything - first.everything if own.scans == "stacks" else 0
        return dataclasses.replace(
            one,
            bytes=one.bytes + own.others - first.others + unseen,
            # Of ways that take the same the first one comes first.
            seconds=one.seconds + plain[number] - min(plain) + number * _LATER * plain[0],
            variant=number,
            kind=one.kind if own.scans == "stacks" else f"{one.kind} scans {own.scans}",
        )

    def best(several: Sequence[Sequence[StepCandidate]], costs: Any) -> tuple[StepCandidate, ...]:
        found = [of(number, one) for number, own in enumerate(several) for one in own]
        return tuple(pareto_optimal(found, costs, rank=lambda one: one.variant))

    whole = best([own.whole for own in variants], cost_of)
    by_layer = best([own.by_layer for own in variants], cost_of_part)
    front = thinned_front(whole, first.others)
    return dataclasses.replace(
        first, front=front, whole=whole, by_layer=by_layer, variants=tuple(variants)
    )


def _turns_again(first: StepProblem, own: StepProblem) -> float:
    """Seconds of what scans compute again in each turn that are stacks in the first way."""
    if own.scans != "checkpointed":
        return 0.0
    others = {region.digest for region in own.regions}
    stacks = (one for one in first.regions if isinstance(one, StackRegion))
    return sum(one.seconds_again for one in stacks if one.digest not in others)
