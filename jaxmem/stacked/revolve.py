"""Revolve plans: a fixed number of carries, moved as the backward pass goes.

The schedule is a table with one row for each layer: which positions the slots
hold when that layer is reversed (`jaxmem.solve.revolve`).  One loop goes over
the rows from the last layer to the first, with an inner loop that advances from
the nearest carry held and stores on the way what the row asks for.  The program
has the same size for any number of layers.

The forward pass is the schedule's first sweep.  It keeps the last layer's tape,
with which the way down starts; so the evaluations are those of the published
schedule, none more.  (Where some ys turn out to have no cotangents, that tape is of
another layer than the one to be pulled, and is made again.)
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem import _jax
from jaxmem.solve import schedule
from jaxmem.stacked.forms import Form
from jaxmem.stacked.state import NOWHERE, Cotangents, Into, buffer, load, pull, start, store
from jaxmem.trace.layer import Layer
from jaxmem.trace.names import CARRY_NAME

# The carries in the slots; the tape of the last layer, None if it is to be made again.
Kept = tuple[list[Any], list[Any] | None]


def forward(form: Form, layer: Layer, slots: int, args: Sequence[Any]) -> tuple[list[Any], Kept]:
    """(results, what is kept)."""
    consts, init, xs = form.body.split_in(args)
    last = form.length - 1
    held = jnp.asarray(schedule(form.length, slots).held[last], jnp.int32)
    ys = [
        _jax.unfilled(aval, form.length)
        for aval in form.body.split_out(form.body.jaxpr.out_avals)[1]
    ]

    def write(ys: Any, y: Any, i: Any) -> Any:
        at = form.index(i)
        return [lax.dynamic_update_index_in_dim(r, v, at, 0) for r, v in zip(ys, y, strict=True)]

    def step(state: Any, i: Any) -> Any:
        carry, kept, ys = state
        carry, y = layer.advance(consts, carry, form.at(xs, i))
        return (carry, _keep(kept, carry, i + 1, held), write(ys, y, i)), None

    (carry, kept, ys), _ = lax.scan(
        step,
        (init, buffer(init, held.size), ys),
        jnp.arange(last, dtype=jnp.int32),
        unroll=form.unrolled(last),
    )
    carry, y, tape = layer.taped(consts, carry, form.at(xs, last))
    kept = [_jax.named(k, CARRY_NAME) for k in kept]
    return [*carry, *write(ys, y, last)], (kept, tape)


def backward(
    form: Form,
    layer: Layer,
    slots: int,
    args: Sequence[Any],
    kept: Kept,
    ct_carry: Sequence[Any],
    ct_ys: Sequence[Any],
    into: Into = NOWHERE,
) -> Cotangents:
    """Cotangents of the operands; one of the final carry may be None for zero."""
    consts, _, xs = form.body.split_in(args)
    carries, tape = kept
    last = form.length - 1
    table = schedule(form.length, slots)
    held = np.asarray(table.held, np.int32)
    restart = np.asarray(table.restart, np.int32)
    state, ct_ys = start(form, layer, args, ct_carry, ct_ys, into)
    todo = form.length

    # The last layer and all others are pulled alike: under a jit that is traced and lowered
    # once, and gone again before anything is optimised.
    @jax.jit
    def down_one(state: Any, step: Any, tape: Any) -> Any:
        return pull(form, layer, args, ct_ys, state, step, tape, into)

    if tape is not None:
        todo -= 1
        state = down_one(state, jnp.int32(todo), tape)
    # Where the carry in each row's slot stands before the row's own stores: as the row
    # before left it, which for the first row is how the forward pass left it.
    before = held[np.minimum(np.arange(1, form.length + 1), last)]
    slot = np.append(restart[:last], np.argmax(held[last]))
    rows = {
        "layer": np.arange(form.length, dtype=np.int32),
        "held": held,
        "slot": slot.astype(np.int32),
        "from": before[np.arange(form.length), slot],
    }

    def down(loop: Any, row: Any) -> Any:
        state, carries = loop

        stacked = into.inputs(xs, state.xs, layer.wrt_x)

        def advance(i: Any, at: Any) -> Any:
            carry, carries = at
            x = form.at(stacked, i)
            with jax.named_scope(_jax.RECOMPUTED):
                carry = layer.step(consts, carry, x)
            return carry, _keep(carries, carry, i + 1, row["held"])

        begin = load(carries, row["slot"])
        carry, carries = lax.fori_loop(row["from"], row["layer"], advance, (begin, carries))
        x = form.at(stacked, row["layer"])
        with jax.named_scope(_jax.RECOMPUTED):
            _, _, tape = layer.taped(consts, carry, x)
        state = down_one(state, row["layer"], tape)
        return (state, carries), None

    (state, _), _ = lax.scan(
        down,
        (state, carries),
        {name: jnp.asarray(column[:todo]) for name, column in rows.items()},
        reverse=True,
    )
    return state


def _keep(kept: list[Any], carry: Sequence[Any], position: Any, held: Any) -> list[Any]:
    """Store a carry if the row's slots are to hold its position."""
    match = held == position
    return store(kept, carry, jnp.argmax(match).astype(jnp.int32), jnp.any(match))
