"""A net trained in JAX, in separate processes: planned and compiled, then run and measured.

Two processes, since an allocator's peak cannot be reset: the first one's compiler tries kernels,
and leaves the executable in a cache, where the second one finds it.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxmem
from side import jax_nets
from side.methods import HAND
from side.shapes import Net, weights

# ---------------------------------------------------------------- API


def prepare(
    net: Net, family: str, how: str, plan: Path, budget: int | None = None
) -> dict[str, Any]:
    """Plan if `how` is "fit", and compile.

    Args:
      plan: where one is saved.

    Returns:
      "compiled_bytes", what the compiler says that the step needs.

    Raises:
      jaxmem.BudgetError: no plan is within the budget.
    """
    job = _job(net, family, how)
    if how == "fit":
        assert budget is not None
        fitted = jaxmem.fit(
            job.step, *job.args, budget=budget, donate_argnums=job.donate_argnums, progress=False
        )
        fitted.plan.save(plan)
    memory = _compiled(job, _under(family, how, plan)).memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {"compiled_bytes": total - memory.alias_size_in_bytes}


def run(net: Net, family: str, how: str, plan: Path, warmup: int, steps: int) -> dict[str, Any]:
    """Train for so many steps on one batch.

    Returns:
      "seconds" of each step after the warm-up, "losses" of the first two steps, "peak_bytes" of the
      allocator (None where it keeps none), "device", and whether it was "compiled" here.
    """
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    job = _job(net, family, how)
    compiled = _compiled(job, _under(family, how, plan))
    device = jax.devices()[0]
    # One by one from the host, so that nothing but the arguments themselves is there.
    given = weights(net.shapes)
    params = jax.tree.map(jax.device_put, given)
    state = jax.tree.map(lambda spec: jax.device_put(np.zeros(spec.shape, spec.dtype)), job.args[1])
    batch = [jax.device_put(array) for array in net.data()]
    del given
    jax.block_until_ready((params, state, batch))
    seconds, losses = [], []
    for _ in range(warmup + steps):
        start = time.perf_counter()
        params, state, value = compiled(params, state, *batch)
        jax.block_until_ready((params, state, value))
        seconds.append(time.perf_counter() - start)
        losses.append(float(value))
    return {
        "seconds": seconds[warmup:],
        "losses": losses[:2],
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "device": device.device_kind,
        "compiled": "/jax/compilation_cache/cache_hits" not in events,
    }


# ---------------------------------------------------------------- implementation


def _job(net: Net, family: str, how: str) -> jaxmem.Job:
    loss = jax_nets.loss(net, _checkpoint(how) if family == HAND else None)
    return jax_nets.training(net, jax.value_and_grad(loss))


def _checkpoint(policy: str) -> jax_nets.Around:
    saved = getattr(jax.checkpoint_policies, policy)
    return lambda layer: jax.checkpoint(layer, policy=saved, prevent_cse=False)


def _under(family: str, how: str, plan: Path) -> contextlib.AbstractContextManager[None]:
    if family == HAND:
        return contextlib.nullcontext()
    return jaxmem.use_plan(plan) if how == "fit" else jaxmem.use_policy(how)


def _compiled(job: jaxmem.Job, under: contextlib.AbstractContextManager[None]) -> Any:
    with under:
        jitted = jax.jit(job.step, donate_argnums=job.donate_argnums)
        return jitted.lower(*job.args).compile()
