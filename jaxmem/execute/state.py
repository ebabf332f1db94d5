"""What the backward pass carries from layer to layer, and buffers of carries."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

from jaxmem import _jax
from jaxmem.execute.forms import Form
from jaxmem.layer import Layer


class Cotangents(NamedTuple):
    """Cotangents on the way down a stack, of those operands that are differentiated."""

    consts: list[Any]  # summed over the layers done so far
    carry: list[Any]
    xs: list[Any]  # stacked; rows of layers not done yet are zero


def start(layer: Layer, args: Sequence[Any], ct_carry: Sequence[Any]) -> Cotangents:
    """The state before the last layer; a cotangent of the carry may be None for zero."""
    consts, init, xs = layer.body.split_in(args)
    return Cotangents(
        [_jax.zeros_like(c) for c in _only(consts, layer.wrt_consts)],
        [
            _jax.zeros_like(c) if ct is None else ct
            for c, ct in zip(_only(init, layer.wrt_carry), ct_carry, strict=True)
        ],
        [_jax.zeros_like(x) for x in _only(xs, layer.wrt_x)],
    )


def pull(
    form: Form,
    layer: Layer,
    args: Sequence[Any],
    ct_ys: Sequence[Any],
    state: Cotangents,
    step: Any,
    tape: Sequence[Any],
) -> Cotangents:
    """One layer down: its gradient goes straight into its row of the stacked gradients."""
    consts, _, xs = layer.body.split_in(args)
    ct_y = form.at(ct_ys, step)
    g_consts, ct_carry, g_x = layer.pullback(consts, form.at(xs, step), tape, state.carry, ct_y)
    return Cotangents(
        [total + g for total, g in zip(state.consts, g_consts, strict=True)],
        ct_carry,
        [
            lax.dynamic_update_index_in_dim(rows, g, form.index(step), 0)
            for rows, g in zip(state.xs, g_x, strict=True)
        ],
    )


def buffer(carry: Sequence[Any], slots: int) -> list[Any]:
    """Room for so many carries, all of them this one; it is the first slot's to stay."""
    return [lax.broadcast(c, (slots,)) for c in carry]


def store(kept: Sequence[Any], carry: Sequence[Any], slot: Any, when: Any = True) -> list[Any]:
    """Write a carry into a slot where `when` holds.

    The choice is made on the slot, not by a conditional around the write, for
    which compilers keep a second copy of the whole buffer.
    """
    if when is True:
        return [
            lax.dynamic_update_index_in_dim(rows, c, slot, 0)
            for rows, c in zip(kept, carry, strict=True)
        ]
    written = []
    for rows, c in zip(kept, carry, strict=True):
        old = lax.dynamic_index_in_dim(rows, slot, keepdims=False)
        written.append(lax.dynamic_update_index_in_dim(rows, lax.select(when, c, old), slot, 0))
    return written


def load(kept: Sequence[Any], slot: Any) -> list[Any]:
    """The carry in a slot."""
    return [lax.dynamic_index_in_dim(rows, slot, keepdims=False) for rows in kept]


def _only(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]
