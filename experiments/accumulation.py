"""Ways to accumulate gradients compared: are they exact, what do they need, how fast are they?

python experiments/accumulation.py            # minutes, most of them for a TPU
python experiments/accumulation.py --small    # a quick trial on the attached backend

It prints tables and writes `results/accumulation.csv` and `.png`.  The ways are in
`acc/forms.py`.  Compiled programs for absent devices are cached on disk: the same command
resumes after an interruption, and compiles again only what a change of the library affects.
"""

import dataclasses
import datetime
import importlib.metadata
from pathlib import Path

import jax
import tyro
from tqdm import tqdm

from acc import exactness, memory, picture, speed, table
from acc.table import Row
from lm import files

RESULTS = Path(__file__).parent / "results"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare jaxmem's ways to accumulate gradients with optax's and a hand-written loop."""

    targets: tuple[str, ...] = ("local", "h100-80g", "v5e-16g")
    """What to compile for; "local" is the attached backend."""
    width: int = 2048
    """Of the matrices whose memory is reported."""
    layers: int = 8
    """How many of them."""
    microbatches: int = 8
    """Parts of a batch."""
    timed_width: int = 512
    """Of the matrices that are timed."""
    rounds: int = 31
    """Steps of each program that are timed."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where accumulation.csv and accumulation.png are written."""
    small: bool = False
    """A quick trial: small programs, fewer, the attached backend, a few rounds."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self, targets=("local",), width=128, layers=2, microbatches=2, timed_width=32, rounds=3
        )


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """All rows, printed and written."""
    options = options.sized()
    rows = [
        *tqdm(exactness.rows(), "exactness", total=exactness.count(), unit="case"),
        *_memory(options),
        *_speed(options),
    ]
    table.write(
        options.results / "accumulation.csv",
        rows,
        ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "optax")),
        datetime.date.today().isoformat(),
    )
    files.write(options.results / "accumulation.png", picture.draw(rows, *shown(rows)))
    print(report(rows))
    print(f"written to {options.results}: accumulation.csv, accumulation.png")
    return rows


def report(rows: list[Row]) -> str:
    """The tables, with the messages of forms that refused or were not compiled."""
    parts = []
    gradients = [row for row in rows if row.question == exactness.GRADIENT]
    parts += [
        "relative error of the gradient against float64",
        table.to_text(gradients, list(dict.fromkeys(row.case for row in gradients)), "case"),
    ]
    for row in rows:
        if row.question == exactness.MOMENT:
            parts.append(
                f"{row.form}: its second moment differs from Adam's by {row.value:.0%} ({row.case})"
            )
    known = [row for row in rows if row.question == memory.MEMORY and row.unit != "bytes"]
    for case in dict.fromkeys(row.case for row in known):
        found = [row for row in known if row.case == case]
        parts += [
            f"required memory in units of the float32 parameters: {case}",
            table.to_text(found, list(dict.fromkeys(row.device for row in found)), "device"),
        ]
    times = [row for row in rows if row.question == speed.STEP_TIME]
    parts += [
        f"step time over that of the scan by hand, on {jax.devices()[0].device_kind}",
        table.to_text(times, list(dict.fromkeys(row.case for row in times)), "case"),
    ]
    notes = dict.fromkeys(
        f"{row.form} {row.text} ({row.case}): {row.note}"
        for row in rows
        if isinstance(row.value, str) and row.note
    )
    return "\n\n".join([*parts, *notes])


def shown(rows: list[Row]) -> tuple[list[str], str]:
    """What the picture shows: the first two problems, and an accelerator if there is one."""
    known = [row for row in rows if row.unit == "P"]
    device = next((row.device for row in known if row.device != "cpu"), known[0].device)
    return list(dict.fromkeys(row.case for row in known))[:2], device


# ---------------------------------------------------------------- implementation


def _memory(options: Options) -> list[Row]:
    problems = memory.problems(options.width, options.layers, options.microbatches)
    wanted = [
        (problem, form, target, options.timeout)
        for problem in (problems[:1] if options.small else problems)
        for target in options.targets
        for form in problem.forms
    ]
    return [row for each in tqdm(wanted, "memory", unit="program") for row in memory.rows(*each)]


def _speed(options: Options) -> list[Row]:
    # The first two are plain stacks.
    problems = memory.problems(options.timed_width, options.layers, options.microbatches)[:2]
    return [row for problem in problems for row in speed.rows(problem, options.rounds)]


if __name__ == "__main__":
    main(tyro.cli(Options))
