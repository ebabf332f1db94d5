"""Gradients of microbatches where the last one's backward pass updates the parameters."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.accumulate import shards
from jaxmem.accumulate.call import Call
from jaxmem.accumulate.gradient import Mean
from jaxmem.accumulate.trees import at_least_float32, sum_dtype
from jaxmem.state import in_backward
from jaxmem.state.in_backward import Done, Task
from jaxmem.state.on_leaves import OnLeaves, device_type, pure
from jaxmem.state.places import Places


@dataclasses.dataclass(frozen=True)
class Updating(Mean):
    """Sums gradients of all microbatches but the last, in whose backward pass it updates.

    Of all, and updates then, if there is no parameter that is updated in a backward pass.
    """

    optimizer: Any
    state: Any
    passes: int
    microbatches: int
    in_backward = True

    def begin(
        self, leaves: Sequence[jax.Array], names: Sequence[str], axes: Sequence[str]
    ) -> list[Any]:
        if self.microbatches == 1:
            return [None] * len(leaves)
        return super().begin(leaves, names, axes)

    def nothing(self, gradient: jax.Array) -> jax.Array:
        return jnp.zeros_like(gradient, dtype=sum_dtype(gradient, self.dtype))

    def end(self, held: Any, divisor: Any, axes: Sequence[str]) -> Any:
        return held

    def last(
        self,
        call: Call,
        closed: Any,
        params: Sequence[Any],
        rest: Sequence[Any],
        held: Sequence[Any],
        seed: Callable[[Sequence[Any]], Any],
    ) -> Done:
        return in_backward.run(self._task(call, closed, params, rest, shards.opened(held), seed))

    def has_work(self, call: Call, closed: Any, params: Sequence[Any]) -> bool:
        return in_backward.has_work(self._task(call, closed, params, [], [], None))

    def after(
        self,
        call: Call,
        closed: Any,
        params: Sequence[Any],
        gradients: Sequence[Any],
        value: Any,
    ) -> Done:
        return in_backward.after(self._task(call, closed, params, [], [], None), gradients, value)

    def _task(
        self,
        call: Call,
        closed: Any,
        params: Sequence[Any],
        rest: Sequence[Any],
        before: Sequence[Any],
        seed: Any,
    ) -> Task:
        params = list(params)
        trees = OnLeaves(self.optimizer, pure(call.trees[0], params), params, self.state)
        types = [device_type(leaf, sum_dtype(leaf, self.dtype)) for leaf in params]
        value = device_type(closed.out_avals[0], at_least_float32(closed.out_avals[0].dtype))
        names = [call.names[path] for path in call.diff]
        places = Places.of(self.zero, names, params, self.state)
        return Task(
            closed=closed,
            params=params,
            rest=rest,
            state=trees.state_leaves,
            update=trees.update(value, places),
            before=before,
            seed=seed,
            gradient_types=places.types(types),
            passes=self.passes,
            places=places,
        )
