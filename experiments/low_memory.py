"""Layers that keep less in a transformer: what they save, and what a budget then costs.

    python experiments/low_memory.py            # half an hour, all compilation
    python experiments/low_memory.py --small    # a quick trial, on fewer layers

The gradient of 24 pre-norm layers (width 1024, 16 heads, 8 sequences of 1024, bfloat16, plain
attention, exact GELU) is compiled for absent accelerators as it is written, and with
`jaxmem.low_memory` put over it: with all layers replaced, with norms alone, whose gradients are
exact, and with GELU alone.  First nothing is recomputed; then `jaxmem.fit` brings the plain model
and the one with all replaced within the same ten budgets, by the fewest FLOPs, and what it has to
recompute is compared.

It prints tables and writes `results/low_memory.csv`; the same command resumes after an
interruption.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from tqdm import tqdm

import jaxmem
from common.table import Record, Table, markdown, versions

RESULTS = Path(__file__).parent / "results"
KEY = ("target", "layers", "form", "budget")
Form = Literal["plain", "norms", "gelu", "both"]
FORMS: tuple[Form, ...] = ("plain", "norms", "gelu", "both")
FITTED: tuple[Form, ...] = ("plain", "both")

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile a transformer with and without layers that keep less."""

    targets: tuple[str, ...] = ("h100-80g", "v5e-16g")
    """What to compile for."""
    fitted: tuple[str, ...] = ("h100-80g",)
    """For which of them budgets are tried."""
    budgets: tuple[int, ...] = (3, 4, 5, 6, 8, 11, 14, 18, 23, 28)
    """Of required memory, in GiB, for 24 layers."""
    results: Path = RESULTS
    """Where low_memory.csv is written."""
    small: bool = False
    """A quick trial: two layers, one target, one budget."""

    @property
    def layers(self) -> int:
        """How many."""
        return 2 if self.small else 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """A compiled gradient.

    Attributes:
      form: what is replaced.
      budget: GiB; 0 where nothing is recomputed.
      residual_bytes: what jax keeps for the backward pass; of the plain model, not of a plan.
      matmul_flops: of the compiled program; 0 where no plan brings it within the budget.
    """

    target: str
    layers: int
    form: str
    budget: int
    temp_bytes: int
    required_bytes: int
    residual_bytes: int
    matmul_flops: float


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows, completed and printed."""
    table = Table(options.results / "low_memory.csv", Row, KEY)
    targets = options.targets[:1] if options.small else options.targets
    budgets = options.budgets[:1] if options.small else options.budgets
    wanted: list[Any] = [(target, form, 0) for target in targets for form in FORMS]
    wanted += [
        (target, form, budget)
        for target in targets
        if target in options.fitted
        for budget in budgets
        for form in FITTED
    ]
    found: list[Row] = []
    for target, form, budget in tqdm(wanted, unit="program", disable=None):
        own = versions(target)
        key = {"target": target, "layers": options.layers, "form": form, "budget": budget}
        row = table.find(own, **key)
        if row is None:
            row = measured(own, target, options.layers, form, budget)
            table.add(row)
        found.append(row)
    print(f"{kept(found)}\n\n{fitted(found)}\n\nwritten: {table.path}")
    return found


def measured(versions: str, target: str, layers: int, form: Form, budget: int) -> Row:
    """One of the rows, compiled."""
    step, args = gradient(layers, form)
    key: dict[str, Any] = {"target": target, "layers": layers, "form": form, "budget": budget}
    residuals = 0
    if budget:
        try:
            fit = jaxmem.fit(
                step, *args, budget=f"{budget}GiB", target=target, cost="flops", progress=False
            )
        except jaxmem.BudgetError:
            return Row(
                versions=versions, **key, temp_bytes=0, required_bytes=0, residual_bytes=0,
                matmul_flops=0.0,
            )  # fmt: skip
        report = fit.report
    else:
        report = jaxmem.memory_report(step, *args, target=target, suggest=False)
        loss, args = of(layers, form)
        residuals = jaxmem.saved_residuals(loss, *args).total_bytes
    return Row(
        versions=versions, **key, temp_bytes=report.temp_bytes,
        required_bytes=report.required_bytes, residual_bytes=residuals,
        matmul_flops=report.matmul_flops or 0.0,
    )  # fmt: skip


def gradient(layers: int, form: Form) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The value and gradient of a transformer, under what `fit` plans; arguments by shape."""
    loss, args = of(layers, form)
    return jax.value_and_grad(loss), args


def of(
    layers: int,
    form: Form,
    batch: int = 8,
    sequence: int = 1024,
    width: int = 1024,
    heads: int = 16,
) -> tuple[Callable[[Any, Any], jax.Array], tuple[Any, Any]]:
    """The mean square of what a transformer returns, and its arguments by shape."""
    shapes = {
        "qkv": (width, 3 * width), "out": (width, width),
        "up": (width, 4 * width), "down": (4 * width, width),
    }  # fmt: skip
    spec = functools.partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    params = {name: spec((layers, *shape)) for name, shape in shapes.items()}
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    if form == "gelu":
        gelu = functools.partial(jaxmem.layers.regelu2, approximate=False)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        shape = batch, sequence, heads, width // heads
        q, k, v = (part.reshape(shape) for part in jnp.split(normal(x) @ p["qkv"], 3, axis=-1))
        x = x + attention(q, k, v).reshape(x.shape) @ p["out"]
        return x + gelu(normal(x) @ p["up"]) @ p["down"], None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)).mean()

    if form in ("norms", "both"):
        loss = jaxmem.low_memory(loss, exact=form == "norms")
    # Keeps everything, until there is a plan.
    return jaxmem.remat(loss, "none"), (params, spec((batch, sequence, width)))


def normal(x: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 along the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    variance = ((y - mean) ** 2).mean(-1, keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal, with the scores in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal, scores / math.sqrt(q.shape[-1]), jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def kept(rows: Sequence[Row]) -> str:
    """Where nothing is recomputed, as a Markdown table in MiB."""
    lines = [["nothing recomputed", "residuals", "temporaries", "of plain"]]
    rows = [row for row in rows if not row.budget]
    plain = {row.target: row.temp_bytes for row in rows if row.form == "plain"}
    for row in rows:
        part = f"{row.temp_bytes / plain[row.target] - 1:+.1%}"
        bytes_ = [f"{size / 2**20:.0f}" for size in (row.residual_bytes, row.temp_bytes)]
        lines.append([f"{row.target}, {row.form}", *bytes_, part])
    return markdown(lines)


def fitted(rows: Sequence[Row]) -> str:
    """Matmul FLOPs within budgets, over those of the plain model, as a Markdown table."""
    lines = [["budget", "plain: extra matmul FLOPs", "with layers that keep less"]]
    least = {row.target: row.matmul_flops for row in rows if not row.budget and row.form == "plain"}
    for target, budget in dict.fromkeys((row.target, row.budget) for row in rows if row.budget):
        pair = {
            row.form: row.matmul_flops
            for row in rows
            if (row.target, row.budget) == (target, budget)
        }
        cells = [
            f"{pair[form] / least[target] - 1:+.1%}" if pair.get(form) else "none fits"
            for form in ("plain", "both")
        ]
        lines.append([f"{target}, {budget} GiB", *cells])
    return markdown(lines)


if __name__ == "__main__":
    main(tyro.cli(Options))
