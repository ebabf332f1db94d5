"""The loop over microbatches: what is added up, and what is divided by what.

The gradient of a mean of sums is the sum of the gradients over the sum of the weights.  So
each microbatch adds the gradient of its *total*, and one division ends the loop.  Several terms
with denominators of their own would need a gradient each; instead their weights are summed
before, in a pass from which the compiler drops all else, and the loop then adds the gradient of
one number.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _jax
from jaxmem.accumulate import devices, shards
from jaxmem.accumulate.call import Call, Path
from jaxmem.accumulate.combine import Spec
from jaxmem.accumulate.micro import Micro
from jaxmem.accumulate.objective import Objective, Sink
from jaxmem.accumulate.split import microbatch
from jaxmem.accumulate.trees import at_least_float32
from jaxmem.accumulate.weighted import Weighted, counted, ratio

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Result:
    """Of the whole batch.

    Attributes:
      value: the loss, a scalar in float32 or wider.
      weights: the sum of each term's weights; the number of rows for a mean loss.
      aux: auxiliary outputs, combined.
      aux_split: of each leaf of `aux`, whether each device holds a part of it.
      held: what the sink made of the gradients of leaves that are not split.
      rows: gradients of leaves that are, in the order of the batch.
    """

    value: jax.Array
    weights: tuple[Any, ...]
    aux: Any
    aux_split: list[bool]
    held: Any
    rows: dict[Path, jax.Array]


# ---------------------------------------------------------------- API


def run(call: Call, sink: Sink, spec: Spec, *, has_aux: bool, axes: tuple[str, ...] = ()) -> Result:
    """Run the function on one microbatch after another.

    Args:
      call: the function and its arguments.
      sink: takes the gradients.
      spec: how auxiliary outputs are combined.
      has_aux: whether the function returns any.
      axes: mesh axes over which other parts of the batch lie, inside `shard_map`.

    Raises:
      TypeError, ValueError: what the function returns cannot be.
    """
    loop = _Loop(call, sink, spec, has_aux, axes)
    return loop.run()


# ---------------------------------------------------------------- implementation


class _Loop:
    def __init__(
        self, call: Call, sink: Sink, spec: Spec, has_aux: bool, axes: tuple[str, ...]
    ) -> None:
        self.sink, self.spec, self.has_aux, self.axes = sink, spec, has_aux, axes
        leaves = dict(call.leaves)
        for path in call.keys:
            leaves[path] = devices.own_key(jnp.asarray(leaves[path]), axes)
        arrays = [leaf for leaf in leaves.values() if isinstance(leaf, jax.Array)]
        self.varying = frozenset().union(*map(_jax.varying, arrays))
        # Parameters that all devices share would get their gradients summed in each microbatch.
        self.summed = {path: self.varying - _jax.varying(leaves[path]) for path in call.diff}
        # What wants each microbatch's share of a sum wants it over the other axes, too.
        apart = self.varying & set(axes) if sink.wants_share else self.varying
        for path in call.diff:
            leaves[path] = _jax.as_varying(leaves[path], apart)
        self.call = call.with_leaves(leaves, call.split)
        self.split = call.split
        own = set(call.rows)
        self.shared = tuple(path for path in call.diff if path not in own)
        self.split_diff = tuple(path for path in call.diff if path in own)
        # Traced once for every size, whatever it is asked for.
        micro = Micro(self.call, spec, has_aux)
        self._micro = jax.jit(micro, inline=True, static_argnames=("rows",))
        dealt = {path: dict(self.split.dealt(leaves[path])) for path in call.rows}
        self.groups = [
            (group, {path: parts[group] for path, parts in dealt.items()})
            for group in self.split.groups
        ]

    def run(self) -> Result:
        self.call.check_carried(self.call.carried)
        carry = devices.own_keys(jax.tree.map(jnp.asarray, self.call.carry()), self.axes)
        terms, aux = self._shapes(carry)
        self.mean = not isinstance(terms, Weighted)
        # Of factors and shares: what they multiply may have 64 bits.
        self.dtype = at_least_float32(*(leaf.dtype for leaf in jax.tree.leaves(terms)))
        weights = self._known_weights(carry, terms)
        scales, divisor = self._scales(weights)
        factors = self._factors(divisor)
        objective = Objective(
            micro=self.micro,
            params={path: self.call.leaves[path] for path in self.shared},
            split=self.split_diff,
            add=self.sink.add,
            scales=scales,
            dtype=self.dtype,
            place=self._varying,
            as_read=self._as_read,
        )

        sums = self._sums(terms)
        state = (
            self.sink.begin(
                [_jax.on_device(self.call.leaves[path]) for path in self.shared],
                [self.call.names[path] for path in self.shared],
                self.axes,
            ),
            sums,
            self.spec.zeros(aux) if self.has_aux else [],
            carry,
        )
        if self.split.microbatches == 1:
            state = (shards.only_once(state[0], True), *state[1:])
        state = self._varying(state)
        closed = self._without_work(objective, carry)
        in_backward = self.sink.in_backward and closed is None
        collected = []
        for group, rows in self.groups:
            given = group.size, rows, group.first, factors(group.size)
            body = functools.partial(self._add, objective, *given)
            is_last = in_backward and group is self.groups[-1][0]
            count = group.count - is_last
            outs = []
            if count == 1:
                state, out = body(state, group.first)
                state = (shards.only_once(state[0], False), *state[1:])
                outs.append(jax.tree.map(lambda leaf: leaf[None], out))
            elif count:
                numbers = jnp.arange(group.first, group.first + count)
                state, out = jax.lax.scan(body, state, numbers)
                outs.append(out)
            if is_last:
                index = group.first + count
                state, out = self._last(objective, *given, state, index, weights, divisor)
                outs.append(jax.tree.map(lambda leaf: leaf[None], out))
            collected.append(jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs))
        if closed is not None:
            sink: Any = self.sink
            value, _, by = self._finished(state[1], weights, divisor)
            done = objective.after(state[0], closed, value, by, sink, self.call)
            state = (done, *state[1:])
        return self._result(state, collected, aux, weights, divisor)

    # The function on one microbatch.

    def _leaves(self, rows: dict[Path, Any], first: int, index: Any) -> dict[Path, Any]:
        """The leaves that are a microbatch's own."""
        leaves = {path: self.call.leaves[path] for path in self.shared}
        leaves |= {path: microbatch(dealt, index - first) for path, dealt in rows.items()}
        if self.split.microbatches > 1:  # one microbatch is the batch
            for path in self.call.keys:
                leaves[path] = devices.fold_in(self.call.leaves[path], index)
        return leaves

    def micro(self, leaves: dict[Path, Any], carry: list[Any], rows: int) -> tuple[Any, Any]:
        """See `Micro`."""
        leaves = jax.tree.map(_jax.on_device, leaves)
        leaves |= {path: self._as_read(path, leaves[path]) for path in self.shared}
        # What is constant comes out of an inlined jit as a number, too.
        return jax.tree.map(jnp.asarray, self._micro(leaves, carry, rows=rows))

    def _as_read(self, path: Path, leaf: Any) -> Any:
        """A parameter, or its type, as the function reads it."""
        return shards.as_read(self.sink.zero, self.call.names[path], leaf)

    def _shapes(self, carry: list[Any]) -> tuple[Any, Any]:
        """Shapes of what the function returns for a microbatch."""
        group, rows = self.groups[0]

        def first(carry: list[Any]) -> Any:
            return self.micro(self._leaves(rows, group.first, group.first), carry, rows=group.size)

        return jax.eval_shape(first, carry)

    # Weights.

    def _known_weights(self, carry: list[Any], terms: Any) -> tuple[Any, ...] | None:
        """The weights of the whole batch, where they must be known before the loop."""
        if self.mean:
            return (self.split.rows * self._devices(),)
        if len(terms.terms) == 1 and not self.sink.wants_share:
            return None
        zeros = self._varying([devices.zeros(weight) for _, weight in terms.terms])
        state = (zeros, self._varying(carry))
        for group, rows in self.groups:

            def body(state: Any, index: Any, group: Any = group, rows: Any = rows) -> Any:
                weights, carry = state
                loss, aux = self.micro(
                    self._leaves(rows, group.first, index), carry, rows=group.size
                )
                new = [a + b for a, (_, b) in zip(weights, loss.terms, strict=True)]
                return self._varying((new, self._carried(aux, carry))), None

            numbers = jnp.arange(group.first, group.first + group.count)
            state, _ = jax.lax.scan(body, state, numbers)
        return tuple(devices.summed(state[0], self.axes))

    def _scales(self, weights: tuple[Any, ...] | None) -> tuple[tuple[Any, ...] | None, Any]:
        """How each term counts in what is differentiated, and what the sum is divided by."""
        if self.mean:
            divisor = self.split.microbatches if self.split.even else self.split.rows
            return None, divisor * self._devices()
        if weights is None:
            return (None,), None
        if len(weights) == 1:
            return (None,), weights[0]
        return tuple(ratio(jnp.ones((), self.dtype), weight) for weight in weights), 1

    def _factors(self, divisor: Any) -> Callable[[int], Any]:
        """How often a microbatch of so many rows counts; None for once."""
        ragged = self.mean and not self.split.even

        def factor(size: int) -> Any:
            if not self.sink.wants_share:
                return jnp.asarray(size, self.dtype) if ragged else None
            return ratio(jnp.asarray(size if ragged else 1, self.dtype), divisor)

        return factor

    # The loop.

    def _without_work(self, objective: Objective, carry: list[Any]) -> Any:
        """What is differentiated, if the sink works in a backward pass and has no work there.

        A pass of its own for the last microbatch would hold a second gradient then, next to the
        sums of those before.
        """
        if not self.sink.in_backward or self.split.microbatches == 1:
            return None
        sink: Any = self.sink
        group, rows = self.groups[-1]
        leaves = self._leaves(rows, group.first, group.first)
        closed = objective.traced(leaves, carry, group.size)
        params = list(objective.params.values())
        return None if sink.has_work(self.call, closed, params) else closed

    def _add(
        self,
        objective: Objective,
        size: int,
        rows: Any,
        first: int,
        factor: Any,
        state: Any,
        index: Any,
    ) -> tuple[Any, Any]:
        held, sums, aux_sums, carry = state
        leaves = self._leaves(rows, first, index)

        held, split, loss, aux = objective(held, leaves, carry, size, factor)
        aux_sums, collected = self._added_aux(aux_sums, loss, aux, size)
        state = (held, self._added(sums, loss, size), aux_sums, self._carried(aux, carry))
        return self._varying(state), (collected, split)

    def _last(
        self,
        objective: Objective,
        size: int,
        rows: Any,
        first: int,
        factor: Any,
        state: Any,
        index: Any,
        weights: Any,
        divisor: Any,
    ) -> tuple[Any, Any]:
        """The last microbatch, for a sink that does something in its backward pass."""
        held, sums, aux_sums, carry = state
        leaves = self._leaves(rows, first, index)

        def finish(loss: Any) -> tuple[Any, Any]:
            value, _, by = self._finished(self._added(sums, loss, size), weights, divisor)
            return value, by

        sink: Any = self.sink
        done, loss, aux = objective.last(held, leaves, carry, size, factor, finish, sink, self.call)
        aux_sums, collected = self._added_aux(aux_sums, loss, aux, size)
        state = (done, self._added(sums, loss, size), aux_sums, self._carried(aux, carry))
        return state, (collected, [])

    def _added_aux(self, sums: Any, loss: Any, aux: Any, size: int) -> tuple[Any, Any]:
        if not self.has_aux:
            return sums, []
        weight = jnp.asarray(size, self.dtype) if self.mean else loss.terms[0][1]
        return self.spec.add(sums, aux, weight)

    def _carried(self, aux: Any, carry: list[Any]) -> list[Any]:
        if not carry:
            return carry
        return jax.tree.map(
            lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype),
            self.spec.carried(aux),
            carry,
        )

    def _sums(self, terms: Any) -> Any:
        """Totals and weights before the first microbatch."""
        if self.mean:
            return jnp.zeros((), at_least_float32(terms.dtype))
        return [
            (jnp.zeros((), at_least_float32(total.dtype)), jnp.zeros((), weight.dtype))
            for total, weight in terms.terms
        ]

    def _added(self, sums: Any, loss: Any, size: int) -> Any:
        if self.mean:
            loss = loss.astype(sums.dtype)
            return sums + (loss if self.split.even else loss * size)
        return [
            (old + counted(total.astype(old.dtype), weight), weights + weight)
            for (old, weights), (total, weight) in zip(sums, loss.terms, strict=True)
        ]

    def _finished(self, sums: Any, weights: Any, divisor: Any) -> tuple[Any, Any, Any]:
        """Value, weights and divisor of the whole batch, from the sums over it."""
        if self.mean:
            return sums / divisor, weights, divisor
        weights = tuple(weight for _, weight in sums)
        return Weighted.of(sums).mean, weights, weights[0] if divisor is None else divisor

    def _varying(self, tree: Any) -> Any:
        if not self.varying:
            return tree
        return jax.tree.map(lambda leaf: _jax.as_varying(leaf, self.varying), tree)

    def _devices(self) -> int:
        return math.prod(jax.lax.axis_size(axis) for axis in self.axes)

    def _result(
        self, state: Any, collected: list[Any], aux: Any, weights: Any, divisor: Any
    ) -> Result:
        held, sums, aux_sums, carry = state
        # One sum over the devices: the compiler makes one message of all its parts.
        value, weights, divisor = self._finished(devices.summed(sums, self.axes), weights, divisor)
        held = self.sink.end(held, divisor, self.axes)
        if not (self.sink.wants_share or self.sink.in_backward):
            held = [
                devices.summed(leaf, sorted(self.summed[path] - set(self.axes)))
                for path, leaf in zip(self.shared, held, strict=True)
            ]
        rows = {}
        for number, path in enumerate(self.split_diff):
            whole = self.split.collected([out[number] for _, out in collected])
            rows[path] = self.sink.divided(whole, divisor, self.call.leaves[path])
        aux_split: list[bool] = []
        if self.has_aux:
            aux, aux_split = self.spec.result(
                aux_sums,
                [out for out, _ in collected],
                devices.averaged(carry, self.axes),
                aux,
                self.split,
                self.axes,
            )
        return Result(value, tuple(weights), aux, aux_split, held, rows)
