"""What a program's memory is for: parameters, gradient, optimizer state, saved values, the rest.

Arguments are told by `jaxmem.trace.training_state`, which is exact.  The other parts are what
is live at the peak, told by what the compiler's text shows of each buffer (`jaxmem.hlo.roles`):
the pass in which it was computed, and whether the backward pass reads it.  A gradient
is a product or a sum of the backward pass that has the form of a parameter or of one layer of it,
which no activation of the program has; or a loop's sum of such.

Known gaps, each of which leaves bytes to the rest: gradients of the form of an activation; those
of several parameters computed as one product; those that were clipped or scaled; partial sums, in
which a GPU's compiler computes a product; a layer's working copy of what is saved; and what shares
a buffer with other values.  The buffer of a donated argument counts as that argument throughout;
that of a result as a result, unless at the peak it holds a gradient of the same shape.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxmem.compile.compiling import Compiled
from jaxmem.compile.program import Program
from jaxmem.hlo.buffers import Buffer
from jaxmem.report.report import Places
from jaxmem.trace.activations import Activations, Form, activations, form, merged

# ---------------------------------------------------------------- API


def parts(
    program: Program,
    compiled: Compiled,
    arguments: dict[str, int],
    buffers: Sequence[Buffer],
    whole: Places,
    results: int,
) -> dict[str, Places]:
    """The parts of a program's memory by kind, which sum to the whole in each place.

    Args:
      arguments: bytes of each in device memory, by its path.
      buffers: live at the peak.
      whole: all that is required.
      results: bytes of those that are in no donated argument's place.
    """
    fixed = _Tally()
    for kind, places in _of_arguments(program, compiled, arguments):
        fixed.add(kind, places)
    fixed.add("results", Places(device=results))
    live = _Tally()
    for kind, places in _at_peak(program, compiled, buffers):
        live.add(kind, places)
    found = fixed.with_temporaries(live, whole)
    return {kind: places for kind, places in sorted(found.items(), key=_order) if any(places)}


def gradient_of_stacks(
    program: Program, compiled: Compiled, buffers: Sequence[Buffer]
) -> tuple[int, int]:
    """Bytes on the device of gradients that loops stack, and of one layer of each."""
    gradient = _Gradient(program, compiled, buffers)
    stacks = [
        b
        for b in buffers
        if b.role == "sum" and b.is_stack and b.place == "device" and gradient.holds(b)
    ]
    return sum(b.bytes for b in stacks), sum(b.bytes // b.shape[0] for b in stacks)


# ---------------------------------------------------------------- implementation

_PLACES = {"device": "device", "on-chip": "on_chip", "host": "host"}
_KINDS = ("parameters", "gradient", "state", "saved", "recomputed", "arguments", "results", "rest")


def _order(item: tuple[str, Places]) -> tuple[int, int]:
    kind, places = item
    return _KINDS.index(kind.partition("/")[0]), -sum(places)


class _Tally:
    """Bytes by kind and place."""

    def __init__(self) -> None:
        self.of: dict[str, Places] = {}

    def add(self, kind: str, places: Places) -> None:
        self.of[kind] = self.of.get(kind, Places()) + places

    @property
    def sum(self) -> Places:
        return sum(self.of.values(), Places())

    def with_temporaries(self, live: "_Tally", whole: Places) -> dict[str, Places]:
        """With parts of what is live, as far as there is room for them, and with the rest."""
        left = whole - self.sum
        told = live.sum
        for place in ("device", "on_chip", "host"):
            # The compiler's sums and its list of buffers may differ where it refuses a program.
            if getattr(told, place) > getattr(left, place):
                live.of = {k: dataclasses.replace(v, **{place: 0}) for k, v in live.of.items()}
        for kind, places in live.of.items():
            self.add(kind, places)
        rest = whole - self.sum
        # Compilers may state less in host memory than there are arguments.
        self.add("rest", Places(rest.device, max(rest.on_chip, 0), max(rest.host, 0)))
        return self.of


def _of_arguments(
    program: Program, compiled: Compiled, arguments: dict[str, int]
) -> Iterator[tuple[str, Places]]:
    left = dict(arguments)
    sizes = {} if compiled.analysis is None else compiled.analysis.parameter_bytes
    # On one device; an argument that the program does not read is nowhere.
    read = {k: sizes.get(n, program.arguments[k].bytes) for n, k in enumerate(compiled.kept)}
    for k, argument in enumerate(program.arguments):
        if argument.is_parameter:
            kind = "parameters"
        else:
            kind = "arguments" if argument.field is None else f"state/{argument.field}"
        here = left.pop(argument.name, 0)
        host = argument.memory_kind is not None and compiled.platform != "cpu" and not here
        yield (
            kind,
            Places(
                here,
                host=read.get(k, 0) if host and not argument.disk_bytes else 0,
                disk=argument.disk_bytes,
            ),
        )
    yield "arguments", Places(sum(left.values()))  # constants and padding


def _at_peak(
    program: Program, compiled: Compiled, buffers: Sequence[Buffer]
) -> Iterator[tuple[str, Places]]:
    gradient = _Gradient(program, compiled, buffers)
    for buffer in buffers:
        if buffer.kind not in ("output", "temporary"):
            continue
        size = Places(**{_PLACES[buffer.place]: buffer.bytes})
        if buffer.role == "sum" and gradient.holds(buffer):
            yield "gradient", size
            if buffer.kind == "output":
                # What holds it is no more a part of the results.
                yield "results", Places() - size
        elif buffer.role in ("saved", "recomputed") and buffer.kind == "temporary":
            yield buffer.role, size


class _Gradient:
    """Which sums of the backward pass are the gradient of a parameter."""

    def __init__(self, program: Program, compiled: Compiled, buffers: Sequence[Buffer]) -> None:
        self._devices = compiled.devices
        given = program.arguments
        shapes = {argument.shape for argument in given if argument.is_parameter}
        # On one device, where it is split over several.
        parameters = {n for n, k in enumerate(compiled.kept) if given[k].is_parameter}
        shapes |= {b.shape for b in buffers if b.kind == "argument" and b.parameter in parameters}
        rows = {found for shape in shapes if len(found := form(shape[1:])) > 1}
        whole = {form(shape) for shape in shapes} | rows
        self._forms = {one for each in whole for one in merged(each)} - {()}
        known = bool(shapes) and any(buffer.role == "sum" for buffer in buffers)
        data = [not a.is_parameter and a.field is None for a in given]
        self._activations = (
            activations(program.jaxpr, data) if known else Activations(frozenset(), frozenset())
        )

    def holds(self, buffer: Buffer) -> bool:
        # Of all layers or of one; or, where a loop stacks it, of a segment of them.
        forms = {form(buffer.shape)} - {()}
        if buffer.is_stack and len(segment := form(buffer.shape[1:])) > 1:
            forms.add(segment)
        others = self._activations.scanned if buffer.is_stack else self._activations.computed
        return (
            buffer.dtype.startswith(("bf", "f"))
            and not forms.isdisjoint(self._forms)
            and not any(self._is_part(one, other) for one in forms for other in others)
        )

    def _is_part(self, one: Form, other: Form) -> bool:
        """Whether `other`, split over the devices, may have this form."""
        if one == other or self._devices == 1 or len(one) != len(other):
            return one == other
        share, rest = divmod(math.prod(other), math.prod(one))
        fits = all(large % small == 0 for large, small in zip(other, one, strict=True))
        return rest == 0 and fits and self._devices % share == 0
