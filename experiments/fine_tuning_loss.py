"""Fine-tuning with layers that keep less, beside the same without: the held-out loss.

    python experiments/fine_tuning_loss.py    # six minutes of two cores
    python experiments/fine_tuning_loss.py --small

For each seed the byte model of `train_lm.py` is trained on the help texts that CPython carries, as
it stands; and then fine-tuned on other text, source code of the standard library, once as it stands
and once under `jaxmem.low_memory`, with the same batches and dropout.  The loss is that of modules
that were not trained on, without dropout.

It prints a table and writes `results/fine_tuning_loss.csv`; the same command resumes after an
interruption.
"""

import dataclasses
import functools
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm

import jaxmem
from common.table import Record, Table, markdown, versions
from jaxmem import policies
from lm import data, model
from lm.config import Config

RESULTS = Path(__file__).parent / "results"
KEY = ("layers", "width", "pretrained", "steps", "seed", "form")
# Of modules in the order of their names: one in so many is held out.
HELD_OUT = 8

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Fine-tune a byte model with and without layers that keep less."""

    layers: int = 4
    """Blocks."""
    width: int = 64
    """Size of a token's vector between blocks."""
    pretrained: int = 600
    """Steps on the help texts."""
    steps: int = 300
    """Steps on source code."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters, batches and dropout."""
    results: Path = RESULTS
    """Where fine_tuning_loss.csv is written."""
    small: bool = False
    """A quick trial: one seed, few steps."""

    @property
    def own(self) -> "Options":
        """With what `small` changes."""
        if not self.small:
            return self
        return dataclasses.replace(self, pretrained=5, steps=5, seeds=self.seeds[:1], layers=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """A model after fine-tuning.

    Attributes:
      form: "plain", or "low memory" where all is replaced.
      before, loss: nats a byte of held-out source code, before and after.
      residual_bytes: what jax keeps of a batch for the backward pass.
    """

    layers: int
    width: int
    pretrained: int
    steps: int
    seed: int
    form: str
    before: float
    loss: float
    residual_bytes: int


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows, completed and printed."""
    options = options.own
    table = Table(options.results / "fine_tuning_loss.csv", Row, KEY)
    found: list[Row] = []
    for seed in tqdm(options.seeds, unit="seed", disable=None):
        config = Config(layers=options.layers, width=options.width, batch=16, seed=seed)
        key = {name: getattr(options, name) for name in ("layers", "width", "pretrained", "steps")}
        start = None
        for form in ("plain", "low memory"):
            own = versions("local")
            row = table.find(own, **key, seed=seed, form=form)
            if row is None:
                start = pretrained(config, options.pretrained) if start is None else start
                row = Row(
                    versions=own, **key, seed=seed, form=form,
                    **finetuned(config, start, options.steps, form),
                )  # fmt: skip
                table.add(row)
            found.append(row)
    print(f"{summary(found)}\n\nwritten: {table.path}")
    return found


def pretrained(config: Config, steps: int) -> Any:
    """Parameters after so many steps on the help texts."""
    read = functools.partial(
        data.batch, seed=config.seed, size=config.batch, sequence=config.sequence
    )
    params = model.init(config, jax.random.key(config.seed))
    return trained(losses(config, "plain"), params, read, steps, 5e-3, config.seed)


def finetuned(config: Config, params: Any, steps: int, form: str) -> dict[str, Any]:
    """The held-out loss of source code before and after so many steps on the rest of it."""
    train, rest = sources()

    def read(step: int) -> np.ndarray:
        random = np.random.default_rng([config.seed, step, 1])
        return windows(train, random.integers(0, len(train) - config.sequence, config.batch))

    def windows(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return text[starts[:, None] + np.arange(config.sequence + 1)].astype(np.int32)

    held_out = windows(rest, np.linspace(0, len(rest) - config.sequence - 1, 512).astype(int))
    loss = losses(config, form)
    tuned = trained(loss, params, read, steps, 1e-3, config.seed + 100)
    plain = jax.jit(losses(config, "plain"), static_argnums=2)
    before, after = (float(plain(p, held_out, None)) for p in (params, tuned))
    kept = jaxmem.saved_residuals(loss, params, jnp.asarray(read(0)), jax.random.key(0))
    return {"before": before, "loss": after, "residual_bytes": kept.total_bytes}


def losses(config: Config, form: str) -> Callable[..., jax.Array]:
    """The loss of parameters, tokens and a key for dropout, or None."""
    loss = functools.partial(model.loss, config, policies.none())
    return loss if form == "plain" else jaxmem.low_memory(loss)


def trained(
    loss: Callable[..., jax.Array],
    params: Any,
    read: Callable[[int], np.ndarray],
    steps: int,
    rate: float,
    seed: int,
) -> Any:
    """Parameters after so many steps of AdamW, with a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 20), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array, key: jax.Array) -> Any:
        gradient = jax.grad(loss)(params, tokens, key)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    keys = jax.random.split(jax.random.key(seed), steps)
    for number in range(steps):
        params, state = step(params, state, jnp.asarray(read(number)), keys[number])
    return params


@functools.cache
def sources() -> tuple[np.ndarray, np.ndarray]:
    """Source code of the standard library to train on, and modules held out, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_bytes() for path in sorted(folder.glob("[a-z]*.py"))]
    held_out = texts[HELD_OUT // 2 :: HELD_OUT]
    train = [text for k, text in enumerate(texts) if k % HELD_OUT != HELD_OUT // 2]
    return tuple(np.frombuffer(b"\n".join(part), np.uint8) for part in (train, held_out))  # pyright: ignore[reportReturnType]


def summary(rows: Sequence[Row]) -> str:
    """Held-out losses, as a Markdown table."""
    lines = [["seed", "before", "plain", "low memory", "difference", "residuals"]]
    differences = []
    for seed in dict.fromkeys(row.seed for row in rows):
        plain, low = (row for row in rows if row.seed == seed)
        differences.append(low.loss - plain.loss)
        lines.append([
            str(seed), f"{plain.before:.4f}", f"{plain.loss:.4f}", f"{low.loss:.4f}",
            f"{differences[-1]:+.4f}", f"{low.residual_bytes / plain.residual_bytes - 1:+.0%}",
        ])  # fmt: skip
    mean = statistics.mean(differences)
    return f"{markdown(lines)}\n\nmean difference {mean:+.4f} nats a byte"


if __name__ == "__main__":
    main(tyro.cli(Options))
