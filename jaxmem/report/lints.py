"""What costs memory or misleads in a compiled program, each with its remedy."""

import importlib.metadata
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxmem._util.text import size
from jaxmem.compile.compiling import Compiled
from jaxmem.compile.program import Program
from jaxmem.estimate.costs import Costs, two_levels, unrolled_without_barriers
from jaxmem.policies import ByLayer, NoRemat
from jaxmem.report.fusions import broken_chains, layout_copies, written_conversions
from jaxmem.report.mesh_lints import gathered_stacks, repeated_collectives, whole_states
from jaxmem.report.parts import gradient_of_stacks
from jaxmem.report.report import Lint

# Below these shares a thing is not worth a reader's time.
_UNDONATED = 0.05
_PADDING = 0.20
# Of what the program needs, and of the device that it fills.
_STATE = 0.25
_CROWDED = 0.75
# Of what is on the host; with less lost, it is worth being there.  And of the temporaries.
_OVERLAP = 0.50
_REORDERED = 0.05
# Outside of loops, with the first computation: its CPU compiler drops barriers.
CPU_MERGES_RECOMPUTATION = jax.__version_info__ < (0, 11)

# ---------------------------------------------------------------- API


def lints(program: Program, compiled: Compiled, work: Costs) -> tuple[Lint, ...]:
    """All that apply, in a fixed order."""
    return tuple(
        lint
        for check in (
            _not_donated,
            _policy_without_effect,
            _recomputation_removed,
            _barriers_off,
            _two_levels,
            _compilers_own,
            _overlap,
            _avoiding,
            _padding,
            _large_state,
            gathered_stacks,
            whole_states,
            repeated_collectives,
            broken_chains,
            layout_copies,
            written_conversions,
            _cudnn,
            _cpu,
        )
        for lint in check(program, compiled, work)
    )


def where_it_does_not_fit(found: Iterable[Lint]) -> list[str]:
    """What these say that helps only where a program does not fit, as it costs time."""
    return [
        f"{lint.remedy.removeprefix(_IF_IT_FITS)}: {lint.message}"
        for lint in found
        if lint.remedy.startswith(_IF_IT_FITS)
    ]


# ---------------------------------------------------------------- implementation


def _not_donated(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    def key(leaf: Any) -> tuple[tuple[int, ...], str]:
        return tuple(leaf.shape), str(leaf.dtype)

    outputs = Counter(key(leaf) for leaf in jax.tree.leaves(program.traced.out_info))
    outputs -= Counter(key(a) for a in program.arguments if a.donated)
    sizes = {} if compiled.analysis is None else compiled.analysis.parameter_bytes
    fitting: dict[str, int] = {}
    arguments = 0
    for parameter, index in enumerate(compiled.kept):
        argument = program.arguments[index]
        on_device = sizes.get(parameter, argument.bytes)
        arguments += on_device
        if not argument.donated and outputs[key(argument)] > 0:
            outputs[key(argument)] -= 1
            root = argument.name.split("/")[0]
            fitting[root] = fitting.get(root, 0) + on_device
    total = sum(fitting.values())
    needed = arguments + (compiled.stats.get("temp_bytes") or 0)
    if total > _UNDONATED * needed and total > 2**10:
        names = ", ".join(sorted(fitting, key=lambda root: -fitting[root]))
        some = any(argument.donated for argument in program.arguments)
        yield Lint(
            "not-donated",
            f"{'not all that could be' if some else 'nothing'} is donated: results have the "
            f"shapes of {names}, {size(total)} that are held twice",
            f"donate {names} with donate_argnums= if the caller does not use the old ones again",
        )


def _policy_without_effect(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    record = program.record
    asked = any(not isinstance(policy, NoRemat | ByLayer) for policy in record.regions)
    idle = [
        (p, plan)
        for p, plan in record.plans
        if plan.kind == "none" and not isinstance(p, NoRemat | ByLayer)
    ]
    if asked and not idle and not work.recomputed_flops:
        yield Lint(
            "policy-no-effect",
            "decorated stacks are run, but nothing of them is recomputed: no gradient goes "
            "through them, or the policy keeps everything",
            "report the training step (with its gradient), or take no notice for inference",
        )
    else:
        for policy, plan in dict.fromkeys(idle):
            yield Lint(
                "policy-no-effect",
                f"the policy {policy} keeps everything in a stack of {plan.length} layers: any cut "
                "of it would need more",
                "nothing, if that is enough; else a policy that always recomputes, such as 'full'",
            )


def _recomputation_removed(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    if compiled.analysis is None or compiled.analysis.unknown_loops or work.unknown_loops:
        return
    asked = float(work.recomputed_matmul_flops)
    model = work.matmul_flops - asked
    done = compiled.analysis.matmul_flops - model
    if compiled.devices > 1 and model:
        # In what share work is repeated on several devices, the compiled program tells.
        asked /= model
        model = compiled.analysis.matmul_flops - compiled.analysis.recomputed_matmul_flops
        asked, done = asked * model, float(compiled.analysis.recomputed_matmul_flops)
    # The compiler may shave a little off either for reasons of its own.
    if asked > 0.02 * model and done < 0.5 * asked:
        yield Lint(
            "recomputation-removed",
            f"rematerialisation asks for {asked / model:.0%} extra matmul FLOPs, and the "
            f"compiled program has {max(done, 0) / model:.0%}: the compiler merged it with the "
            "first computation, and kept the values",
            "scan over the layers, or leave prevent_cse=True where they are unrolled"
            + (" (on CPU jax 0.10 heeds it not)" if compiled.platform == "cpu" else ""),
        )


def _barriers_off(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    if lines := unrolled_without_barriers(program.jaxpr):
        yield Lint(
            "barriers-off",
            f"jax.checkpoint with prevent_cse=False stands outside of any scan ({_list(lines)}): "
            "the compiler may merge its recomputation with the first computation",
            "leave prevent_cse=True there; False is right only inside a scan",
        )


def _two_levels(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    lines = dict.fromkeys((*program.record.twice, *two_levels(program.jaxpr)))
    if lines:
        yield Lint(
            "two-levels",
            f"two levels of rematerialisation over the same layer ({_list(tuple(lines))}): it is "
            "computed once more than either alone would",
            "drop one of the two; for two levels by intent there is remat_sqrt(levels=2)",
        )


def _compilers_own(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    analysis = compiled.analysis
    if analysis is not None and analysis.xla_remat_instructions:
        yield Lint(
            "compiler-remat",
            f"the compiler itself rematerialises {analysis.xla_remat_instructions} instructions, "
            "as the program is at the limit of the memory or over it, and chooses without knowing "
            "the layers",
            "choose a policy for the layer stack, so that it need not",
        )
    elif "reduce memory use below" in compiled.log:
        yield Lint(
            "compiler-remat",
            "the compiler tried to rematerialise on its own to fit the memory, and could not",
            "choose a policy for the layer stack, or a smaller batch",
        )


def _overlap(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    # On a TPU the order is made for memory and transfers at once.
    analysis = compiled.analysis
    if compiled.platform != "gpu" or analysis is None:
        return
    more, there = analysis.overlap_bytes, analysis.space_bytes["host"]
    if more > _OVERLAP * there > 0:
        yield Lint(
            "transfers-overlapped",
            f"{size(there)} are on the host, and the device needs {size(more)} more than it would "
            "in another order: the compiler orders a loop with transfers so as to overlap them, "
            "and minds memory only near its limit, which is most of the device",
            f"{_IF_IT_FITS}lower the limit: {_lower_limit(compiled)}",
        )
    # Between several devices there are messages, which are worth being overlapped.
    alone = compiled.devices == 1 and not there
    if alone and more > _REORDERED * (compiled.stats["temp_bytes"] or 0):
        yield Lint(
            "ordered-for-time",
            f"temporaries need about {size(more)} more than they would in another order: the "
            "compiler orders loops so as to overlap copies with products, and minds memory only "
            "near its limit, which is most of the device",
            f"{_IF_IT_FITS}compiler_options={{{_IN_ORDER!r}: False}} for jax.jit and "
            "for the report",
        )


# What a remedy begins with that costs time.
_IF_IT_FITS = "nothing, if it fits; else "

# The option by which an order for little memory is left as it is.
_IN_ORDER = "xla_gpu_enable_latency_hiding_scheduler"


def _lower_limit(compiled: Compiled) -> str:
    """The option that puts the compiler's limit just below what the program needs.

    It is a percentage of what arguments and results leave, of four fifths of an absent device
    or of what jax has preallocated of an attached one (XLA's GetSchedulerMemoryLimit), for
    temporaries and results.  Below what any order can keep it gives poor ones.
    """
    stats = {key: value or 0 for key, value in compiled.stats.items()}
    results = stats["output_bytes"] - stats["alias_bytes"]
    attached = compiled.default_capacity_bytes is None
    memory = (compiled.capacity_bytes or 0) * (1.0 if attached else 0.8)
    room = memory - stats["argument_bytes"] - results
    name = "xla_gpu_memory_limit_slop_factor"
    if room <= 0:
        return f"{name} in compiler_options= of jax.jit and of the report, below its 95"
    percent = math.ceil(100 * (stats["temp_bytes"] + results) / room) - 1
    return (
        f'compiler_options={{"{name}": {min(max(percent, 1), 94)}}} for jax.jit and for the report '
        "(95 by default; try the percentages around it, as absent and attached devices differ)"
    )


def _avoiding(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    if compiled.avoiding:
        options = ", ".join(f"{name}={value}" for name, value in compiled.avoiding.items())
        yield Lint(
            "compiler-defect",
            f"compiled with {options}: without it the compiler refuses the program, as for an "
            "absent GPU it cannot tune its kernels",
            "nothing; on an attached GPU the option may be needless, and the figures differ a "
            "little where it is not set",
        )


def _padding(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    if compiled.analysis is None:
        return
    buffers = [b for b in compiled.analysis.buffers if b.place == "device"]
    live = sum(buffer.bytes for buffer in buffers)
    padding = compiled.analysis.padding_bytes
    if padding > _PADDING * live:
        worst = max(buffers, key=lambda buffer: buffer.padding_bytes)
        shape = f"{worst.dtype}[{','.join(map(str, worst.shape))}]"
        where = f" ({worst.source})" if worst.source else ""
        yield Lint(
            "padding",
            f"{padding / live:.0%} of the memory at the peak is padding, most of it in "
            f"{worst.name} {shape}{where}",
            "make the last two dimensions multiples of 8 and 128, or fold small ones into others",
        )


def _large_state(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    capacity = compiled.capacity_bytes
    stats = compiled.stats
    needed = (stats.get("argument_bytes") or 0) + (stats.get("temp_bytes") or 0)
    if capacity is None or compiled.platform == "cpu" or needed < _CROWDED * capacity:
        return
    wide = [
        argument
        for argument in program.arguments
        if argument.field is not None
        and argument.memory_kind is None
        and argument.dtype in ("float32", "bfloat16", "float16")
    ]
    held = sum(argument.bytes for argument in wide) // compiled.devices
    if held > _STATE * needed:
        stored = sum(argument.bytes // int(argument.dtype[-2:]) * 8 for argument in wide)
        fields = ", ".join(dict.fromkeys(argument.field or "" for argument in wide))
        buffers = () if compiled.analysis is None else compiled.analysis.buffers
        stacks, layer = gradient_of_stacks(program, compiled, buffers)
        # Where no gradient is live at the peak, it is no part of what is needed.
        fused = (
            f"; jaxmem.value_and_update(loss, optimizer) saves {size(stacks - layer)} of gradient"
        )
        yield Lint(
            "large-state",
            f"the optimizer's state ({fields}) has {size(held)}",
            f"jaxmem.quantize_state(optimizer) saves {size(held - stored // compiled.devices)} of "
            f"it, jaxmem.offload_state(optimizer) up to {size(held)}, which go to the host"
            + fused
            * (stacks > layer),
        )


def _cudnn(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    analysis = compiled.analysis
    if compiled.platform != "gpu" or analysis is None or _has_cudnn():
        return
    if analysis.has_convolution or any("cudnn" in name for name in analysis.custom_call_targets):
        yield Lint(
            "cudnn-missing",
            "the program has convolutions and cuDNN is not installed here: which algorithm a GPU "
            "picks, and the workspace that it takes, are not in these numbers",
            "pip install nvidia-cudnn-cu13, and allow for workspace on top",
        )


def _has_cudnn() -> bool:
    names = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
    return any(any(importlib.metadata.distributions(name=name)) for name in names)


def _cpu(program: Program, compiled: Compiled, work: Costs) -> Iterator[Lint]:
    if compiled.platform == "cpu":
        yield Lint(
            "cpu-numbers",
            "CPU figures are not predictive for "
            + (
                "unrolled code: this compiler merges recomputation with the first computation; "
                "inside lax.scan they are kept apart"
                if CPU_MERGES_RECOMPUTATION
                else "accelerators: this compiler fuses less, and orders otherwise"
            ),
            'pass target="h100-80g" or another accelerator, which need not be attached',
        )


def _list(lines: tuple[str, ...]) -> str:
    shown = ", ".join(lines[:3])
    return shown if len(lines) <= 3 else f"{shown} and {len(lines) - 3} more"
