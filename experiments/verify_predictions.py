"""Predictions and measurements of a fixed list of programs: `results/verify_predictions.csv`.

    python experiments/verify_predictions.py

On an attached GPU each program is compiled, run in a fresh process, and its
allocator's peak is compared with the prediction (`jaxmem.verify`).  Without one the programs are
compiled for an absent GPU, and the table says "not measured".

Existing rows of the same program, device and versions are kept; remove the file to
start over.
"""

import concurrent.futures
import csv
import dataclasses
import datetime
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import tyro
from tqdm import tqdm

import jaxmem
from jaxmem import targets
from jaxmem.jobs import load, parse

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs.py"
NOT_MEASURED = "not measured"
NOT_COMPILED = "not compiled"
FAILED = "failed"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Predict what a list of programs needs, and measure it where there is a GPU."""

    results: Path = HERE / "results" / "verify_predictions.csv"
    """The table."""
    target: str = "h100-80g"
    """What to compile for without a GPU."""
    only: str = ""
    """Only programs whose text has this in it."""
    steps: int = 3
    """How many to run of each."""
    timeout: float = 900.0
    """Seconds for compiling one program, and again for running it."""
    workers: int = 1
    """Programs that are measured at once; the GPU must have the memory of all of them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of the list: a function of `programs.py`, what it is told, and a policy."""

    program: str
    policy: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def text(self) -> str:
        """Its settings as one field of the table."""
        return " ".join(f"{key}={value}" for key, value in self.settings)

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the others."""
        return self.program, self.policy, self.text

    def __str__(self) -> str:
        return " ".join(part for part in self.key if part)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: bytes of one device; the error is a fraction of what was measured."""

    program: str
    policy: str
    settings: str
    predicted_bytes: str
    compiler_peak_bytes: str
    measured_bytes: str
    error: str
    hardware: str
    versions: str
    date: str
    notes: str

    @property
    def case(self) -> tuple[str, str, str]:
        """The `Case.key` that it is of."""
        return self.program, self.policy, self.settings

    @property
    def origin(self) -> tuple[str, str]:
        """Where its numbers are from."""
        return self.hardware, self.versions

    @property
    def is_done(self) -> bool:
        """Whether there is a prediction, and a measurement unless there was no GPU."""
        return self.predicted_bytes.isdigit() and self.measured_bytes != FAILED

    def __str__(self) -> str:
        return " ".join(part for part in self.case if part)


# ---------------------------------------------------------------- the list


def case(program: str, policy: str = "none", **settings: Any) -> Case:
    return Case(program, policy, tuple(settings.items()))


# The reference first, under everything; then steps of all programs, in two
# dtypes, with and without donation, accumulation, offload; optimizers and layers that keep less.
CASES = (
    case("transformer", "none"),
    case("transformer", "dots"),
    case("transformer", "dots_no_batch"),
    case("transformer", "full"),
    case("transformer", "sqrt"),
    case("transformer", "revolve:slots=6"),
    case("transformer", "offload"),
    case("transformer", "names:save=attention"),
    case("transformer", "none", attention="fused"),
    case("transformer", "full", attention="fused", form="step"),
    case("transformer", "dots_no_batch", form="step"),
    case("transformer", "dots_no_batch", form="step", donate=False),
    case("transformer", "full", form="step", accum=4),
    case("transformer", "sqrt", form="step", dtype="float32", batch=4),
    case("mlp", "none"),
    case("mlp", "none", donate=False),
    case("mlp", "dots", dtype="bfloat16"),
    case("mlp", "full", accum=4),
    case("mlp", "sqrt:levels=2", batch=16384),
    case("mlp", "offload", batch=16384, dtype="bfloat16"),
    case("convnet", "none"),
    case("convnet", "dots", dtype="bfloat16", donate=False),
    case("convnet", "full", batch=256),
    case("convnet", "sqrt", batch=256, accum=2, dtype="bfloat16"),
    case("rnn", "none"),
    case("rnn", "sqrt", dtype="bfloat16"),
    case("rnn", "revolve:slots=32", donate=False),
    case("rnn", "offload", accum=2),
    case("states", "own", optimizer="Adam", way="ordinary"),
    case("states", "own", optimizer="Adam", way="fused"),
    case("states", "own", optimizer="8-bit Adam, dynamic", way="ordinary"),
    case("states", "own", optimizer="8-bit Adam, dynamic", way="fused"),
    case("states", "own", optimizer="SGD", way="fused"),
    case("states", "own", optimizer="Adam", way="host state"),
    case("states", "own", optimizer="Adam", way="host state, fused"),
    case("states", "own", optimizer="Adam", way="all on host, fused"),
    case("keeping_less", "none", form="plain"),
    case("keeping_less", "none", form="both"),
    case("keeping_less", "dots_no_batch", form="plain"),
    case("keeping_less", "dots_no_batch", form="both"),
)

# ---------------------------------------------------------------- API


def main(options: Options) -> int:
    """The table, made or completed; the exit code, 1 if a program failed."""
    hardware = attached_gpu()
    if hardware is None:
        # The plugins would only complain that there is nothing of theirs.
        jax.config.update("jax_platforms", "cpu")
    if options.workers > 1:  # the default allocator takes all memory for one process
        os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "cuda_async"
    table = {row.case: row for row in read(options.results)}
    wanted = [each for each in CASES if options.only in str(each)]
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        rows = [pool.submit(made, each, table.get(each.key), options, hardware) for each in wanted]
        done = concurrent.futures.as_completed(rows)
        for future in tqdm(done, total=len(rows), unit="program", disable=None):
            row = future.result()
            table[row.case] = row
            write(options.results, [table[known.key] for known in CASES if known.key in table])
    rows = [table[each.key] for each in wanted]
    print(summary(rows, hardware, options))
    return 1 if any(row.measured_bytes == FAILED for row in rows) else 0


def attached_gpu() -> str | None:
    """The kind of the attached GPU, None without one.

    Another process looks: as long as this one lives, it must not hold any of the GPU's memory.
    """
    code = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    platform, _, kind = done.stdout.strip().partition("\n")
    return kind if platform == "gpu" else None


def made(each: Case, before: Row | None, options: Options, hardware: str | None) -> Row:
    """The row of a case; the one of the table if it is of the same device and versions."""
    row = start(each, options, hardware)
    if before is not None and before.is_done and before.origin == row.origin:
        return before
    return (predicted if hardware is None else measured)(each, row, options)


def summary(rows: list[Row], hardware: str | None, options: Options) -> str:
    """What came of it, in words."""
    lines = [f"{len(rows)} programs, written to {options.results}"]
    lines += [f"  {row.predicted_bytes}: {row}: {row.notes}" for row in rows if not row.is_done]
    if hardware is None:
        lines.append(
            f"predictions only, for {options.target}: measuring needs an attached NVIDIA GPU and "
            'pip install "jax[cuda13]"; then the same command fills the table'
        )
        return "\n".join(lines)
    if errors := {str(row): float(row.error) for row in rows if row.is_done}:
        worst = max(errors, key=lambda name: abs(errors[name]))
        median = statistics.median(abs(error) for error in errors.values())
        lines.append(f"median error {median:.2%}, largest {errors[worst]:+.2%}: {worst}")
    return "\n".join(lines)


# ---------------------------------------------------------------- implementation


def start(each: Case, options: Options, hardware: str | None) -> Row:
    """What is known of a row before anything is compiled."""
    absent = jaxmem.target(options.target)
    found = targets.versions(absent)
    return Row(
        program=each.program,
        policy=each.policy,
        settings=each.text,
        predicted_bytes="",
        compiler_peak_bytes="",
        measured_bytes=NOT_MEASURED,
        error=NOT_MEASURED,
        hardware=hardware or f"{absent.device} (absent)",
        versions=", ".join(f"{name} {number}" for name, number in sorted(found.items())),
        date=datetime.date.today().isoformat(),
        notes="",
    )


def predicted(each: Case, row: Row, options: Options) -> Row:
    """The row with the prediction for an absent device."""
    entry = load.find(f"{PROGRAMS}:{each.program}")
    policy = parse.PolicyText.parse(each.policy)
    try:
        job = entry.make(dict(each.settings))
        with entry.under(policy):
            report = job.report(
                options.target, suggest=False, generate_code=True, timeout=options.timeout
            )
    except RuntimeError as error:  # of the compiler, or of jax where cuDNN is not there
        return dataclasses.replace(row, predicted_bytes=NOT_COMPILED, notes=_line(error))
    return dataclasses.replace(
        row,
        predicted_bytes=str(report.required_bytes),
        compiler_peak_bytes=str(report.peak_bytes),
        notes="; ".join(lint.message for lint in report.lints if lint.kind == "cudnn-missing"),
    )


def measured(each: Case, row: Row, options: Options) -> Row:
    """The row with the prediction for the attached device and what its allocator saw."""
    try:
        found = jaxmem.verify(
            f"{PROGRAMS}:{each.program}",
            dict(each.settings),
            policy=each.policy,
            steps=options.steps,
            timeout=options.timeout,
        )
    except RuntimeError as error:
        failed = dict.fromkeys(("predicted_bytes", "measured_bytes", "error"), FAILED)
        return dataclasses.replace(row, **failed, notes=_line(error))
    return dataclasses.replace(
        row,
        predicted_bytes=str(found.predicted_bytes),
        compiler_peak_bytes=str(found.compiler_peak_bytes),
        measured_bytes=str(found.measured_bytes),
        error=f"{found.error:+.5f}",
        notes="; ".join(found.notes),
    )


def read(path: Path) -> list[Row]:
    """The rows of a table; none if it is not there or of another form."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != _COLUMNS:
            return []
        return [Row(**line) for line in reader]


def write(path: Path, rows: list[Row]) -> None:
    """Write the table so that a reader sees all of it or the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
    unfinished.replace(path)


_COLUMNS = [field.name for field in dataclasses.fields(Row)]


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
