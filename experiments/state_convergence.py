"""Does training with less state come as far?  Held-out losses against those of AdamW.

    python experiments/state_convergence.py            # about ten minutes on two cores
    python experiments/state_convergence.py --small    # a quick trial

The model of `train_lm.py` with 8 layers, on its text: 200 steps for each of three seeds, of AdamW
in float32, with its state in 8 bits in both codecs and updated in the backward pass, with weights
(and then moments) in bfloat16, of which the state holds 8 bits more or not, and of AdaLomo, SGD and
LOMO, which is SGD in the backward pass; all gradients are clipped.  Each seed is another model,
another order of the text and another dropout.

Runs that round differently drift apart, whatever they store: as a measure of that, AdamW is also
run from parameters that are each moved to the next float32 number.

It prints a table and writes `results/state_convergence.csv`; the same command resumes after an
interruption.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from tqdm import tqdm

from common.table import Record, Table, markdown, versions
from lm.config import Config
from lm.program import build, held_out_loss, initial

RESULTS = Path(__file__).parent / "results"
ADAMW, NUDGED, SGD, LOMO = "AdamW", "AdamW, parameters nudged", "SGD", "LOMO"
BITS = "8-bit"
BFLOAT16, MASTERS = "bfloat16 weights", "bfloat16 weights, 8 bits more in the state"
GOAL = 0.01  # nats of held-out loss
EQUAL = 1e-4  # the same; of what ends in a few last bits of the gradient's norm

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Train with several optimizers, and compare the losses on held-out text."""

    model: Config = dataclasses.field(default_factory=lambda: Config(layers=8))
    """What is trained; optimizer, state and learning rate are set here."""
    rate: float = 5e-3
    """Of AdamW; the others have their own."""
    seeds: int = 3
    """How many."""
    results: Path = RESULTS
    """Where state_convergence.csv is written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: two seeds of a small model, a few steps."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        tiny = Config(layers=2, width=32, heads=2, sequence=16, batch=4, steps=8)
        return dataclasses.replace(self, model=tiny, seeds=2)

    def ways(self) -> dict[str, Config]:
        """What to train with, by name."""
        plain = dataclasses.replace(self.model, learning_rate=self.rate)
        sgd = dataclasses.replace(plain, optimizer="sgd", learning_rate=100 * self.rate)
        found = {
            ADAMW: plain,
            NUDGED: plain,
            "8-bit, dynamic": dataclasses.replace(plain, state="8bit"),
            "8-bit, companding": dataclasses.replace(plain, state="8bit-companding"),
            "8-bit, dynamic, fused": dataclasses.replace(plain, state="8bit", fused=True),
            "AdaLomo": dataclasses.replace(
                plain, optimizer="adalomo", learning_rate=10 * self.rate, fused=True
            ),
            BFLOAT16: dataclasses.replace(plain, weights="bfloat16"),
            MASTERS: dataclasses.replace(plain, weights="bfloat16+8"),
            f"{MASTERS}, 8-bit": dataclasses.replace(plain, weights="bfloat16+8", state="8bit"),
            SGD: sgd,
            LOMO: dataclasses.replace(sgd, fused=True),
        }
        for config in found.values():
            config.check()
        return found


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """A run.

    Attributes:
      sizes: of the model and of the run.
      learning_rate: at its peak.
      loss: on held-out text in the end, nats per byte.
    """

    sizes: str
    name: str
    seed: int
    learning_rate: float
    loss: float


KEY = ("sizes", "name", "seed", "learning_rate")

# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows of all runs, completed and printed."""
    options = options.sized()
    known = Table(options.results / "state_convergence.csv", Row, KEY)
    evaluate = held_out_loss(options.model)
    found = []
    with tqdm(total=len(options.ways()) * options.seeds, unit="run", disable=None) as bar:
        for name, config in options.ways().items():
            trained = _Trained(name, config, evaluate)
            for seed in range(options.seeds):
                bar.set_postfix_str(f"{name}, seed {seed}")
                found.append(_row(known, options.again, trained, seed))
                bar.update()
    print(f"{summary(found)}\n\n{answer(found)}\nwritten: {known.path}")
    return found


def differences(rows: Sequence[Row], name: str, of: str = ADAMW) -> list[float]:
    """Losses over those of another, seed by seed."""
    other = {row.seed: row.loss for row in rows if row.name == of}
    return [row.loss - other[row.seed] for row in rows if row.name == name]


def summary(rows: Sequence[Row]) -> str:
    """A Markdown table, a line for each optimizer."""
    lines = [["", "rate", "held-out loss, mean", "over AdamW, mean", "of one seed, at most"]]
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        off = differences(rows, name)
        lines.append(
            [
                name,
                f"{own[0].learning_rate:g}",
                f"{statistics.mean(row.loss for row in own):.4f}",
                f"{statistics.mean(off):+.4f}" if name != ADAMW else "",
                f"{max(off, key=abs):+.4f}" if name != ADAMW else "",
            ]
        )
    return markdown(lines)


def answer(rows: Sequence[Row]) -> str:
    """What was to be reached, and whether it is."""
    lines = []
    for name in dict.fromkeys(row.name for row in rows if row.name.startswith(BITS)):
        mean = statistics.mean(differences(rows, name))
        words = "within" if mean <= GOAL else "NOT within"
        lines.append(f"{name}: {mean:+.4f} nats, {words} {GOAL}")
    off = max(map(abs, differences(rows, LOMO, SGD)))
    words = "equals" if off <= EQUAL else "does NOT equal"
    lines.append(f"LOMO {words} SGD: {off:.1e} nats at most")
    return "\n".join(lines)


# ---------------------------------------------------------------- implementation


class _Trained:
    """Runs of one optimizer, compiled once."""

    def __init__(self, name: str, config: Config, evaluate: Callable[[Any], float]) -> None:
        self.name, self.config, self.evaluate = name, config, evaluate
        self._program: Any = None

    def loss(self, seed: int) -> float:
        """On held-out text, after all steps."""
        if self._program is None:
            self._program = build(self.config, self.config.remat)
        config = dataclasses.replace(self.config, seed=seed)
        program, state = dataclasses.replace(self._program, config=config), initial(config)
        if self.name == NUDGED:
            state = state._replace(params=jax.tree.map(_next_number, state.params))
        for step in range(1, config.steps + 1):
            state, _ = program.run(state, step)
        return self.evaluate(state.params)


def _row(known: Table[Row], again: bool, trained: _Trained, seed: int) -> Row:
    """That of the table, or else a new one, which is put there."""
    own, config = versions("local", "optax", "flax"), trained.config
    names = ("layers", "width", "sequence", "batch", "steps")
    key: dict[str, Any] = {
        "sizes": " ".join(f"{name}={getattr(config, name)}" for name in names),
        "name": trained.name,
        "seed": seed,
        "learning_rate": config.learning_rate,
    }
    row = None if again else known.find(own, **key)
    if row is None:
        row = Row(**key, loss=trained.loss(seed), versions=own)
        known.add(row)
    return row


def _next_number(leaf: jax.Array) -> jax.Array:
    return jnp.nextafter(leaf, jnp.asarray(jnp.inf, leaf.dtype))


if __name__ == "__main__":
    main(tyro.cli(Options))
