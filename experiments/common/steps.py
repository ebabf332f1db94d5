"""The rows of compiled train steps: an optimizer, a way, and what they need."""

import dataclasses
import warnings

import jaxmem
from common import ways
from common.compiling import compiling
from common.table import Record, Table, versions
from common.ways import Training, Way

KEY = ("target", "sizes", "optimizer", "way")

# ---------------------------------------------------------------- types


class InParameters:
    """Sizes of a row in P, the bytes of the parameters."""

    parameter_bytes: int
    required_bytes: int | None

    def share(self, bytes: int | None) -> float | None:
        """In P, the bytes of the parameters."""
        return None if bytes is None else bytes / self.parameter_bytes

    @property
    def required(self) -> float | None:
        """In P."""
        return self.share(self.required_bytes)


@dataclasses.dataclass(frozen=True)
class Row(InParameters, Record):
    """A compiled step; sizes in bytes.

    Attributes:
      sizes: of the model and its batch.
      state_bytes: of the optimizer's state, wherever it is.
      passes: backward passes of a step.
      stacked_gradient_bytes: of the gradients of stacks that exist as a whole; None where all do.
      why: stacks are not updated in the backward pass, where they could be and are not.
      required_bytes: on the device, of which `argument_bytes` and `temp_bytes`.
      capacity_bytes: the device's memory.
      seconds: by the roofline of the target, transfers to the host not counted.
      error: what the compiler said, where it refused the program.
    """

    target: str
    sizes: str
    optimizer: str
    way: str
    parameter_bytes: int
    state_bytes: int
    passes: int = 1
    stacked_gradient_bytes: int | None = None
    why: str = ""
    required_bytes: int | None = None
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    host_bytes: int | None = None
    capacity_bytes: int | None = None
    seconds: float | None = None
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether the device has the memory."""
        if self.required_bytes is None or self.capacity_bytes is None:
            return False
        return self.required_bytes <= self.capacity_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """What a row is made of."""

    target: str
    sizes: str
    optimizer: str
    way: Way
    training: Training

    def row(self, known: Table[Row], again: bool, timeout: float, small: bool) -> Row:
        """The row of the table, or else a new one, which is put there."""
        own = versions(self.target, "optax")
        key = {name: getattr(self, name) for name in KEY}
        row = None if again else known.find(own, **key)
        if row is None:
            with warnings.catch_warnings():
                # That no stack is updated in the backward pass is in the row.
                warnings.simplefilter("ignore", jaxmem.JaxmemWarning)
                row = self._made(own, timeout, small)
            known.add(row)
        return row

    # ------------------------------------------------------------ implementation

    def _made(self, versions: str, timeout: float, small: bool) -> Row:
        training, optimizer, way = self.training, self.optimizer, self.way
        row = Row(
            self.target, self.sizes, optimizer, way,
            parameter_bytes=ways.nbytes(training.params),
            state_bytes=ways.nbytes(training.state(optimizer)),
            versions=versions,
        )  # fmt: skip
        if (plan := training.plan(optimizer, way)) is not None:
            after = training.after(optimizer, way)
            row = dataclasses.replace(
                row,
                passes=plan.passes,
                stacked_gradient_bytes=sum(leaf.bytes for leaf in after),
                why="; ".join(f"{leaf.path}: {leaf.reason}" for leaf in after),
            )
        try:
            report = training.job(optimizer, way).report(
                suggest=False, **compiling(self.target, timeout, small)
            )
        except jaxmem.CompileError as error:
            return dataclasses.replace(row, error=" ".join(str(error).split())[:300])
        return dataclasses.replace(
            row,
            required_bytes=report.required_bytes,
            argument_bytes=report.argument_bytes,
            temp_bytes=report.temp_bytes,
            host_bytes=report.host_bytes,
            capacity_bytes=report.capacity_bytes,
            seconds=report.estimated_seconds,
        )
