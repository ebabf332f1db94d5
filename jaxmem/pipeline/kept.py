"""GPipe with nothing recomputed: a loop over ticks, which jax differentiates (arXiv 1811.06965).

In each tick a stage computes one microbatch and passes it on; the backward pass of the loop is the
same pipeline in the other direction.  Of each tick is kept what the policy keeps of its layers.
Only what is before the layers and after them is recomputed.

A branch of `lax.cond` that is differentiated returns its operands as residuals, which a loop would
stack, a copy of the parameters for each tick.  So stages that have nothing to do compute something
that nobody reads, and the branches have a derivative of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.pipeline import carried
from jaxmem.pipeline.carried import Carried
from jaxmem.pipeline.device import Inputs, Program, loss_dtype
from jaxmem.pipeline.stage import Message

# ---------------------------------------------------------------- API


def value(program: Program, inputs: Inputs) -> tuple[jax.Array, Carried]:
    """This stage's share in the loss: all of it on the last one, 0 on others; and what it made."""
    schedule, stages = program.schedule, program.stages
    stage = lax.axis_index(program.axis)
    params = [x[0, 0] for x in inputs.params]
    last = schedule.stages - 1
    dtype = loss_dtype(program, inputs.scales)
    count = len(inputs.shared) + len(inputs.rows) + len(inputs.keys)

    def begin(*flat: Any) -> Message:
        return stages.begin(flat[:count])

    def loss(*flat: Any) -> list[jax.Array]:
        size = len(stages.message_types)
        operands, message, scales = flat[:count], flat[count : count + size], flat[count + size :]
        return [stages.loss(operands, list(message), list(scales))]

    def nothing(*flat: Any) -> list[jax.Array]:
        return [jnp.zeros((), dtype)]

    def tick(state: tuple[Message, Carried], number: Any) -> tuple[Any, jax.Array]:
        received, own = state
        index = number - stage
        is_there = (index >= 0) & (index < schedule.microbatches)
        index = jnp.clip(index, 0, schedule.microbatches - 1)
        operands = program.operands(inputs, index, own.after)
        message = _either(stage == 0, begin, _passed(count), [*operands, *received])
        rows = carried.rows_of(program, own, stage)
        message, kept = stages.layers(params, operands, message, stage, rows)
        is_last = is_there & (stage == last)
        [share] = _either(is_last, loss, nothing, [*operands, *message, *inputs.scales])
        if stages.cut.has_more:
            found = lax.stop_gradient((operands, message, kept))
            made = carried.made(program, *found, is_last)
            own = carried.merged(program, own, made, index, stage, is_there)
        return (program.forwards(message), own), share

    ticks = jnp.arange(schedule.microbatches + last, dtype=jnp.int32)
    # Where nothing has arrived yet, layers are given something that they could be given.
    first = lax.stop_gradient(stages.begin(program.operands(inputs, 0)))
    begun = carried.begun(program, [x[0] for x in inputs.layers], inputs.after)
    (_, own), losses = lax.scan(tick, (first, begun), ticks)
    return losses.sum(), own


# ---------------------------------------------------------------- implementation


def _passed(count: int) -> Callable[..., list[Any]]:
    return lambda *flat: list(flat[count:])


def _either(
    flag: Any,
    run: Callable[..., list[Any]],
    other: Callable[..., list[Any]],
    args: Sequence[Any],
) -> list[Any]:
    """One of two functions of the same arrays; recomputed from these in the backward pass."""
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in args]

    def choose(flag: Any, args: Sequence[Any]) -> list[Any]:
        return lax.cond(flag, run, other, *args)

    call = jax.custom_vjp(choose)

    def forward(flag: Any, args: Sequence[Any]) -> tuple[list[Any], Any]:
        return choose(flag, args), (flag, args)

    def backward(kept: Any, cotangents: list[Any]) -> tuple[None, list[Any]]:
        flag, args = kept

        def pulled(fn: Callable[..., list[Any]], args: Sequence[Any], cts: Any) -> list[Any]:
            floats = [x for x, one in zip(args, is_float, strict=True) if one]

            def of(*floats: Any) -> list[Any]:
                given = iter(floats)
                return fn(*(next(given) if one else x
                            for x, one in zip(args, is_float, strict=True)))  # fmt: skip

            return list(jax.vjp(of, *floats)[1](cts))

        found = iter(
            lax.cond(
                flag,
                lambda args, cts: pulled(run, args, cts),
                lambda args, cts: pulled(other, args, cts),
                args,
                cotangents,
            )
        )
        return None, [next(found) if one else None for one in is_float]

    call.defvjp(forward, backward)
    return call(flag, list(args))
