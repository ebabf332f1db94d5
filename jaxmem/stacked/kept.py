"""Plans that keep single values: each run of layers stores what it was told to, and no more.

The forward pass is a scan for each run that stacks the values kept; the backward pass
goes down the runs, and in each layer computes what is missing from these, from the
parameters and from whatever else stays available.  A layer's carry is a value like any
other, kept only if something needs it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _jax
from jaxmem.estimate.backward import tied
from jaxmem.stacked.forms import VALUE_NAME, Form
from jaxmem.stacked.state import NOWHERE, Cotangents, Into, pull, start
from jaxmem.trace.layer import Layer

# Pairs of a number of layers and the layer with the tape that these keep, first to last.
Runs = Sequence[tuple[int, Layer]]
# Of each run, the values that its layers keep, stacked; those of a single layer as they are.
Kept = list[list[Any]]


def forward(form: Form, runs: Runs, args: Sequence[Any]) -> tuple[list[Any], Kept]:
    """(results, what is kept)."""
    consts, carry, xs = form.body.split_in(args)
    ys = [
        _jax.unfilled(aval, form.length)
        for aval in form.body.split_out(form.body.jaxpr.out_avals)[1]
    ]
    kept = []
    for count, indices, run in _placed(form, runs):
        if count == 1:
            x = form.read(_rows(xs, indices[0]))
            if form.interleaved and run.has_loops:
                carry, y, tape = run.tape(consts, carry, x, with_y=True, own_arrays=True)
            else:
                carry, y, tape = run.taped(consts, carry, x)
            y, tape = [leaf[None] for leaf in y], run.to_store(tape)
        else:

            def step(carry: Any, at: Any, run: Layer = run) -> Any:
                x = _rows(xs, at) if len(runs) > 1 else at
                carry, y, tape = run.tape(consts, carry, form.read(x), with_y=True)
                return carry, (y, run.to_store(tape))

            over = indices if len(runs) > 1 else xs
            carry, (y, tape) = lax.scan(
                step, carry, over, length=count, reverse=form.reverse, unroll=form.unrolled(count)
            )
        # Not concatenated: a compiler would look into that, and add a sum of it up in another
        # order than the sum of a whole array.
        ys = (
            y
            if len(runs) == 1
            else [_placed_at(a, b, indices[0]) for a, b in zip(ys, y, strict=True)]
        )
        kept.append([_jax.named(value, VALUE_NAME) for value in tape])
    return [*carry, *ys], kept


def backward(
    form: Form,
    runs: Runs,
    args: Sequence[Any],
    kept: Kept,
    ct_carry: Sequence[Any],
    ct_ys: Sequence[Any],
    into: Into = NOWHERE,
) -> Cotangents:
    """Cotangents of the operands; one of the final carry may be None for zero."""
    state, ct_ys = start(form, runs[0][1], args, ct_carry, ct_ys, into)
    parts = list(zip(_placed(form, runs), kept, strict=True))
    for (count, indices, run), tapes in reversed(parts):

        def down(state: Cotangents, at: Any, run: Layer = run) -> Cotangents:
            index, tape = at
            tape = run.from_store(tape)
            return pull(form, run, args, ct_ys, state, form.index(index), tape, into)

        if count == 1:
            if run.recomputes and not form.interleaved:
                # Outside a loop nothing else keeps a compiler from finding that it has the
                # values already that are to be recomputed.
                carry, tapes = tied(state.carry, tapes)
                state = state._replace(carry=carry)
            state = down(state, (indices[0], tapes))
        else:
            state, _ = lax.scan(
                lambda state, at, down=down: (down(state, at), None),
                state,
                (indices, tapes),
                reverse=not form.reverse,
                unroll=form.unrolled(count),
            )
    return state


def _placed(form: Form, runs: Runs) -> Iterator[tuple[int, jax.Array, Layer]]:
    """Of each run: how many layers, where they are in the stacked inputs, the layer with its tape.

    Places go up, whichever way the computation goes, so that stacked results do.
    """
    done = 0
    for count, run in runs:
        first = form.length - done - count if form.reverse else done
        yield count, jnp.arange(first, first + count, dtype=jnp.int32), run
        done += count


def _placed_at(whole: Any, part: Any, index: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(whole, part, index, 0)


def _rows(xs: Sequence[Any], index: Any) -> list[Any]:
    return [lax.dynamic_index_in_dim(x, index, keepdims=False) for x in xs]
