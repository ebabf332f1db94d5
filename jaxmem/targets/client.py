"""Compile for an accelerator in another process, and hear what came of it.

A compiler for an absent accelerator may crash, hang or take all memory.  It does
so in a worker (`worker.py`): the process goes on, with an error that says what
happened, and the next call gets a fresh worker.  Workers are kept for further
calls, since starting one and loading its compiler takes a second or more.
"""

import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxmem.targets import installed, refusals
from jaxmem.targets.pool import Died, TimedOut, pool
from jaxmem.targets.spec import Target

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class CompilerOutput:
    """What a compiler says of a program, as plain data; bytes are per device.

    Attributes:
      stats: `argument_bytes`, `output_bytes`, `alias_bytes`, `temp_bytes`, the same with
        `host_` before them, `code_bytes`, `peak_bytes`; empty if the compiler gave none.
      hlo, assignment, live_range: the optimized program, its allocations and when
        they are alive, in the compiler's own words.
      log: what it printed.
      versions: of all that took part.
      seconds: that compiling took, without starting a worker.
      assembled: whether it went to the end.  Where NVIDIA's assembler is not
        installed the compiler stops when all buffers have their places.
      too_large_bytes: what the program needs, if a TPU's compiler refused it for
        that; `stats` and the texts are there nevertheless, as far as it came.
      too_large_space: of which memory: "hbm", or "vmem" for a kernel's own.
      available_bytes: what there is of that memory.
      message: its refusal.
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
    """A compiler crashed, hung, refused a program or is not installed; this process is fine.

    Attributes:
      log: the last lines that it printed.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\nThe compiler's last words:\n{log}" if log else message)
        self.log = log


# ---------------------------------------------------------------- API


def compile_for(
    target: Target,
    exported: bytes,
    *,
    donate: Sequence[int] = (),
    mesh_axes: Mapping[str, int] | Sequence[tuple[str, int]] | None = None,
    memory_kinds: tuple[Sequence[str | None], Sequence[str | None]] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    timeout: float = 900.0,
) -> CompilerOutput:
    """Compile a program for a target.

    Args:
      target: what to compile for.
      exported: `jax.export`'s serialization of a program with flat arguments and results.
      donate: indices of the arguments that the program may overwrite.
      mesh_axes: names and sizes of the mesh that it is sharded over.
      memory_kinds: of the arguments and of the results, "pinned_host" or None each.
      compiler_options: as for jax's `.compile(compiler_options=…)`.
      timeout: seconds, after which the compiler is killed.

    Raises:
      CompileError: the compiler is not installed, crashed, took too long or refused the program.
      ValueError: the mesh is not one of this target's devices.
    """
    if missing := target.missing():
        raise CompileError("; ".join(missing))
    axes = [list(axis) for axis in (dict(mesh_axes).items() if mesh_axes else ())]
    if axes and math.prod(size for _, size in axes) != target.devices:
        raise ValueError(
            f"a mesh of {' × '.join(f'{name}={size}' for name, size in axes)} is not one of the "
            f"{target.devices} device(s) of this target; pass target.with_devices(…)"
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
    }
    deadline = time.monotonic() + timeout
    with pool.borrowed(target.platform) as worker:
        try:
            reply = worker.ask(request, exported, deadline)
        except TimedOut as error:
            raise CompileError(
                f"compiling for {target.name} took more than {timeout:g} s and was stopped; "
                "pass timeout= for more, or compile with the layers in one lax.scan, whose body "
                "is compiled once",
                _last(error.log),
            ) from None
        except Died as error:
            raise CompileError(_why_dead(error, target), _last(error.log)) from None
        except OSError as error:
            raise CompileError(
                f"the files for the compiler could not be written or read: {error}; is "
                f"{worker.folder} on a full disk? TMPDIR says where such files go"
            ) from None
    if "error" in reply:
        raise CompileError(_why_refused(reply, target), _last(reply["log"]))
    return _output(reply, target)


def warm_up(target: Target) -> None:
    """Start a worker for a target without waiting for it, while there is something else to do."""
    if not target.missing():
        pool.warm_up(target.platform, {"do": "warm", "topology": target.topology})


def versions(target: Target) -> dict[str, str]:
    """The versions of all that takes part in compiling for a target."""
    return installed.versions(target.platform)


def settings() -> dict[str, Any]:
    """What of `jax.config` decides what comes out of a compiler."""
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
    if not (refused := reply["refused"]):
        return found
    size, stats = refusals.too_large(refused), refusals.stats_of(found.assignment, target.platform)
    if size is None and not refusals.unassembled(refused):
        raise CompileError(_why_refused({"error": refused}, target), _last(found.log))
    found = dataclasses.replace(
        found, stats=stats, assembled=False, message=refusals.first_line(refused)
    )
    if size is None:
        return found
    return dataclasses.replace(
        found,
        too_large_bytes=_exactly(size, stats),
        too_large_space=size.space,
        available_bytes=size.available,
    )


def _exactly(size: refusals.TooLarge, stats: Mapping[str, int | None]) -> int:
    """The compiler says two places after the point; its own table has the bytes."""
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
        "another target, or another release of jax, may do"
    )


def _unknown_flags(log: str) -> str:
    """What to say where a flag of the user's ended the process."""
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


def _why_refused(reply: Mapping[str, Any], target: Target) -> str:
    said = refusals.first_line(reply["error"])
    if "cudnn" in said.casefold():
        return (
            f"compiling for {target.name} needs cuDNN, which is not there: "
            f'pip install "nvidia-cudnn-cu13" ({said})'
        )
    return f"the compiler for {target.name} refused the program: {said}"


def _last(log: str, lines: int = 12) -> str:
    return "\n".join([line for line in log.splitlines() if line.strip()][-lines:])
