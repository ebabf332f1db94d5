"""Flax models that others wrote, as they stand: what do `fit` and `remat_sqrt` make of them?

    python experiments/foreign_models.py                       # compiled for an absent H100
    python experiments/foreign_models.py --models GPT-2 BERT --layers 4
    python experiments/foreign_models.py --small               # a quick trial

Eight models of the package `transformers` are trained with AdamW: decoders, encoders, both, local
attention, convolutions.  Their layers are written out in Python, and none of their code knows of
jaxmem: a decorator is put around the call of the model.  Next to the plain step are compiled
`@jaxmem.remat_sqrt`, what `jaxmem.fit` plans for shares of the plain temporaries, and the
gradient checkpointing that a model has of its own (`enable_gradient_checkpointing()`), in exactly
whose memory `fit` is asked for a plan, too: "beaten" counts the models whose own option
recomputes less.

Temporaries and matmul FLOPs are the compiled program's; extra ones are over those of the plain
step, or, where the compiler refuses that, over the model's.  A program that it refuses is a row
with what it said; shares are then of the temporaries as predicted.  "Planning" is the time to
trace and plan the step without any compilation, "fit" the whole call; both depend on what
else the machine does.  T5's file calls `jnp.clip` with a keyword that jax has removed, and gets it
back; nothing else is changed.

It prints a table and writes `results/foreign_models.csv` and `.png`; the same command resumes
after an interruption.
"""

import dataclasses
from pathlib import Path

import tyro
from tqdm import tqdm

from foreign import picture, table
from foreign.nets import NETS, SMALL, Net
from foreign.study import Study, made_by
from foreign.table import Cost, Row

RESULTS = Path(__file__).parent / "results"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Plan what models of transformers keep and recompute."""

    models: tuple[str, ...] = tuple(NETS)
    """Which of the eight."""
    targets: tuple[str, ...] = ("h100-80g",)
    """What to compile for; "local" is the attached backend. The picture is of the first."""
    shares: tuple[float, ...] = (0.5, 0.25, 0.15)
    """Of the plain program's temporaries, for which `fit` is asked."""
    layers: int | None = None
    """Instead of the models' own numbers, in encoder and decoder each."""
    cost: Cost = "roofline"
    """What `fit` makes least."""
    compiles: int = 6
    """How often `fit` may ask the compiler for one budget."""
    timeout: float = 1800.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where foreign_models.csv and .png are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: small models on the attached backend."""

    def sized(self) -> "Options":
        """The same, small if that is asked for."""
        if not self.small:
            return self
        models = self.models if self.models != tuple(NETS) else ("GPT-2", "BERT")
        return dataclasses.replace(
            self, models=models, targets=("local",), shares=(0.9,), compiles=3
        )

    def net(self, model: str) -> Net:
        sizes = dict(SMALL[model]) if self.small else {}
        if self.layers is not None:
            sizes["layers"] = self.layers
        return NETS[model](**sizes)


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows of all targets, completed, printed; those of the first drawn."""
    options = options.sized()
    known = table.table(options.results / "foreign_models.csv")
    if options.again:
        for target in options.targets:
            known.drop(known.of(made_by(target), target=target))
    nets = {model: options.net(model) for model in options.models}
    found = []
    with tqdm(unit="program", disable=None) as bar:
        for target in options.targets:
            study = Study(
                known,
                target,
                shares=options.shares,
                cost=options.cost,
                compiles=options.compiles,
                timeout=options.timeout,
                small=options.small,
                tell=bar.update,
            )
            rows = [row for model, net in nets.items() for row in study.rows(model, net)]
            print(f"{target}\n\n{table.summary(rows)}\n\n{table.answer(rows)}\n")
            found.append(rows)
    file = options.results / "foreign_models.png"
    picture.draw(found[0], file)
    print(f"written: {known.path}, {file}")
    return [row for rows in found for row in rows]


if __name__ == "__main__":
    main(tyro.cli(Options))
