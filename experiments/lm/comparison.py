"""One model under every policy: memory by the compiler, time side by side, and the losses."""

import csv
import dataclasses
import io
import statistics
import time
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxmem import policies
from jaxmem.errors import OffloadWarning
from jaxmem.policies import Policy
from lm.config import Config
from lm.program import Memory, Program, State, build, initial
from lm.stopping import Listener

POLICIES: dict[str, Policy] = {
    "none": policies.none(),
    "full": policies.full(),
    "dots": policies.dots(),
    "sqrt": policies.sqrt(),
    "sqrt levels=2": policies.sqrt(levels=2),
    "revolve": policies.revolve(),
    "offload": policies.offload(),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What one policy costs; None where it was not or could not be had.

    Attributes:
      temporary_bytes: buffers of the compiled train step other than arguments and results.
      required_bytes: arguments + outputs − aliased + temporaries.
      extra_forwards: layer evaluations beyond the first forward pass.
      step_seconds: median of the timed steps.
      step_time_ratio: that, over the median of "none" in the same run.
      loss_difference: the largest absolute difference from the loss of "none" at the same step.
    """

    policy: str
    temporary_bytes: int | None
    required_bytes: int | None
    extra_forwards: int
    step_seconds: float | None = None
    step_time_ratio: float | None = None
    loss_difference: float | None = None


def programs(
    config: Config, compiled: dict[str, Program], listener: Listener, steps: Any = iter
) -> dict[str, Program]:
    """The train step under every policy, and under the run's own if that is another.

    Args:
      compiled: those that exist already.
      steps: wraps the labels, to show progress.
    """
    wanted = POLICIES | {config.label: config.remat}
    found = {}
    for label in steps(list(wanted)):
        listener.check()
        found[label] = compiled.get(label) or build_quietly(config, wanted[label])
    return found


def build_quietly(config: Config, policy: Policy) -> Program:
    """`build`, with the warning that offload saves nothing here left to `note`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        return build(config, policy)


def note() -> str | None:
    """What must be known to read the row of "offload" on this backend."""
    if jax.default_backend() != "cpu":
        return None
    return "offload: on a CPU device and host memory are one, so nothing leaves it"


def sizes(found: dict[str, Program]) -> list[Row]:
    """The part of the table that needs no running."""
    return [_row(label, program) for label, program in found.items()]


def race(
    config: Config, found: dict[str, Program], listener: Listener, rounds: Any = iter
) -> list[Row]:
    """Run every program for a few steps from the same start, and compare.

    The programs alternate step by step, so that other load on the machine affects
    all of them equally.  The first step of each is not timed.

    Args:
      rounds: wraps the numbers of the steps, to show progress.

    Raises:
      Stopped: a signal came.
    """
    start = initial(config)
    places = jax.tree.map(lambda leaf: leaf.sharding, start)
    start = jax.device_get(start)
    states: dict[str, State] = {label: jax.device_put(start, places) for label in found}
    seconds: dict[str, list[float]] = {label: [] for label in found}
    losses: dict[str, list[float]] = {label: [] for label in found}
    labels = list(found)
    for step in rounds(range(1, config.compare_steps + 1)):
        for label in labels[step % len(labels) :] + labels[: step % len(labels)]:
            listener.check()
            before = time.perf_counter()
            states[label], loss = found[label].run(states[label], step)
            jax.block_until_ready(states[label])
            seconds[label].append(time.perf_counter() - before)
            losses[label].append(loss)
    medians = {label: statistics.median(times[1:]) for label, times in seconds.items()}
    return [
        dataclasses.replace(
            _row(label, program),
            step_seconds=medians[label],
            step_time_ratio=medians[label] / medians["none"],
            loss_difference=float(np.max(np.abs(np.subtract(losses[label], losses["none"])))),
        )
        for label, program in found.items()
    ]


def to_csv(rows: Iterable[Row]) -> str:
    """The table as CSV; what is None is left empty."""
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(Row)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return out.getvalue()


def from_csv(text: str) -> list[Row]:
    """The rows that `to_csv` wrote."""
    whole = ("temporary_bytes", "required_bytes", "extra_forwards")

    def value(name: str, cell: str) -> Any:
        if name == "policy":
            return cell
        return None if cell == "" else int(cell) if name in whole else float(cell)

    return [
        Row(**{name: value(name, cell) for name, cell in line.items()})
        for line in csv.DictReader(io.StringIO(text))
    ]


def to_text(rows: Iterable[Row]) -> str:
    """The table in Markdown, which a terminal shows as well."""
    head = ("policy", "temporaries", "required", "extra forwards", "step time", "× none", "Δ loss")
    cells = [head] + [
        (
            row.policy,
            _mebibytes(row.temporary_bytes),
            _mebibytes(row.required_bytes),
            str(row.extra_forwards),
            "" if row.step_seconds is None else f"{row.step_seconds * 1e3:.0f} ms",
            "" if row.step_time_ratio is None else f"{row.step_time_ratio:.2f}",
            "" if row.loss_difference is None else f"{row.loss_difference:.1g}",
        )
        for row in rows
    ]
    columns = [column for column in range(len(head)) if any(line[column] for line in cells[1:])]
    widths = {column: max(len(line[column]) for line in cells) for column in columns}

    def line(texts: tuple[str, ...]) -> str:
        first, *rest = columns
        parts = [texts[first].ljust(widths[first])]
        parts += [texts[column].rjust(widths[column]) for column in rest]
        return "| " + " | ".join(parts) + " |"

    first, *rest = columns
    rules = ["-" * (widths[first] + 2)] + ["-" * (widths[c] + 1) + ":" for c in rest]
    return "\n".join([line(cells[0]), f"|{'|'.join(rules)}|", *map(line, cells[1:])])


# ---------------------------------------------------------------- implementation


def _row(label: str, program: Program) -> Row:
    memory: Memory | None = program.memory
    return Row(
        label,
        memory and memory.temporaries,
        memory and memory.required,
        program.extra_forwards,
    )


def _mebibytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**20:.1f} MiB"
