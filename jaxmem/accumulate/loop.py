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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxmem.accumulate import devices, inplace
from jaxmem.accumulate.call import Call, Path
from jaxmem.accumulate.combine import Spec
from jaxmem.accumulate.micro import Micro
from jaxmem.accumulate.split import microbatch
from jaxmem.accumulate.trees import weighed
from jaxmem.accumulate.weighted import Weighted, ratio

# ---------------------------------------------------------------- types


class Sink(Protocol):
    """Where gradients go, microbatch by microbatch.

    Attributes:
      wants_share: whether `add` is to get the microbatch's share in the gradient of the
        whole batch, and not what is divided at the end.
    """

    wants_share: bool

    def begin(self, leaves: Sequence[jax.Array]) -> list[Any]:
        """What is held for each leaf before the first microbatch: trees of arrays of its shape."""
        ...

    def add(self, held: Any, gradient: jax.Array, factor: Any) -> Any:
        """What is held for a leaf, or for rows of it, after one more gradient.

        It counts `factor` times (None: once), and not at all, even if it is NaN, with 0.
        """
        ...

    def divided(self, total: jax.Array, divisor: Any, leaf: jax.Array) -> jax.Array:
        """The gradient of a leaf that is split, after the loop."""
        ...

    def end(self, held: list[Any], divisor: Any, axes: Sequence[str]) -> Any:
        """What is made of it: summed over `axes`, and divided (None: by 1)."""
        ...


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
        self.varying = frozenset().union(*map(devices.varying, arrays))
        # Parameters that all devices share would get their gradients summed in each microbatch.
        self.summed = {path: self.varying - devices.varying(leaves[path]) for path in call.diff}
        if not sink.wants_share:
            for path in call.diff:
                leaves[path] = devices.as_varying(leaves[path], self.varying)
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
        carry = devices.own_keys(jax.tree.map(jnp.asarray, self.call.carry()), self.axes)
        shapes = self._shapes(carry)
        terms, aux = shapes
        self.mean = not isinstance(terms, Weighted)
        weights = self._known_weights(carry, terms)
        self.scales, divisor = self._scales(weights)
        factors = self._factors(divisor)

        sums = self._sums(terms)
        state = (
            self.sink.begin([self.call.leaves[path] for path in self.shared]),
            sums,
            self.spec.zeros(aux) if self.has_aux else [],
            carry,
        )
        state = self._varying(state)
        collected = []
        for group, rows in self.groups:
            body = functools.partial(self._add, group.size, rows, group.first, factors)
            if group.count == 1:
                state, out = body(state, group.first)
                out = jax.tree.map(lambda leaf: leaf[None], out)
            else:
                numbers = jnp.arange(group.first, group.first + group.count)
                state, out = jax.lax.scan(body, state, numbers)
            collected.append(out)
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
        # What is constant comes out of an inlined jit as a number, too.
        return jax.tree.map(jnp.asarray, self._micro(leaves, carry, rows=rows))

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

    def _scales(self, weights: tuple[Any, ...] | None) -> tuple[tuple[Any, ...], Any]:
        """How each term counts in what is differentiated, and what the sum is divided by."""
        if weights is None:
            return (None,), None
        if self.mean:
            divisor = self.split.microbatches if self.split.even else self.split.rows
            return (None,), divisor * self._devices()
        if len(weights) == 1:
            return (None,), weights[0]
        return tuple(ratio(jnp.float32(1), weight) for weight in weights), 1

    def _factors(self, divisor: Any) -> Callable[[int], Any]:
        """How often a microbatch of so many rows counts; None for once."""
        ragged = self.mean and not self.split.even

        def factor(size: int) -> Any:
            if not self.sink.wants_share:
                return jnp.float32(size) if ragged else None
            return ratio(jnp.float32(size if ragged else 1), jnp.asarray(divisor, jnp.float32))

        return factor

    # The loop.

    def _add(
        self, size: int, rows: Any, first: int, factors: Any, state: Any, index: Any
    ) -> tuple[Any, Any]:
        held, sums, aux_sums, carry = state
        leaves = self._leaves(rows, first, index)

        held, split, loss, aux = self._gradients(held, leaves, carry, size, factors(size))
        new_sums = self._added(sums, loss, size)
        collected: Any = []
        if self.has_aux:
            weight = jnp.float32(size) if self.mean else loss.terms[0][1]
            aux_sums, collected = self.spec.add(aux_sums, aux, weight)
        state = (held, new_sums, aux_sums, self._carried(aux, carry))
        return self._varying(state), (collected, split)

    def _gradients(
        self, held: list[Any], leaves: dict[Path, Any], carry: list[Any], size: int, factor: Any
    ) -> tuple[list[Any], list[Any], Any, Any]:
        """What is held with one more microbatch; gradients of its rows, its loss and its aux."""
        shared = [self.call.leaves[path] for path in self.shared]
        split = [leaves[path] for path in self.split_diff]

        def objective(shared: list[Any], split: list[Any], leaves: Any, carry: Any) -> Any:
            own = {
                **leaves,
                **dict(zip(self.shared, shared, strict=True)),
                **dict(zip(self.split_diff, split, strict=True)),
            }
            loss, aux = self.micro(own, carry, rows=size)
            if self.mean:
                return loss, (loss, aux)
            parts = [
                _times(jnp.where(weight == 0, jnp.zeros_like(total), total), scale)
                for (total, weight), scale in zip(loss.terms, self.scales, strict=True)
            ]
            return _sum(parts), (loss, aux)

        flat, tree = jax.tree.flatten((shared, split, leaves, carry))
        closed, out_shape = jax.make_jaxpr(
            lambda *flat: objective(*tree.unflatten(flat)), return_shape=True
        )(*flat)
        out_tree = jax.tree.structure(out_shape)
        stacked = inplace.find(closed, range(len(shared)), range(len(shared) + len(split)))
        always = self.mean and factor is None  # then nothing is multiplied

        def add(held: Any, gradient: jax.Array, factor: Any) -> Any:
            return self.sink.add(held, gradient, None if always else factor)

        def run(shared: list[Any], split: list[Any], own: Any, factor: Any) -> Any:
            full = [*shared, *split, *flat[len(shared) + len(split) :]]
            outs, own, factor = inplace.evaluate(stacked, full, own, factor, add)
            # What is constant comes out of a jaxpr as a number.
            value, found = out_tree.unflatten(map(jnp.asarray, outs))
            return (value, own, factor), found

        alone = [k for k in range(len(shared)) if k not in stacked.arguments]
        own = {k: held[k] for k in sorted(stacked.arguments)}

        def of(given: list[Any], split: list[Any], own: Any, factor: Any) -> Any:
            full = list(shared)
            for k, leaf in zip(alone, given, strict=True):
                full[k] = leaf
            return run(full, split, own, factor)

        one = self._varying(jnp.ones((), jnp.float32))
        (value, *_), pull, (loss, aux) = jax.vjp(
            of, [shared[k] for k in alone], split, own, one, has_aux=True
        )
        seed = jnp.ones_like(value)
        if not self.mean:
            # What has no weight is left out, whatever it is: 0 × NaN is NaN.
            factor = one if factor is None else factor
            if len(loss.terms) == 1:
                # The gradient of the microbatch's mean, which is that many times as small as that
                # of its sum: a narrow dtype may not hold the latter.
                ((_, weight),) = loss.terms
                seed, factor = ratio(jnp.float32(1), weight).astype(seed.dtype), factor * weight
            else:
                counts = functools.reduce(jnp.logical_or, [weight != 0 for _, weight in loss.terms])
                factor = jnp.where(counts, factor, 0)
        given = one if factor is None else self._varying(factor)
        new, split_out, own, _ = pull((self._varying(seed), own, given))
        held = list(held)
        for k, gradient in zip(alone, new, strict=True):
            held[k] = add(held[k], gradient, given)
        for k, after in own.items():
            held[k] = after
        rows = [gradient if always else weighed(gradient, given) for gradient in split_out]
        return held, rows, loss, aux

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
            return jnp.zeros((), jnp.promote_types(terms.dtype, jnp.float32))
        return [
            (jnp.zeros((), jnp.promote_types(total.dtype, jnp.float32)), jnp.zeros((), jnp.float32))
            for total, _ in terms.terms
        ]

    def _added(self, sums: Any, loss: Any, size: int) -> Any:
        if self.mean:
            loss = loss.astype(sums.dtype)
            return sums + (loss if self.split.even else loss * size)
        return [
            (old + jnp.where(weight == 0, 0, total.astype(old.dtype)), weights + weight)
            for (old, weights), (total, weight) in zip(sums, loss.terms, strict=True)
        ]

    def _varying(self, tree: Any) -> Any:
        if not self.varying:
            return tree
        return jax.tree.map(lambda leaf: devices.as_varying(leaf, self.varying), tree)

    def _devices(self) -> int:
        return math.prod(jax.lax.axis_size(axis) for axis in self.axes)

    def _result(
        self, state: Any, collected: list[Any], aux: Any, weights: Any, divisor: Any
    ) -> Result:
        held, sums, aux_sums, carry = state
        # One sum over the devices: the compiler makes one message of all its parts.
        sums = devices.summed(sums, self.axes)
        if self.mean:
            value = sums / divisor
        else:
            weights = tuple(weight for _, weight in sums)
            value = Weighted.of(sums).mean
            if divisor is None:
                divisor = weights[0]
        held = self.sink.end(held, divisor, self.axes)
        if not self.sink.wants_share:
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


def _times(total: jax.Array, scale: Any) -> jax.Array:
    return total if scale is None else total * scale.astype(total.dtype)


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
    dtype = functools.reduce(jnp.promote_types, [part.dtype for part in parts])
    return functools.reduce(jnp.add, [part.astype(dtype) for part in parts])
