"""Stages recomputed from their inputs: value and gradients in one loop over a schedule's ticks.

In a tick a stage does the forward pass of a microbatch, the backward pass of another, or both, as
the schedule's table says.  Of a forward pass its input is kept, until the backward pass recomputes
the chunk from it: with GPipe the inputs of all microbatches, with 1F1B no more than there are
stages.  Gradients are added up in place, layer by layer.

Where the compiler splits what a stage computes over other mesh axes, devices have to meet in all of
its collectives, and stages must not take different branches.  Then all of them compute in each
tick, and what is not asked for is left out of the sums.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.accumulate.trees import sum_dtype
from jaxmem.pipeline import carried
from jaxmem.pipeline.backward import (
    Backward,
    Gradients,
    Tick,
    floats_of,
    held_at,
    of_chunk,
    only_if,
)
from jaxmem.pipeline.carried import Carried, Made
from jaxmem.pipeline.device import Inputs, Program, entering, loss_dtype
from jaxmem.pipeline.schedule import Places, Row, cotangent_places, input_places, state_places
from jaxmem.pipeline.stage import Message

T = TypeVar("T")

# ---------------------------------------------------------------- types


class _State(NamedTuple):
    """Between ticks.

    Attributes:
      inputs, cotangents: what is held, [places, …].
      states: what forward passes read of `carried`, likewise.
      sent, sent_back: what the neighbours sent in the tick before.
    """

    inputs: Message
    cotangents: list[Any]
    states: list[Any]
    carried: Carried
    sent: Message
    sent_back: list[Any]
    sums: Gradients
    loss: jax.Array


# ---------------------------------------------------------------- API


def value(program: Program, inputs: Inputs) -> tuple[jax.Array, Carried]:
    """This stage's share in the loss: all of it on the last one, 0 on others; and what it made."""
    loss, _, made = _run(program, inputs, None)
    return loss, made


def value_and_gradients(
    program: Program, inputs: Inputs, wanted: Gradients
) -> tuple[jax.Array, Gradients, Carried]:
    """The same, with this stage's share in the gradients.

    Args:
      wanted: flags.
    """
    loss, sums, made = _run(program, inputs, wanted)
    assert sums is not None
    return loss, sums, made


# ---------------------------------------------------------------- the loop


def _run(
    program: Program, inputs: Inputs, wanted: Gradients | None
) -> tuple[jax.Array, Gradients | None, Carried]:
    schedule = program.schedule if wanted is not None else program.schedule.forward_only()
    places = input_places(schedule), cotangent_places(schedule), state_places(schedule)
    held, held_back, held_states = places
    ticks = _column(program, schedule.forward, schedule.backward, *places)
    local = inputs._replace(
        params=[x[0] for x in inputs.params], layers=[x[0] for x in inputs.layers]
    )
    more = program.stages.cut.has_more
    stages = program.stages
    empty = stages.empty()
    floats = floats_of(program, empty)
    zero = jnp.zeros((), loss_dtype(program, inputs.scales))
    sums = None if wanted is None else _zeros(program, local, wanted)
    backward = None if wanted is None else Backward(program, local, wanted)

    def tick(state: _State, now: Tick) -> tuple[_State, None]:
        kept = _received(state.inputs, state.sent, now.input_received)
        back = _received(state.cotangents, state.sent_back, now.cotangent_received)
        forward = functools.partial(
            _forward, program, local, kept, now, wanted is None, state.carried
        )
        if program.branches:
            message, loss, made = forward()
        else:
            none = empty, zero, carried.nothing_made(program) if more else None
            message, loss, made = lax.cond(now.any_forward, forward, lambda: none)
        loss = state.loss + loss
        sums, sent_back = state.sums, state.sent_back
        states, new = state.states, state.carried
        if made is not None:
            chunk, is_there = jnp.maximum(now.forward_chunk, 0), now.forward >= 0
            if backward is not None:
                read = [*carried.rows_of(program, new, chunk), *new.after]
                states = _received(states, read, now.state_forward)
            index = jnp.maximum(now.forward, 0)
            new = carried.merged(program, new, made, index, chunk, is_there)
        if backward is not None:
            sums, sent_back, loss = only_if(
                now.backward >= 0 if program.branches else now.any_backward,
                functools.partial(backward, kept, back, states, now),
                (sums, sent_back, loss),
            )
            sent_back = program.backwards(sent_back)
        sent = program.forwards(message)
        return _State(kept, back, states, new, sent, sent_back, sums, loss), None

    begun = carried.begun(program, local.layers, local.after)
    one_chunk = [x[0] for x in local.layers]

    state = _State(
        [jnp.zeros((held.count, *x.shape), x.dtype) for x in empty],
        [jnp.zeros((held_back.count, *x.shape), x.dtype) for x in floats],
        _places([*one_chunk, *local.after], held_states),
        begun,
        empty,
        floats,
        sums,  # pyright: ignore[reportArgumentType]
        zero,
    )
    state, _ = lax.scan(tick, state, ticks)
    return state.loss, state.sums, state.carried


def _forward(
    program: Program, inputs: Inputs, kept: Message, now: Tick, is_alone: bool, before: Carried
) -> tuple[Message, jax.Array, Made | None]:
    """A forward pass, if there is one in this tick.

    Args:
      is_alone: whether no backward pass follows; where one does, it makes what leaves the last
        chunk itself, unless there is more than the loss.
    """
    more = program.stages.cut.has_more
    index, chunk = jnp.maximum(now.forward, 0), jnp.maximum(now.forward_chunk, 0)
    is_there, is_last = now.forward >= 0, chunk == program.last_chunk
    zero = jnp.zeros((), loss_dtype(program, inputs.scales))

    def pass_on() -> tuple[Message, jax.Array, Made | None]:
        operands = program.operands(inputs, index, before.after)
        message = entering(program, operands, held_at(kept, now.forward_place), chunk)
        params = of_chunk(program, inputs.params, chunk)
        states = carried.rows_of(program, before, chunk)
        message, rows = program.stages.layers(params, operands, message, chunk, states)
        made = None
        if more:
            made = carried.made(program, operands, message, rows, is_there & is_last)
        if not is_alone:
            return message, zero, made
        last = functools.partial(program.stages.loss, operands, message, inputs.scales)
        return message, program.either(is_there & is_last, last, lambda: zero), made

    if not program.branches:
        return pass_on()
    is_there = is_there if is_alone or more else is_there & ~is_last
    none = program.stages.empty(), zero, carried.nothing_made(program) if more else None
    return lax.cond(is_there, pass_on, lambda: none)


# ---------------------------------------------------------------- implementation


def _column(
    program: Program, forward: tuple[Row, ...], backward: tuple[Row, ...],
    held: Places, held_back: Places, held_states: Places,
) -> Tick:  # fmt: skip
    """The tables, of this stage."""
    stage = lax.axis_index(program.axis)

    def own(table: Any) -> jax.Array:
        return jnp.asarray(np.array(table, np.int32))[:, stage]

    def some(table: tuple[Row, ...]) -> jax.Array:
        return jnp.asarray([any(work is not None for work in row) for row in table])

    def works(table: tuple[Row, ...], which: int) -> jax.Array:
        return own([[-1 if work is None else work[which] for work in row] for row in table])

    return Tick(
        works(forward, 0), works(forward, 1), own(held.forward),
        works(backward, 0), works(backward, 1), own(held.backward), own(held_back.backward),
        own(held.received), own(held_back.received),
        own(held_states.forward), own(held_states.backward), some(forward), some(backward),
    )  # fmt: skip


def _received(held: list[Any], sent: list[Any], place: Any) -> list[Any]:
    """What is held, with what arrived in its place, if anything did."""
    at = jnp.maximum(place, 0)

    def one(held: Any, new: Any) -> Any:
        old = lax.dynamic_index_in_dim(held, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(held, jnp.where(place >= 0, new, old), at, 0)

    return [one(a, b) for a, b in zip(held, sent, strict=True)]


def _places(arrays: Sequence[Any], held: Places) -> list[Any]:
    """Room for what is held of each."""
    return [jnp.broadcast_to(x, (held.count, *x.shape)) for x in arrays]


def _zeros(program: Program, inputs: Inputs, wanted: Gradients) -> Gradients:
    def zeros(x: Any, flag: bool) -> Any:
        return jnp.zeros(x.shape, sum_dtype(x, program.dtype)) if flag else None

    return Gradients(
        list(map(zeros, inputs.params, wanted.params)),
        list(map(zeros, inputs.shared, wanted.shared)),
    )
