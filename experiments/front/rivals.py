"""Policies in use for transformers, and the budgets at which `jaxmem.fit` is compared with them."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import programs

import jaxmem
from front import peers
from front.table import EQUINOX, FLAX, HALIAX, HAND, POLICY, Made, Row, refused

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Rival:
    """One way to decide what a layer keeps.

    Attributes:
      kind: `HAND` (each layer under `jax.checkpoint`), `POLICY` (of jaxmem), or another library.
      name: as it is shown.
      checkpoint: for `HAND`, as `programs.transformer` takes it.
      policy, options: for `POLICY`, as `jaxmem.use_policy` takes them.
      stack: for another library, how it runs the layers.
    """

    kind: str
    name: str
    checkpoint: str | None = None
    policy: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    stack: peers.Stack | None = None

    def row(self, size: Mapping[str, Any], made: Made, **compiling: Any) -> Row:
        """Compiled for a target; the gradients of another library are run as well.

        Args:
          size: keywords of `programs.transformer`.
          **compiling: options of `jaxmem.memory_report`.
        """
        report = self.report(size, made.target, **compiling)
        if self.stack is None:
            return made.row(self.kind, self.name, report, refused(report))
        off = peers.off(self.stack, size["layers"])
        notes = [f"gradients off by {off:.0e}" if off else "gradients the same", refused(report)]
        if report.host_bytes:
            notes.append(f"{report.host_bytes} bytes on the host")
        # Not the report's: of a loop of unknown length it counts one round.
        model, work = peers.model_flops(size), report.matmul_flops
        if self.kind == EQUINOX and work is not None:
            work = peers.loop_flops(work, model, self.stack, size["layers"])
        rest = {"matmul_flops": work, "model_matmul_flops": model}
        return made.row(self.kind, self.name, report, *notes, **rest)

    def report(self, size: Mapping[str, Any], target: str, **compiling: Any) -> jaxmem.MemoryReport:
        """What the compiler says of it, for a target; arguments as for `row`."""
        if self.stack is not None:
            job = peers.job(size, self.stack)
        else:
            job = programs.transformer(**size, checkpoint=self.checkpoint)
        with self._policy():
            return job.report(target, suggest=False, **compiling)

    def _policy(self) -> contextlib.AbstractContextManager[None]:
        if not self.policy:
            return contextlib.nullcontext()
        return jaxmem.use_policy(self.policy, **dict(self.options))


@dataclasses.dataclass(frozen=True)
class Asked:
    """A budget that `fit` is given, and why."""

    name: str
    budget: int


# ---------------------------------------------------------------- the lists


def hand(name: str, checkpoint: str) -> Rival:
    return Rival(HAND, name, checkpoint=checkpoint)


def ours(name: str, policy: str, **options: Any) -> Rival:
    return Rival(POLICY, name, policy=policy, options=tuple(options.items()))


def peer(kind: str, name: str, stack: peers.Stack) -> Rival:
    return Rival(kind, name, stack=stack)


KEPT = "none"

# Names-policies in the style of large training codes, whose names are of projections.
RIVALS = (
    hand(KEPT, "none"),
    hand("dots_saveable", "dots_saveable"),
    hand("dots_with_no_batch_dims", "dots_with_no_batch_dims_saveable"),
    hand("save nothing", "nothing_saveable"),
    hand("minimal", "names:qkv,out,up,down"),
    hand("minimal with context", "names:qkv,attention,out,up,down"),
    hand("save dots except mlp", "names:qkv,out"),
    hand("save qkv", "names:qkv"),
    hand("save qkv and context", "names:qkv,attention"),
    hand("save context", "names:attention"),
    hand("save out projection", "names:out"),
    ours("jaxmem full", "full"),
    ours("jaxmem dots_no_batch", "dots_no_batch"),
    ours("jaxmem sqrt", "sqrt"),
    ours("jaxmem revolve, 6 slots", "revolve", slots=6),
)


def of_others(layers: int) -> list[Rival]:
    """The ways of other libraries to run a stack of so many layers."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    two, three = cut(layers, 2), cut(layers, 3)
    found = [
        peer(FLAX, "nn.remat", peers.linen()),
        peer(FLAX, "nn.remat dots_with_no_batch_dims", peers.linen(dots)),
        peer(FLAX, f"nn.remat_scan {_by(two)}", peers.linen_scan(*two)),
        peer(FLAX, f"nn.remat_scan {_by(three)}", peers.linen_scan(*three)),
        peer(FLAX, f"nn.remat_scan {layers}×1", peers.linen_scan(layers, 1)),
        peer(FLAX, f"nn.remat_scan {_by(two)} of nn.remat", peers.linen_scan(*two, each=True)),
        peer(HALIAX, "haliax save_carries", peers.haliax()),
        peer(HALIAX, "haliax recompute", peers.haliax(carries=False)),
        peer(HALIAX, "haliax save_inputs", peers.haliax(inputs=True)),
        peer(HALIAX, f"haliax nested {two[0]}", peers.haliax(blocks=two[0])),
        peer(HALIAX, "haliax offload", peers.haliax("offload", "offload")),
    ]
    for number in sorted({math.isqrt(layers), layers // 3, layers // 2} - {0, layers}):
        found.append(peer(EQUINOX, f"equinox {number} checkpoints", peers.equinox(number)))
    return [*found, peer(EQUINOX, "equinox all checkpoints", peers.equinox(layers))]


def of_each_kind(rivals: Sequence[Rival]) -> list[Rival]:
    """The first of each."""
    return list({rival.kind: rival for rival in reversed(rivals)}.values())[::-1]


def cut(layers: int, levels: int) -> tuple[int, ...]:
    """Lengths of nested loops over so many layers, as equal as divisors are.

    >>> cut(24, 2), cut(24, 3)
    ((4, 6), (2, 3, 4))
    """
    if levels == 1:
        return (layers,)
    root = round(layers ** (1 / levels), 9)
    first = max(d for d in range(1, layers + 1) if layers % d == 0 and d <= root)
    return (first, *cut(layers // first, levels - 1))


def _by(lengths: Sequence[int]) -> str:
    return "×".join(map(str, lengths))


# Reductions of the undecorated program's temporaries, and the extra matmul FLOPs, in percent
# of the model's, with which sets of values found by hand get there.
SHRUNK = {7: 4.8, 10: 14.3, 19: 23.8}


def asked(rivals: Sequence[Row], all_of_it: bool = True) -> list[Asked]:
    """What to ask `fit`: as much as each rival needs, between those made by hand, a part of all.

    No more than the target has.

    Args:
      all_of_it: whether to ask for more than the first.
    """
    found = [Asked(as_much_as(row.name), row.required_bytes) for row in rivals if not row.too_large]
    if not all_of_it:
        return found
    front = sorted({row.required_bytes for row in pareto(rivals)}, reverse=True)
    for more, less in itertools.pairwise(front):
        found.append(Asked(f"between {more} and {less}", round(math.sqrt(more * less))))
    bare = next(row for row in rivals if row.name == KEPT)
    fixed = bare.required_bytes - bare.temp_bytes
    found += [Asked(shrunk(k), fixed + bare.temp_bytes // k) for k in SHRUNK]
    return found


def as_much_as(name: str) -> str:
    """What the question is called that gives `fit` the memory of a rival."""
    return f"as {name}"


def shrunk(times: int) -> str:
    return f"temporaries / {times}"


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Rivals written by hand that no other of them beats in bytes and matmul FLOPs."""
    known = [
        row
        for row in rows
        if row.kind == HAND and row.matmul_flops is not None and not row.too_large
    ]
    return [
        row
        for row in known
        if not any(
            (other.required_bytes, other.work) != (row.required_bytes, row.work)
            and other.required_bytes <= row.required_bytes
            and other.work <= row.work
            for other in known
        )
    ]
