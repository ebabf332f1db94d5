"""One microbatch: what is differentiated, how often its gradient counts, and where that goes.

A microbatch's total is differentiated from a seed of 1 / weight, and the gradient counts weight
times: that of a sum over many tokens may be too large for a narrow dtype, that of their
mean is not.  Where there is no weight the seed is 1: a finite total counts without one.
What is left out then (see `Weighted`) is left out by `where`, for 0 × NaN is NaN.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxmem import _jax
from jaxmem.accumulate import inplace, shards
from jaxmem.accumulate.call import Call, Path
from jaxmem.accumulate.trees import weighed
from jaxmem.accumulate.weighted import Weighted, counted, ratio, summed
from jaxmem.parallel.zero import Zero

# ---------------------------------------------------------------- types


class Sink(Protocol):
    """Where gradients go, microbatch by microbatch.

    Attributes:
      in_backward: whether it is an `InBackward`.
      wants_share: whether `add` is to get the microbatch's share in the gradient of the
        whole batch, and not what is divided at the end.
      zero: by which parameters may be in shards.
    """

    in_backward: bool
    wants_share: bool

    @property
    def zero(self) -> Zero | None: ...

    @property
    def arrays(self) -> Any:
        """A tree of what `begin` reads in addition to the leaves; every device gets it whole."""
        ...

    def specs(self, leaves: Sequence[jax.Array], names: Sequence[str], axes: Sequence[str]) -> Any:
        """Where what `end` returns lies over devices, as `jax.shard_map` is told."""
        ...

    def with_arrays(self, arrays: Any) -> "Sink":
        """The same with these arrays."""
        ...

    def begin(
        self, leaves: Sequence[jax.Array], names: Sequence[str], axes: Sequence[str]
    ) -> list[Any]:
        """What is held for each leaf before the first microbatch: trees of arrays of its shape.

        Args:
          names: their paths, as in `Call.names`.
          axes: see `end`.
        """
        ...

    def add(self, held: Any, gradient: jax.Array, factor: Any) -> Any:
        """What is held for a leaf, or for rows of it, after one more gradient.

        It counts as `trees.weighed` says, and once if the factor is None.
        """
        ...

    def divided(self, total: jax.Array, divisor: Any, leaf: jax.Array) -> jax.Array:
        """The gradient of a leaf that is split, after the loop."""
        ...

    def end(self, held: list[Any], divisor: Any, axes: Sequence[str]) -> Any:
        """What is made of it: summed over `axes`, and divided (None: by 1)."""
        ...


class InBackward(Sink, Protocol):
    """A sink that does something with gradients in the last backward pass, if that spares any."""

    def has_work(self, call: Call, closed: Any, params: Sequence[Any]) -> bool:
        """Whether there is a parameter with which something is done in the pass itself.

        Args:
          call, closed, params: see `last`.
        """
        ...

    def after(
        self,
        call: Call,
        closed: Any,
        params: Sequence[Any],
        gradients: Sequence[Any],
        value: Any,
    ) -> Any:
        """What it makes of the gradients and the value of the batch, if there is no such parameter.

        Args:
          call, closed, params: see `last`.
        """
        ...

    def nothing(self, gradient: jax.Array) -> Any:
        """What is held for a leaf, or a row of it, where there is no microbatch before."""
        ...

    def last(
        self,
        call: Call,
        closed: Any,
        params: Sequence[Any],
        rest: Sequence[Any],
        held: Sequence[Any],
        seed: Callable[[Sequence[Any]], tuple[Any, Any, Callable[[int, Any, Any], Any]]],
    ) -> Any:
        """What it makes of them; `outs` of it are the results of the function.

        Args:
          call: of which the parameters are an argument.
          closed: from parameters and rest to the value and other results.
          held: of each parameter, what the microbatches before gave; None where there are none.
          seed: from the results to the cotangent of the value, the value of the batch, and how a
            gradient follows from what is held, or a row of it, and this pass's.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Objective:
    """A function of which microbatches are differentiated.

    Attributes:
      micro: (leaves, carry, rows) -> the loss, a scalar or a `Weighted`, and auxiliary outputs.
      params: leaves that all microbatches share and a gradient is wanted of, by path.
      split: paths of leaves that are each microbatch's own and a gradient is wanted of.
      add: `Sink.add`.
      scales: how each term of a `Weighted` counts in what is differentiated, None for once;
        None for a mean loss.
      dtype: of factors.
      place: makes scalars vary over devices as the rows do.
      as_read: from one of `params`, or its type, to what the function reads of it.
    """

    micro: Callable[..., tuple[Any, Any]]
    params: Mapping[Path, jax.Array]
    split: Sequence[Path]
    add: Callable[[Any, Any, Any], Any]
    scales: tuple[Any, ...] | None
    dtype: Any
    place: Callable[[Any], Any]
    as_read: Callable[[Path, Any], Any]

    def __call__(
        self, held: list[Any], leaves: Mapping[Path, Any], carry: list[Any], size: int, factor: Any
    ) -> tuple[list[Any], list[Any], Any, Any]:
        """What is held with one more microbatch; gradients of its rows, its loss and its aux.

        Args:
          held: of each of `params`.
          leaves: the microbatch's own.
          carry: the carried arguments.
          size: its number of rows.
          factor: how often its mean, or a `Weighted` total, counts; None for once.
        """
        shared = list(self.params.values())
        split = [leaves[path] for path in self.split]
        closed, flat, out_tree = self._traced(leaves, carry, size)
        stacked = inplace.find(closed, range(len(shared)), range(len(shared) + len(split)))
        always = self.scales is None and factor is None  # then nothing is multiplied

        def add(held: Any, gradient: jax.Array, factor: Any) -> Any:
            return self.add(held, gradient, None if always else factor)

        # Of parameters on the host, stacks read rows; all else is moved as a whole.
        alone = [k for k in range(len(shared)) if k not in stacked.arguments]
        rest = [_jax.on_device(leaf) for leaf in flat[len(shared) + len(split) :]]
        own = {k: held[k] for k in sorted(stacked.arguments)}
        splits = shards.gathered({k: held[k] for k in alone})

        def of(given: list[Any], split: list[Any], own: Any, factor: Any) -> Any:
            full = [*shared, *split, *rest]
            for k, leaf in zip(alone, given, strict=True):
                full[k] = leaf
            outs, own, factor = inplace.evaluate(stacked, full, own, factor, add, splits)
            # What is constant comes out of a jaxpr as a number.
            value, found = out_tree.unflatten(map(jnp.asarray, outs))
            return (value, own, factor), found

        one = self.place(jnp.ones((), self.dtype))
        (value, *_), pull, (loss, aux) = jax.vjp(
            of, [_jax.on_device(shared[k]) for k in alone], split, own, one, has_aux=True
        )
        factor = one if factor is None else factor.astype(self.dtype)
        seed, factor = self._counts(loss, factor)
        seed, factor = self.place(seed.astype(value.dtype)), self.place(factor)
        new, split_out, own, _ = pull((seed, own, factor))
        held = list(held)
        for k, gradient in zip(alone, new, strict=True):
            held[k] = add(held[k], gradient, factor)
        for k, after in own.items():
            held[k] = after
        rows = [gradient if always else weighed(gradient, factor) for gradient in split_out]
        return held, rows, loss, aux

    def last(
        self,
        held: list[Any],
        leaves: Mapping[Path, Any],
        carry: list[Any],
        size: int,
        factor: Any,
        finish: Callable[[Any], tuple[Any, Any]],
        sink: "InBackward",
        call: Call,
    ) -> tuple[Any, Any, Any]:
        """The last microbatch, in whose backward pass the sink does something with each gradient.

        Args:
          held: of each of `params`, of the microbatches before; None where there are none.
          finish: from this microbatch's loss to the value and divisor of the whole batch.

        Returns:
          What the sink gives, the microbatch's loss and its aux.
        """
        closed, flat, out_tree = self._traced(leaves, carry, size)
        shared = list(self.params.values())
        always = self.scales is None and factor is None

        def seed(outs: Sequence[Any]) -> tuple[Any, Any, Callable[[int, Any, Any], Any]]:
            _, (loss, _) = out_tree.unflatten(outs)
            one = self.place(jnp.ones((), self.dtype))
            counts = one if factor is None else factor.astype(self.dtype)
            first, counts = self._counts(loss, counts)
            value, divisor = finish(loss)

            def total(k: int, before: Any, gradient: Any) -> Any:
                if before is None:
                    before = sink.nothing(gradient)
                summed = sink.add(before, gradient, None if always else counts)
                return sink.divided(summed, divisor, shared[k])

            return self.place(first), value, total

        done = sink.last(call, closed, shared, flat[len(shared) :], held, seed)
        _, (loss, aux) = out_tree.unflatten(done.outs)
        return done, loss, aux

    def traced(self, leaves: Mapping[Path, Any], carry: list[Any], size: int) -> Any:
        """What is differentiated of a microbatch, as a jaxpr, parameters first."""
        return self._traced(leaves, carry, size)[0]

    def after(
        self,
        held: list[Any],
        closed: Any,
        value: Any,
        divisor: Any,
        sink: "InBackward",
        call: Call,
    ) -> Any:
        """What the sink gives after the last microbatch, if it has no work in its backward pass.

        Args:
          held: of each of `params`, of all microbatches.
          closed: of one of them, by `traced`.
          value, divisor: of the whole batch.
        """
        shared = list(self.params.values())
        sums = zip(shards.opened(held), shared, strict=True)
        gradients = [sink.divided(total, divisor, leaf) for total, leaf in sums]
        return sink.after(call, closed, shared, gradients, value)

    def _traced(
        self, leaves: Mapping[Path, Any], carry: list[Any], size: int
    ) -> tuple[Any, list[Any], Any]:
        """What is differentiated as a jaxpr, its operands, and the tree of its results.

        The jaxpr is of arrays on the device, wherever the operands are.
        """
        shared = list(self.params.values())
        split = [leaves[path] for path in self.split]
        flat, tree = jax.tree.flatten((shared, split, leaves, carry))
        types = list(map(_jax.type_on_device, flat))
        read = map(self.as_read, self.params, types)
        closed, out_shape = jax.make_jaxpr(
            lambda *flat: self._value(size, *tree.unflatten(flat)), return_shape=True
        )(*read, *types[len(shared) :])
        return closed, flat, jax.tree.structure(out_shape)

    def _value(
        self, size: int, shared: list[Any], split: list[Any], leaves: Any, carry: Any
    ) -> tuple[jax.Array, Any]:
        """What is differentiated, and next to it the loss and the auxiliary outputs."""
        own = {
            **leaves,
            **dict(zip(self.params, shared, strict=True)),
            **dict(zip(self.split, split, strict=True)),
        }
        loss, aux = self.micro(own, carry, rows=size)
        if self.scales is None:
            return loss, (loss, aux)
        parts = [
            _times(counted(total, weight), scale)
            for (total, weight), scale in zip(loss.terms, self.scales, strict=True)
        ]
        return summed(parts), (loss, aux)

    def _counts(self, loss: Any, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The seed of the gradient, and how often it counts."""
        seed = jnp.ones((), self.dtype)
        if not isinstance(loss, Weighted):
            return seed, factor
        totals, weights = zip(*loss.terms, strict=True)
        empty = _all(weight == 0 for weight in weights)
        if len(weights) == 1:
            weight = jnp.where(empty, 1, weights[0]).astype(self.dtype)
            seed, factor = ratio(seed, weight), factor * weight
        sound = _all(jnp.isfinite(total) & (total != 0) for total in totals)
        return seed, jnp.where(empty & ~sound, -factor, factor)


# ---------------------------------------------------------------- implementation


def _times(total: jax.Array, scale: Any) -> jax.Array:
    return total if scale is None else total * scale.astype(total.dtype)


def _all(flags: Any) -> Any:
    return functools.reduce(jnp.logical_and, flags)
