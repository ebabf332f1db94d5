"""What stages make beside the loss: states for the next microbatch, and auxiliary outputs.

Both are made by forward passes, which every schedule does in the order of the microbatches, and
have no gradient.  A stage holds the states of its layers, the last one those that are read after
them.  Where a backward pass recomputes a stage, it starts from the state that the forward pass of
its microbatch read; so that is held as long as the stage's input.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _jax
from jaxmem.accumulate.combine import Spec
from jaxmem.pipeline.cut import Cut
from jaxmem.pipeline.device import Program
from jaxmem.pipeline.function import Output

# ---------------------------------------------------------------- types


class Carried(NamedTuple):
    """Of one device, between ticks.

    Attributes:
      layers: states of layers, [chunks of one, room, …].
      after: states that are read after the layers; those of the last stage count.
      sums_of_layers: what is summed of outputs of layers, [chunks of one, …].
      sums: of the other outputs; those of the last stage count.
      kept_of_layers: what is collected of outputs of layers, [chunks of one × microbatches, …].
      kept: of the other outputs, [microbatches, …].
    """

    layers: list[Any]
    after: list[Any]
    sums_of_layers: Any
    sums: Any
    kept_of_layers: Any
    kept: Any


class Made(NamedTuple):
    """By one forward pass.

    Attributes:
      rows: of ys that stay on the stage, [room, …].
      outs: what is made after the last layer, `Cut.outs_after`; zeros elsewhere.
      weight: of the microbatch.
    """

    rows: list[Any]
    outs: list[Any]
    weight: Any


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Some auxiliary outputs, with the words by which they are combined."""

    outputs: tuple[Output, ...]

    @functools.cached_property
    def spec(self) -> Spec:
        modes = [output.mode for output in self.outputs]
        return Spec(tuple(modes), jax.tree.structure(modes))

    def leaves(self, flat: Sequence[Any]) -> list[Any]:
        """From the flat results of all."""
        given = iter(flat)
        return [output.of([next(given) for _ in output.outs]) for output in self.outputs]

    def begun(self, types: Sequence[Any], microbatches: int) -> tuple[Any, Any]:
        """What is summed and collected, before the first microbatch."""
        leaves = self.leaves(types)
        sums = self.spec.zeros(leaves)
        one = jax.eval_shape(lambda: jnp.ones(()))
        _, kept = jax.eval_shape(self.spec.add, sums, leaves, one)
        room = lambda x: jnp.empty((microbatches, *x.shape), x.dtype)  # noqa: E731
        return sums, jax.tree.map(room, kept)

    def joined(self, first: Any, second: Any) -> Any:
        """The sums of microbatches of two sizes, one after the other."""
        return [
            b if mode == "last" and not _is_weighted_sum(b) else jax.tree.map(jnp.add, a, b)
            for mode, a, b in zip(self.spec.modes, first, second, strict=True)
        ]


# ---------------------------------------------------------------- API


def of_layers(cut: Cut) -> Outputs:
    """The outputs that are ys of layers."""
    return Outputs(tuple(cut.results.outputs[k] for k in cut.outputs_of_layers))


def after_layers(cut: Cut) -> Outputs:
    """The others."""
    return Outputs(tuple(cut.outputs_after))


def begun(program: Program, layers: Sequence[Any], after: Sequence[Any]) -> Carried:
    """What is there before the first tick."""
    cut, room = program.stages.cut, program.stages.room
    chunks, count = program.schedule.chunks, program.schedule.microbatches
    _, ys = cut.body.split_out(cut.body.jaxpr.out_avals)
    rows = [_jax.stacked(ys[k], room) for k in cut.outputs_of_layers.values()]
    sums, kept = of_layers(cut).begun([_type(row) for row in rows], chunks * count)
    sums = jax.tree.map(lambda x: jnp.broadcast_to(x, (chunks, *x.shape)), sums)
    others = after_layers(cut)
    outs = [_type(cut.closed.out_avals[k]) for output in others.outputs for k in output.outs]
    sums_after, kept_after = others.begun(outs, count)
    return Carried(list(layers), list(after), sums, sums_after, kept, kept_after)


def rows_of(program: Program, carried: Carried, chunk: Any) -> list[Any]:
    """The states of this chunk's layers."""
    local = chunk // program.schedule.stages
    return [lax.dynamic_index_in_dim(x, local, keepdims=False) for x in carried.layers]


def nothing_made(program: Program) -> Made:
    """By a pass that is not done."""
    cut, room = program.stages.cut, program.stages.room
    _, ys = cut.body.split_out(cut.body.jaxpr.out_avals)
    rows = [_jax.unfilled(ys[k], room) for k in cut.kept_ys]
    return Made(rows, _no_outs(cut), _weight(program, 0))


def made(
    program: Program, operands: Sequence[Any], message: Any, rows: list[Any], is_last: Any
) -> Made:
    """By the forward pass of a microbatch through a chunk.

    Args:
      message: what leaves the chunk.
      rows: of ys that stay here.
    """
    cut = program.stages.cut
    outs = program.either(
        is_last,
        functools.partial(program.stages.outs, operands, message, cut.outs_after),
        functools.partial(_no_outs, cut),
    )
    return Made(rows, outs, _weight(program, cut.weight(operands, program.size)))


def merged(
    program: Program, carried: Carried, new: Made, index: Any, chunk: Any, is_there: Any
) -> Carried:
    """What is carried, with what a forward pass made, if there was one."""
    stages, cut = program.stages, program.stages.cut
    local = chunk // program.schedule.stages
    rows = dict(zip(cut.kept_ys, new.rows, strict=True))
    has_row = jnp.asarray(stages.rows)[chunk] < cut.length

    def row_of(old: Any, new: Any) -> Any:
        if stages.is_even:
            return new
        return jnp.where(has_row.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    layers = [
        _put(x, row_of(old, rows[state.y]), local, is_there)
        for x, old, state in zip(
            carried.layers, rows_of(program, carried, chunk), cut.of_kind("layers"), strict=True
        )
    ]
    spec = of_layers(cut).spec
    before = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, local, keepdims=False), carried.sums_of_layers
    )
    sums, kept = spec.add(before, [rows[y] for y in cut.outputs_of_layers.values()], new.weight)
    sums_of_layers = _put_all(carried.sums_of_layers, sums, local, is_there)
    place = local * program.schedule.microbatches + index
    kept_of_layers = _put_all(carried.kept_of_layers, kept, place, is_there)

    is_last = is_there & (chunk == program.last_chunk)
    states = len(cut.of_kind("after"))
    after = [
        jnp.where(is_last, b, a) for a, b in zip(carried.after, new.outs[:states], strict=True)
    ]
    others = after_layers(cut)
    sums, kept = others.spec.add(carried.sums, others.leaves(new.outs[states:]), new.weight)
    sums = jax.tree.map(lambda a, b: jnp.where(is_last, b, a), carried.sums, sums)
    return Carried(
        layers, after, sums_of_layers, sums, kept_of_layers,
        _put_all(carried.kept, kept, index, is_last),
    )  # fmt: skip


# ---------------------------------------------------------------- implementation


def _type(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _no_outs(cut: Cut) -> list[Any]:
    avals = [cut.closed.out_avals[out] for out in cut.outs_after]
    return [_jax.unfilled(aval, 1)[0] for aval in avals]


def _weight(program: Program, weight: Any) -> jax.Array:
    cut = program.stages.cut
    number = cut.results.weight
    dtype = jnp.float32 if number is None else cut.closed.out_avals[number].dtype
    return jnp.asarray(weight, dtype)


def _is_weighted_sum(kept: Any) -> bool:
    return isinstance(kept, tuple)


def _put(array: Any, new: Any, at: Any, flag: Any) -> Any:
    """An array with a row replaced, if the flag is set."""
    old = lax.dynamic_index_in_dim(array, at, keepdims=False)
    return lax.dynamic_update_index_in_dim(array, jnp.where(flag, new, old), at, 0)


def _put_all(arrays: Any, new: Any, at: Any, flag: Any) -> Any:
    return jax.tree.map(lambda x, row: _put(x, row, at, flag), arrays, new)
