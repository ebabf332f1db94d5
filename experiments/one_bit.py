"""Does it cost quality to send signs of the momentum?  Held-out losses against those of Adam.

    python experiments/one_bit.py            # about half an hour on two cores
    python experiments/one_bit.py --small    # a quick trial

The model of `train_lm.py` with 2 layers, on its text, on four devices that the CPU is divided into:
400 steps for each of three seeds.  AdamW averages gradients in all of them, 1-bit Adam
(`jaxmem.one_bit_adam`) in the first quarter.  Then it sends the signs of the momentum, as in the
paper; of the momentum over the root of the variance (`scaled=True`); and, to see what they are for,
without the errors of earlier signs.  All are the same step, for AdamW with a warm-up that never
ends: text, dropout and the clipping of each device's gradient are the same, so that runs are equal
until signs are sent.  `--lamb` adds LAMB and 1-bit LAMB.

Bytes between devices and in the state are read from the compiled program.

It prints tables, writes `results/one_bit.csv` (losses), `results/one_bit_bytes.csv` and a picture;
the same command resumes after an interruption.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from tqdm import tqdm

from common.table import Record, Table, markdown, versions
from jaxmem.hlo.collectives import collectives
from jaxmem.hlo.text import parse
from lm.config import Config
from lm.program import State, build, held_out_loss, initial, shapes

RESULTS = Path(__file__).parent / "results"
DEVICES = 4
ADAM, PAPER, SCALED, WITHOUT = "AdamW", "1-bit Adam", "1-bit Adam, scaled", "1-bit Adam, no errors"
LAMB, LAMB_1, LAMB_SCALED = "LAMB", "1-bit LAMB", "1-bit LAMB, scaled"
GOAL = 0.02  # nats of held-out loss
TIMES = 30  # fewer bytes than an all-reduce of float32

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Train with averaged gradients and with signs, and compare the losses on held-out text."""

    model: Config = dataclasses.field(
        default_factory=lambda: Config(
            policy="full", layers=2, batch=32, steps=400, mesh=f"data={DEVICES}"
        )
    )
    """What is trained; the optimizer is set here."""
    seeds: int = 3
    """How many."""
    lamb: bool = False
    """LAMB as well."""
    lamb_rate: float = 2e-2
    """Its learning rate."""
    results: Path = RESULTS
    """Where tables and picture are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: two seeds of a small model, a few steps."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        tiny = Config(
            policy="full", layers=1, width=32, heads=2, sequence=16, batch=8, steps=8,
            eval_every=4, mesh=self.model.mesh,
        )  # fmt: skip
        return dataclasses.replace(self, model=tiny, seeds=2)

    def ways(self) -> dict[str, Config]:
        """What to train with, by name."""
        signs = dataclasses.replace(self.model, optimizer="one-bit-adam")
        found = {
            ADAM: dataclasses.replace(signs, averaged_steps=signs.steps),
            PAPER: signs,
            SCALED: dataclasses.replace(signs, scaled=True),
            WITHOUT: dataclasses.replace(signs, error_feedback=False),
        }
        if self.lamb:
            lamb = dataclasses.replace(
                signs, optimizer="one-bit-lamb", learning_rate=self.lamb_rate
            )
            found |= {
                LAMB: dataclasses.replace(lamb, averaged_steps=lamb.steps),
                LAMB_1: lamb,
                LAMB_SCALED: dataclasses.replace(lamb, scaled=True),
            }
        for config in found.values():
            config.check()
        return found


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """A run after some steps.

    Attributes:
      sizes: of the model and of the run.
      loss: on held-out text, nats per byte.
    """

    sizes: str
    name: str
    seed: int
    step: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Bytes(Record):
    """A compiled step, on one device.

    Attributes:
      numbers: of the parameters.
      state_bytes: of the optimizer's state.
      averaging_bytes, signs_bytes: what is sent in a step of either phase, by ring algorithms.
      scale_bytes: of scales, among the latter.
    """

    sizes: str
    name: str
    numbers: int
    state_bytes: int
    averaging_bytes: int
    signs_bytes: int
    scale_bytes: int


KEY = ("sizes", "name", "seed", "step")

# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows of all runs, completed, printed and drawn."""
    options = options.sized()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    known = Table(options.results / "one_bit.csv", Row, KEY)
    sent = Table(options.results / "one_bit_bytes.csv", Bytes, ("sizes", "name"))
    evaluate = held_out_loss(options.model)
    ways = {name: _Trained(name, config, evaluate) for name, config in options.ways().items()}
    found: list[Row] = []
    with tqdm(total=len(ways) * options.seeds, unit="run", disable=None) as bar:
        for seed in range(options.seeds):
            for name, trained in ways.items():
                bar.set_postfix_str(f"{name}, seed {seed}")
                found += trained.rows(known, options.again, seed)
                bar.update()
    bytes_of = [ways[name].bytes(sent) for name in ways if name in (PAPER, LAMB_1)]
    print(f"{summary(found)}\n\n{sent_table(bytes_of)}\n\n{answer(found, bytes_of)}")
    path = options.results / "one_bit.png"
    _draw(found, options.ways()[PAPER].signs["warmup_steps"], path)
    print(f"written: {known.path}, {sent.path}, {path}")
    return found


def differences(rows: Sequence[Row], name: str) -> list[float]:
    """Last losses over those of the same optimizer that averages in all steps, seed by seed."""
    last = max(row.step for row in rows)
    of = LAMB if "LAMB" in name else ADAM
    other = {row.seed: row.loss for row in rows if (row.name, row.step) == (of, last)}
    own = [row for row in rows if (row.name, row.step) == (name, last)]
    return [row.loss - other[row.seed] for row in own]


def summary(rows: Sequence[Row]) -> str:
    """A Markdown table, a line for each optimizer."""
    last = max(row.step for row in rows)
    lines = [["", "held-out loss, mean", "over averaging, mean", "seed by seed"]]
    for name in dict.fromkeys(row.name for row in rows):
        off = differences(rows, name)
        own = [row.loss for row in rows if (row.name, row.step) == (name, last)]
        is_base = name in (ADAM, LAMB)
        lines.append(
            [
                name,
                f"{statistics.mean(own):.4f}",
                "" if is_base else f"{statistics.mean(off):+.4f}",
                "" if is_base else " ".join(f"{one:+.4f}" for one in off),
            ]
        )
    return markdown(lines)


def sent_table(rows: Sequence[Bytes]) -> str:
    """A Markdown table of what a device sends and holds."""
    lines = [["", "state, bytes a number", "sent, averaging", "sent, signs", "times less"]]
    for row in rows:
        lines.append(
            [
                row.name,
                f"{row.state_bytes / row.numbers:.2f}",
                f"{row.averaging_bytes:,}",
                f"{row.signs_bytes:,}",
                f"{row.averaging_bytes / (row.signs_bytes - row.scale_bytes):.1f}",
            ]
        )
    return markdown(lines)


def answer(rows: Sequence[Row], sent: Sequence[Bytes]) -> str:
    """What was to be reached, and whether it is."""
    lines = []
    names = [name for name in dict.fromkeys(row.name for row in rows) if name not in (ADAM, LAMB)]
    for name in names:
        off = differences(rows, name)
        words = "within" if statistics.mean(off) <= GOAL else "NOT within"
        lines.append(f"{name}: {statistics.mean(off):+.4f} nats, {words} {GOAL}")
    for row in sent:
        times = row.averaging_bytes / (row.signs_bytes - row.scale_bytes)
        words = "at least" if times >= TIMES else "NOT"
        lines.append(f"{row.name}: {times:.1f} times fewer bytes beside scales, {words} {TIMES}")
    return "\n".join(lines)


# ---------------------------------------------------------------- implementation


class _Trained:
    """Runs of one optimizer, compiled once."""

    def __init__(self, name: str, config: Config, evaluate: Callable[[Any], float]) -> None:
        self.name, self.config, self._evaluate = name, config, evaluate
        self._program: Any = None
        self._begun: Any = None

    @property
    def sizes(self) -> str:
        names = ("layers", "width", "sequence", "batch", "steps", "learning_rate")
        return " ".join(f"{name}={getattr(self.config, name)}" for name in names)

    def rows(self, known: Table[Row], again: bool, seed: int) -> list[Row]:
        """Those of the table, or else new ones, which are put there."""
        own = versions("local", "optax", "flax")
        every = self.config.eval_every
        steps = list(range(every, self.config.steps + 1, every))
        key = {"sizes": self.sizes, "name": self.name, "seed": seed}
        found = [known.find(own, **key, step=step) for step in steps]
        there = [row for row in found if row is not None]
        if len(there) == len(steps) and not again:
            return there
        losses = self.losses(seed)
        rows = [Row(**key, step=step, loss=losses[step], versions=own) for step in steps]
        known.add(*rows)
        return rows

    def losses(self, seed: int) -> dict[int, float]:
        """On held-out text, by step."""
        config = dataclasses.replace(self.config, seed=seed)
        program = dataclasses.replace(self._compiled(), config=config)
        state, found = self._initial(config), {}
        for step in range(1, config.steps + 1):
            state, _ = program.run(state, step)
            if step % config.eval_every == 0:
                found[step] = self._evaluate(state.params)
        return found

    def bytes(self, known: Table[Bytes]) -> Bytes:
        """What a compiled step sends, its phases apart."""
        own = versions("local", "optax", "flax")
        row = known.find(own, sizes=self.sizes, name=self.name)
        if row is not None:
            return row
        module = parse(self._compiled().step.as_text())
        phases = sorted(
            sum(c.total_bytes for c in collectives(dataclasses.replace(module, entry=branch)))
            for computation in module.computations.values()
            for instruction in computation.instructions
            if instruction.opcode == "conditional"
            for branch in instruction.all_called()
        )
        signs, averaging = [total for total in phases if total]
        state = shapes(self.config)
        leaves = jax.tree.leaves(state.params)
        layout = self.config.layout
        assert layout is not None
        places = layout.of(state.optimizer)
        held = jax.tree.map(
            lambda leaf, place: _nbytes(place.shard_shape(leaf.shape)), state.optimizer, places
        )
        row = Bytes(
            self.sizes,
            self.name,
            sum(leaf.size for leaf in leaves),
            sum(jax.tree.leaves(held)),
            averaging,
            signs,
            2 * (DEVICES - 1) * 4 * len(leaves),
            versions=own,
        )
        known.add(row)
        return row

    def _initial(self, config: Config) -> Any:
        """The state before the first step: the optimizer's is of zeros, whatever the seed."""
        layout = config.layout
        assert layout is not None
        if self._begun is None:
            self._begun = jax.tree.map(np.asarray, initial(config).optimizer)
        params = initial(dataclasses.replace(config, mesh=None, optimizer="sgd")).params
        state = State(params, self._begun)
        return jax.device_put(state, layout.of(state))

    def _compiled(self) -> Any:
        if self._program is None:
            self._program = build(self.config, self.config.remat)
        return self._program


def _nbytes(shape: Sequence[int]) -> int:
    """Of numbers of 4 bytes, as all of a state are."""
    return 4 * math.prod(shape)


def _draw(rows: Sequence[Row], switch: int, path: Path) -> None:
    from common.picture import COLOURS, drawn

    paper, scaled = (statistics.mean(differences(rows, name)) for name in (PAPER, SCALED))
    message = f"Signs of the momentum: {paper:+.3f} nats after all steps, scaled {scaled:+.3f}"
    names = [name for name in dict.fromkeys(row.name for row in rows) if "LAMB" not in name]
    with drawn(path, message, width=9, across=2) as (losses, over):
        base = {(row.seed, row.step): row.loss for row in rows if row.name == ADAM}
        for name, colour in zip(names, COLOURS, strict=False):
            own = [row for row in rows if row.name == name]
            steps = sorted({row.step for row in own})
            means = [statistics.mean(r.loss for r in own if r.step == step) for step in steps]
            losses.plot(steps, means, color=colour, label=name)
            if name == ADAM:
                continue
            for seed in sorted({row.seed for row in own}):
                off = [r.loss - base[seed, r.step] for r in own if r.seed == seed]
                over.plot(steps, off, color=colour, linewidth=0.8, alpha=0.7)
        for axes in (losses, over):
            axes.axvline(switch, color="#999999", linewidth=0.8, linestyle=":")
            axes.set_xlabel("step (dotted: signs from here on)")
        losses.set_ylabel("held-out loss, nats per byte, mean of the seeds")
        losses.legend(frameon=False)
        over.set_ylabel("over AdamW, seed by seed")
        over.set_ylim(-0.05, 0.15)


if __name__ == "__main__":
    main(tyro.cli(Options))
