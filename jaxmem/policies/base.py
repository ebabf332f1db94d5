"""What all policies are."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

# Scans in a decorated function: each with a plan of its own; parts of the function's code, which
# has the plan; or parts of it that compute each of their turns again.
Scans = Literal["stacks", "parts", "checkpointed"]


class Policy:
    """Base of all policies: a value from which, with the sizes of a stack, a `Plan` is made.

    >>> from jaxmem import policies
    >>> policies.parse("sqrt", levels=2) == policies.sqrt(levels=2)
    True
    """

    # What it is called in JSON.
    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data that `policies.from_json` reads back."""
        fields = dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]
        return {"policy": self.kind, **fields}


@dataclasses.dataclass(frozen=True)
class PipelineChoice:
    """How the microbatches of a pipeline go through its stages."""

    microbatches: int
    schedule: str


@dataclasses.dataclass(frozen=True)
class PipelineNote:
    """What a pipeline tells of itself to those who take note.

    Attributes:
      stages: how many.
      chunks: of layers on each device.
      microbatches, rows: of a batch.
      schedule: its name.
      held_bytes: of inputs of stages, on one device.
      seconds: of a step in which nothing but the stages is recomputed, in those of a forward pass
        of one microbatch through one chunk.
      again: how often a step waits for what the layers of one chunk recompute.
    """

    stages: int
    chunks: int
    microbatches: int
    rows: int
    schedule: str
    held_bytes: int
    seconds: float
    again: float


class ByLayer(Policy):
    """Base of the policies that look at a stack's very layer to say what its plan is.

    Attributes:
      partition: a mesh axis over which the carries of stacks that name none are split, where they
        can be; "" for none.
    """

    partition: str = ""

    def scans_are(self, closed: Any, stacks: Sequence[Any]) -> Scans:
        """What the scans in a decorated function are, to which it is applied.

        Args:
          closed: the function's jaxpr.
          stacks: as `jaxmem.trace.find` found them in it.
        """
        return "stacks"

    def plan_for(self, stack: Any, layer: Any) -> Any:
        """The `Plan` of a stack, None for everything kept.

        Args:
          stack: a `jaxmem.stacked.stack.Stack`.
          layer: its layer, taken apart for what is differentiated.
        """
        raise NotImplementedError

    def pipeline(self, choices: Sequence[PipelineChoice]) -> PipelineChoice:
        """How a pipeline that leaves it open is run.

        Args:
          choices: what is possible there, what it does by itself first.
        """
        return choices[0]

    def note_pipeline(self, note: PipelineNote) -> None:
        """For those who take note of a pipeline that is run."""

    def as_it_stands(
        self, stack: Any, layer: Any, args: Sequence[Any]
    ) -> AbstractContextManager[Any]:
        """While open, a stack that keeps everything is differentiated; for those who take note.

        Args:
          args: its operands.
        """
        return nullcontext()

    def run_unrolled(self, closed: Any, args: Sequence[Any], label: str) -> list[Any]:
        """The results of decorated code that has no stack, where these are differentiated.

        Args:
          closed: its jaxpr.
          args: flat.
          label: what it is called in messages.
        """
        raise NotImplementedError
