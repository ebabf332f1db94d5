"""`MemoryReport`: what the compiler says that a program needs, as plain data.

The headline is `required_bytes`, arguments + outputs - aliased + temporaries:
what must be allocated on a device, on every backend.  The compiler's own
`peak_bytes` stands second, since it counts other things on each backend.

Here are the numbers, their JSON and their arithmetic; `jaxmem.memory` makes
reports, `jaxmem.show` draws them.
"""

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Literal

from jaxmem.hlo.buffers import Buffer, Timeline
from jaxmem.records import from_data, parsed, to_data
from jaxmem.text import size

if TYPE_CHECKING:
    from jaxmem.difference import Difference

Source = Literal["compiled", "measured", "estimated"]

_VERSION = 2

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Lint:
    """Something about a program that costs memory or misleads, and what to do about it.

    Attributes:
      kind: a short fixed name, such as "nothing-donated".
      message: the fact.
      remedy: what to do.
    """

    kind: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A policy for the decorated stacks under which the program would fit.

    Attributes:
      policy: as `jaxmem.remat` takes it by name, such as "sqrt".
      required_bytes: of the program compiled under it.
    """

    policy: str
    required_bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport:
    """The memory and the work of one compiled program, per device.

    Attributes:
      required_bytes: arguments + outputs - aliased + temporaries in device memory, the headline.
      argument_bytes: the arguments that the program reads.
      output_bytes: the results, the compiler's table of them included.
      alias_bytes: results that take the place of donated arguments.
      temp_bytes: everything in between: residuals, gradients, workspace.
      host_bytes: the same sum for buffers in host memory, where the backend has them apart.
      on_chip_bytes: buffers in on-chip memory (VMEM on TPU), which take no device memory.
      peak_bytes: the compiler's own peak.  Not portable: on CPU it leaves the
        temporaries out, elsewhere it may count host or on-chip memory in.
      capacity_bytes: what one device has, None where unknown.
      default_capacity_bytes: what jax takes of it unless told otherwise: 75 % on a GPU.
      flops: floating-point operations of the traced program, loops times their
        lengths, a multiply-add as two; of several devices each has an equal share.
      bytes_moved: between memory and compute, as an estimate (see `jaxmem.costs`).
      matmul_flops: of matrix products and convolutions in the *compiled* program, so
        that recomputation which the compiler removed is not charged; None where
        the compiler gives no text of it.
      model_matmul_flops: the same without recomputation: of the traced program, or, where
        the compiler splits it over devices, of the compiled one.
      estimated_seconds: roofline time on the target: the longer of its matrix peak
        (bf16, dense) and its memory bandwidth.  An estimate, and a lower bound; None where
        the target's figures are unknown.
      arguments: bytes by the path of each argument; they sum to `argument_bytes`.
        An argument that the program never reads, or that is in host memory, has 0.
      buffers: what is alive at the peak, largest first.
      timeline: live bytes along the program; None where the compiler does not tell.
      lints: what costs memory or misleads, with remedies.
      suggestion: when it does not fit, the next policy that would.
      advice: the same in words, or why there is none.
      source: where the numbers are from.
      target: the name of the target, or the kind of the attached device.
      device: the vendor's name of it.
      platform: "cpu", "gpu" or "tpu".
      devices: how many devices the program runs on; all figures are for one.
      notes: what a reader must know to use the numbers.
      versions: of jax, jaxlib, jaxmem and the plugin that compiled it.
      flags: compiler flags and options that were set.
      compile_seconds: how long the compiler took, 0 for a result from the cache.
      cached: whether it is from the cache.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.ShapeDtypeStruct((1024,), "float32")
    >>> report = jaxmem.memory_report(lambda x: 2 * jnp.sin(x), x)
    >>> report.argument_bytes, report.output_bytes, report.required_bytes
    (4096, 4096, 8192)
    """

    required_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_bytes: int
    on_chip_bytes: int
    peak_bytes: int | None
    capacity_bytes: int | None
    default_capacity_bytes: int | None
    flops: int | None
    bytes_moved: int | None
    matmul_flops: int | None
    model_matmul_flops: int | None
    estimated_seconds: float | None
    arguments: dict[str, int] = dataclasses.field(hash=False)
    buffers: tuple[Buffer, ...]
    timeline: Timeline | None
    lints: tuple[Lint, ...]
    suggestion: Suggestion | None
    advice: str
    source: Source
    target: str
    device: str
    platform: str
    devices: int
    notes: tuple[str, ...]
    versions: dict[str, str] = dataclasses.field(hash=False)
    flags: dict[str, str] = dataclasses.field(hash=False)
    compile_seconds: float
    cached: bool

    # ------------------------------------------------------------ what follows from it

    @property
    def fits(self) -> bool | None:
        """Whether `required_bytes` is within the capacity, None where that is unknown."""
        return _within(self.required_bytes, self.capacity_bytes)

    @property
    def fits_by_default(self) -> bool | None:
        """Whether it is within what jax takes by default, None where that is unknown."""
        return _within(self.required_bytes, self.default_capacity_bytes)

    @property
    def recompute_overhead(self) -> float | None:
        """Matrix work of the compiled program over that of the model, less one; 0.33 is a third.

        None where either is unknown or the model has no matrix products.
        """
        if self.matmul_flops is None or not self.model_matmul_flops:
            return None
        return self.matmul_flops / self.model_matmul_flops - 1

    @property
    def allowance(self) -> str:
        """The environment variable that lets jax take enough of the memory; "" for none needed."""
        if not self.fits or self.fits_by_default is not False:
            return ""
        ample = self.required_bytes <= 0.95 * (self.capacity_bytes or 0)
        return f"XLA_PYTHON_CLIENT_MEM_FRACTION={0.95 if ample else 0.99}"

    # ------------------------------------------------------------ in and out

    def to_json(self) -> str:
        """The report as JSON text; `fits` and the like are in it for other readers."""
        derived = {key: getattr(self, key) for key in _DERIVED}
        return json.dumps({"jaxmem_report": _VERSION, **to_data(self), **derived})

    @classmethod
    def from_json(cls, text: str) -> "MemoryReport":
        """The report that `to_json` wrote.

        Raises:
          ValueError: the text is no such report; the message says where.
        """
        data = parsed(text, "memory report")
        if not isinstance(data, dict) or data.pop("jaxmem_report", None) != _VERSION:
            raise ValueError(
                f"bad memory report: jaxmem_report: expected {_VERSION}, the version; is this a "
                "report, and of this version of jaxmem?"
            )
        given = {key: value for key, value in data.items() if key not in _DERIVED}
        try:
            return from_data(cls, given)
        except ValueError as error:
            raise ValueError(f"bad memory report: {error}") from None

    # ------------------------------------------------------------ arithmetic

    def __sub__(self, other: "MemoryReport") -> "Difference":
        """What this report has more than `other`, part by part; `print` it."""
        from jaxmem.difference import Difference

        if not isinstance(other, MemoryReport):
            return NotImplemented
        return Difference(self, other)

    # ------------------------------------------------------------ looking at it

    @property
    def verdict(self) -> str:
        """One line: what it needs of what there is, and what to do if that is too much."""
        need = f"needs {size(self.required_bytes)}"
        if self.capacity_bytes is None:
            return f"{need} on {self.target}, capacity unknown"
        of = f"{need} of {size(self.capacity_bytes)} on {self.target}"
        if not self.fits:
            short = size(self.required_bytes - self.capacity_bytes)
            return f"{of}: does not fit, {short} too much" + (
                f"; {self.advice}" if self.advice else ""
            )
        if self.fits_by_default is False:
            default = size(self.default_capacity_bytes or 0)
            return (
                f"{of}: fits, but not in the {default} that jax takes by default; "
                f"set {self.allowance}"
            )
        return f"{of}: fits"

    def __repr__(self) -> str:
        return f"<MemoryReport {self.verdict}>"

    def __str__(self) -> str:
        from jaxmem.show.text import plain

        return plain(self)

    def __rich__(self) -> Any:
        from jaxmem.show.text import renderable

        return renderable(self)

    def _repr_html_(self) -> str:
        from jaxmem.show.html import html

        return html(self)

    def plot(self, path: Any = None, **options: Any) -> Any:
        """A picture of the live bytes along the program, the peak's largest buffers named.

        Args:
          path: where to write it, as PNG or SVG by its ending; None for nowhere.
          **options: see `jaxmem.show.plot.plot_report`.

        Returns:
          The matplotlib figure.

        Raises:
          ImportError: matplotlib is not installed; says what to type.
          ValueError: the report has no timeline.
        """
        from jaxmem.show.plot import plot_report

        return plot_report(self, path, **options)


_DERIVED = ("fits", "fits_by_default", "recompute_overhead", "verdict")


def _within(required: int, capacity: int | None) -> bool | None:
    return None if capacity is None else required <= capacity
