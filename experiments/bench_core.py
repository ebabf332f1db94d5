"""The time that decorators cost: in tracing, in a step, in compiling deep stacks.

Three questions, each answered by a ratio or a time measured in one run:

* trace + lower of a train step with a decorator, over without (goal: at most 1.3);
* step time of `full`, over the hand-written `jax.checkpoint` in `lax.scan` (goal: within 3 %);
* seconds to compile the gradient of 10 000 layers under `revolve` (goal: under 10).

Rounds alternate between the variants, and medians are compared, since machines are noisy.
Run it with `make bench`; it prints a table and writes `experiments/results/bench_core.csv`.
"""

import csv
import dataclasses
import gc
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import linen as nn
from tqdm import tqdm

import jaxmem

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Options:
    """How much to measure."""

    rounds: int = 15
    """Times that each variant is measured."""
    layers: int = 24
    """Depth of the transformer that is traced and stepped."""
    width: int = 128
    """Its width."""
    depth: int = 10_000
    """Layers of the deep stack that is compiled."""
    results: Path = RESULTS
    """Where the table is written."""


class Block(nn.Module):
    """A pre-norm transformer layer, as the scan over layers wants it."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm()(x)
        x = x + nn.Dropout(0.1, deterministic=False)(nn.SelfAttention(num_heads=4)(y))
        y = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.gelu(y)), None


class Encoder(nn.Module):
    """A scanned stack of blocks; `block` lets the hand-written form in."""

    layers: int
    width: int
    block: Any = Block

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stack = nn.scan(
            self.block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        return stack(self.width, name="layers")(x, None)[0]


def train_step(encoder: nn.Module) -> Callable[..., Any]:
    """An optimizer step; a fresh function object each time, so that nothing is cached."""
    optimizer = optax.adamw(1e-3)

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return (encoder.apply(params, x, rngs={"dropout": key}) ** 2).mean()  # pyright: ignore

    def step(params: Any, state: Any, x: jax.Array, key: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def alternate(
    contestants: dict[str, Callable[[], float]], rounds: int, what: str
) -> dict[str, list[float]]:
    """Seconds of each variant, in rounds over all of them in shuffled order."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order, shuffle = list(contestants), random.Random(0).shuffle
    for _ in tqdm(range(rounds), desc=what, unit="round"):
        shuffle(order)
        for name in order:
            seconds[name].append(contestants[name]())
    return seconds


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - start


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of neighbouring measurements."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def problem(options: Options) -> tuple[nn.Module, tuple[Any, ...]]:
    encoder = Encoder(options.layers, options.width)
    x = jnp.ones((4, 64, options.width))
    params = encoder.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    return encoder, (params, optax.adamw(1e-3).init(params), x, jax.random.key(2))


def trace_and_lower(options: Options) -> list[dict[str, Any]]:
    _, args = problem(options)
    policies = ["full", "dots", "sqrt", "revolve"]
    encoders = {"undecorated": Encoder} | {p: jaxmem.remat(Encoder, p) for p in policies}

    def lower(cls: Any) -> Callable[[], float]:
        def once() -> float:
            step = train_step(cls(options.layers, options.width))
            # Rounds allocate alike, so collections would fall on the same contestant each time.
            gc.collect()
            gc.disable()
            start = time.perf_counter()
            jax.jit(step).lower(*args)
            seconds = time.perf_counter() - start
            gc.enable()
            return seconds

        return once

    measures = {name: lower(cls) for name, cls in encoders.items()}
    for measure in measures.values():
        measure()  # imports and caches that any first trace fills
    seconds = alternate(measures, options.rounds, "trace + lower")
    return [
        {
            "question": f"trace + lower, {name} / undecorated",
            "value": ratio(seconds[name], seconds["undecorated"]),
            "goal": "≤ 1.3",
        }
        for name in policies
    ]


def step_time(options: Options) -> list[dict[str, Any]]:
    _, args = problem(options)
    by_hand = nn.remat(Block, prevent_cse=False)
    encoders = {
        "hand-written": Encoder(options.layers, options.width, by_hand),
        "full": jaxmem.remat(Encoder, "full")(options.layers, options.width),
    }
    # flax's remat renames what is in it; the weights are the same.
    steps = {}
    for name, encoder in encoders.items():
        variables = encoder.init(
            {"params": jax.random.key(0), "dropout": jax.random.key(1)}, args[2]
        )
        given = (variables, optax.adamw(1e-3).init(variables), *args[2:])
        compiled = jax.jit(train_step(encoder)).lower(*given).compile()
        compiled(*given)
        steps[name] = lambda compiled=compiled, given=given: timed(lambda: compiled(*given))
    seconds = alternate(steps, 2 * options.rounds, "step")
    value = ratio(seconds["full"], seconds["hand-written"])
    return [{"question": "step time, full / hand-written", "value": value, "goal": "0.97 … 1.03"}]


def compile_deep(options: Options) -> list[dict[str, Any]]:
    def loss(weights: jax.Array, h: jax.Array) -> jax.Array:
        layer = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
        return jaxmem.scan(layer, h, weights, remat=jaxmem.policies.revolve(8))[0].sum()

    shapes = [(options.depth, 32, 32), (8, 32)]
    specs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    start = time.perf_counter()
    jax.jit(jax.grad(loss)).lower(*specs).compile()
    return [
        {
            "question": f"seconds to trace, lower and compile {options.depth} layers, revolve(8)",
            "value": time.perf_counter() - start,
            "goal": "< 10",
        }
    ]


def main(options: Options) -> None:
    rows = [*trace_and_lower(options), *step_time(options), *compile_deep(options)]
    device = jax.devices()[0]
    where = {
        "device": device.device_kind,
        "machine": platform.machine(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    with (options.results / "bench_core.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        writer.writerows({**row, "value": f"{row['value']:.3f}", **where} for row in rows)
    for row in rows:
        print(f"{row['question']:<62} {row['value']:>7.3f}   goal {row['goal']}")


if __name__ == "__main__":
    main(tyro.cli(Options))
