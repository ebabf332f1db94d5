"""The time of a step on the attached backend, compared with a hand-written scan.

The programs alternate in shuffled order; a ratio is the median over consecutive measurements,
since machines are noisy.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import optax
from bench_core import alternate, ratio, timed

from acc.forms import BY_HAND, FORMS, Form
from acc.memory import Problem
from acc.table import Row

STEP_TIME = "step time"


def rows(problem: Problem, rounds: int, forms: tuple[Form, ...] = FORMS) -> list[Row]:
    """Every form with microbatches inside a step, over the scan written by hand."""
    inside = [form for form in forms if form.takes == "batch"]
    steps = {form.name: runner(problem, form) for form in inside}
    for step in steps.values():
        step()
    seconds = alternate(
        {name: functools.partial(timed, step) for name, step in steps.items()},
        rounds,
        f"timing, {problem.name}",
    )
    device = jax.default_backend()
    found = []
    for name, times in seconds.items():
        value = ratio(times, seconds[BY_HAND.name])
        note = f"median {statistics.median(times) * 1e3:.1f} ms of {rounds}"
        found.append(Row(STEP_TIME, problem.name, name, value, "of lax.scan", device, note))
    return found


def runner(problem: Problem, form: Form) -> Callable[[], Any]:
    """A function that takes one step further at each call; its state is donated."""
    step = form.make(problem.losses, optax.adam(1e-3), problem.microbatches)
    # Of such matrices, tanh of the product neither vanishes nor saturates.
    params = jax.tree.map(
        lambda spec: jax.random.normal(jax.random.key(0), spec.shape) / spec.shape[-1] ** 0.5,
        problem.params,
    )
    batch = jax.random.normal(jax.random.key(1), problem.rows(form).shape)
    state = step.init(params)
    compiled = jax.jit(step.update, donate_argnums=(0, 1)).lower(params, state, batch).compile()
    held = [params, state]

    def once() -> Any:
        *held[:], value = compiled(*held, batch)
        return held, value

    return once
