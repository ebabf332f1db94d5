"""What mixed precision needs: parameters cast ahead of the loop over layers, or in it.

    python experiments/mixed_precision.py            # three minutes, all compilation
    python experiments/mixed_precision.py --small    # a quick trial, on fewer layers

The gradient of 24 transformer layers (width 1024, 16 heads, 4 sequences of 512) with respect to
float32 parameters, computed in bfloat16, is compiled for absent accelerators in three ways:

* ideal: parameters and gradients in bfloat16, to which the 4 bytes are added that a float32
  parameter and its gradient have more;
* cast ahead: all parameters are cast before the loop, as most training code does;
* mixed_precision: `jaxmem.mixed_precision`, which casts a layer's parameters where they are read.

It prints what is required, in P, the bytes of the float32 parameters (of which parameters and
gradients are two), and how many layers in bfloat16 that is beyond the ideal, and writes
`results/mixed_precision.csv`; the same command resumes after an interruption.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from tqdm import tqdm

import jaxmem
from common.table import Record, Table, markdown, versions

RESULTS = Path(__file__).parent / "results"
POLICIES = ("full", "dots", "none")
WAYS = ("ideal", "cast ahead", "mixed_precision")
KEY = ("target", "layers", "policy", "way")
WIDTH, HEADS, BATCH, SEQUENCE = 1024, 16, 4, 512

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile a gradient in mixed precision, cast ahead and cast late."""

    targets: tuple[str, ...] = ("h100-80g", "v5e-16g")
    """What to compile for."""
    results: Path = RESULTS
    """Where mixed_precision.csv is written."""
    small: bool = False
    """A quick trial: eight layers, one target, one policy."""

    @property
    def layers(self) -> int:
        """How many."""
        return 8 if self.small else 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Record):
    """A compiled gradient; sizes in bytes.

    Attributes:
      parameter_bytes: of all parameters in float32.
      required_bytes: arguments, results and temporaries; of the ideal, as if parameters and
        gradients were float32.
    """

    target: str
    layers: int
    policy: str
    way: str
    parameter_bytes: int
    required_bytes: int

    @property
    def required(self) -> float:
        """In P."""
        return self.required_bytes / self.parameter_bytes

    @property
    def layer_bytes(self) -> float:
        """Of one layer's parameters in bfloat16."""
        return self.parameter_bytes / self.layers / 2


# ---------------------------------------------------------------- API


def main(options: Options) -> list[Row]:
    """The rows, completed and printed."""
    table = Table(options.results / "mixed_precision.csv", Row, KEY)
    targets = options.targets[:1] if options.small else options.targets
    policies = POLICIES[:1] if options.small else POLICIES
    wanted = [(t, p, way) for t in targets for p in policies for way in WAYS]
    found: list[Row] = []
    for target, policy, way in tqdm(wanted, unit="program", disable=None):
        own = versions(target)
        key = {"target": target, "layers": options.layers, "policy": policy, "way": way}
        row = table.find(own, **key)
        if row is None:
            row = measured(own, **key)
            table.add(row)
        found.append(row)
    print(f"{summary(found)}\n\nwritten: {table.path}")
    return found


def measured(versions: str, target: str, layers: int, policy: str, way: str) -> Row:
    """One of the rows, compiled."""
    is_ideal = way == "ideal"
    params, x = specs(layers, "bfloat16" if is_ideal else "float32")
    whole = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    loss = CASTS[way] if policy == "none" else jaxmem.remat(CASTS[way], policy)
    report = jaxmem.memory_report(jax.grad(loss), params, x, target=target, suggest=False)
    return Row(
        versions=versions, target=target, layers=layers, policy=policy, way=way,
        parameter_bytes=whole,
        required_bytes=report.required_bytes + (whole if is_ideal else 0),
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> str:
    """A line for each target and policy: what each way requires, and layers beyond the ideal."""
    beyond = [f"{way}, layers" for way in WAYS[1:]]
    lines = [["target", "policy", *(f"{way}, P" for way in WAYS), *beyond]]
    for target, policy in dict.fromkeys((row.target, row.policy) for row in rows):
        own = {row.way: row for row in rows if (row.target, row.policy) == (target, policy)}
        ideal = own["ideal"].required_bytes
        lines.append([
            target, policy, *(f"{own[way].required:.3f}" for way in WAYS),
            *(
                f"{(own[way].required_bytes - ideal) / own[way].layer_bytes:+.2f}"
                for way in WAYS[1:]
            ),
        ])  # fmt: skip
    return markdown(lines)


def specs(layers: int, dtype: str) -> tuple[Any, Any]:
    """Parameters and a batch of the model, by shape."""

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    params = {
        "norm": of(layers, 2, WIDTH),
        "qkv": of(layers, WIDTH, 3, HEADS, WIDTH // HEADS),
        "out": of(layers, HEADS, WIDTH // HEADS, WIDTH),
        "up": of(layers, WIDTH, 4 * WIDTH),
        "down": of(layers, 4 * WIDTH, WIDTH),
    }
    return params, of(BATCH, SEQUENCE, WIDTH)


# ---------------------------------------------------------------- implementation


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def _layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
    q, k, v = jnp.einsum("bsd,dnhe->nbshe", _normed(h, p["norm"][0]), p["qkv"])
    scores = jnp.einsum("bshe,bthe->bhst", q, k) * (WIDTH // HEADS) ** -0.5
    h = h + jnp.einsum("bhst,bthe,hed->bsd", jax.nn.softmax(scores), v, p["out"])
    return h + jax.nn.gelu(_normed(h, p["norm"][1]) @ p["up"]) @ p["down"], None


def _model(params: Any, x: jax.Array) -> jax.Array:
    h, _ = jax.lax.scan(_layer, x, params)
    return (h.astype(jnp.float32) ** 2).mean()


def _cast_ahead(params: Any, x: jax.Array) -> jax.Array:
    return _model(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, x)))


CASTS: dict[str, Any] = {
    "ideal": _model,
    "cast ahead": _cast_ahead,
    "mixed_precision": jaxmem.mixed_precision(_model),
}


if __name__ == "__main__":
    main(tyro.cli(Options))
