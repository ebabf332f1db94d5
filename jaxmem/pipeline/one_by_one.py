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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem import _jax
from jaxmem.accumulate import inplace
from jaxmem.accumulate.trees import sum_dtype
from jaxmem.pipeline import carried
from jaxmem.pipeline.carried import Carried, Made
from jaxmem.pipeline.device import Inputs, Program, entering, loss_dtype
from jaxmem.pipeline.schedule import Places, Row, cotangent_places, input_places, state_places
from jaxmem.pipeline.stage import Message

T = TypeVar("T")

# ---------------------------------------------------------------- types


class Gradients(NamedTuple):
    """Sums of them; None of what no gradient is wanted of.

    Attributes:
      params: as `Inputs.params` on this device, [chunks of one, room, …].
      shared: as `Inputs.shared`.
    """

    params: list[Any]
    shared: list[Any]


class _State(NamedTuple):
    """Between ticks.

    Attributes:
      inputs, cotangents: what is held, [places, …].
      states: what forward passes read of `carried`, likewise.
      sent, sent_back: what the neighbours sent in the tick before.
    """

    inputs: Message
    cotangents: list[Any]
    states: tuple[list[Any], list[Any]]
    carried: Carried
    sent: Message
    sent_back: list[Any]
    sums: Gradients
    loss: jax.Array


class _Tick(NamedTuple):
    """This stage's column of the schedule, an entry for each tick; −1 for none.

    Attributes:
      any_forward, any_backward: whether any stage has such a pass.
    """

    forward: Any
    forward_chunk: Any
    forward_place: Any
    backward: Any
    backward_chunk: Any
    backward_place: Any
    cotangent_place: Any
    input_received: Any
    cotangent_received: Any
    state_forward: Any
    state_backward: Any
    any_forward: Any
    any_backward: Any


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
    floats = _floats(program, empty)
    zero = jnp.zeros((), loss_dtype(program, inputs.scales))
    sums = None if wanted is None else _zeros(program, local, wanted)
    backward = None if wanted is None else _Backward(program, local, wanted)

    def tick(state: _State, now: _Tick) -> tuple[_State, None]:
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
        if more:
            chunk, is_there = jnp.maximum(now.forward_chunk, 0), now.forward >= 0
            if backward is not None:
                read = carried.rows_of(program, new, chunk), new.after
                states = tuple(map(_received, states, read, [now.state_forward] * 2))
            index = jnp.maximum(now.forward, 0)
            new = carried.merged(program, new, made, index, chunk, is_there)
        if backward is not None:
            sums, sent_back, loss = _only_if(
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
        (_places(one_chunk, held_states), _places(local.after, held_states)),
        begun,
        empty,
        floats,
        sums,  # pyright: ignore[reportArgumentType]
        zero,
    )
    state, _ = lax.scan(tick, state, ticks)
    return state.loss, state.sums, state.carried


def _forward(
    program: Program, inputs: Inputs, kept: Message, now: _Tick, is_alone: bool, before: Carried
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
        message = entering(program, operands, _held(kept, now.forward_place), chunk)
        params = _of_chunk(program, inputs.params, chunk)
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


class _Backward:
    """The backward pass of one microbatch through one chunk, which is recomputed from its input."""

    def __init__(self, program: Program, inputs: Inputs, wanted: Gradients) -> None:
        self.program, self.inputs, self.wanted = program, inputs, wanted
        cut = program.stages.cut
        shared = [number for number, flag in enumerate(wanted.shared) if flag]
        before = [*cut.consts, *cut.own_xs]
        read = cut.reads(before), cut.reads(cut.carry), cut.read_after
        self.in_layers, self.at_first, self.at_last = (
            [number for number in shared if number in numbers] for numbers in read
        )
        self.diff_params = [number for number, flag in enumerate(wanted.params) if flag]

    def __call__(
        self,
        kept: Message,
        back: list[Any],
        states: tuple[list[Any], list[Any]],
        now: _Tick,
        state: tuple[Gradients, list[Any], Any],
    ) -> tuple[Gradients, list[Any], Any]:
        sums, received, loss = state
        program, inputs = self.program, self.inputs
        index, chunk = jnp.maximum(now.backward, 0), jnp.maximum(now.backward_chunk, 0)
        is_there, is_first, is_last = now.backward >= 0, chunk == 0, chunk == program.last_chunk
        of_layers, after = (_held(own, now.state_backward) for own in states)
        operands = program.operands(inputs, index, after)
        message = entering(program, operands, _held(kept, now.backward_place), chunk)
        message, pull = self._layers(operands, message, chunk, of_layers)
        received = _held(back, now.cotangent_place)

        def last(state: Any) -> Any:
            shared, received, loss = state
            share, shared, cotangent = self._last(operands, message, shared, is_there & is_last)
            if not program.branches:
                share = jnp.where(is_there & is_last, share, 0)
                cotangent = [
                    jnp.where(is_last, a, b) for a, b in zip(cotangent, received, strict=True)
                ]
            return shared, cotangent, loss + share

        shared, cotangent, loss = self._only_if(is_last, last, (sums.shared, received, loss))
        own = _of_chunk(program, sums.params, chunk)
        own, shared, cotangent = pull(cotangent, own, shared, is_there)
        first = functools.partial(self._first, operands, cotangent, is_there & is_first)
        shared = self._only_if(is_first, first, shared)
        params = _with_chunk(program, sums.params, own, chunk)
        return Gradients(params, shared), cotangent, loss

    def _only_if(self, flag: Any, run: Callable[[T], T], state: T) -> T:
        return _only_if(flag, run, state) if self.program.branches else run(state)

    def _added(self, rows: Any, gradient: Any, counts: Any) -> Any:
        """A sum with a gradient added, if it counts; it may be NaN if it does not."""
        if not self.program.branches:
            gradient = jnp.where(counts > 0, gradient, jnp.zeros((), gradient.dtype))
        return rows + gradient.astype(rows.dtype)

    def _plus(
        self, sums: list[Any], places: Sequence[int], own: Sequence[Any], counts: Any
    ) -> list[Any]:
        new = [self._added(sums[k], g, counts) for k, g in zip(places, own, strict=True)]
        return _with(sums, places, new)

    def _layers(self, operands: list[Any], message: Message, chunk: Any, states: list[Any]) -> Any:
        """The chunk recomputed, and its pull-back, which adds gradients of layers in place."""
        program, stages = self.program, self.program.stages
        params = _of_chunk(program, self.inputs.params, chunk)
        count = len(params)
        flat, tree = jax.tree.flatten((params, operands, message, chunk, states))

        def run(*flat: Any) -> Message:
            return stages.layers(*jax.tree.unflatten(tree, flat))[0]

        closed = jax.make_jaxpr(run)(*flat)
        diff_shared = [count + number for number in self.in_layers]
        floats = [k for k, flag in enumerate(stages.is_float) if flag]
        diff_message = [count + len(operands) + k for k in floats]
        wanted = [*self.diff_params, *diff_shared, *diff_message]
        stacked = inplace.find(closed, self.diff_params, wanted)
        inside = sorted(stacked.arguments)
        alone = [number for number in wanted if number not in stacked.arguments]

        def of(given: list[Any], held: Any, factor: Any) -> Any:
            full = list(flat)
            for number, value in zip(alone, given, strict=True):
                full[number] = value
            outs, held, factor = inplace.evaluate(stacked, full, held, factor, self._added)
            outs = [_jax.as_array(out, aval) for out, aval in zip(
                outs, closed.out_avals, strict=True)]  # fmt: skip
            return ([outs[k] for k in floats], held, factor), outs

        one = jnp.ones(())
        like = {number: jnp.zeros(flat[number].shape, sum_dtype(flat[number], program.dtype))
                for number in inside}  # fmt: skip
        _, pulled, message = jax.vjp(of, [flat[n] for n in alone], like, one, has_aux=True)

        def pull(cotangent: list[Any], sums: list[Any], shared: list[Any], flag: Any) -> Any:
            held = {number: sums[number] for number in inside}
            counts = flag.astype(one.dtype)
            found, held, _ = pulled((cotangent, held, counts))
            gradients = dict(zip(alone, found, strict=True))
            sums = list(sums)
            for number in self.diff_params:
                sums[number] = (
                    held[number]
                    if number in held
                    else self._added(sums[number], gradients[number], counts)
                )
            own = [gradients[count + number] for number in self.in_layers]
            shared = self._plus(shared, self.in_layers, own, counts)
            return sums, shared, [gradients[place] for place in diff_message]

        return message, pull

    def _last(self, operands: list[Any], message: Message, shared: list[Any], counts: Any) -> Any:
        """What is after the last layer: its value, its gradients added, and the cotangent."""
        stages = self.program.stages
        floats = [k for k, flag in enumerate(stages.is_float) if flag]

        def loss(own: list[Any], given: list[Any]) -> jax.Array:
            return stages.loss(
                _with(operands, self.at_last, own), _with(message, floats, given),
                self.inputs.scales,
            )  # fmt: skip

        share, (own, cotangent) = jax.value_and_grad(loss, (0, 1))(
            [operands[number] for number in self.at_last], [message[k] for k in floats]
        )
        return share, self._plus(shared, self.at_last, own, counts), cotangent

    def _first(
        self, operands: list[Any], cotangent: list[Any], counts: Any, shared: list[Any]
    ) -> list[Any]:
        """What is before the first layer: its gradients added."""
        if not self.at_first:
            return shared
        stages = self.program.stages

        def begin(own: list[Any]) -> list[Any]:
            return _floats(self.program, stages.begin(_with(operands, self.at_first, own)))

        _, pull = jax.vjp(begin, [operands[number] for number in self.at_first])
        (own,) = pull(cotangent)
        return self._plus(shared, self.at_first, own, counts)


# ---------------------------------------------------------------- implementation


def _only_if(flag: Any, run: Callable[[T], T], state: T) -> T:
    """A loop of one iteration or none: what a loop carries, compilers change in its place.

    What a branch of `lax.cond` returns they keep twice.
    """
    return lax.fori_loop(0, jnp.asarray(flag, jnp.int32), lambda _, state: run(state), state)


def _column(
    program: Program, forward: tuple[Row, ...], backward: tuple[Row, ...],
    held: Places, held_back: Places, held_states: Places,
) -> _Tick:  # fmt: skip
    """The tables, of this stage."""
    stage = lax.axis_index(program.axis)

    def own(table: Any) -> jax.Array:
        return jnp.asarray(np.array(table, np.int32))[:, stage]

    def some(table: tuple[Row, ...]) -> jax.Array:
        return jnp.asarray([any(work is not None for work in row) for row in table])

    def works(table: tuple[Row, ...], which: int) -> jax.Array:
        return own([[-1 if work is None else work[which] for work in row] for row in table])

    return _Tick(
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


def _held(held: list[Any], place: Any) -> list[Any]:
    at = jnp.maximum(place, 0)
    return [lax.dynamic_index_in_dim(x, at, keepdims=False) for x in held]


def _places(arrays: Sequence[Any], held: Places) -> list[Any]:
    """Room for what is held of each."""
    return [jnp.broadcast_to(x, (held.count, *x.shape)) for x in arrays]


def _of_chunk(program: Program, params: Sequence[Any], chunk: Any) -> list[Any]:
    """Of arrays [chunks of one, …], this chunk's; None stays."""
    local = chunk // program.schedule.stages
    if program.schedule.chunks == 1:
        return [None if x is None else x[0] for x in params]
    return [
        None if x is None else lax.dynamic_index_in_dim(x, local, keepdims=False) for x in params
    ]


def _with_chunk(program: Program, params: list[Any], own: list[Any], chunk: Any) -> list[Any]:
    local = chunk // program.schedule.stages
    if program.schedule.chunks == 1:
        return [None if x is None else x[None] for x in own]
    return [
        None if x is None else lax.dynamic_update_index_in_dim(x, new, local, 0)
        for x, new in zip(params, own, strict=True)
    ]


def _floats(program: Program, message: Message) -> list[Any]:
    return [x for x, flag in zip(message, program.stages.is_float, strict=True) if flag]


def _zeros(program: Program, inputs: Inputs, wanted: Gradients) -> Gradients:
    def zeros(x: Any, flag: bool) -> Any:
        return jnp.zeros(x.shape, sum_dtype(x, program.dtype)) if flag else None

    return Gradients(
        list(map(zeros, inputs.params, wanted.params)),
        list(map(zeros, inputs.shared, wanted.shared)),
    )


def _with(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    found = list(values)
    for place, value in zip(places, new, strict=True):
        found[place] = value
    return found
