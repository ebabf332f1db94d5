"""Periodic plans: carries kept at the cuts, one segment's tapes at a time.

The forward pass is one flat scan that writes each layer's carry into the slot
of the segment to come, so that the last write, where that segment begins, stays.
The backward pass goes over the segments from the last to the first: inside a
segment it records where the segments of the next level begin, and at the
innermost level the tapes of all layers, and then goes down these.

All loops have constant trip counts.  Where a length does not divide, only the
last segment is shorter; it has its own copy of the loop.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _jax
from jaxmem._jax import RECOMPUTED
from jaxmem.stacked.forms import Form
from jaxmem.stacked.state import NOWHERE, Cotangents, Into, buffer, load, pull, start, store
from jaxmem.trace.layer import Layer
from jaxmem.trace.names import CARRY_NAME

Kept = list[Any]


def forward(
    form: Form, layer: Layer, lengths: Sequence[int], args: Sequence[Any]
) -> tuple[list[Any], Kept]:
    """(results, the carries in front of all segments)."""
    consts, init, xs = form.body.split_in(args)
    size = lengths[0]
    slots = -(-form.length // size)

    def step(state: Any, x: Any) -> Any:
        i, carry, kept = state
        carry, y = layer.advance(consts, carry, form.read(x))
        slot = i // size + 1
        kept = store(kept, carry, jnp.minimum(slot, slots - 1), slot < slots)
        return (i + 1, carry, kept), y

    (_, carry, kept), ys = lax.scan(
        step,
        (jnp.int32(0), init, buffer(init, slots)),
        xs,
        length=form.length,
        reverse=form.reverse,
        unroll=form.unroll,
    )
    return [*carry, *ys], [_jax.named(k, CARRY_NAME) for k in kept]


def backward(
    form: Form,
    layer: Layer,
    lengths: Sequence[int],
    args: Sequence[Any],
    kept: Kept,
    ct_carry: Sequence[Any],
    ct_ys: Sequence[Any],
    into: Into = NOWHERE,
) -> Cotangents:
    """Cotangents of the operands; one of the final carry may be None for zero."""
    state, ct_ys = start(form, layer, args, ct_carry, ct_ys, into)
    descent = _Descent(form, layer, args, ct_ys, into)
    return descent.segments(0, form.length, tuple(lengths), kept, state)


class _Descent:
    """The way down a stack, level by level."""

    def __init__(
        self, form: Form, layer: Layer, args: Sequence[Any], ct_ys: Sequence[Any], into: Into
    ) -> None:
        self.form, self.layer, self.args, self.ct_ys, self.into = form, layer, args, ct_ys, into
        self.consts, _, self.xs = form.body.split_in(args)

    def x(self, state: Cotangents, step: Any) -> list[Any]:
        """One layer's slice of the stacked inputs."""
        return self.form.at(self.into.inputs(self.xs, state.xs, self.layer.wrt_x), step)

    def segments(
        self,
        first: Any,
        n: int,
        lengths: tuple[int, ...],
        begins: Kept,
        state: Cotangents,
    ) -> Cotangents:
        """Down n layers from `first` on, given the carries in front of their segments."""
        size, deeper = lengths[0], lengths[1:]
        whole, rest = divmod(n, size)

        def one_from(begin: list[Any], segment: Any, length: int, state: Cotangents) -> Cotangents:
            return self.layers(first + segment * size, length, deeper, begin, state)

        def one(segment: Any, state: Cotangents) -> Cotangents:
            return one_from(load(begins, segment), segment, size, state)

        def alone(segment: int, length: int, state: Cotangents) -> Cotangents:
            # Outside a loop nothing else keeps a compiler from recomputing a segment
            # before the cotangents are there, next to what is live till then.
            begin, ct = lax.optimization_barrier((load(begins, segment), state.carry))
            return one_from(begin, segment, length, state._replace(carry=ct))

        if rest:
            state = alone(whole, rest, state)
        if whole == 1:
            return alone(0, size, state)
        state, _ = lax.scan(
            lambda state, segment: (one(segment, state), None),
            state,
            jnp.arange(whole, dtype=jnp.int32),
            reverse=True,
        )
        return state

    def layers(
        self, first: Any, n: int, lengths: tuple[int, ...], carry: list[Any], state: Cotangents
    ) -> Cotangents:
        """Down n layers from `first` on, given the carry in front of them."""
        if lengths and lengths[0] < n:
            begins = self.record(first, n, lengths[0], carry, state)
            return self.segments(first, n, lengths, begins, state)
        if lengths:
            return self.layers(first, n, lengths[1:], carry, state)
        if n == 1:
            with jax.named_scope(RECOMPUTED):
                _, _, tape = self.layer.tape(self.consts, carry, self.x(state, first))
            return self.pull(state, first, tape)

        def replay(carry: Any, i: Any) -> Any:
            x = self.x(state, first + i)
            with jax.named_scope(RECOMPUTED):
                carry, _, tape = self.layer.tape(self.consts, carry, x)
            return carry, tape

        steps = jnp.arange(n, dtype=jnp.int32)
        unroll = self.form.unrolled(n)
        _, tapes = lax.scan(replay, carry, steps, unroll=unroll)
        state, _ = lax.scan(
            lambda state, at: (self.pull(state, first + at[0], at[1]), None),
            state,
            (steps, tapes),
            reverse=True,
            unroll=unroll,
        )
        return state

    def record(
        self, first: Any, n: int, size: int, carry: list[Any], cotangents: Cotangents
    ) -> Kept:
        """The carries in front of all segments of n layers."""
        slots = -(-n // size)
        layers = (slots - 1) * size

        def step(state: Any, i: Any) -> Any:
            carry, begins = state
            x = self.x(cotangents, first + i)
            with jax.named_scope(RECOMPUTED):
                carry = self.layer.step(self.consts, carry, x)
            return (carry, store(begins, carry, i // size + 1)), None

        (_, begins), _ = lax.scan(
            step,
            (carry, buffer(carry, slots)),
            jnp.arange(layers, dtype=jnp.int32),
            unroll=self.form.unrolled(layers),
        )
        return begins

    def pull(self, state: Cotangents, step: Any, tape: Sequence[Any]) -> Cotangents:
        return pull(self.form, self.layer, self.args, self.ct_ys, state, step, tape, self.into)
