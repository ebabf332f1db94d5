"""The front of a step's plans, for tests that want more of it than the candidate that fits."""

from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import numpy as np

import jaxmem
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.step_problem import Cost, StepProblem
from jaxmem.fitting.ways import build_problem

# ---------------------------------------------------------------- API


def problem(
    step: Callable[..., Any],
    *args: Any,
    target: str = "local",
    donate: tuple[int, ...] = (),
    cost: Cost = "roofline",
) -> StepProblem:
    """What of a step can be planned; no compiler is asked."""
    return build_problem(question(step, *args, target=target, donate=donate), False, cost)


def question(
    step: Callable[..., Any],
    *args: Any,
    target: str = "local",
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> CompileRequest:
    """A step as `fit` asks for it; `options` are the compiler's."""
    return CompileRequest(step, args, {}, target, donate, (), options, 900.0, True)


def plans(step: Callable[..., Any], *args: Any, most: int) -> list[jaxmem.StepPlan]:
    """So many plans of a step's front at most, spread over it: without the first, which keeps
    everything, with the last, which needs the least."""
    found = problem(step, *args)
    last = len(found.front) - 1
    places = np.linspace(min(1, last), last, most).round().astype(int)
    return [found.plan(int(candidate)) for candidate in dict.fromkeys(places)]


def assert_plans_give(
    step: Callable[..., Any], args: tuple[Any, ...], wanted: Any, most: int, **how: Any
) -> None:
    """So many plans of a step's front compute what is wanted, as close as `how` says."""
    found = plans(step, *args, most=most)
    assert found
    for plan in found:
        with jaxmem.use_plan(plan):
            chex.assert_trees_all_close(jax.jit(step)(*args), wanted, **how)


def kinds(plan: jaxmem.StepPlan) -> Iterator[str]:
    """Of what kind the plans of its stacks are."""
    return (getattr(region.plan, "kind", "unrolled") for region in plan.regions)
