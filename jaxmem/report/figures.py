"""The report of a compiled program: the compiler's figures, under the names that the user knows."""

import dataclasses
from collections.abc import Sequence

from jaxmem.compile.compiling import Compiled
from jaxmem.compile.program import Argument, Program
from jaxmem.estimate.costs import Costs, costs
from jaxmem.hlo.analysis import Analysis
from jaxmem.hlo.buffers import Buffer
from jaxmem.hlo.collectives import Collective, merged
from jaxmem.hlo.fusions import Fusions
from jaxmem.hlo.unfused import Unfused
from jaxmem.parallel.rings import ring_seconds
from jaxmem.report.lints import lints
from jaxmem.report.parts import parts
from jaxmem.report.report import MemoryReport, Places
from jaxmem.report.roofline import Roofline
from jaxmem.trace.names import GivenNames

# ---------------------------------------------------------------- API


def report_of(program: Program, compiled: Compiled) -> MemoryReport:
    """What the compiler says of a program; without advice."""
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
    # Arrays on disk are in host memory in a program for an absent accelerator.
    host -= min(
        host,
        sum(a.bytes * (2 - a.donated) for a in program.arguments if a.memory_kind and a.disk_bytes),
    )
    analysis = compiled.analysis
    matmul = None if analysis is None else analysis.matmul_flops
    per_device = work * (1 / compiled.devices)
    if traced_only := _only_traced(compiled, work):
        matmul = round(per_device.matmul_flops)
    model = round(per_device.matmul_flops - per_device.recomputed_matmul_flops)
    if analysis is not None and compiled.devices > 1:
        # Only the compiled program shows how the work is split over devices or repeated on them.
        model = analysis.matmul_flops - analysis.recomputed_matmul_flops
    buffers = () if analysis is None else _named(analysis, program, compiled)
    collectives = () if analysis is None else _sent(analysis, program, compiled)
    fused = None if analysis is None else _fused(analysis, program, compiled)
    moved = round(per_device.bytes) if fused is None or traced_only else fused.bytes
    sending = _communicating(compiled, collectives)
    roofline = _roofline(compiled, per_device, matmul, moved, sending)
    required = argument + output - alias + temp
    on_chip = 0 if analysis is None else analysis.space_bytes.get("on-chip", 0)
    whole = Places(required, on_chip, host)
    return MemoryReport(
        required_bytes=required,
        argument_bytes=argument,
        output_bytes=output,
        alias_bytes=alias,
        temp_bytes=temp,
        host_bytes=host,
        on_chip_bytes=on_chip,
        peak_bytes=stats.get("peak_bytes"),
        capacity_bytes=compiled.capacity_bytes,
        default_capacity_bytes=compiled.default_capacity_bytes,
        flops=round(per_device.flops),
        bytes_moved=moved,
        matmul_flops=matmul,
        model_matmul_flops=model,
        estimated_seconds=roofline and max(roofline.compute_seconds, roofline.memory_seconds),
        arguments=arguments,
        buffers=buffers,
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
        state=_state_bytes(program, compiled, arguments),
        parts=parts(program, compiled, arguments, buffers, whole, max(output - alias, 0)),
        collectives=collectives,
        communication_seconds=sending,
        fusions=fused,
        roofline=roofline,
    )


# ---------------------------------------------------------------- implementation


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


def _state_bytes(
    program: Program, compiled: Compiled, arguments: dict[str, int]
) -> dict[str, tuple[int, int]]:
    """Bytes of each field of the optimizer states among the arguments, on device and host."""
    found: dict[str, tuple[int, int]] = {}
    for argument in program.arguments:
        if argument.field is not None:
            here, there = found.get(argument.field, (0, 0))
            host = _on_host(argument, compiled)
            there_now = 0 if argument.disk_bytes else argument.bytes
            own = (0, there_now) if host else (arguments[argument.name], 0)
            found[argument.field] = here + own[0], there + own[1]
    return dict(sorted(found.items(), key=lambda item: -sum(item[1])))


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


def _sent(analysis: Analysis, program: Program, compiled: Compiled) -> tuple[Collective, ...]:
    """The collectives, arguments under the names that the user knows."""

    def named(collective: Collective) -> Collective:
        parameter = collective.parameter
        if parameter is None or parameter >= len(compiled.kept):
            return collective
        name = program.arguments[compiled.kept[parameter]].name
        return dataclasses.replace(collective, name=name)

    return merged([named(collective) for collective in analysis.collectives])


def _fused(analysis: Analysis, program: Program, compiled: Compiled) -> Fusions | None:
    """The kernels, arguments under the names that the user knows."""

    def named(one: Unfused) -> Unfused:
        if one.parameter is None or one.parameter >= len(compiled.kept):
            return one
        name = program.arguments[compiled.kept[one.parameter]].name
        return dataclasses.replace(one, value=name)

    found = analysis.fusions
    return found and dataclasses.replace(found, unfused=tuple(map(named, found.unfused)))


def _roofline(
    compiled: Compiled, work: Costs, matmul_flops: int | None, moved: int, sending: float | None
) -> Roofline | None:
    if compiled.bandwidth is None or compiled.matrix_peak is None:
        return None
    return Roofline(
        matmul_flops=round(work.matmul_flops) if matmul_flops is None else matmul_flops,
        bytes=moved,
        peak_flops=compiled.matrix_peak,
        bandwidth=compiled.bandwidth,
        communication_seconds=sending,
    )


def _communicating(compiled: Compiled, collectives: Sequence[Collective]) -> float | None:
    """Seconds of the collectives one after the other, each in a ring."""
    if compiled.devices == 1:
        return 0.0
    if compiled.link is None:
        return None
    link = compiled.link
    return sum(
        one.times * ring_seconds(one.kind, one.wire_bytes, one.group_size, link)
        for one in collectives
    )


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
    if any(a.disk_bytes and a.memory_kind is not None for a in program.arguments):
        notes.append(
            "optimizer state on disk was compiled as if it were in host memory: a program for an "
            "absent accelerator cannot call back, and the device gets the same rows"
        )
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
