"""How fast is a step that updates layers in the backward pass, on the attached backend?

    python experiments/state_speed.py            # minutes on two cores
    python experiments/state_speed.py --small    # a quick trial

The train step of `train_lm.py`, AdamW without clipping (which takes a second backward pass when
fused): ordinary, fused (`jaxmem.value_and_update`), and both with the state in 8 bits.  All are
timed in turn in every round, so that other work on the machine affects all of them; compared is
the median over the rounds of the ratio within a round.  Goal: the fused step has at least 0.95 of
the ordinary step's speed.

It prints a table and writes `results/state_speed.csv`.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import tyro
from bench_core import alternate, ratio, timed

from common.table import Record, Table, markdown, versions
from lm.config import Config
from lm.program import build, initial

RESULTS = Path(__file__).parent / "results"
GOAL = 0.95
ORDINARY, FUSED = "ordinary", "fused"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Time train steps side by side."""

    model: Config = dataclasses.field(
        default_factory=lambda: Config(layers=12, width=128, clip=None)
    )
    """What is trained; state and fusion are set here."""
    rounds: int = 15
    """Times that each step is measured."""
    steps: int = 4
    """How many in one measurement."""
    results: Path = RESULTS
    """Where state_speed.csv is written."""
    small: bool = False
    """Only see that it runs: two rounds of a small model."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        tiny = Config(layers=2, width=32, heads=2, sequence=16, batch=4, clip=None)
        return dataclasses.replace(self, model=tiny, rounds=2, steps=1)

    def ways(self) -> dict[str, Config]:
        """What is timed, by name."""
        bits = dataclasses.replace(self.model, state="8bit")
        return {
            ORDINARY: self.model,
            FUSED: dataclasses.replace(self.model, fused=True),
            f"8-bit, {ORDINARY}": bits,
            f"8-bit, {FUSED}": dataclasses.replace(bits, fused=True),
        }


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """A step.

    Attributes:
      seconds: of one step, in the median.
      speed: over that of the ordinary step with the state in the same form, paired.
    """

    sizes: str
    name: str
    seconds: float
    speed: float


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows, made, printed, written."""
    options = options.sized()
    seconds = alternate(
        {name: _contestant(config, options.steps) for name, config in options.ways().items()},
        options.rounds + 1,
        "timing",
    )
    seconds = {name: found[1:] for name, found in seconds.items()}  # the first warms up
    names = ("layers", "width", "sequence", "batch", "policy")
    sizes = " ".join(f"{name}={getattr(options.model, name)}" for name in names)
    rows = [
        Row(
            sizes, name, statistics.median(found) / options.steps,
            ratio(seconds[name.replace(FUSED, ORDINARY)], found), versions=versions("local"),
        )
        for name, found in seconds.items()
    ]  # fmt: skip
    table = Table(options.results / "state_speed.csv", Row, ("sizes", "name"))
    table.add(*rows)
    print(f"{summary(rows)}\n\n{answer(rows)}\nwritten: {table.path}")
    return rows


def summary(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [["", "a step", "speed over ordinary"]]
    lines += [[row.name, f"{row.seconds * 1e3:.1f} ms", f"{row.speed:.3f}"] for row in rows]
    return markdown(lines)


def answer(rows: Sequence[Row]) -> str:
    """Whether the goal is reached."""
    (speed,) = (row.speed for row in rows if row.name == FUSED)
    return f"fused: {speed:.3f} of the ordinary step's speed, goal {GOAL}" + (
        "" if speed >= GOAL else ", NOT reached"
    )


# ---------------------------------------------------------------- implementation


def _contestant(config: Config, steps: int) -> Callable[[], float]:
    """Seconds of some steps; each call goes on where the last one ended."""
    program, state, done = build(config, config.remat), initial(config), 0

    def run() -> float:
        nonlocal state, done

        def act() -> object:
            nonlocal state, done
            for _ in range(steps):
                done += 1
                state, _ = program.run(state, done)
            return state

        return timed(act)

    jax.block_until_ready(state)
    return run


if __name__ == "__main__":
    main(tyro.cli(Options))
