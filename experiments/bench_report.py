"""The time of a memory report, compared with compilation alone of the same program.

Three questions, each answered in one run, for programs of `programs.py`:

* a report, with an empty cache, without its trace and lowering, over jax's own `.compile()`
  (goal: at most 15 % or 0.5 s more), where the compiler is loaded already: in this process for
  the one, in the worker for the other.  The first report of a process starts that worker, and
  the time of which is a row of its own;
* the same report again (goals: under 1 s in all, under 100 ms beyond trace, lowering and export);
* the first report on the reference transformer, all in all (goal: under 40 s).

The variants alternate in shuffled order, and medians are compared, since machines
are noisy.  It prints a table and writes `experiments/results/bench_report.csv`.
"""

import csv
import dataclasses
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import programs
import tyro
from jax import export
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

import jaxmem

RESULTS = Path(__file__).parent / "results"
# The first is the one that the goals for the whole are about.
PROGRAMS: dict[str, Callable[[], jaxmem.Job]] = {
    "transformer": programs.transformer,
    "mlp": programs.mlp,
    "rnn": programs.rnn,
}
REFERENCE = next(iter(PROGRAMS))


@dataclasses.dataclass(frozen=True)
class Options:
    """How much to measure."""

    rounds: int = 3
    """Times that each variant is measured."""
    target: str = "h100-80g"
    """What to compile for."""
    results: Path = RESULTS
    """Where the table is written."""
    measure: tuple[Literal["report", "later", "bare"], str] | None = None
    """What a process of one measurement is to do: print its seconds as JSON, and nothing else."""


# ---------------------------------------------------------------- in a process of its own


def seconds_of_report(job: jaxmem.Job, target: str) -> dict[str, float]:
    """Of the first report, and of the same again, without the export that any report takes."""
    first = timed(lambda: job.report(target, suggest=False))
    again, exports = [], []
    for _ in range(5):
        exports.append(timed(lambda: exported(job)))
        again.append(timed(lambda: job.report(target, suggest=False)))
    median = statistics.median
    beyond = median(a - b for a, b in zip(again, exports, strict=True))
    return {"first": first, "again": median(again), "again_beyond_export": beyond}


def seconds_of_later(job: jaxmem.Job, target: str) -> dict[str, float]:
    """Of a report that is not the first of its process."""
    small = jax.ShapeDtypeStruct((8,), "float32")
    jaxmem.memory_report(lambda x: x + 1, small, target=target)
    return {"later": timed(lambda: job.report(target, suggest=False))}


def seconds_of_bare(job: jaxmem.Job, target: str) -> dict[str, float]:
    """Of jax's own steps, once the compiler is loaded."""
    device = topologies.get_topology_desc(**jaxmem.target(target).topology).devices[0]
    sharding = SingleDeviceSharding(device)

    def put(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    small = put(jax.ShapeDtypeStruct((8,), "float32"))
    jax.jit(lambda x: x + 1).lower(small).compile()
    args = jax.tree.map(put, job.args)
    jitted = jax.jit(job.step, donate_argnums=job.donate_argnums)
    lowered: list[Any] = []
    lower = timed(lambda: lowered.append(jitted.lower(*args)))
    return {"lower": lower, "compile": timed(lambda: lowered[0].compile())}


def exported(job: jaxmem.Job) -> bytes:
    # Another function each time, or jax would not trace it again as a report does.
    jitted = jax.jit(lambda *args: job.step(*args), donate_argnums=job.donate_argnums)
    return export.export(jitted, platforms=["cuda"])(*job.args).mlir_module_serialized


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# ---------------------------------------------------------------- all of them


def measured(what: str, program: str, target: str) -> dict[str, float]:
    """What such a process says, begun with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="bench-report-") as cache:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAXMEM_CACHE_DIR": cache,
            "TPU_SKIP_MDS_QUERY": "1",
        }
        command = [sys.executable, __file__, "--target", target, "--measure", what, program]
        start = time.perf_counter()
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return {**json.loads(done.stdout), "process": time.perf_counter() - start}


def rows(found: dict[tuple[str, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """The answers, in the order of the questions."""

    def median(what: str, program: str, key: str) -> float:
        return statistics.median(each[key] for each in found[what, program])

    answers = []
    for program in PROGRAMS:
        bare = median("bare", program, "compile")
        both = median("bare", program, "lower") + bare
        goal = f"≤ {max(0.5, 0.15 * bare):.3g}"
        later = median("later", program, "later") - both
        first = median("report", program, "first") - both
        answers += [
            (f"bare compile, {program}, s", bare, ""),
            (f"report beyond trace + lower + bare compile, {program}, s", later, goal),
            (f"the same, first report of a process, {program}, s", first, ""),
        ]
    for program in PROGRAMS:
        again = median("report", program, "again")
        beyond = median("report", program, "again_beyond_export")
        answers += [
            (f"the same report again, {program}, s", again, "< 1"),
            (f"of it beyond trace + lower + export, {program}, s", beyond, "< 0.1"),
        ]
    answers += [
        (f"first report, {REFERENCE}, s", median("report", REFERENCE, "first"), "< 40"),
        (f"its process, imports included, {REFERENCE}, s", _process(found), ""),
    ]
    return [{"question": q, "value": value, "goal": goal} for q, value, goal in answers]


def main(options: Options) -> None:
    if options.measure is not None:
        what, program = options.measure
        measures = {
            "report": seconds_of_report,
            "later": seconds_of_later,
            "bare": seconds_of_bare,
        }
        print(json.dumps(measures[what](PROGRAMS[program](), options.target)))
        return
    found: dict[tuple[str, str], list[dict[str, float]]] = {
        (what, program): [] for program in PROGRAMS for what in ("report", "later", "bare")
    }
    turns = list(found)
    with tqdm(total=options.rounds * len(turns), unit="process") as progress:
        for k in range(options.rounds):
            random.Random(k).shuffle(turns)
            for turn in turns:
                found[turn].append(measured(*turn, options.target))
                progress.update()
    answers = rows(found)
    where = {
        "target": options.target,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    with (options.results / "bench_report.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*answers[0], *where])
        writer.writeheader()
        writer.writerows({**row, "value": f"{row['value']:.3f}", **where} for row in answers)
    for row in answers:
        goal = f"   goal {row['goal']}" if row["goal"] else ""
        print(f"{row['question']:<66} {row['value']:>7.3f}{goal}")


def _process(found: dict[tuple[str, str], list[dict[str, float]]]) -> float:
    return statistics.median(each["process"] for each in found["report", REFERENCE])


if __name__ == "__main__":
    main(tyro.cli(Options))
