"""What the compiler says a function needs: a `MemoryReport` of numbers, text and JSON.

The headline is `required_bytes`, arguments + outputs - aliased + temporaries:
what must be allocated on a device, on every backend.  The compiler's own
`peak_bytes` stands second, since it counts other things on each backend.

Known gap: on CPU the barriers that keep recomputation apart are removed, so the
figures of unrolled code say nothing about an accelerator.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from jaxmem.arguments import is_array, named_leaves
from jaxmem.text import columns, size

Source = Literal["compiled", "measured", "estimated"]

_SHOWN = 12

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport:
    """The memory of one compiled program, in bytes per device.

    Attributes:
      required_bytes: arguments + outputs - aliased + temporaries, the headline.
      argument_bytes: the arguments that the program reads.
      output_bytes: the results, the compiler's table of them included.
      alias_bytes: results that take the place of donated arguments.
      temp_bytes: everything in between: residuals, gradients, workspace.
      host_bytes: the same sum for buffers in host memory, where the backend has them apart.
      peak_bytes: the compiler's own peak.  Not portable: on CPU it leaves the
        temporaries out, elsewhere it may count host or on-chip memory in.
      capacity_bytes: what the runtime may allocate on one device, None where unknown.
      fits: whether `required_bytes` is within the capacity, None where that is unknown.
      arguments: bytes by the path of each argument; they sum to `argument_bytes`.
        An argument that the program never reads has 0.
      source: where the numbers are from.
      target: the kind of device.
      platform: "cpu", "gpu" or "tpu".
      notes: what a reader must know to use the numbers.
      jax_version: the jax that compiled it.
    """

    required_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_bytes: int
    peak_bytes: int | None
    capacity_bytes: int | None
    fits: bool | None
    arguments: dict[str, int] = dataclasses.field(hash=False)
    source: Source
    target: str
    platform: str
    notes: tuple[str, ...]
    jax_version: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            expected, fine = _EXPECTED[field.name]
            if not fine(value := getattr(self, field.name)):
                raise ValueError(
                    f"bad memory report: {field.name}: expected {expected}, got {value!r}"
                )

    # ------------------------------------------------------------ in and out

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps({"jaxmem_report": 1, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "MemoryReport":
        """The report that `to_json` wrote.

        Raises:
          ValueError: the text is no such report; the message says where.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"bad memory report: not JSON at line {error.lineno} column {error.colno}: "
                f"{error.msg}"
            ) from None
        if not isinstance(data, dict) or data.pop("jaxmem_report", None) != 1:
            raise ValueError(
                "bad memory report: jaxmem_report: expected 1, the version; is this a report?"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [key for key in data if key not in known]:
            raise ValueError(f"bad memory report: {unknown[0]}: unknown key")
        if missing := [key for key in known if key not in data]:
            raise ValueError(f"bad memory report: {missing[0]}: missing")
        if isinstance(data["notes"], list):
            data["notes"] = tuple(data["notes"])
        return cls(**data)

    # ------------------------------------------------------------ looking at it

    @property
    def verdict(self) -> str:
        """One line: what it needs of what there is."""
        need = f"needs {size(self.required_bytes)}"
        if self.capacity_bytes is None:
            return f"{need} on {self.target}, capacity unknown"
        of = f"{need} of {size(self.capacity_bytes)} on {self.target}"
        if self.fits:
            return f"{of}: fits"
        short = self.required_bytes - self.capacity_bytes
        return f"{of}: does not fit, {size(short)} too much"

    def __repr__(self) -> str:
        return f"<MemoryReport {self.verdict}>"

    def __str__(self) -> str:
        rows = [
            ["arguments", size(self.argument_bytes), ""],
            ["outputs", size(self.output_bytes), ""],
            ["aliased", size(-self.alias_bytes), "outputs that reuse donated arguments"],
            ["temporaries", size(self.temp_bytes), ""],
            ["required", size(self.required_bytes), f"{self.required_bytes} bytes"],
        ]
        if self.host_bytes:
            rows.append(["on the host", size(self.host_bytes), ""])
        if self.peak_bytes is not None:
            rows.append(["peak", size(self.peak_bytes), "the compiler's own count, not portable"])
        text = f"{self.verdict}\n{columns(rows, right=[1])}"
        if self.arguments:
            text += f"\narguments, largest first:\n{columns(self._argument_rows(), right=[1])}"
        return "\n".join([text, *(f"note: {note}" for note in self.notes)])

    def _argument_rows(self) -> list[list[str]]:
        ordered = sorted(self.arguments.items(), key=lambda item: -item[1])
        rows = [[name, size(count)] for name, count in ordered[:_SHOWN]]
        if rest := ordered[_SHOWN:]:
            rows.append([f"… and {len(rest)} more", size(sum(count for _, count in rest))])
        return rows


# ---------------------------------------------------------------- API


def memory_report(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    target: str = "local",
    **kwargs: Any,
) -> MemoryReport:
    """Compile `fn` for the attached backend and report the memory that it needs.

    Nothing is run and nothing of the size of the arguments is allocated.

    Args:
      fn: a function of arrays, plain or already jitted.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees, with or without
        shardings.  Figures of a sharded program are for one device.
      donate_argnums: as for `jax.jit`; what `fn` has from its own `jit` holds too.
      static_argnums: as for `jax.jit`.
      target: "local".
      **kwargs: arrays, passed on to `fn` by name.

    Raises:
      TypeError: `fn` is not callable, or an argument is not an array; the message names its path.
      ValueError: another target.
      RuntimeError: the backend gives no memory analysis.

    >>> import jax, jaxmem
    >>> x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> report = jaxmem.memory_report(lambda x: x + 1, x, donate_argnums=0)
    >>> report.required_bytes, report.arguments
    (4194304, {'x': 4194304})
    """
    if not callable(fn):
        raise TypeError(
            f"memory_report takes a function and its arguments, got {fn!r} of type "
            f"{type(fn).__name__} as the function; pass memory_report(fn, *args), not fn(*args)"
        )
    if target != "local":
        raise ValueError(
            f"unknown target {target!r}: only the attached backend is supported; "
            'pass target="local"'
        )
    donated, static = _numbers(donate_argnums), _numbers(static_argnums, len(args))
    jitted: Any = fn if _is_jitted(fn) else None
    if jitted is None:
        _check_arrays(fn, args, kwargs, static)
    if jitted is None or donated or static:
        jitted = jax.jit(fn, donate_argnums=donated, static_argnums=static)
    try:
        lowered = jitted.lower(*args, **kwargs)
    except (TypeError, ValueError):
        # A function jitted elsewhere may have static arguments that are not known
        # here; only if jax rejects the call is an argument that is no array at fault.
        _check_arrays(fn, args, kwargs, static)
        raise
    compiled = lowered.compile()
    analysis = compiled.memory_analysis()
    device = _device(compiled)
    if analysis is None:
        raise RuntimeError(
            f"the {device.platform} backend gave no memory analysis of this program, so there is "
            "nothing to report; a program that runs nothing on the device has none, and neither "
            "have some plugins"
        )
    return _report(fn, compiled, analysis, device, args, kwargs)


# ---------------------------------------------------------------- implementation


def _report(
    fn: Callable[..., Any],
    compiled: Any,
    analysis: Any,
    device: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> MemoryReport:
    argument, output = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    alias, temp = analysis.alias_size_in_bytes, analysis.temp_size_in_bytes
    host = (
        analysis.host_argument_size_in_bytes
        + analysis.host_output_size_in_bytes
        - analysis.host_alias_size_in_bytes
        + analysis.host_temp_size_in_bytes
    )
    required = argument + output - alias + temp
    capacity = (_memory_stats(device) or {}).get("bytes_limit")
    shardings = compiled.input_shardings
    return MemoryReport(
        required_bytes=required,
        argument_bytes=argument,
        output_bytes=output,
        alias_bytes=alias,
        temp_bytes=temp,
        host_bytes=host,
        peak_bytes=getattr(analysis, "peak_memory_in_bytes", None),
        capacity_bytes=capacity,
        fits=None if capacity is None else required <= capacity,
        arguments=_split(fn, compiled, args, kwargs, argument),
        source="compiled",
        target=device.device_kind,
        platform=device.platform,
        notes=_notes(device, capacity, _device_count(shardings)),
        jax_version=jax.__version__,
    )


def _notes(device: Any, capacity: int | None, devices: int) -> tuple[str, ...]:
    notes = []
    if device.platform == "cpu":
        notes.append(
            "CPU figures are not predictive for unrolled code: this compiler merges recomputation "
            "with the first computation; inside lax.scan they are kept apart"
        )
    elif capacity is not None:
        notes.append(
            "the capacity is what this process may allocate; jax takes 75 % of a GPU's memory "
            "unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
            if device.platform == "gpu"
            else "the capacity is what this process may allocate"
        )
    if devices > 1:
        notes.append(f"figures are for one of {devices} devices")
    return tuple(notes)


def _split(
    fn: Callable[..., Any], compiled: Any, args: Sequence[Any], kwargs: dict[str, Any], total: int
) -> dict[str, int]:
    """The bytes of each argument on one device, as the compiled program reads it."""
    in_args, in_kwargs = compiled.in_avals
    names = named_leaves(fn, in_args, in_kwargs, positions=_dynamic_positions(args, in_args))
    # None stands for an argument that jit dropped, since nothing reads it; a None that was
    # an argument itself is among the types, too.
    avals = jax.tree.leaves(compiled.in_avals, is_leaf=_is_none)
    given = jax.tree.leaves(compiled.input_shardings, is_leaf=_is_none)
    shardings = [s for aval, s in zip(avals, given, strict=True) if aval is not None]
    found: dict[str, int] = {}
    for (name, aval), sharding in zip(names, shardings, strict=True):
        found[name] = found.get(name, 0) + _bytes_on_device(aval, sharding)
    # Whatever the layout of a device adds, and constants that were made arguments.
    if rest := total - sum(found.values()):
        found["(constants and padding)"] = rest
    return found


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _bytes_on_device(aval: Any, sharding: jax.sharding.Sharding | None) -> int:
    if sharding is None:
        return 0
    # On CPU host memory is the device's memory, and is counted as such.
    platform = next(iter(sharding.device_set)).platform
    if platform != "cpu" and "host" in str(sharding.memory_kind):
        return 0
    return math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize


def _dynamic_positions(args: Sequence[Any], traced: Sequence[Any]) -> list[int]:
    """Where in the call each traced argument stood: static ones are gone from the trace."""
    positions, k = [], 0
    for tree in traced:
        while k < len(args) - 1 and not _matches(args[k], tree):
            k += 1
        positions.append(k)
        k += 1
    return positions


def _matches(arg: Any, avals: Any) -> bool:
    if jax.tree.structure(arg) != jax.tree.structure(avals):
        return False
    pairs = zip(jax.tree.leaves(arg), jax.tree.leaves(avals), strict=True)
    return all(
        getattr(leaf, "shape", ()) == aval.shape and _traceable(leaf) for leaf, aval in pairs
    )


def _check_arrays(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], static: Sequence[int]
) -> None:
    positions = [k for k in range(len(args)) if k not in static]
    for name, leaf in named_leaves(fn, [args[k] for k in positions], kwargs, positions):
        if not _traceable(leaf):
            raise TypeError(
                f"memory_report: argument '{name}' is not an array but {leaf!r} of type "
                f"{type(leaf).__name__}; give its position in static_argnums=, bind it with "
                "functools.partial, or pass an array or a jax.ShapeDtypeStruct"
            )


def _traceable(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _is_jitted(fn: Any) -> bool:
    return callable(getattr(fn, "lower", None)) and callable(getattr(fn, "trace", None))


def _numbers(numbers: int | Sequence[int], count: int | None = None) -> tuple[int, ...]:
    several = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    return several if count is None else tuple(k + count if k < 0 else k for k in several)


def _device(compiled: Any) -> Any:
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        for device in getattr(sharding, "device_set", ()):
            return device
    return jax.devices()[0]


def _device_count(shardings: Any) -> int:
    return max((len(s.device_set) for s in jax.tree.leaves(shardings)), default=1)


def _memory_stats(device: Any) -> dict[str, Any] | None:
    try:
        return device.memory_stats()
    except (RuntimeError, NotImplementedError):  # not every runtime keeps them
        return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_split(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_text(key) and _is_count(count) for key, count in value.items()
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value))


_COUNT = ("a whole number", _is_count)
_COUNT_OR_NONE = ("a whole number or null", _is_count_or_none)
_TEXT = ("text", _is_text)
_SOURCES = ("compiled", "measured", "estimated")
_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "required_bytes": _COUNT,
    "argument_bytes": _COUNT,
    "output_bytes": _COUNT,
    "alias_bytes": _COUNT,
    "temp_bytes": _COUNT,
    "host_bytes": _COUNT,
    "peak_bytes": _COUNT_OR_NONE,
    "capacity_bytes": _COUNT_OR_NONE,
    "fits": ("true, false or null", lambda value: value is None or isinstance(value, bool)),
    "arguments": ("whole numbers by path", _is_split),
    "source": (f"one of {', '.join(_SOURCES)}", lambda value: value in _SOURCES),
    "target": _TEXT,
    "platform": _TEXT,
    "notes": ("a list of texts", _is_texts),
    "jax_version": _TEXT,
}
