"""Is training the same whatever the microbatches?  Writes `results/accumulation_curves.csv`.

    python experiments/accumulation_curves.py     # about five minutes on two cores

The model of `train_lm.py` on ragged sequences, without dropout: the same batches whole, in 2, 4 and
8 microbatches within a step, and across steps.

These programs all round differently, and training can amplify that: at a learning rate that is
too high, runs that differ in their last bits soon diverge.  For comparison there is therefore a
curve without accumulation: of the whole batch, from parameters that are each perturbed to the
next float32 number.
"""

import csv
import dataclasses
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tqdm import tqdm

from lm import files
from lm.config import Config
from lm.program import Program, build, initial

RESULTS = Path(__file__).parent / "results"
GOAL = 1e-5
WHOLE, NUDGED = "whole batch", "none; parameters nudged"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Train the same model with several forms of accumulation, and compare the losses."""

    model: Config = dataclasses.field(
        default_factory=lambda: Config(ragged=True, dropout=0.0, steps=50)
    )
    """What is trained; its accumulation and its learning rate are set here."""
    learning_rates: tuple[float, ...] = (1e-3, 5e-3)
    """The goal is for the first; the last is the default of train_lm.py."""
    microbatches: tuple[int, ...] = (2, 4, 8)
    """How many, inside a step and across steps."""
    results: Path = RESULTS
    """Where accumulation_curves.csv and accumulation_curves.png are written."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """The losses of one run."""

    learning_rate: float
    form: str
    losses: tuple[float, ...]

    def off(self, other: "Curve") -> np.ndarray:
        """Relative difference from another at each step."""
        return np.abs(np.divide(self.losses, other.losses) - 1)


# ---------------------------------------------------------------- API


def main(options: Options) -> None:
    wanted = [
        (rate, form, config)
        for rate in options.learning_rates
        for form, config in forms(options, rate).items()
    ]
    curves = [
        curve(rate, form, config) for rate, form, config in tqdm(wanted, "training", unit="run")
    ]
    options.results.mkdir(parents=True, exist_ok=True)
    files.write(options.results / "accumulation_curves.csv", to_csv(curves))
    files.write(options.results / "accumulation_curves.png", draw(curves))
    print(report(curves))
    print(f"written to {options.results}: accumulation_curves.csv, accumulation_curves.png")


def forms(options: Options, learning_rate: float) -> dict[str, Config]:
    """What to train, by name."""
    plain = dataclasses.replace(options.model, learning_rate=learning_rate, accum=1)
    plain.check()
    found = {WHOLE: plain, NUDGED: plain}
    for count in options.microbatches:
        for form in ("inside", "across"):
            config = dataclasses.replace(plain, accum=count, accum_form=form)
            config.check()
            found[f"{count} {form}"] = config
    return found


def curve(learning_rate: float, form: str, config: Config) -> Curve:
    """The losses of all steps."""
    program, state = _program(config), initial(config)
    if form == NUDGED:
        state = state._replace(params=jax.tree.map(_next_number, state.params))
    losses = []
    for step in range(1, config.steps + 1):
        state, loss = program.run(state, step)
        losses.append(loss)
    return Curve(learning_rate, form, tuple(losses))


def pairs(curves: Sequence[Curve]) -> list[tuple[Curve, Curve]]:
    """Each curve with that of the whole batch at its learning rate."""
    whole = {each.learning_rate: each for each in curves if each.form == WHOLE}
    return [(each, whole[each.learning_rate]) for each in curves if each.form != WHOLE]


def report(curves: Sequence[Curve]) -> str:
    """The largest difference of each."""
    return "\n".join(
        f"learning rate {one.learning_rate:g}, {one.form:<30}: largest relative difference "
        f"{one.off(whole).max():.1e}, of {len(one.losses)} steps; last loss {one.losses[-1]:.4f}"
        for one, whole in pairs(curves)
    )


def to_csv(curves: Sequence[Curve]) -> str:
    """One line a step and run."""
    whole = {each.learning_rate: each for each in curves if each.form == WHOLE}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["learning_rate", "form", "step", "loss", "relative_difference", "jax"])
    for each in curves:
        off = each.off(whole[each.learning_rate])
        for step, (loss, difference) in enumerate(zip(each.losses, off, strict=True), 1):
            row = [each.learning_rate, each.form, step, f"{loss:.8g}", f"{difference:.3g}"]
            writer.writerow([*row, jax.__version__])
    return out.getvalue()


def draw(curves: Sequence[Curve]) -> bytes:
    """Differences over steps, one panel for each learning rate."""
    rates = list(dict.fromkeys(each.learning_rate for each in curves))
    figure = Figure(figsize=(5.5 * len(rates), 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, rate in zip(panels, rates, strict=True):
        _panel(axes, [pair for pair in pairs(curves) if pair[0].learning_rate == rate])
        axes.set_title(f"learning rate {rate:g}", fontsize=10)
    panels[0].set_ylabel("relative difference of the loss\nfrom that of the whole batch")
    panels[0].legend(fontsize=8, frameon=False, loc="upper left", title="microbatches")
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


# ---------------------------------------------------------------- implementation

_SHADES = {"inside": ("#9ecae1", "#4292c6", "#08519c"), "across": ("#fdbe85", "#fd8d3c", "#a63603")}


def _panel(axes: Any, found: Sequence[tuple[Curve, Curve]]) -> None:
    used = dict.fromkeys(_SHADES, 0)
    for one, whole in found:
        if one.form == NUDGED:
            style: dict[str, Any] = {"color": "#444444", "ls": ":", "lw": 2}
        else:
            kind = one.form.split()[-1]
            style = {"color": _SHADES[kind][used[kind] % 3], "lw": 1.3}
            used[kind] += 1
        # What does not differ at all is drawn where float32 ends.
        off = np.maximum(one.off(whole), np.finfo(np.float32).eps / 2)
        axes.semilogy(range(1, len(off) + 1), off, label=one.form, **style)
    axes.axhline(GOAL, color="#444444", lw=0.8, ls="--")
    axes.annotate(f"goal, {GOAL:g}", (1, GOAL), (0, 3), textcoords="offset points", fontsize=8)
    axes.set_xlabel("optimizer step")
    axes.spines[["top", "right"]].set_visible(False)


@functools.lru_cache(maxsize=1)  # the nudged run follows the one that it is nudged from
def _program(config: Config) -> Program:
    return build(config, config.remat)


def _next_number(leaf: jax.Array) -> jax.Array:
    return jnp.nextafter(leaf, jnp.asarray(jnp.inf, leaf.dtype))


if __name__ == "__main__":
    main(tyro.cli(Options))
