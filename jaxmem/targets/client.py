"""Compile for an accelerator in another process, and read the result.

A compiler for an absent accelerator may crash, hang or take all memory.  It does
so in a worker (`worker.py`): this process continues, with an error that says what
happened, and the next call gets a fresh worker.  Workers are kept for further
calls, since starting one and loading jax takes a second or more.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxmem.targets import installed, refusals
from jaxmem.targets.pool import Died, TimedOut, pool
from jaxmem.targets.spec import Target

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class CompilerOutput:
    """A compiler's output for a program, as plain data; bytes are per device.

    Attributes:
      stats: `argument_bytes`, `output_bytes`, `alias_bytes`, `temp_bytes`, the same with
        `host_` before them, `code_bytes`, `peak_bytes`; empty if the compiler gave none.
      hlo, assignment, live_range: the optimized program, its buffer assignment and
      live ranges, as text.
      log: what the compiler printed.
      versions: of the packages that compiled it.
      seconds: compile time, without starting a worker.
      assembled: whether machine code was produced.  Where NVIDIA's assembler is not
      installed the compiler stops after buffer assignment.
      too_large_bytes: what the program needs, if a TPU's compiler refused it as too
      large; `stats` and the texts are present as far as compilation went.
      too_large_space: the memory that is too small: "hbm", or "vmem" for that of a kernel.
      available_bytes: the size of that memory.
      message: the refusal.
    """

    stats: dict[str, int | None]
    hlo: str
    assignment: str
    live_range: str
    log: str
    versions: dict[str, str]
    seconds: float
    assembled: bool = True
    too_large_bytes: int | None = None
    too_large_space: str = ""
    available_bytes: int | None = None
    message: str = ""


class CompileError(RuntimeError):
    """A compiler crashed, hung, refused a program or is not installed; this process is unharmed.

    Attributes:
      log: the last lines that it printed.
      is_defect: whether it failed at something of its own (INTERNAL), that other programs of the
        same step may not meet.
    """

    def __init__(self, message: str, log: str = "", is_defect: bool = False) -> None:
        super().__init__(f"{message}\nThe end of the compiler's log:\n{log}" if log else message)
        self.log, self.is_defect = log, is_defect


class Compilation:
    """A program that is compiled for a target, meanwhile, until its buffers are assigned.

    Args:
      target: what to compile for.
      exported: `jax.export`'s serialization of a program with flat arguments and results.
      donate: indices of the arguments that the program may overwrite.
      mesh_axes: names and sizes of the mesh that it is sharded over.
      memory_kinds: of the arguments and of the results, "pinned_host" or None each.
      compiler_options: as for jax's `.compile(compiler_options=…)`.
      generate_code: whether to go on to machine code, as is done anyway for a TPU's program that
        may be too large for it.
      timeout: seconds, after which the compiler is killed.

    Raises:
      CompileError: the compiler is not installed, or ended at once.
      ValueError: the mesh does not have this target's number of devices.
    """

    def __init__(
        self,
        target: Target,
        exported: bytes,
        *,
        donate: Sequence[int] = (),
        mesh_axes: Mapping[str, int] | Sequence[tuple[str, int]] | None = None,
        memory_kinds: tuple[Sequence[str | None], Sequence[str | None]] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        generate_code: bool = False,
        timeout: float = 900.0,
    ) -> None:
        if missing := target.missing():
            raise CompileError("; ".join(missing))
        axes = [list(axis) for axis in (dict(mesh_axes).items() if mesh_axes else ())]
        if axes and math.prod(size for _, size in axes) != target.devices:
            raise ValueError(
                f"the mesh {' × '.join(f'{name}={size}' for name, size in axes)} does not match "
                f"the {target.devices} device(s) of this target; pass target.with_devices(…)"
            )
        request = {
            "do": "compile",
            "topology": target.topology,
            "devices": target.devices,
            "donate": list(donate),
            "mesh_axes": axes,
            "memory_kinds": memory_kinds and [list(kinds) for kinds in memory_kinds],
            "options": dict(compiler_options or {}),
            "settings": settings(),
            "generate_code": generate_code,
            "room": round(_SURE * target.memory) if target.platform == "tpu" else None,
        }
        self._target, self._timeout = target, timeout
        self._deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as lent:
            self._worker = lent.enter_context(pool.borrowed(target.platform))
            with self._explained():
                self._worker.begin(request, exported)
            self._lent = lent.pop_all()  # until there is an answer, or nobody waits for it

    def answered(self, seconds: float) -> bool:
        """Whether `output` need not wait any more, after waiting for at most so long."""
        return self._worker.answered(seconds)

    def output(self) -> CompilerOutput:
        """What the compiler came to; asked for once.

        Raises:
          CompileError: it crashed, took too long or refused the program.
        """
        with self._lent, self._explained():
            reply = self._worker.finish(self._deadline)
        if "error" in reply:
            raise _refusal(reply["error"], reply["log"], self._target)
        return _output(reply, self._target)

    def stop(self) -> None:
        """End the compiler: nobody wants the output."""
        with contextlib.suppress(_Stopped), self._lent:
            raise _Stopped

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        target = self._target
        try:
            yield
        except TimedOut as error:
            raise CompileError(
                f"compiling for {target.name} took more than {self._timeout:g} s and was stopped; "
                "pass timeout= for more, or compile with the layers in one lax.scan, whose body "
                "is compiled once",
                _last(error.log),
            ) from None
        except Died as error:
            raise CompileError(_why_dead(error, target), _last(error.log)) from None
        except OSError as error:
            raise CompileError(
                f"the files for the compiler could not be written or read: {error}; is "
                f"{self._worker.folder} on a full disk? TMPDIR sets the folder of such files"
            ) from None


class _Stopped(Exception):
    """A compilation was given up."""


# ---------------------------------------------------------------- API


def compile_for(target: Target, exported: bytes, **options: Any) -> CompilerOutput:
    """Compile a program for a target, and wait for it: a `Compilation`, and its output.

    Args:
      target, exported: as for `Compilation`.
      **options: its keywords.

    Raises:
      CompileError: the compiler is not installed, crashed, took too long or refused the program.
      ValueError: the mesh does not have this target's number of devices.
    """
    return Compilation(target, exported, **options).output()


def warm_up(target: Target) -> None:
    """Start a worker for a target without waiting for it."""
    if not target.missing():
        pool.warm_up(target.platform, {"do": "warm"})


def versions(target: Target) -> dict[str, str]:
    """The versions of the packages that compile for a target."""
    return installed.versions(target.platform)


def settings() -> dict[str, Any]:
    """The settings of `jax.config` that a compiled result depends on."""
    given = {name: getattr(jax.config, name, None) for name in _SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


_SETTINGS = (
    "jax_use_shardy_partitioner",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_compiler_enable_remat_pass",
)

# ---------------------------------------------------------------- implementation

# What needs no more than this part of a device is not refused as too large for it: code and what
# a TPU's compiler keeps for itself are less than the rest.
_SURE = 0.97


def _output(reply: dict[str, Any], target: Target) -> CompilerOutput:
    texts = reply["texts"]
    found = CompilerOutput(
        stats=reply["stats"],
        hlo=texts["hlo"],
        assignment=texts["assignment"],
        live_range=texts["live_range"],
        log=reply["log"],
        versions=versions(target),
        seconds=reply["seconds"],
    )
    refused = reply["refused"]
    if not (refused or reply["stopped"]):
        return found
    size, stats = refusals.too_large(refused), refusals.stats_of(found.assignment, target.platform)
    if refused and size is None and not refusals.unassembled(refused):
        raise _refusal(refused, found.log, target)
    found = dataclasses.replace(
        found, stats=stats, assembled=False, message=refusals.first_line(refused)
    )
    if size is None:
        return found
    return dataclasses.replace(
        found,
        too_large_bytes=_exact_size(size, stats),
        too_large_space=size.space,
        available_bytes=size.available,
    )


def _exact_size(size: refusals.TooLarge, stats: Mapping[str, int | None]) -> int:
    """The size in bytes from the compiler's table; its message rounds to two decimals."""
    if size.space == "hbm" and stats:
        part = {kind: stats[f"{kind}_bytes"] or 0 for kind in ("argument", "output", "temp")}
        total = sum(part.values()) - (stats["alias_bytes"] or 0)
        if abs(total - size.required) <= 0.01 * size.required:
            return total
    return size.required


def _why_dead(error: Died, target: Target) -> str:
    if unknown := _unknown_flags(error.log):
        return unknown
    what = f"the compiler for {target.name}"
    if error.signal is None:
        return f"{what} ended with exit code {error.code}"
    if error.signal == "SIGKILL":
        return (
            f"{what} was killed (SIGKILL): most likely this machine ran out of memory while "
            "compiling; close other programs, compile a smaller model, or put the layers in one "
            "lax.scan"
        )
    return (
        f"{what} crashed ({error.signal}): a fault of the compiler on this program, not of jaxmem; "
        "try another target or another release of jax"
    )


def _unknown_flags(log: str) -> str:
    """The message if a flag set by the user ended the process."""
    for name, mark in (
        ("XLA_FLAGS", "Unknown flag"),
        ("LIBTPU_INIT_ARGS", "nknown command line flag"),
    ):
        lines = [line.strip() for line in log.splitlines() if mark in line]
        if lines and (value := os.environ.get(name)):
            said = lines[0].partition("] ")[2] or lines[0]
            return (
                f"{name}={value!r} has a flag that a compiler does not know: {said}; remove it "
                "from that variable"
            )
    return ""


def _refusal(message: str, log: str, target: Target) -> CompileError:
    """The error for what a compiler says."""
    said = refusals.first_line(message)
    if "cudnn" in said.casefold():
        return CompileError(
            f"compiling for {target.name} needs cuDNN, which is not installed: "
            f'pip install "nvidia-cudnn-cu13" ({said})',
            _last(log),
        )
    text = f"the compiler for {target.name} refused the program: {said}"
    return CompileError(text, _last(log), is_defect=refusals.is_defect(message))


def _last(log: str, lines: int = 12) -> str:
    return "\n".join([line for line in log.splitlines() if line.strip()][-lines:])
