"""Fine-tuning ViT-B and LLaMA-7B with layers that keep less: the memory of a step.

    python experiments/fine_tuning_memory.py            # ten minutes, all compilation
    python experiments/fine_tuning_memory.py --small    # a quick trial, on two layers

Steps of the sizes published with LowMemoryBP (arXiv 2406.16282; `tuning/models.py`) are compiled
for absent accelerators, with nothing recomputed but attention scores: adapters (LoRA) at queries
and values, at every matrix, or all weights trained; as it is written, with `jaxmem.low_memory`
above it (of norms alone, which is exact, and of all), and with the scale and bias of norms also
merged into the matrices behind them, as is done there before training.

It prints a table and writes `results/fine_tuning_memory.csv`; the same command resumes after an
interruption.
"""

import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path

import tyro
from tqdm import tqdm

from common.table import Record, Table, markdown, versions
from tuning import models

RESULTS = Path(__file__).parent / "results"
KEY = ("target", "model", "layers", "tuned", "form")

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile fine-tuning steps with and without layers that keep less."""

    target: str = "h100-80g"
    """What to compile for."""
    large: str = "b200-192g"
    """What to compile steps for that train all of a model of 7 B parameters."""
    results: Path = RESULTS
    """Where fine_tuning_memory.csv is written."""
    small: bool = False
    """A quick trial: two layers of one model, adapters at every matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """A compiled step; sizes in bytes.

    Attributes:
      tuned: what is trained.
      form: "plain", "norms", "low memory" or "merged".
    """

    target: str
    model: str
    layers: int
    tuned: str
    form: str
    required_bytes: int
    temp_bytes: int


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows, completed and printed."""
    table = Table(options.results / "fine_tuning_memory.csv", Row, KEY)
    wanted = [
        (name, tuned, form)
        for name in models.MODELS
        for tuned in typing.get_args(models.Tuned)
        for form in typing.get_args(models.Form)
        if not options.small or (name, tuned) == ("ViT-B", "adapters")
    ]
    found: list[Row] = []
    for name, tuned, form in tqdm(wanted, unit="program", disable=None):
        target = options.large if (name, tuned) == ("LLaMA-7B", "all") else options.target
        model = models.MODELS[name]
        if options.small:
            model = dataclasses.replace(model, layers=2)
        own = versions(target)
        key = {
            "target": target, "model": name, "layers": model.layers, "tuned": tuned, "form": form,
        }  # fmt: skip
        row = table.find(own, **key)
        if row is None:
            report = models.train(model, tuned, form).report(target, suggest=False)
            row = Row(
                versions=own, **key, required_bytes=report.required_bytes,
                temp_bytes=report.temp_bytes,
            )  # fmt: skip
            table.add(row)
        found.append(row)
    print(f"{summary(found)}\n\nwritten: {table.path}")
    return found


def summary(rows: Sequence[Row]) -> str:
    """What each step requires, and how much less than as it is written, as a Markdown table."""
    lines = [["required, GiB", "plain", "norms", "", "low memory", "", "merged", ""]]
    for name, tuned in dict.fromkeys((row.model, row.tuned) for row in rows):
        forms = {row.form: row for row in rows if (row.model, row.tuned) == (name, tuned)}
        plain = forms["plain"].required_bytes
        cells = [f"{plain / 2**30:.2f}"]
        for form in ("norms", "low memory", "merged"):
            size = forms[form].required_bytes
            cells += [f"{size / 2**30:.2f}", f"{size / plain - 1:+.1%}"]
        lines.append([f"{name}, {tuned} ({forms['plain'].target})", *cells])
    return markdown(lines)


if __name__ == "__main__":
    main(tyro.cli(Options))
