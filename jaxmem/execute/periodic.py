"""Periodic plans: carries kept at the cuts, one segment's tapes at a time.

The forward pass is one flat scan that writes each layer's carry into the slot
of its segment, so that the last write, the segment's end, stays.  The backward
pass goes over the segments from the last to the first: inside a segment it
records the carries of the next level, and at the innermost level the tapes of
all layers, and then goes down these.

All loops have constant trip counts.  Where a length does not divide, only the
last segment is shorter; it has its own copy of the loop.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmem.execute.forms import CARRY_NAME, Form
from jaxmem.execute.state import Cotangents, buffer, load, pull, start, store
from jaxmem.layer import Layer

Kept = list[Any]


def forward(
    form: Form, layer: Layer, lengths: Sequence[int], args: Sequence[Any]
) -> tuple[list[Any], Kept]:
    """(results, carries at the ends of all segments but the last)."""
    consts, init, xs = form.body.split_in(args)
    size = lengths[0]
    slots = -(-form.length // size) - 1

    def step(state: Any, x: Any) -> Any:
        i, carry, kept = state
        carry, y = layer.advance(consts, carry, x)
        slot = i // size
        kept = store(kept, carry, lax.min(slot, max(slots - 1, 0)), slot < slots) if slots else []
        return (i + 1, carry, kept), y

    (_, carry, kept), ys = lax.scan(
        step,
        (jnp.int32(0), init, buffer(init, slots) if slots else []),
        xs,
        length=form.length,
        reverse=form.reverse,
        unroll=form.unroll,
    )
    return [*carry, *ys], [checkpoint_name(k, CARRY_NAME) for k in kept]


def backward(
    form: Form,
    layer: Layer,
    lengths: Sequence[int],
    args: Sequence[Any],
    kept: Kept,
    ct_carry: Sequence[Any],
    ct_ys: Sequence[Any],
) -> Cotangents:
    """Cotangents of the operands; cotangents of results may be None for zero."""
    descent = _Descent(form, layer, args, ct_ys)
    _, init, _ = form.body.split_in(args)
    state = start(layer, form.length, args, ct_carry)
    return descent.segments(0, form.length, tuple(lengths), init, kept, state)


class _Descent:
    """The way down a stack, level by level."""

    def __init__(self, form: Form, layer: Layer, args: Sequence[Any], ct_ys: Sequence[Any]) -> None:
        self.form, self.layer, self.args, self.ct_ys = form, layer, args, ct_ys
        self.consts, _, self.xs = form.body.split_in(args)

    def segments(
        self,
        first: Any,
        n: int,
        lengths: tuple[int, ...],
        carry: list[Any],
        ends: Kept,
        state: Cotangents,
    ) -> Cotangents:
        """Down n layers from `first` on, given the carries at the ends of their segments."""
        size, deeper = lengths[0], lengths[1:]
        whole, rest = divmod(n, size)

        def one(segment: Any, length: int, state: Cotangents) -> Cotangents:
            begin = load(ends, carry, segment - 1)
            return self.layers(first + segment * size, length, deeper, begin, state)

        def alone(segment: int, length: int, state: Cotangents) -> Cotangents:
            # Outside a loop nothing keeps a compiler from computing a segment again before
            # the cotangents are there, next to the tapes of the segment before it.  The
            # barrier says so; and where barriers are dropped (on CPU), the place to begin
            # is a number that only the loop over the segment before it gives.
            begin = load(ends, carry, jnp.int32(segment - 1))
            begin, state = lax.optimization_barrier((begin, state))
            return self.layers(state.left - length, length, deeper, begin, state)

        if rest:
            state = alone(whole, rest, state)
        if whole == 1:
            return alone(0, size, state)
        state, _ = lax.scan(
            lambda state, segment: (one(segment, size, state), None),
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
            ends = self.record(first, n, lengths[0], carry)
            return self.segments(first, n, lengths, carry, ends, state)
        if lengths:
            return self.layers(first, n, lengths[1:], carry, state)
        if n == 1:
            _, _, tape = self.layer.tape(self.consts, carry, self.form.at(self.xs, first))
            return self.pull(state, first, tape)

        def replay(carry: Any, i: Any) -> Any:
            x = self.form.at(self.xs, first + i)
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

    def record(self, first: Any, n: int, size: int, carry: list[Any]) -> Kept:
        """The carries at the ends of all segments of n layers but the last."""

        def layer(carry: Any, step: Any) -> Any:
            return self.layer.step(self.consts, carry, self.form.at(self.xs, step)), None

        def segment(carry: Any, begin: Any) -> Any:
            steps = begin + jnp.arange(size, dtype=jnp.int32)
            carry, _ = lax.scan(layer, carry, steps, unroll=self.form.unrolled(size))
            return carry, carry

        begins = first + size * jnp.arange(-(-n // size) - 1, dtype=jnp.int32)
        _, ends = lax.scan(segment, carry, begins)
        return ends

    def pull(self, state: Cotangents, step: Any, tape: Sequence[Any]) -> Cotangents:
        return pull(self.form, self.layer, self.args, self.ct_ys, state, step, tape)
