"""What the backward pass carries from layer to layer, and buffers of carries."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmem import _jax
from jaxmem.estimate.backward import interleaved_pullback
from jaxmem.stacked.forms import Form
from jaxmem.trace.layer import Layer


class Cotangents(NamedTuple):
    """Cotangents on the way down a stack, of those operands that are differentiated."""

    consts: list[Any]  # summed over the layers done so far
    carry: list[Any]
    xs: list[Any]  # stacked; rows of layers not done yet are zero, or what they are added to


@dataclasses.dataclass(frozen=True)
class Into:
    """What gradients of stacked inputs are added to, instead of being returned.

    Attributes:
      held: by number among the differentiated xs: a tree of arrays, stacked as the input is.
      factor: passed to `add`.
      add: (slices of a tree, the gradient of those, factor) -> the slices after.
    """

    held: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    factor: Any = None
    add: Callable[[Any, Any, Any], Any] = lambda rows, gradient, factor: gradient

    def inputs(self, xs: Sequence[Any], state: Sequence[Any], wrt: Sequence[bool]) -> Sequence[Any]:
        """The stacked inputs that layers not done yet are to be read from.

        Args:
          xs: as the stack was given them.
          state: `Cotangents.xs`.
          wrt: which of xs are differentiated.
        """
        return xs

    def written(
        self, xs: Sequence[Any], gradients: Sequence[Any], index: Any, pulled: Sequence[Any]
    ) -> list[Any]:
        """One layer's gradients, in the places where they belong.

        Args:
          xs: `Cotangents.xs`.
          gradients: of the differentiated xs.
          pulled: cotangents of the carry in front of the layer, for which xs have been read.
        """
        pairs = zip(xs, gradients, strict=True)
        return [self.write(number, x, g, index) for number, (x, g) in enumerate(pairs)]

    def write(self, number: int, rows: Any, gradient: Any, index: Any) -> Any:
        """One layer's gradient, in the place where it belongs."""
        if number not in self.held:
            row = _jax.beside(gradient, rows)
            return lax.dynamic_update_index_in_dim(rows, row, index, 0)
        own = jax.tree.map(lambda r: lax.dynamic_index_in_dim(r, index, keepdims=False), rows)
        return jax.tree.map(
            lambda r, new: lax.dynamic_update_index_in_dim(r, new, index, 0),
            rows,
            self.add(own, gradient, self.factor),
        )

    def write_all(self, number: int, rows: Any, gradients: Any) -> Any:
        """The gradients of all layers at once, where they are there at once."""
        return self.add(rows, gradients, self.factor)


NOWHERE = Into()


def start(
    form: Form,
    layer: Layer,
    args: Sequence[Any],
    ct_carry: Sequence[Any],
    ct_ys: Sequence[Any],
    into: Into = NOWHERE,
) -> tuple[Cotangents, Sequence[Any]]:
    """The state before the last layer, and the cotangents of ys as they are to be read.

    A cotangent of the carry may be None for zero.
    """
    consts, init, xs = layer.body.split_in(args)
    zeros = _jax.zeros_of
    if form.own_arrays:
        zeros, (ct_carry, ct_ys) = _jax.zeros_behind((ct_carry, ct_ys))

    def rows_for(x: Any) -> Any:
        """Room for a stacked input's gradients, in the memory where it is; all is written."""
        return _jax.unfilled_like(x) if _jax.is_on_host(x) else zeros(jax.typeof(x))

    state = Cotangents(
        [zeros(jax.typeof(c)) for c in _only(consts, layer.wrt_consts)],
        [
            zeros(jax.typeof(c)) if ct is None else ct
            for c, ct in zip(_only(init, layer.wrt_carry), ct_carry, strict=True)
        ],
        [
            into.held[number] if number in into.held else rows_for(x)
            for number, x in enumerate(_only(xs, layer.wrt_x))
        ],
    )
    return state, ct_ys


def pull(
    form: Form,
    layer: Layer,
    args: Sequence[Any],
    ct_ys: Sequence[Any],
    state: Cotangents,
    step: Any,
    tape: Sequence[Any],
    into: Into = NOWHERE,
) -> Cotangents:
    """One layer down: its gradient goes directly into its row of the stacked gradients."""
    consts, _, xs = layer.body.split_in(args)
    xs = into.inputs(xs, state.xs, layer.wrt_x)
    ct_y = form.at(ct_ys, step)
    pullback = Layer.pullback
    if form.interleaved and (layer.recomputes or layer.has_loops):
        pullback = functools.partial(
            interleaved_pullback, waits=form.waits, casts_wait=form.casts_wait
        )
    g_consts, ct_carry, g_x = pullback(layer, consts, form.at(xs, step), tape, state.carry, ct_y)
    return Cotangents(
        [total + g for total, g in zip(state.consts, g_consts, strict=True)],
        ct_carry,
        into.written(state.xs, g_x, form.index(step), ct_carry),
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
