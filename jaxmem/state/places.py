"""Where gradients, parameters and the leaves of a state lie over the devices, in an update."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxmem import _jax
from jaxmem.accumulate.shards import path_of, splits_of
from jaxmem.parallel.split import Split
from jaxmem.parallel.zero import Zero
from jaxmem.state import stored

# ---------------------------------------------------------------- API


@dataclasses.dataclass(frozen=True)
class Places:
    """How ZeRO splits what an update computes with; nothing is split without splits.

    Attributes:
      params: how each parameter's gradient, and its update, are split.
      state: how each leaf of the state is.
      keeps_shards: whether parameters stay in shards, as in stage 3.
    """

    params: Sequence[Split] = ()
    state: Sequence[Split] = ()
    keeps_shards: bool = False

    @classmethod
    def of(
        cls, zero: Zero | None, names: Sequence[str], params: Sequence[Any], state: Any
    ) -> "Places":
        """The places by ZeRO of parameters, by their names in errors, and of a state."""
        splits = splits_of(zero, names, params)
        if zero is None or splits is None:
            return cls()
        own = zero.states(stored.types(state), list(map(path_of, names)), params)
        return cls(splits, list(own), zero.stage > 2)

    def types(self, avals: Sequence[Any]) -> list[Any]:
        """Types of parameters, or of their gradients, as the update has them."""
        if not self.params:
            return list(avals)
        return [split.as_updated(aval) for split, aval in zip(self.params, avals, strict=True)]

    def check_rows(self, leaves: Iterable[int]) -> None:
        """Warn of parameters that are updated row by row, if their rows are what is split."""
        for leaf in leaves if self.params else ():
            self.params[leaf].check_rows()

    def gradient(self, leaf: int, value: Any) -> Any:
        """A gradient on the device, or a row of it, reduce-scattered."""
        return _placed(self.params[leaf].scattered, value) if self.params else value

    def gathered(self, leaves: Mapping[int, int]) -> dict[int, Split]:
        """Of parameters, by whatever key, how they are split if they are gathered to be read."""
        return {key: self.params[leaf] for key, leaf in leaves.items()} if self.keeps_shards else {}

    def shards(self, leaf: int, param: Any) -> Any:
        """What of a parameter is updated on each device."""
        if not self.params or _jax.is_on_host(param):
            return param
        return self.params[leaf].scattered(param)

    def whole(self, leaf: int, before: Any, shards: Any) -> Any:
        """Its new value, where the old one was."""
        if not self.params or _jax.is_on_host(before):
            return shards
        split = self.params[leaf]
        shards = split.scattered(shards)
        return shards if self.keeps_shards else split.written(before, shards)

    def in_shards(self, leaf: int, state: Sequence[int], rows: Sequence[Any]) -> Sequence[Any]:
        """Rows of a parameter, and of leaves of its state, as they are updated."""
        if not self.params:
            return rows
        splits = [self.params[leaf], *(self.state[number] for number in state)]
        first, *rest = rows
        if not self.keeps_shards:
            # The partitioner takes the way in which a part of an array is read for that of the
            # array, and would split the stack of parameters that is carried from layer to layer.
            first = self.params[leaf].gathered(first)
        pairs = zip(splits, [first, *rest], strict=True)
        return [split.scattered(row) for split, row in pairs]

    def stored(self, leaf: int, state: Sequence[int], arrays: Sequence[Any]) -> tuple[Any, ...]:
        """A parameter and leaves of its state, or rows of them, as they are stored."""
        if not self.params or not arrays:
            return tuple(arrays)
        param, *rest = arrays
        split = self.params[leaf]
        place = split.scattered if self.keeps_shards else split.gathered
        splits = (self.state[number] for number in state)
        return (
            _placed(place, param),
            *(_placed(split.scattered, array) for split, array in zip(splits, rest, strict=True)),
        )

    def state_in_shards(self, state: Sequence[Any]) -> list[Any]:
        """The leaves of a state, as they are stored."""
        if not self.params:
            return list(state)
        pairs = zip(self.state, state, strict=True)
        return [_placed(split.scattered, leaf) for split, leaf in pairs]


NOWHERE = Places()

# ---------------------------------------------------------------- implementation


def _placed(place: Callable[[Any], Any], leaf: Any) -> Any:
    """An array on the device in its place; in other memories arrays lie as they were given."""
    return leaf if stored.is_on_disk(leaf) or _jax.is_on_host(leaf) else place(leaf)
