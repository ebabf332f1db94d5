"""The backward pass of one microbatch through one chunk, which is recomputed from its input."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _jax
from jaxmem.accumulate import inplace
from jaxmem.accumulate.trees import sum_dtype
from jaxmem.pipeline.device import Inputs, Program, entering
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


class Tick(NamedTuple):
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


class Backward:
    """Called for each microbatch and chunk.

    Args:
      wanted: flags, of which gradients.
    """

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
        states: list[Any],
        now: Tick,
        state: tuple[Gradients, list[Any], Any],
    ) -> tuple[Gradients, list[Any], Any]:
        sums, received, loss = state
        program, inputs = self.program, self.inputs
        index, chunk = jnp.maximum(now.backward, 0), jnp.maximum(now.backward_chunk, 0)
        is_there, is_first, is_last = now.backward >= 0, chunk == 0, chunk == program.last_chunk
        states = held_at(states, now.state_backward)
        count = len(program.stages.cut.of_kind("layers"))
        of_layers, after = states[:count], states[count:]
        operands = program.operands(inputs, index, after)
        message = entering(program, operands, held_at(kept, now.backward_place), chunk)
        message, pull = self._layers(operands, message, chunk, of_layers)
        received = held_at(back, now.cotangent_place)

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
        own = of_chunk(program, sums.params, chunk)
        own, shared, cotangent = pull(cotangent, own, shared, is_there)
        first = functools.partial(self._first, operands, cotangent, is_there & is_first)
        shared = self._only_if(is_first, first, shared)
        params = _with_chunk(program, sums.params, own, chunk)
        return Gradients(params, shared), cotangent, loss

    def _only_if(self, flag: Any, run: Callable[[T], T], state: T) -> T:
        return only_if(flag, run, state) if self.program.branches else run(state)

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
        params = of_chunk(program, self.inputs.params, chunk)
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
            return floats_of(self.program, stages.begin(_with(operands, self.at_first, own)))

        _, pull = jax.vjp(begin, [operands[number] for number in self.at_first])
        (own,) = pull(cotangent)
        return self._plus(shared, self.at_first, own, counts)


def only_if(flag: Any, run: Callable[[T], T], state: T) -> T:
    """A loop of one iteration or none: what a loop carries, compilers change in its place.

    What a branch of `lax.cond` returns they keep twice.
    """
    return lax.fori_loop(0, jnp.asarray(flag, jnp.int32), lambda _, state: run(state), state)


def held_at(held: list[Any], place: Any) -> list[Any]:
    """What is held in a place; in any where that is −1."""
    at = jnp.maximum(place, 0)
    return [lax.dynamic_index_in_dim(x, at, keepdims=False) for x in held]


def of_chunk(program: Program, params: Sequence[Any], chunk: Any) -> list[Any]:
    """Of arrays [chunks of one, …], this chunk's; None stays."""
    local = chunk // program.schedule.stages
    if program.schedule.chunks == 1:
        return [None if x is None else x[0] for x in params]
    return [
        None if x is None else lax.dynamic_index_in_dim(x, local, keepdims=False) for x in params
    ]


def floats_of(program: Program, message: Message) -> list[Any]:
    """The arrays of a message that have a cotangent."""
    return [x for x, flag in zip(message, program.stages.is_float, strict=True) if flag]


# ---------------------------------------------------------------- implementation


def _with_chunk(program: Program, params: list[Any], own: list[Any], chunk: Any) -> list[Any]:
    local = chunk // program.schedule.stages
    if program.schedule.chunks == 1:
        return [None if x is None else x[None] for x in own]
    return [
        None if x is None else lax.dynamic_update_index_in_dim(x, new, local, 0)
        for x, new in zip(params, own, strict=True)
    ]


def _with(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    found = list(values)
    for place, value in zip(places, new, strict=True):
        found[place] = value
    return found
