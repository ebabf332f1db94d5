"""`MemoryReport`: the memory that a program needs according to its compiler, as plain data.

The headline is `required_bytes`, arguments + outputs - aliased + temporaries:
what must be allocated on a device, on every backend.  The compiler's
`peak_bytes` is secondary, since each backend counts other things in it.

This module holds the numbers, their JSON and their arithmetic; `jaxmem.report.figures`
makes reports, `jaxmem.show` displays them.
"""

import dataclasses
import json
import operator
from collections.abc import Iterator
from typing import Any, Literal

from jaxmem._util.records import from_data, parsed, to_data
from jaxmem._util.shown import Shown, picture
from jaxmem._util.text import arrow, size
from jaxmem.hlo.buffers import Buffer, Timeline
from jaxmem.hlo.collectives import Collective
from jaxmem.hlo.fusions import Fusions
from jaxmem.report.changes import ArgumentChange, BufferChange, argument_changes, buffer_changes
from jaxmem.report.roofline import Roofline

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


@dataclasses.dataclass(frozen=True)
class Places:
    """Bytes of one part of a program's memory, by where they are.

    Attributes:
      device: in device memory, a share of `required_bytes`.
      on_chip: in on-chip memory, at the peak of that.
      host: in host memory, at the peak of that.
      disk: in files, of optimizer state on disk.

    >>> Places(3, host=4) + Places(2)
    Places(device=5, on_chip=0, host=4, disk=0)
    """

    device: int = 0
    on_chip: int = 0
    host: int = 0
    disk: int = 0

    def __iter__(self) -> Iterator[int]:
        return iter((self.device, self.on_chip, self.host, self.disk))

    def __add__(self, other: "Places") -> "Places":
        return Places(*map(operator.add, self, other))

    def __sub__(self, other: "Places") -> "Places":
        return Places(*map(operator.sub, self, other))


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport(Shown):
    """The memory, FLOPs and traffic of one compiled program, per device.

    Attributes:
      required_bytes: arguments + outputs - aliased + temporaries in device memory, the headline.
      argument_bytes: the arguments that the program reads.
      output_bytes: the results, including the compiler's table of them.
      alias_bytes: results that reuse the buffers of donated arguments.
      temp_bytes: everything else: residuals, gradients, workspace.
      host_bytes: the same sum for buffers in host memory, where the backend reports them.
      on_chip_bytes: buffers in on-chip memory (VMEM on TPU), which take no device memory.
      peak_bytes: the compiler's own peak, None where no machine code was generated.  Not
        portable: on CPU it leaves the temporaries out, elsewhere it may include host or on-chip
        memory.
      capacity_bytes: the memory of one device, None where unknown.
      default_capacity_bytes: what jax takes of it by default: 75 % on a GPU.
      flops: floating-point operations of the traced program, loops times their
      lengths, a multiply-add as two; with several devices an equal share of them.
      bytes_moved: read and written in device memory, by the kernels of the compiled program
        (`fusions`); where the compiler gives no text, or only the traced program shows how often
        loops run, an estimate of the traced program (see `jaxmem.estimate.costs`).
      matmul_flops: FLOPs of matrix products and convolutions in the *compiled* program,
        so that recomputation which the compiler removed is not counted; None where
        the compiler gives no text of it.
        model_matmul_flops: the same without recomputation: of the traced program, or, where
        the compiler splits it over devices, of the compiled one.
      estimated_seconds: roofline time on the target: the longer of its matrix peak
        (bf16, dense) and its memory bandwidth.  An estimate, and a lower bound; None where
        the target's figures are unknown.
      arguments: bytes of each argument by its path; they sum to `argument_bytes`.
        An argument that the program never reads, or that is in host memory, has 0.
      state: of the arguments that are an optimizer's state, the bytes by its fields, such as "mu":
        on the device, and on the host.
      parts: what the memory is for: "parameters"; "gradient", as far as it is live at the peak;
        "state/mu" and the like, an optimizer's state by its fields; "saved", what is kept at the
        peak from the forward pass for the backward pass (carries, and values that a policy keeps);
        "recomputed", what the backward pass has computed again; other "arguments"; "results" in no
        donated argument's place; and "rest", which is cotangents of activations, working memory
        and all that the compiler's text does not tell.  In device memory they sum to
        `required_bytes`, in host and on-chip memory to what is stated for those; parts of no bytes
        are left out.  Arguments are exact; `jaxmem.report.parts` says what the others leave to the
        rest.
      buffers: what is live at the peak, largest first.
      timeline: live bytes along the program; None where the compiler gives none.
      lints: what costs memory or misleads, with remedies.
      suggestion: when it does not fit, the next policy that would.
      advice: the same in words, or why there is none.
      source: where the numbers are from.
      target: the name of the target, or the kind of the attached device.
      device: the vendor's name of the device.
      platform: "cpu", "gpu" or "tpu".
      devices: how many devices the program runs on; all figures are per device.
      collectives: what is sent between devices, by array, those that send most first; see
        `jaxmem.Collective`.
      communication_seconds: of these, one after the other in rings at the peak of the device's
        links within a host or slice; what is hidden behind computation is not taken off.  None
        where the links' figures are unknown.
      fusions: the kernels of the compiled program, the operations in each, what they move and
        what the same operations would move one by one (see `jaxmem.Fusions`); `print` it.  None
        where the compiler gives no text.
      roofline: the times of products, traffic and communication at the target's peaks (see
        `jaxmem.Roofline`); None where those are unknown.
      notes: caveats about the numbers.
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
    state: dict[str, tuple[int, int]] = dataclasses.field(hash=False, default_factory=dict)
    parts: dict[str, Places] = dataclasses.field(hash=False, default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    communication_seconds: float | None = None
    fusions: Fusions | None = None
    roofline: Roofline | None = None

    # ------------------------------------------------------------ derived

    @property
    def fits(self) -> bool | None:
        """Whether `required_bytes` is within the capacity, None where that is unknown."""
        return _within(self.required_bytes, self.capacity_bytes)

    @property
    def fits_by_default(self) -> bool | None:
        """Whether it is within what jax allocates by default, None where that is unknown."""
        return _within(self.required_bytes, self.default_capacity_bytes)

    @property
    def recompute_overhead(self) -> float | None:
        """Extra matmul FLOPs of the compiled program, relative to the model's; 0.33 is a third.

        None where either is unknown or the model has no matrix products.
        """
        if self.matmul_flops is None or not self.model_matmul_flops:
            return None
        return self.matmul_flops / self.model_matmul_flops - 1

    @property
    def collective_bytes(self) -> int:
        """What one device sends to others in one call, by the formulas of `jaxmem.Collective`."""
        return sum(collective.total_bytes for collective in self.collectives)

    @property
    def allowance(self) -> str:
        """The environment setting that lets jax take enough memory; "" if none is needed."""
        if not self.fits or self.fits_by_default is not False:
            return ""
        ample = self.required_bytes <= 0.95 * (self.capacity_bytes or 0)
        return f"XLA_PYTHON_CLIENT_MEM_FRACTION={0.95 if ample else 0.99}"

    # ------------------------------------------------------------ in and out

    def to_json(self) -> str:
        """The report as JSON text, with derived values such as `fits` for other programs."""
        derived = {key: getattr(self, key) for key in _DERIVED}
        return json.dumps({"jaxmem_report": _VERSION, **to_data(self), **derived})

    @classmethod
    def from_json(cls, text: str) -> "MemoryReport":
        """The report that `to_json` wrote.

        Raises:
          ValueError: the text is not a report; the message says where.
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
        """What this report needs more or less than `other`, part by part; `print` it."""
        if not isinstance(other, MemoryReport):
            return NotImplemented
        return Difference(self, other)

    # ------------------------------------------------------------ display

    @property
    def verdict(self) -> str:
        """One line: required memory, capacity, and what to do if it does not fit."""
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

    def plot(self, path: Any = None, **options: Any) -> Any:
        """Draw the live bytes along the program, with the largest buffers at the peak named.

        Args:
          path: where to write it, as PNG or SVG by its suffix; None to not write it.
          **options: see `jaxmem.show.plot.plot_report`.

        Returns:
          The matplotlib figure.

        Raises:
          ImportError: matplotlib is not installed; the message says how to install it.
          ValueError: the report has no timeline.
        """
        return picture(self, "plot", path, options)

    def plot_fusions(self, path: Any = None, **options: Any) -> Any:
        """Draw the bytes moved by source line with and without fusion, and the roofline.

        Args:
          path: where to write it, as PNG or SVG by its suffix; None to not write it.
          **options: see `jaxmem.show.traffic.plot_fusions`.

        Returns:
          The matplotlib figure.

        Raises:
          ImportError: matplotlib is not installed; the message says how to install it.
          ValueError: the report has no kernels to draw.
        """
        return picture(self, "plot_fusions", path, options)


@dataclasses.dataclass(frozen=True, repr=False)
class Difference(Shown):
    """The difference of two reports, as `after - before` gives it; `print` it.

    Every number of a report is an attribute here, as the difference; None where
    either report does not know it.
    """

    after: MemoryReport
    before: MemoryReport

    @property
    def required_bytes(self) -> int:
        return self.after.required_bytes - self.before.required_bytes

    @property
    def argument_bytes(self) -> int:
        return self.after.argument_bytes - self.before.argument_bytes

    @property
    def output_bytes(self) -> int:
        return self.after.output_bytes - self.before.output_bytes

    @property
    def alias_bytes(self) -> int:
        return self.after.alias_bytes - self.before.alias_bytes

    @property
    def temp_bytes(self) -> int:
        return self.after.temp_bytes - self.before.temp_bytes

    @property
    def host_bytes(self) -> int:
        return self.after.host_bytes - self.before.host_bytes

    @property
    def on_chip_bytes(self) -> int:
        return self.after.on_chip_bytes - self.before.on_chip_bytes

    @property
    def peak_bytes(self) -> int | None:
        return _minus(self.after.peak_bytes, self.before.peak_bytes)

    @property
    def flops(self) -> int | None:
        return _minus(self.after.flops, self.before.flops)

    @property
    def bytes_moved(self) -> int | None:
        return _minus(self.after.bytes_moved, self.before.bytes_moved)

    @property
    def collective_bytes(self) -> int:
        return self.after.collective_bytes - self.before.collective_bytes

    @property
    def matmul_flops(self) -> int | None:
        return _minus(self.after.matmul_flops, self.before.matmul_flops)

    @property
    def recompute_overhead(self) -> float | None:
        return _minus(self.after.recompute_overhead, self.before.recompute_overhead)

    @property
    def estimated_seconds(self) -> float | None:
        return _minus(self.after.estimated_seconds, self.before.estimated_seconds)

    @property
    def communication_seconds(self) -> float | None:
        return _minus(self.after.communication_seconds, self.before.communication_seconds)

    @property
    def parts(self) -> dict[str, Places]:
        """How much more each of `MemoryReport.parts` has, without those that have as much."""
        kinds = dict.fromkeys((*self.before.parts, *self.after.parts))
        found = {
            kind: self.after.parts.get(kind, Places()) - self.before.parts.get(kind, Places())
            for kind in kinds
        }
        return {kind: change for kind, change in found.items() if any(change)}

    @property
    def arguments(self) -> tuple[ArgumentChange, ...]:
        """Arguments that differ, the largest difference first."""
        return argument_changes(self.after.arguments, self.before.arguments)

    @property
    def buffers(self) -> tuple[BufferChange, ...]:
        """Buffers live at the peak that differ, the largest difference first."""
        return buffer_changes(self.after.buffers, self.before.buffers)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the two may not be comparable: different targets, versions or flags."""
        return tuple(_warnings(self.after, self.before))

    @property
    def headline(self) -> str:
        """The result in one line: "needs 3.2 GiB less (41.0 → 37.8 GiB)"."""
        after, before = self.after, self.before
        less = self.required_bytes
        text = f"needs the same ({size(after.required_bytes)})"
        if less:
            sizes = arrow(before.required_bytes, after.required_bytes)
            text = f"needs {size(abs(less))} {'less' if less < 0 else 'more'} ({sizes})"
        if before.fits != after.fits and after.fits is not None and before.fits is not None:
            text += ": now fits" if after.fits else ": no longer fits"
        return text

    # ------------------------------------------------------------ display

    def to_json(self) -> str:
        """As JSON text: numbers, what differs of the rest, warnings and both verdicts."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return json.dumps(
            {
                "jaxmem_difference": 1,
                **numbers,
                "parts": {kind: dataclasses.asdict(part) for kind, part in self.parts.items()},
                "arguments": [dataclasses.asdict(change) for change in self.arguments],
                "buffers": [
                    {"change": c.change, "bytes": c.bytes, **_only_buffers(c)} for c in self.buffers
                ],
                "warnings": list(self.warnings),
                "after": self.after.verdict,
                "before": self.before.verdict,
            }
        )

    def __repr__(self) -> str:
        return f"<Difference {self.headline}>"


# ---------------------------------------------------------------- implementation

_DERIVED = ("fits", "fits_by_default", "recompute_overhead", "collective_bytes", "verdict")
_NUMBERS = (
    "required_bytes",
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "host_bytes",
    "on_chip_bytes",
    "peak_bytes",
    "flops",
    "bytes_moved",
    "collective_bytes",
    "matmul_flops",
    "recompute_overhead",
    "estimated_seconds",
    "communication_seconds",
)


def _within(required: int, capacity: int | None) -> bool | None:
    return None if capacity is None else required <= capacity


def _minus(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a - b


def _only_buffers(change: BufferChange) -> dict[str, Any]:
    return {
        side: [dataclasses.asdict(buffer) for buffer in getattr(change, side)]
        for side in ("after", "before")
    }


def _warnings(after: MemoryReport, before: MemoryReport) -> Iterator[str]:
    """Why the two may not be comparable."""
    if after.target != before.target:
        yield f"the targets differ: {before.target} → {after.target}"
    if after.devices != before.devices:
        yield f"the numbers of devices differ: {before.devices} → {after.devices}"
    if after.source != before.source:
        yield f"the sources differ: {before.source} → {after.source}"
    for what, new, old in (
        ("versions", after.versions, before.versions),
        ("flags", after.flags, before.flags),
    ):
        names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
        if names:
            changed = ", ".join(
                f"{name} {old.get(name, 'not set')} → {new.get(name, 'not set')}" for name in names
            )
            yield f"the {what} differ: {changed}"
