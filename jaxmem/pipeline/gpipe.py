"""GPipe: a loop over ticks, which jax differentiates (arXiv 1811.06965).

In each tick a stage computes one microbatch and passes it on.  The backward pass of the loop is the
same pipeline in the other direction.  Of each tick the stage's input is kept, and the stage is
recomputed from it; inside, layers keep what the policy says.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.pipeline.device import Inputs, Program, entering, leaving, loss_dtype
from jaxmem.pipeline.stage import Message

# ---------------------------------------------------------------- API


def value(program: Program, inputs: Inputs) -> jax.Array:
    """This stage's share in the loss: all of it on the last one, 0 on others."""
    schedule, stages = program.schedule, program.stages
    stage = lax.axis_index(program.axis)
    params = [x[0, 0] for x in inputs.params]

    def compute(
        params: Any, shared: Any, received: Message, index: Any
    ) -> tuple[Message, jax.Array]:
        own = inputs._replace(shared=shared)
        is_there = (index >= 0) & (index < schedule.microbatches)

        def pass_on() -> tuple[Message, jax.Array]:
            operands = program.operands(own, index)
            message = entering(program, operands, received, stage)
            message = stages.layers(params, operands, message, stage)
            return message, leaving(program, operands, message, inputs.scales, stage)

        def idle() -> tuple[Message, jax.Array]:
            return list(received), jnp.zeros((), loss_dtype(program, inputs.scales))

        return lax.cond(is_there, pass_on, idle)

    if program.recompute:
        compute = jax.checkpoint(compute, prevent_cse=False)

    def tick(received: Message, number: Any) -> tuple[Message, jax.Array]:
        message, loss = compute(params, inputs.shared, received, number - stage)
        return program.forwards(message), loss

    ticks = jnp.arange(schedule.microbatches + schedule.stages - 1, dtype=jnp.int32)
    _, losses = lax.scan(tick, stages.empty(), ticks)
    return losses.sum()
