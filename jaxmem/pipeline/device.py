"""What all executors share: a pipeline as one device sees it, inside of `shard_map`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.accumulate import devices
from jaxmem.accumulate.split import microbatch
from jaxmem.pipeline.schedule import PipelineSchedule
from jaxmem.pipeline.stage import Message, Stages, select

T = TypeVar("T")

# ---------------------------------------------------------------- types


class Inputs(NamedTuple):
    """Arrays that a pipeline reads.

    Attributes:
      params: of layers, [stages, chunks of one, room, …]; a device has its own stage.
      shared: operands that all microbatches share.
      rows: of the batch, dealt to microbatches, [size, microbatches, …].
      keys: random keys of the batch.
      scales: how the loss of a microbatch, or each of its totals, counts.
      before: states that do not depend on the layers, of all microbatches, [microbatches, …].
      layers: states of layers, as `params`.
      after: states that are read after the layers.
    """

    params: list[Any]
    shared: list[Any]
    rows: list[Any]
    keys: list[Any]
    scales: list[Any]
    before: list[Any]
    layers: list[Any]
    after: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A pipeline of microbatches of one size.

    Attributes:
      stages: what is computed.
      axis: of the mesh.
      schedule: of all.
      first: number of the first of these microbatches in the batch.
      total: microbatches of the batch; one alone uses random keys as they are.
      size: rows of a microbatch.
      recompute: whether a stage is recomputed from its input.
      dtype: what gradients are summed in; None for that of each parameter.
      branches: whether stages may take different branches.
    """

    stages: Stages
    axis: str
    schedule: PipelineSchedule
    first: int
    total: int
    size: int
    recompute: bool
    dtype: np.dtype | None
    branches: bool

    @property
    def last_chunk(self) -> int:
        return len(self.stages.sizes) - 1

    def operands(
        self,
        inputs: Inputs,
        index: Any,
        after: Sequence[Any] | None = None,
        before: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Those of the function on one microbatch, by its number among these.

        Args:
          after: the states that are read after the layers; None for those of the beginning.
          before: this microbatch's states that do not depend on the layers, instead of the inputs'.
        """
        rows = [microbatch(leaf, index) for leaf in inputs.rows]
        keys = inputs.keys
        if self.total > 1:
            keys = [devices.fold_in(key, self.first + index) for key in keys]
        shared, cut = list(inputs.shared), self.stages.cut
        before = [values[index] for values in inputs.before] if before is None else before
        for state, value in zip(cut.of_kind("before"), before, strict=True):
            shared[state.number] = value
        after = inputs.after if after is None else after
        for state, value in zip(cut.of_kind("after"), after, strict=True):
            shared[state.number] = value
        return [*shared, *rows, *keys]

    def either(self, flag: Any, run: Callable[[], T], other: Callable[[], T]) -> T:
        """What one of two functions gives; where stages may not branch, both are computed."""
        if self.branches:
            return lax.cond(flag, run, other)
        return jax.tree.map(lambda a, b: select(flag, a, b), run(), other())

    def forwards(self, message: Message) -> Message:
        """What the stage before sent; the first one gets it from the last."""
        return self._sent(message, 1)

    def backwards(self, message: Message) -> Message:
        return self._sent(message, -1)

    def _sent(self, message: Message, step: int) -> Message:
        count = self.schedule.stages
        pairs = [(stage, (stage + step) % count) for stage in range(count)]
        return [lax.ppermute(x, self.axis, pairs) for x in message]


# ---------------------------------------------------------------- API


def entering(program: Program, operands: Sequence[Any], received: Message, chunk: Any) -> Message:
    """What a chunk begins with: the first one from the batch, others from what was received."""
    begin = functools.partial(program.stages.begin, operands)
    return program.either(chunk == 0, begin, lambda: list(received))


def loss_dtype(program: Program, scales: Sequence[Any]) -> Any:
    """What the loss is summed in."""
    return jnp.result_type(*(scale.dtype for scale in scales))
