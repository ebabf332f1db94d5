"""All parameters of Llama-3-8B trained on one accelerator: which one suffices for each way?

    python experiments/full_finetune.py            # minutes, nearly all of it compilation
    python experiments/full_finetune.py --small    # a quick trial, on the attached backend
    jaxmem report experiments/full_finetune.py:llama --target h100-80g
    jaxmem fit experiments/full_finetune.py:llama --target rtx-4090-24g --budget 22GiB \
        --set way="all on host, fused"

The sizes are those of Llama 3 8B: 32 layers of width 4096 with 32 heads that share 8 keys and
values, hidden layers of 14336 with a gate, a vocabulary of 128256, embedding and head untied.
Parameters are float32, all else bfloat16; one sequence of 2048 tokens, layers in a `lax.scan` under
`remat_full`, attention without a fused kernel.  Parameters and state are donated.

The smallest accelerator is found among all of jaxmem's catalogue, GPUs and TPUs apart: those that
have as much as the first target of their kind required are compiled for, the smallest first, till
one has the memory.  That is the whole memory of the device: jax takes 75 % of a GPU's
unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.

Published, for comparison: LOMO needs 10.8 % of the memory of AdamW under DeepSpeed, and trains 65 B
parameters on 8 cards of 24 GB (Lv et al. 2023); ZeRO-Offload trains 13 B on one card of 32 GB (Ren
et al. 2021).

It prints a table and writes `results/full_finetune.csv` and `.png`; the same command resumes after
an interruption.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from tqdm import tqdm

import jaxmem
from common import picture
from common.steps import KEY, Case, Row
from common.table import Table, markdown
from common.ways import (
    ADALOMO,
    ADAMW,
    ALL_HOST,
    DYNAMIC_W,
    FUSED,
    HOST_FUSED,
    ORDINARY,
    SGD,
    Training,
    Way,
)
from jaxmem._util.text import size

RESULTS = Path(__file__).parent / "results"
CASES: tuple[tuple[str, Way], ...] = (
    (ADAMW, ORDINARY),
    (ADAMW, FUSED),
    (DYNAMIC_W, ORDINARY),
    (DYNAMIC_W, FUSED),
    (SGD, FUSED),
    (ADALOMO, FUSED),
    (ADAMW, HOST_FUSED),
    (DYNAMIC_W, HOST_FUSED),
    (ADAMW, ALL_HOST),
    (DYNAMIC_W, ALL_HOST),
)

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    groups: int = 8
    vocabulary: int = 128_256
    batch: int = 1
    sequence: int = 2048

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items())


SMALL = Sizes(layers=2, width=64, hidden=96, heads=4, groups=2, vocabulary=256, sequence=32)


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile a full fine-tuning step of Llama-3-8B in every way."""

    targets: tuple[str, ...] = ("h100-80g", "h200-141g", "rtx-4090-24g", "v5e-16g", "v5p-95g")
    """What to compile every way for; "local" is the attached backend."""
    sequence: int = 2048
    """Tokens."""
    timeout: float = 900.0
    """Seconds for compiling one program."""
    results: Path = RESULTS
    """Where full_finetune.csv and .png are written."""
    again: bool = False
    """Make all rows anew."""
    small: bool = False
    """Only see that it runs: a small model on the attached backend, in three of the ways."""

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.small else Sizes(sequence=self.sequence)

    @property
    def cases(self) -> tuple[tuple[str, Way], ...]:
        return ((ADAMW, ORDINARY), (SGD, FUSED), (ADAMW, ALL_HOST)) if self.small else CASES


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows of every way, completed, printed, drawn; and those of the smallest accelerators."""
    known = Table(options.results / "full_finetune.csv", Row, KEY)
    targets = ("local",) if options.small else options.targets
    found: list[Row] = []
    with tqdm(total=len(options.cases) * len(targets), unit="program", disable=None) as bar:
        model = training(options.sizes)

        def row(target: str, optimizer: str, way: Way) -> Row:
            bar.set_postfix_str(f"{target}, {optimizer}, {way}")
            case = Case(target, str(options.sizes), optimizer, way, model)
            return case.row(known, options.again, options.timeout, options.small)

        for optimizer, way in options.cases:
            own = []
            for target in targets:
                own.append(row(target, optimizer, way))
                bar.update()
            for name in () if options.small else _candidates(own):
                if all(one.target != name for one in own):
                    own.append(row(name, optimizer, way))
            found += own
    file = options.results / "full_finetune.png"
    draw(found, file)
    print(f"{summary(found, targets)}\n\n{answer(found)}\nwritten: {known.path}, {file}")
    return found


def llama(
    optimizer: str = DYNAMIC_W, way: Way = FUSED, layers: int = 32, sequence: int = 2048
) -> jaxmem.Job:
    """One of the steps, for the commands of jaxmem."""
    return training(Sizes(layers=layers, sequence=sequence)).job(optimizer, way)


def training(sizes: Sizes) -> Training:
    """The model, by shapes alone."""
    own, spec = sizes, jax.ShapeDtypeStruct
    width, wide = own.width, own.hidden
    shared = own.groups * own.width // own.heads
    layers = {
        "attention_norm": (width,),
        "query": (width, width),
        "key": (width, shared),
        "value": (width, shared),
        "out": (width, width),
        "norm": (width,),
        "gate": (width, wide),
        "up": (width, wide),
        "down": (wide, width),
    }
    params = {
        "embedding": spec((own.vocabulary, width), "float32"),
        "layers": {name: spec((own.layers, *shape), "float32") for name, shape in layers.items()},
        "norm": spec((width,), "float32"),
        "head": spec((width, own.vocabulary), "float32"),
    }

    @jaxmem.remat_full
    def stack(layers: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, p: (_layer(own, x, p), None), x, layers)[0]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = stack(params["layers"], params["embedding"][tokens[:, :-1]].astype(jnp.bfloat16))
        x = _normal(x, params["norm"]) @ params["head"].astype(x.dtype)
        logits = jax.nn.log_softmax(x.astype(jnp.float32))
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    return Training(loss, params, spec((own.batch, own.sequence + 1), "int32"))


def smallest(rows: Sequence[Row], platform: str) -> str:
    """The accelerator with the least memory that has enough, of those compiled for."""
    fitting = [
        row for row in rows
        if row.fits and row.target != "local" and jaxmem.target(row.target).platform == platform
    ]  # fmt: skip
    return min(fitting, key=lambda row: row.capacity_bytes or 0).target if fitting else "none"


def summary(rows: Sequence[Row], targets: Sequence[str]) -> str:
    """A Markdown table, a line for each way."""
    lines = [["", "state", *targets, "host", "smallest GPU", "smallest TPU"]]
    for optimizer, way, own in _by_way(rows):
        cells = []
        for target in targets:
            (row,) = (row for row in own if row.target == target)
            text = "refused" if row.required_bytes is None else size(row.required_bytes)
            cells.append(text if row.fits or row.capacity_bytes is None else f"({text})")
        host = max(row.host_bytes or 0 for row in own)
        lines.append(
            [
                f"{optimizer}, {way}", size(own[0].state_bytes), *cells, size(host) if host else "",
                smallest(own, "gpu"), smallest(own, "tpu"),
            ]
        )  # fmt: skip
    return f"{markdown(lines)}\n\nIn brackets: more than the device has."


def answer(rows: Sequence[Row]) -> str:
    """What the goals say, and how far LOMO is from AdamW."""
    found = {(optimizer, way): own for optimizer, way, own in _by_way(rows)}
    lines = [f"parameters {size(rows[0].parameter_bytes)}"]
    plain, lomo = (found.get(key, [None])[0] for key in ((ADAMW, ORDINARY), (SGD, FUSED)))
    if plain and lomo and plain.required_bytes and lomo.required_bytes:
        share = lomo.required_bytes / plain.required_bytes
        lines.append(f"LOMO needs {share:.1%} of the memory of AdamW; published 10.8 %")
    for (optimizer, way), own in found.items():
        for row in own:
            if row.error:
                lines.append(f"{row.target}, {optimizer}, {way}: refused: {row.error}")
            if way != ORDINARY and row is own[0] and row.why:
                lines.append(f"{optimizer}, {way}, after the backward pass: {row.why}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """What each way requires of the first target, and the memory of cards."""
    ways = _by_way(rows)
    cards = [] if rows[0].target == "local" else ["rtx-4090-24g", "a100-40g", "h100-80g"]
    cards += ["h200-141g"] * bool(cards)
    fused = [own[0] for optimizer, way, own in ways if (optimizer, way) == (DYNAMIC_W, FUSED)]
    message = f"Parameters of {size(rows[0].parameter_bytes)}, all of them trained"
    if fused and fused[0].required_bytes and cards:
        needs = size(fused[0].required_bytes)
        message = f"Llama-3-8B, all parameters trained: AdamW in 8 bits, fused, needs {needs}"
    with picture.drawn(path, message, 8.4, 1.5 + 0.36 * len(ways)) as (axes,):
        for place, (_, _, own) in enumerate(ways):
            arguments, required = own[0].argument_bytes, own[0].required_bytes
            if arguments is None or required is None:
                continue
            axes.barh(place, arguments / _GIB, 0.7, color=picture.OURS)
            left = arguments / _GIB
            axes.barh(place, required / _GIB - left, 0.7, left=left, color="#56B4E9")
            axes.annotate(
                f"{required / _GIB:.1f}", (required / _GIB, place), (4, 0), va="center",
                textcoords="offset points", fontsize=8.5, bbox=_WHITE,
            )  # fmt: skip
        for name in cards:
            at = jaxmem.target(name).memory / _GIB
            axes.axvline(at, color=picture.HAND, lw=1, ls="--", zorder=1)
            axes.text(at, -0.75, f"{name} ", ha="right", va="bottom", fontsize=8, rotation=0)
        axes.set_yticks(range(len(ways)), [f"{optimizer}, {way}" for optimizer, way, _ in ways])
        axes.set_ylim(len(ways) - 0.4, -1.2)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"GiB required of {rows[0].target}; arguments, and lighter all else")


# ---------------------------------------------------------------- implementation

_GIB = 2**30
_WHITE = {"facecolor": "white", "lw": 0, "pad": 0.6}


def _by_way(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    pairs = dict.fromkeys((row.optimizer, row.way) for row in rows)
    return [
        (optimizer, way, [row for row in rows if (row.optimizer, row.way) == (optimizer, way)])
        for optimizer, way in pairs
    ]


def _candidates(rows: list[Row]) -> Any:
    """Accelerators to try besides, of each kind the smallest first, till one has the memory."""
    for platform in ("gpu", "tpu"):
        first = [row for row in rows if jaxmem.target(row.target).platform == platform]
        needed = next((row.required_bytes for row in first if row.required_bytes), None)
        if needed is None:
            continue
        known = [one for one in jaxmem.targets.catalog().values() if one.platform == platform]
        for one in sorted(known, key=lambda one: one.memory):
            if one.memory >= 0.97 * needed:
                yield one.name
                if any(row.target == one.name and row.fits for row in rows):
                    break


def _normal(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square normalisation (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    mean = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * scale.astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Positions [B, T, H, K] as rotations of pairs (Su et al. 2021), with Llama 3's base."""
    length, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(length)[:, None] * 500_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (wave(angle)[:, None, :].astype(x.dtype) for wave in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _layer(sizes: Sizes, x: jax.Array, p: Any) -> jax.Array:
    """Attention with shared keys and values, and a gated feed-forward branch."""
    p = {name: leaf.astype(x.dtype) if leaf.ndim > 1 else leaf for name, leaf in p.items()}
    batch, length, width = x.shape
    groups, each = sizes.groups, width // sizes.heads
    y = _normal(x, p["attention_norm"])
    q = _rotated((y @ p["query"]).reshape(batch, length, sizes.heads, each))
    k = _rotated((y @ p["key"]).reshape(batch, length, groups, each))
    v = (y @ p["value"]).reshape(batch, length, groups, each)
    q = q.reshape(batch, length, groups, sizes.heads // groups, each)
    scores = jnp.einsum("bqghk,btgk->bghqt", q, k).astype(jnp.float32) / math.sqrt(each)
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(x.dtype)
    found = jnp.einsum("bghqt,btgk->bqghk", weights, v).reshape(batch, length, width)
    x = x + found @ p["out"]
    y = _normal(x, p["norm"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


if __name__ == "__main__":
    main(tyro.cli(Options))
