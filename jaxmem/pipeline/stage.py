"""What one stage computes: its share of the layers, on the first one what is before them, on the
last one what is after.

Between stages go messages: the carry, and of the layers' ys those that are read after the stack,
in arrays of all layers that each stage fills in its rows of.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem import _jax
from jaxmem.accumulate.trees import at_least_float32
from jaxmem.accumulate.weighted import counted
from jaxmem.pipeline.cut import Cut
from jaxmem.plans.choose import choose, needs_sizes
from jaxmem.plans.plan import Plan
from jaxmem.policies import Policy
from jaxmem.solve.problem import Problem
from jaxmem.stacked import Form
from jaxmem.stacked.stack import Stack, native
from jaxmem.trace import context
from jaxmem.trace.layer import Body

Message = list[Any]  # flat arrays

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The parts of a cut function, dealt out to chunks of layers.

    Attributes:
      cut: the function.
      sizes: layers of each chunk.
      policy: what the layers of a stage keep while it is recomputed, or differentiated.
      branches: whether a stage may skip a layer that it does not have, by a branch.
    """

    cut: Cut
    sizes: tuple[int, ...]
    policy: Policy | Plan
    branches: bool = True

    @property
    def room(self) -> int:
        """The layers of the largest chunk, for which there is room in each."""
        return max(self.sizes)

    @property
    def is_even(self) -> bool:
        return min(self.sizes) == self.room

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """Of the layers of each chunk [chunks, room], where they are in stacked arrays.

        The number of layers where there is none.
        """
        length = self.cut.length
        found = np.full((len(self.sizes), self.room), length)
        first = 0
        for chunk, size in enumerate(self.sizes):
            order = np.arange(first, first + size)
            found[chunk, :size] = length - 1 - order if self.cut.reverse else order
            first += size
        return found

    # ------------------------------------------------------------ parameters

    def arranged(self, stacked: Sequence[Any], stages: int) -> list[Any]:
        """Stacked parameters [layers, …] as [stages, chunks of one, room, …]."""
        chunks = len(self.sizes) // stages
        if np.array_equal(self.rows.ravel(), np.arange(self.cut.length)):
            shape = (chunks, stages, self.room)
            found = [x.reshape(*shape, *x.shape[1:]) for x in stacked]
            return [jnp.swapaxes(x, 0, 1) for x in found]
        rows = self.rows.reshape(chunks, stages, self.room).swapaxes(0, 1)
        rows = np.minimum(rows, self.cut.length - 1)  # what is there is not read
        return [jnp.take(x, rows, axis=0) for x in stacked]

    def rearranged(self, x: Any) -> Any:
        """The other way: [stages, chunks of one, room, …] as [layers, …]."""
        x = jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])
        places = np.full(self.cut.length, -1)
        rows = self.rows.ravel()
        has_row = rows < self.cut.length
        places[rows[has_row]] = np.flatnonzero(has_row)
        if np.array_equal(places, np.arange(len(x))):
            return x
        return jnp.take(x, places, axis=0)

    # ------------------------------------------------------------ messages

    @functools.cached_property
    def message_types(self) -> list[Any]:
        """Types of what goes from stage to stage."""
        _, carry, _ = self.cut.body.split_in(self.cut.body.jaxpr.in_avals)
        _, ys = self.cut.body.split_out(self.cut.body.jaxpr.out_avals)
        used = [y for y, flag in zip(ys, self.cut.used_ys, strict=True) if flag]
        found = [*carry, *(_jax.stacked(y, self.cut.length) for y in used)]
        return [_sent_type(aval) for aval in found]

    @functools.cached_property
    def is_float(self) -> list[bool]:
        """Of each array of a message, whether it has a cotangent."""
        return [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in self.message_types]

    @property
    def message_bytes(self) -> int:
        return sum(aval.size * aval.dtype.itemsize for aval in self.message_types)

    def empty(self) -> Message:
        """A message of zeros."""
        return [jnp.zeros(aval.shape, aval.dtype) for aval in self.message_types]

    def _opened(self, message: Message) -> tuple[list[Any], list[Any]]:
        """Carry, and the arrays of ys that are read."""
        _, carry, _ = self.cut.body.split_in(self.cut.body.jaxpr.in_avals)
        _, ys = self.cut.body.split_out(self.cut.body.jaxpr.out_avals)
        used = [y for y, flag in zip(ys, self.cut.used_ys, strict=True) if flag]
        kinds = [*carry, *used]
        found = [_received(x, aval) for x, aval in zip(message, kinds, strict=True)]
        return found[: len(carry)], found[len(carry) :]

    # ------------------------------------------------------------ parts

    def begin(self, operands: Sequence[Any]) -> Message:
        """What enters the first layer."""
        carry = list(map(_sent, self.cut.evaluate(operands, self.cut.carry)))
        return [*carry, *self.empty()[len(carry) :]]

    def layers(
        self,
        params: Sequence[Any],
        operands: Sequence[Any],
        message: Message,
        chunk: Any,
        states: Sequence[Any] = (),
    ) -> tuple[Message, list[Any]]:
        """A message through the layers of a chunk, and the ys that stay here.

        Args:
          params: [room, …], of this chunk.
          chunk: its number.
          states: of its layers, [room, …].
        """
        cut, body = self.cut, self.cut.body
        carry, ys = self._opened(message)
        values = cut.evaluate(operands, [*cut.consts, *cut.own_xs])
        consts, own = values[: body.num_consts], values[body.num_consts :]
        rows = jnp.asarray(self.rows)[chunk]
        own = iter([x[jnp.minimum(rows, cut.length - 1)] for x in own])
        given = iter(params)
        kept = {state.x: x for state, x in zip(cut.of_kind("layers"), states, strict=True)}
        xs = [
            next(given) if is_parameter else kept[k] if is_state else next(own)
            for k, (is_parameter, is_state) in enumerate(
                zip(cut.is_parameter, cut.is_state, strict=True)
            )
        ]
        body = body if self.is_even else _skipping(body, self.branches)
        xs += [] if self.is_even else [rows < cut.length]
        form = Form(body, self.room, False, cut.unroll)
        stack = Stack(form, self.policy, cut.info, is_stage=True)
        outs = _run(stack, [*consts, *carry, *xs])
        carry, new = body.split_out(outs)
        used = [y for y, flag in zip(new, cut.used_ys, strict=True) if flag]
        ys = [old.at[rows].set(y, mode="drop") for old, y in zip(ys, used, strict=True)]
        return list(map(_sent, [*carry, *ys])), [new[k] for k in cut.kept_ys]

    def outs(
        self, operands: Sequence[Any], message: Message, numbers: Sequence[int]
    ) -> list[jax.Array]:
        """Results of the function by their numbers, from what leaves the last layer."""
        carry, used = self._opened(message)
        ys: Any = iter(used)
        ys = [next(ys) if flag else None for flag in self.cut.used_ys]
        return self.cut.after(operands, carry, ys, numbers)

    def loss(self, operands: Sequence[Any], message: Message, scales: Any) -> jax.Array:
        """The share of a microbatch in the loss of the batch, from what leaves the last layer.

        Args:
          scales: how the mean, or each total, counts.
        """
        results = self.cut.results
        outs = self.outs(operands, message, range(results.losses))
        if results.is_mean:
            return outs[0].astype(at_least_float32(outs[0].dtype)) * scales[0]
        count = len(outs) // 2
        parts = [
            counted(total, weight).astype(scale.dtype) * scale
            for total, weight, scale in zip(outs[:count], outs[count:], scales, strict=True)
        ]
        return functools.reduce(jnp.add, parts)


# ---------------------------------------------------------------- API


def select(flag: Any, a: Any, b: Any) -> Any:
    """`jnp.where` for one flag.

    jax's own derivative of it fails inside of `shard_map` on values with a constraint on their
    sharding, whose types tell of the mesh outside.
    """
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return jnp.where(flag, a, b)
    return _select(flag, a, b)


@jax.custom_vjp
def _select(flag: Any, a: Any, b: Any) -> Any:
    return jnp.where(flag, a, b)


def _select_forward(flag: Any, a: Any, b: Any) -> tuple[Any, Any]:
    return jnp.where(flag, a, b), flag


def _select_backward(flag: Any, cotangent: Any) -> tuple[None, Any, Any]:
    zero = jnp.zeros((), cotangent.dtype)
    return None, jnp.where(flag, cotangent, zero), jnp.where(flag, zero, cotangent)


_select.defvjp(_select_forward, _select_backward)

# ---------------------------------------------------------------- implementation


def _sent_type(aval: Any) -> Any:
    if not _jax.is_key(aval):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def _sent(value: Any) -> Any:
    """Random keys are sent as numbers."""
    return jax.random.key_data(value) if _jax.is_key(value) else value


def _received(value: Any, aval: Any) -> Any:
    if not _jax.is_key(aval):
        return value
    impl = jax.random.key_impl(jnp.empty((), aval.dtype))
    return jax.random.wrap_key_data(value, impl=impl)


def _skipping(body: Body, branches: bool) -> Body:
    """The layer with one input more, which says whether it is there at all."""
    _, ys = body.split_out(body.jaxpr.out_avals)

    def flat(*flat: Any) -> list[Any]:
        *given, is_there = flat
        consts, carry, x = body.split_in(given)

        def layer(consts: Any, carry: Any, x: Any) -> list[Any]:
            carry, y = body(consts, carry, x)
            return [*carry, *y]

        def nothing(consts: Any, carry: Any, x: Any) -> list[Any]:
            return [*carry, *(_jax.unfilled(y, 1)[0] for y in ys)]

        if branches:
            return lax.cond(is_there, layer, nothing, consts, carry, x)
        both = zip(layer(consts, carry, x), nothing(consts, carry, x), strict=True)
        return [select(is_there, a, b) for a, b in both]

    flag = jax.typeof(jnp.zeros((), jnp.bool_))
    return Body(_jax.trace(flat, [*body.jaxpr.in_avals, flag]), body.num_consts, body.num_carry)


def _run(stack: Stack, operands: list[Any]) -> list[Any]:
    """A stack as the scan that jax knows, if the policy alone says which; else bound to it."""
    if not needs_sizes(stack.policy):
        plan = choose(stack.policy, Problem(stack.form.length))
        if run := native(plan):
            context.note_plan(stack.policy, plan)
            return run(stack.form, operands)
    return _jax.bind_stack(stack, operands)
