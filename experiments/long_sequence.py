"""An LSTM over 10 000 steps: does each schedule need and evaluate what its formula says?

python experiments/long_sequence.py            # minutes of compilation, and one of counting
python experiments/long_sequence.py --small    # a hundred steps, on the attached backend

Compared are everything kept, √n segments, segments nested two to four times, revolve with 4 to 64
carries, and equinox's checkpointed loop with as many.  Memory is that of the value_and_grad
compiled for a target, which need not be present.  Evaluations are counted: the same plans run on
the attached backend over as many steps, with a very small cell that reports each of its
evaluations; gradients are compared with that of everything kept.

Formulas are those of the plans (`jaxmem.Plan.bytes`, `.extra_forwards`).  They count carries and
residuals, not the gradient accumulated in addition, nor a step's workspace.  equinox places its
carries without knowing the length of the loop; the formula given for it is the number of
evaluations of the best schedule with as many carries, which is revolve's.

It prints a table and writes `results/long_sequence.csv` and `.png`; the same command resumes
after an interruption.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import tyro
from tqdm import tqdm

import jaxmem
from common.table import Table, versions
from sequence import loops, picture
from sequence.loops import Way
from sequence.table import Row, against_equinox, answer, summary

RESULTS = Path(__file__).parent / "results"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare schedules for a long loop with their formulas, and with equinox's loop."""

    target: str = "h100-80g"
    """What to compile for; "local" is the attached backend."""
    steps: int = 10_000
    """Of the sequence."""
    batch: int = 64
    """Sequences."""
    features: int = 64
    """Of the inputs."""
    width: int = 512
    """Of the LSTM."""
    levels: tuple[int, ...] = (2, 3, 4)
    """Of nested cuts."""
    slots: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Carries of revolve, and of equinox's loop."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where long_sequence.csv and .png are written."""
    small: bool = False
    """Only see that it runs: a hundred steps on the attached backend."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        return dataclasses.replace(
            self, target="local", steps=100, batch=16, features=8, width=32, levels=(2,), slots=(4,)
        )

    @property
    def ways(self) -> list[Way]:
        """All that are compared; equinox's last, which take the longest to count."""
        ours = [Way("none"), Way("sqrt"), *(Way("levels", number) for number in self.levels)]
        both = [Way(kind, number) for kind in ("revolve", "equinox") for number in self.slots]
        return ours + both

    @property
    def program(self) -> str:
        """The sizes as a text, for the table."""
        names = ("steps", "batch", "features", "width")
        return " ".join(f"{name}={getattr(self, name)}" for name in names)


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """All rows, written as they come, printed and drawn."""
    options = options.sized()
    made_by = versions(options.target, "equinox")
    table = Table(
        options.results / "long_sequence.csv", Row, ("target", "program", "kind", "number")
    )
    rows = []
    with tqdm(options.ways, unit="program", disable=None) as bar:
        for way in bar:
            bar.set_postfix_str(str(way))
            key = {"target": options.target, "program": options.program}
            row = table.find(made_by, **key, kind=way.kind, number=way.number)
            if row is None:
                row = _measured(way, options, made_by)
                table.add(row)
            rows.append(row)
    file = options.results / "long_sequence.png"
    picture.draw(rows, f"{options.steps:,} steps: {against_equinox(rows)}", file)
    print(f"{options.target}, {options.program}\n")
    print(f"{summary(rows)}\n\n{answer(rows)}")
    print(f"written: {table.path}, {file}")
    return rows


# ---------------------------------------------------------------- implementation

# What runs while evaluations are counted: sequences, features, width.
_TINY = (2, 3, 4)


def _measured(way: Way, options: Options, made_by: str) -> Row:
    specs = loops.shapes(options.steps, options.batch, options.features, options.width)
    step = loops.gradient(way.run(loops.lstm))
    report = jaxmem.memory_report(
        step, *specs, target=options.target, timeout=options.timeout, suggest=False
    )
    given_and_made = sum(_bytes(tree) for tree in (specs, jax.eval_shape(step, *specs)))
    plan, formula_bytes = _formula(way, specs)
    evaluations, found = _counted(way, plan, options.steps)
    _, plain = _counted(Way("none"), jaxmem.Plan.none(options.steps), options.steps)
    return Row(
        options.target,
        options.program,
        options.steps,
        way.kind,
        way.number,
        report.required_bytes,
        report.temp_bytes,
        report.required_bytes - given_and_made,
        formula_bytes,
        evaluations,
        options.steps + _formula_extra(way, plan, options.steps),
        max(map(_off, jax.tree.leaves(found), jax.tree.leaves(plain))),
        versions=made_by,
    )


@functools.cache
def _counted(way: Way, plan: jaxmem.Plan | None, steps: int) -> tuple[int, Any]:
    return loops.counted(way, plan, loops.shapes(steps, *_TINY))


def _formula(way: Way, specs: Any) -> tuple[jaxmem.Plan | None, int]:
    """The plan for these sizes, None where it is not ours, and the bytes by the formula."""
    (stack,) = jaxmem.stacks(Way("none").run(loops.lstm), *specs)
    carry, tape = stack.problem.carry_bytes, stack.problem.residual_bytes
    if way.policy is None:
        return None, way.number * carry + tape
    (stack,) = jaxmem.stacks(way.run(loops.lstm), *specs)
    return stack.plan, stack.plan.bytes(carry, tape)


def _formula_extra(way: Way, plan: jaxmem.Plan | None, steps: int) -> int:
    if way.kind not in ("revolve", "equinox"):
        assert plan is not None
        return plan.extra_forwards()
    # Griewank & Walther's closed form, written out so that it does not depend on the plan's.
    slots = way.number
    rounds = next(r for r in range(steps) if math.comb(slots + r, slots) >= steps)
    return rounds * steps - math.comb(slots + rounds, rounds - 1)


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _off(found: jax.Array, plain: jax.Array) -> float:
    return float(abs(found - plain).max() / abs(plain).max())


if __name__ == "__main__":
    main(tyro.cli(Options))
