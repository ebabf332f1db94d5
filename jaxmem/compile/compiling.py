"""Compile a program and analyse the result: here, or in a worker for an absent accelerator.

The attached backend compiles in this process, since only the process that has
initialised a GPU can use it.  For a named target the program is exported in portable
form, and the result is cached on disk.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxmem import hlo, targets
from jaxmem._util.records import from_data, to_data
from jaxmem.compile import options as compiler_options
from jaxmem.compile.digest import digest
from jaxmem.compile.program import Exported, Program
from jaxmem.hlo.analysis import Analysis, analyse
from jaxmem.hlo.replica_groups import Mesh
from jaxmem.targets import installed

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a compilation, as it is cached on disk.

    Attributes:
      stats: the compiler's sums, in bytes.
      analysis: of the compiler's texts; None where it gave none.
      versions: of the packages that compiled it.
      seconds: the compile time.
      too_large_bytes: what it would need, where the compiler refused it as too large.
      message: the refusal.
      assembled: whether machine code was produced; memory is assigned before that.
      log: what the compiler printed.
      avoiding: options that were added, since without them the compiler refuses the program.
    """

    stats: dict[str, int | None]
    analysis: Analysis | None
    versions: dict[str, str]
    seconds: float
    too_large_bytes: int | None = None
    message: str = ""
    assembled: bool = True
    log: str = ""
    avoiding: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled(Outcome):
    """A compiled program: the outcome, and what it was compiled for.

    Attributes:
      kept: indices of the arguments that the compiled program reads.
      target, device, platform, devices: what it was compiled for.
      capacity_bytes, default_capacity_bytes: of one device, and what jax takes of it by default.
      bandwidth, matrix_peak: bytes and floating-point operations per second.
      link: bytes per second that a device sends along one axis of its links, and seconds for one
        step of a ring; None where that is unknown.
      flags: the options it was compiled with.
      cached: whether the outcome is from the cache on disk.
    """

    kept: tuple[int, ...]
    target: str
    device: str
    platform: str
    devices: int
    capacity_bytes: int | None
    default_capacity_bytes: int | None
    bandwidth: float | None
    matrix_peak: float | None
    flags: dict[str, str]
    cached: bool = False
    link: tuple[float, float] | None = None


# ---------------------------------------------------------------- API


class Here:
    """A program that is compiled for the attached backend, in this process, when it is asked for.

    Raises:
      RuntimeError: by `result`: the backend gives no memory analysis.
      ValueError: by `result`: the compiler does not know an option.
    """

    def __init__(self, program: Program, options: dict[str, Any]) -> None:
        self._program, self._options = program, options

    def answered(self, seconds: float) -> bool:
        return True  # there is nothing to wait for

    def stop(self) -> None:
        pass

    def result(self) -> Compiled:
        return _compiled_here(self._program, self._options)


class Elsewhere:
    """A program that is compiled for a named target, meanwhile, or read from the cache.

    Args:
      generate_code: see `jaxmem.memory_report`.

    Raises:
      jaxmem.CompileError: see `jaxmem.targets.Compilation`.
      ValueError: the program is sharded over another number of devices than the target has.
    """

    def __init__(
        self,
        program: Program,
        target: "targets.Target",
        options: dict[str, Any],
        timeout: float,
        cache: bool,
        generate_code: bool = False,
    ) -> None:
        try:
            platform = "cuda" if target.platform == "gpu" else target.platform
            exported = program.exported(platform, target.device)
        except ImportError as error:  # of what comes with the compilers
            raise targets.CompileError("; ".join(target.missing()) or str(error)) from None
        self._target = target = _for_devices(target, exported)
        self._exported, self._options, self._timeout = exported, options, timeout
        self._store = targets.Cache() if cache else None
        self._generate_code = generate_code or any(
            mark in exported.module for mark in _REFUSABLE[target.platform]
        )
        self._key = _key(exported, target, options, self._generate_code)
        self._known = _read(self._store.get(self._key)) if self._store else None
        self._running = None if self._known else self._begun(options)

    def answered(self, seconds: float) -> bool:
        """Whether `result` need not wait any more, after waiting for at most so long."""
        return self._running is None or self._running.answered(seconds)

    def stop(self) -> None:
        """End the compiler: nobody wants the result."""
        if self._running is not None:
            self._running.stop()

    def result(self) -> Compiled:
        """What the compiler came to; asked for once.

        Raises:
          jaxmem.CompileError: see `jaxmem.targets.Compilation`.
          ValueError: the compiler does not know an option.
        """
        found = self._known or self._outcome()
        if self._store and not self._known:
            self._store.put(self._key, to_data(found))
        target = self._target
        return Compiled(
            **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
            kept=self._exported.kept,
            target=target.name,
            device=target.device,
            platform=target.platform,
            devices=target.devices,
            capacity_bytes=target.memory,
            default_capacity_bytes=target.default_bytes,
            bandwidth=target.bandwidth,
            matrix_peak=target.matrix_peak,
            link=target.link,
            flags={**_flags(self._options), **found.avoiding},
            cached=self._known is not None,
        )

    # ------------------------------------------------------------ implementation

    def _begun(self, options: dict[str, Any]) -> "targets.Compilation":
        exported = self._exported
        return targets.Compilation(
            self._target,
            exported.blob,
            donate=exported.donate,
            mesh_axes=exported.mesh,
            memory_kinds=exported.memory_kinds,
            compiler_options=options,
            generate_code=self._generate_code,
            timeout=self._timeout,
        )

    def _outcome(self) -> Outcome:
        """As the compiler has it; where it meets a known defect, once more with what avoids it."""
        assert self._running is not None
        with compiler_options.named():
            try:
                return _outcome(self._running.output(), self._target, self._exported.axes)
            except targets.CompileError as error:
                added = targets.avoiding(str(error))
                if added is None or added.keys() & self._options.keys():
                    raise
            self._running = self._begun({**self._options, **added})
            found = _outcome(self._running.output(), self._target, self._exported.axes)
        text = {name: str(value) for name, value in added.items()}
        return dataclasses.replace(found, avoiding=text)


def compile_with_texts(
    lowered: Any, options: dict[str, Any] | None = None
) -> tuple[Any, tuple[str, str], float]:
    """Compile here, and read the buffer assignment and live ranges that the compiler dumps.

    A program from jax's compilation cache has no such texts, and is compiled once more
    without that cache.

        Returns:
          The compiled program, its buffer assignment and its live ranges ("" for one that
          this compiler does not write), and the seconds that it took.
    """
    for attempt in (contextlib.nullcontext, _without_jax_cache):
        start = time.perf_counter()
        with attempt(), tempfile.TemporaryDirectory(prefix="jaxmem-") as dump:
            compiled = lowered.compile(compiler_options={"xla_dump_to": dump, **(options or {})})
            seconds = time.perf_counter() - start
            texts = _dumped(Path(dump), "buffer-assignment"), _dumped(Path(dump), "live-range")
        if all(texts) or not getattr(jax.config, "jax_compilation_cache_dir", None):
            break
    return compiled, texts, seconds


# ---------------------------------------------------------------- implementation


def _compiled_here(program: Program, options: dict[str, Any]) -> Compiled:
    lowered = program.traced.lower()
    with compiler_options.named():
        compiled, texts, seconds = compile_with_texts(lowered, options)
    memory = compiled.memory_analysis()
    device = _device(compiled)
    if memory is None:
        raise RuntimeError(
            f"the {device.platform} backend gave no memory analysis of this program, so there is "
            "nothing to report; a program that runs nothing on the device has none, and neither "
            "have some plugins"
        )
    found = _analysed((compiled.as_text(), *texts), program.axes())
    shardings = _shardings(compiled)
    known = targets.by_device_kind(device.device_kind)
    return Compiled(
        stats=_stats(memory),
        analysis=found,
        kept=tuple(k for k, sharding in enumerate(shardings) if sharding is not None),
        target=device.device_kind,
        device=device.device_kind,
        platform=device.platform,
        devices=max((len(s.device_set) for s in shardings if s is not None), default=1),
        capacity_bytes=(_memory_stats(device) or {}).get("bytes_limit"),
        default_capacity_bytes=None,
        bandwidth=known and known.bandwidth,
        matrix_peak=known and known.matrix_peak,
        link=known and known.link,
        versions=installed.versions(device.platform),
        flags=_flags(options),
        seconds=seconds,
    )


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Disable jax's compilation cache, which reads its settings only after a reset."""
    before = getattr(jax.config, "jax_enable_compilation_cache", True)
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _analysed(texts: Sequence[str | None], mesh: Mesh) -> Analysis | None:
    """The analysis of the texts; None where there are none, or their format is unknown."""
    try:
        return analyse(*(text or "" for text in texts), mesh=mesh) if all(texts) else None
    except ValueError:
        return None


def _shardings(compiled: Any) -> list[Any]:
    """The sharding of each argument; None for an unused one, which jit dropped."""
    avals, given = (
        jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)
        for tree in (compiled.in_avals, compiled.input_shardings)
    )
    # A None that was an argument itself is among the types, too.
    return [s for aval, s in zip(avals, given, strict=True) if aval is not None]


def _stats(memory: Any) -> dict[str, int | None]:
    names = ("argument", "output", "alias", "temp")
    stats: dict[str, int | None] = {
        f"{place}{name}_bytes": getattr(memory, f"{place}{name}_size_in_bytes")
        for place in ("", "host_")
        for name in names
    }
    return {**stats, "peak_bytes": getattr(memory, "peak_memory_in_bytes", None)}


def _dumped(folder: Path, kind: str) -> str:
    """The text of this kind that the compiler dumped for the largest module."""
    found = sorted(folder.glob(f"*-{kind}.txt"), key=lambda path: path.stat().st_size)
    return found[-1].read_text() if found else ""


def _device(compiled: Any) -> Any:
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        for device in getattr(sharding, "device_set", ()):
            return device
    return jax.devices()[0]


def _memory_stats(device: Any) -> dict[str, Any] | None:
    try:
        return device.memory_stats()
    except (RuntimeError, NotImplementedError):  # not every runtime keeps them
        return None


# What a compiler may refuse once buffers are assigned: hand-written kernels (Pallas' on TPUs, and
# on GPUs by Triton and by Mosaic), and on TPUs transfers to the host.
_REFUSABLE = {
    "gpu": ("__gpu$xla.gpu.triton", "mosaic_gpu"),
    "tpu": ("tpu_custom_call", "pinned_host"),
}


def _read(data: Any) -> Outcome | None:
    """The cached outcome; None if there is none, or another version of jaxmem wrote it."""
    try:
        return data and from_data(Outcome, data)
    except ValueError:
        return None


def _outcome(output: "targets.CompilerOutput", target: "targets.Target", mesh: Mesh) -> Outcome:
    if output.too_large_space == "vmem":
        raise targets.CompileError(
            f"a kernel of the program needs more on-chip memory than {target.name} has: "
            f"{output.message}",
            output.log,
        )
    return Outcome(
        stats=output.stats,
        analysis=_analysed((output.hlo, output.assignment, output.live_range), mesh),
        versions=output.versions,
        seconds=output.seconds,
        too_large_bytes=output.too_large_bytes,
        message=output.message,
        assembled=output.assembled,
        log=output.log,
    )


def _for_devices(target: "targets.Target", exported: Exported) -> "targets.Target":
    if exported.devices == target.devices:
        return target
    if target.devices == 1:
        return target.with_devices(exported.devices)
    raise ValueError(
        f"the arguments are sharded over {exported.devices} device(s), and the target "
        f"{target.name} has {target.devices}; make the mesh of the shardings with "
        f"jaxmem.target({target.name!r}, devices={target.devices}).mesh(...)"
    )


def _key(
    exported: Exported, target: "targets.Target", options: dict[str, Any], generate_code: bool
) -> str:
    return targets.Cache.key(
        program=digest(exported.module),
        kept=exported.kept,
        target=repr(target),
        mesh=exported.mesh,
        axes=exported.axes,
        donate=exported.donate,
        memory_kinds=exported.memory_kinds,
        flags=_flags(options),
        settings=targets.settings(),
        versions=targets.versions(target),
        reader=_reader_digest(),
        **({"generate_code": True} if generate_code else {}),
    )


@functools.cache
def _reader_digest() -> str:
    """A digest of the code that reads the compiler's texts."""
    code = (path.read_bytes() for path in sorted(Path(hlo.__path__[0]).glob("*.py")))
    return hashlib.sha256(b"".join(code)).hexdigest()


def _flags(options: dict[str, Any]) -> dict[str, str]:
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    set_here = {name: os.environ[name] for name in names if os.environ.get(name)}
    return {**set_here, **{key: str(value) for key, value in options.items()}}
