"""Policies that are in use for transformers, and what `jaxmem.fit` is asked beside them."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import programs

import jaxmem
from front.table import HAND, POLICY, Row

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Rival:
    """One way to decide what a layer keeps.

    Attributes:
      kind: `HAND` (each layer under `jax.checkpoint`) or `POLICY` (of jaxmem).
      name: as it is shown.
      checkpoint: for `HAND`, as `programs.transformer` takes it.
      policy, options: for `POLICY`, as `jaxmem.use_policy` takes them.
    """

    kind: str
    name: str
    checkpoint: str | None = None
    policy: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def report(self, size: Mapping[str, Any], target: str, timeout: float) -> jaxmem.MemoryReport:
        """Compiled for a target; `size` are keywords of `programs.transformer`."""
        job = programs.transformer(**size, checkpoint=self.checkpoint)
        with self._policy():
            return job.report(target, suggest=False, timeout=timeout)

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

# Temporaries so many times below those of the bare program, and the extra matrix work, in percent
# of the model's, with which sets of values found by hand get there.
SHRUNK = {7: 4.8, 10: 14.3, 19: 23.8}


def asked(rivals: Sequence[Row]) -> list[Asked]:
    """What to ask `fit`: as much as each rival needs, between those made by hand, a part of all.

    No more than the target has.
    """
    found = [Asked(as_much_as(row.name), row.required_bytes) for row in rivals if not row.too_large]
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
    """Rivals written by hand that no other of them beats in bytes and matrix work."""
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
