"""`memory_report`: trace a function, compile it for a target, and report its memory.

For a named target the program is exported in portable form and compiled by a
worker process, so that a crash of the compiler does not harm this process;
results are cached on disk.  For the attached backend ("local") it is compiled here,
since only the process that has initialised a GPU can use it.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem import targets
from jaxmem.compile.compiling import Compiled, compile_elsewhere, compile_here
from jaxmem.compile.options import checked
from jaxmem.compile.program import Argument, Program
from jaxmem.estimate.costs import Costs, costs
from jaxmem.hlo.analysis import Analysis
from jaxmem.hlo.buffers import Buffer
from jaxmem.report.advice import advise
from jaxmem.report.lints import lints
from jaxmem.report.report import MemoryReport
from jaxmem.trace.context import use_policy
from jaxmem.trace.names import GivenNames

# ---------------------------------------------------------------- API


def memory_report(
    fn: Callable[..., Any],
    *args: Any,
    target: "str | targets.Target" = "local",
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
    generate_code: bool = False,
    timeout: float = 900.0,
    cache: bool = True,
    suggest: bool = True,
    **kwargs: Any,
) -> MemoryReport:
    """Compile `fn` for an accelerator, present or absent, and report the memory that it needs.

    Nothing is executed, and nothing of the size of the arguments is allocated.

    Args:
      fn: a function of arrays, plain or already jitted.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees, with or without
        shardings.  Figures of a sharded program are per device; a mesh of absent
        devices is ``jaxmem.target(name, devices=8).mesh(...)``.
      target: "local", the attached backend; or the name of an accelerator
        (`jaxmem.targets.catalog()`, or ``jaxmem targets`` in a shell), which need not be
        present; or a `jaxmem.Target`; or "file.toml:name" for one described in a file.
        donate_argnums: as for `jax.jit`, in addition to what a jitted `fn` itself donates.
      static_argnums: as for `jax.jit`.
      compiler_options: passed to the compiler.
      generate_code: whether the compiler of a named target goes on to machine code when buffers are
        assigned.  No figure changes then, and it may take a hundred times as long; but `peak_bytes`
        is known, and what is too large for the chip's own memory is refused.  Programs with
        hand-written kernels, which may be, and those that send data from a TPU to its host are
        compiled so in any case.
      timeout: seconds after which the compiler of a named target is stopped.
      cache: whether to read and write the results on disk (for named targets).
      suggest: when the program does not fit and has decorated stacks, whether to
        compile it under other policies until one fits.
      **kwargs: arrays, passed on to `fn` by name.  Arguments of `fn` with the name of an
        option above must be passed by position.

    Raises:
      TypeError: `fn` is not callable, an argument is not an array (the message names its
        path), or an option has the wrong type.
      ValueError: unknown target, unknown compiler option, or arguments sharded over another number
      of devices.
      jaxmem.CompileError: the compiler refused the program, crashed, ran out of time or is not
        installed; the message says which and what to do.
      RuntimeError: the attached backend gives no memory analysis.

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
    _check_options(
        target=(target, str | targets.Target | os.PathLike, "the name of a target"),
        compiler_options=(compiler_options, dict | None, "a dict"),
        generate_code=(generate_code, bool, "True or False"),
        timeout=(timeout, int | float, "a number of seconds"),
        cache=(cache, bool, "True or False"),
        suggest=(suggest, bool, "True or False"),
    )
    options = checked(compiler_options)
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
    absent = None if target == "local" else targets.target(target)
    if absent is None:
        _check_present((args, kwargs))
    if absent is not None:
        targets.warm_up(absent)  # while this process traces
    platform = None if absent is None else absent.platform
    program = Program(fn, args, kwargs, donate_argnums, static_argnums, platform)
    if absent is None:
        compiled = compile_here(program, options)
    else:
        compiled = compile_elsewhere(
            program, absent, options, timeout, cache, generate_code=generate_code
        )
    report = _report(program, compiled)
    if report.fits is not False:
        return report

    def under(policy: str, policy_options: dict[str, Any]) -> MemoryReport:
        with use_policy(policy, **policy_options):
            return memory_report(
                fn,
                *args,
                target=target,
                donate_argnums=donate_argnums,
                static_argnums=static_argnums,
                compiler_options=compiler_options,
                generate_code=generate_code,
                timeout=timeout,
                cache=cache,
                suggest=False,
                **kwargs,
            )

    return advise(report, program, under if suggest else None)


# ---------------------------------------------------------------- implementation


def _check_options(**options: tuple[Any, Any, str]) -> None:
    for name, (value, kind, word) in options.items():
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(
                f"memory_report: {name}= takes {word}, got an object of type "
                f"{type(value).__name__}; an argument of the function of that name goes by position"
            )


def _check_present(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, jax.sharding.AbstractMesh) and mesh.size > 1:
            raise ValueError(
                f"an argument is sharded over a mesh of {mesh.size} absent devices, "
                "and the target is the attached backend; name the accelerator, as in "
                'target="h100-80g"'
            )


def _report(program: Program, compiled: Compiled) -> MemoryReport:
    from jaxmem._util.version import __version__

    work = costs(program.jaxpr)
    stats = compiled.stats
    arguments = _argument_bytes(program, compiled)
    argument = sum(arguments.values())
    output, alias = stats.get("output_bytes") or 0, stats.get("alias_bytes") or 0
    temp = _temporaries(compiled, argument + output - alias)
    host = (
        (stats.get("host_argument_bytes") or 0)
        + (stats.get("host_output_bytes") or 0)
        - (stats.get("host_alias_bytes") or 0)
        + (stats.get("host_temp_bytes") or 0)
    )
    analysis = compiled.analysis
    matmul = None if analysis is None else analysis.matmul_flops
    per_device = work * (1 / compiled.devices)
    if _only_traced(compiled, work):
        matmul = round(per_device.matmul_flops)
    model = round(per_device.matmul_flops - per_device.recomputed_matmul_flops)
    if analysis is not None and compiled.devices > 1:
        # Only the compiled program shows how the work is split over devices or repeated on them.
        model = analysis.matmul_flops - analysis.recomputed_matmul_flops
    return MemoryReport(
        required_bytes=argument + output - alias + temp,
        argument_bytes=argument,
        output_bytes=output,
        alias_bytes=alias,
        temp_bytes=temp,
        host_bytes=host,
        on_chip_bytes=0 if analysis is None else analysis.space_bytes.get("on-chip", 0),
        peak_bytes=stats.get("peak_bytes"),
        capacity_bytes=compiled.capacity_bytes,
        default_capacity_bytes=compiled.default_capacity_bytes,
        flops=round(per_device.flops),
        bytes_moved=round(per_device.bytes),
        matmul_flops=matmul,
        model_matmul_flops=model,
        estimated_seconds=_roofline(compiled, per_device, matmul),
        arguments=arguments,
        buffers=() if analysis is None else _named(analysis, program, compiled),
        timeline=None if analysis is None else analysis.timeline,
        lints=lints(program, compiled, work),
        suggestion=None,
        advice="",
        source="compiled",
        target=compiled.target,
        device=compiled.device,
        platform=compiled.platform,
        devices=compiled.devices,
        notes=_notes(program, compiled, work, arguments),
        versions={"jaxmem": __version__, **compiled.versions},
        flags=compiled.flags,
        compile_seconds=0.0 if compiled.cached else compiled.seconds,
        cached=compiled.cached,
    )


def _argument_bytes(program: Program, compiled: Compiled) -> dict[str, int]:
    """Bytes of each argument on one device, by its path."""
    found: dict[str, int] = {argument.name: 0 for argument in program.arguments}
    total = compiled.stats.get("argument_bytes")
    sizes = {} if compiled.analysis is None else compiled.analysis.parameter_bytes
    for parameter, index in enumerate(compiled.kept):
        argument = program.arguments[index]
        if not _on_host(argument, compiled):
            # Where the compiler gives no size: that of the whole array, as if on one device.
            found[argument.name] += sizes.get(parameter, argument.bytes)
    rest = 0 if total is None else total - sum(found.values())
    for index in compiled.kept:
        argument = program.arguments[index]
        if _on_host(argument, compiled) and rest >= argument.bytes:  # see `_notes`
            found[argument.name] += argument.bytes
            rest -= argument.bytes
    # What device layouts add, and arrays that the function closes over.
    if rest := rest + _constants(compiled):
        found["(constants and padding)"] = rest
    return found


def _constants(compiled: Compiled) -> int:
    """Bytes of the arrays that a program closes over, without the scalars of every program.

    The compilers for CPU and GPU include them in none of their sums.
    """
    found = 0 if compiled.analysis is None else compiled.analysis.constant_bytes
    return found if found >= 2**16 else 0


def _temporaries(compiled: Compiled, others: int) -> int:
    analysis, said = compiled.analysis, compiled.stats.get("temp_bytes") or 0
    if compiled.platform == "tpu" and analysis is not None:
        # This compiler's figure for temporaries may count donated arguments a second time.  Its
        # allocations are what it compares with the memory of the chip.
        return analysis.space_bytes["device"] - others
    if compiled.too_large_bytes is not None and analysis is None:
        return compiled.too_large_bytes - others
    return said


def _on_host(argument: Argument, compiled: Compiled) -> bool:
    """Whether it is placed in host memory; on a CPU that is device memory."""
    return argument.memory_kind is not None and compiled.platform != "cpu"


def _named(analysis: Analysis, program: Program, compiled: Compiled) -> tuple[Buffer, ...]:
    """The buffers at the peak, arguments and named values under the names that the user knows."""

    given = GivenNames(program.jaxpr)

    def named(buffer: Buffer) -> Buffer:
        name = buffer.name
        if buffer.parameter is not None and buffer.parameter < len(compiled.kept):
            name = program.arguments[compiled.kept[buffer.parameter]].name
        elif found := given.find(buffer.name, buffer.source, buffer.shape):
            name = found
        return dataclasses.replace(buffer, name=name)

    return tuple(named(buffer) for buffer in analysis.buffers)


def _roofline(compiled: Compiled, work: Costs, matmul_flops: int | None) -> float | None:
    if compiled.bandwidth is None or compiled.matrix_peak is None:
        return None
    flops = work.matmul_flops if matmul_flops is None else matmul_flops
    return max(flops / compiled.matrix_peak, work.bytes / compiled.bandwidth)


def _only_traced(compiled: Compiled, work: Costs) -> bool:
    """Whether only the traced program shows the trip counts of loops with matmul FLOPs.

    Such are the schedules of revolve, which are tables in the program.
    """
    analysis = compiled.analysis
    return analysis is not None and analysis.unknown_loops > 0 and work.unknown_loops == 0


def _notes(
    program: Program, compiled: Compiled, work: Costs, arguments: dict[str, int]
) -> tuple[str, ...]:
    notes = []
    if any(_on_host(a, compiled) and arguments[a.name] for a in program.arguments):
        notes.append(
            "arguments in host memory are counted as device memory: the GPU compiler reports "
            "those so that are not donated and returned to the host"
        )
    if compiled.platform == "gpu" and compiled.message:
        notes.append(
            "NVIDIA's assembler is not installed here, so the program was not assembled into "
            "machine code; memory is assigned before that, and the figures are the same"
        )
    if compiled.too_large_bytes is not None:
        notes.append(f"the compiler refused the program, as it is too large: {compiled.message}")
    if compiled.platform == "gpu" and compiled.default_capacity_bytes is None:
        notes.append(
            "the capacity is what this process may allocate; jax takes 75 % of a GPU's memory "
            "unless XLA_PYTHON_CLIENT_MEM_FRACTION is set"
        )
    if compiled.analysis is None:
        notes.append(
            "the compiler gave no readable text of the program, so buffers, timeline and compiled "
            "matmul FLOPs are missing"
        )
    if compiled.devices > 1:
        notes.append(f"figures are for one of {compiled.devices} devices")
    if _only_traced(compiled, work):
        notes.append(
            "the trip counts of some loops are known from the traced program only; matmul FLOPs "
            "are as traced"
        )
    if work.unknown_loops:
        notes.append(
            f"{work.unknown_loops} while loops have no known length; operations in them are "
            "counted once"
        )
    if work.uncounted:
        notes.append(f"operations not counted: {', '.join(work.uncounted)}")
    return tuple(notes)
