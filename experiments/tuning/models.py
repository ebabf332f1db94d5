"""Fine-tuning steps of ViT-B's and LLaMA-7B's sizes in plain JAX, by shape.

As in the code published with LowMemoryBP (arXiv 2406.16282): ViT-B on 64 images of 224 x 224 in
automatic mixed precision, whose residual stream stays float32, with adapters of rank 4; LLaMA-7B
on 4 sequences of 512 + 128 tokens with adapters of rank 64 at every matrix.  Attention scores are
recomputed, as fused attention does.  Weights that are not trained are in bfloat16 (published:
LLaMA's in 4 bits), those that are in float32, and AdamW has two more arrays of each.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import jaxmem

# Matrices that are trained: those of queries and values, or all, by adapters; or all weights.
Tuned = Literal["query, value", "adapters", "all"]
# As it is written, with norms that keep their result, with all that `jaxmem.low_memory` replaces,
# and so with norms' scales and biases merged into the matrices behind them as well.
Form = Literal["plain", "norms", "low memory", "merged"]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a transformer and its batch.

    Attributes:
      causal: predicts words, with RMS norms, rotary positions and gated layers; or else classes of
        images, with layer norms, biases and GELU.
      outputs: words or classes.
      rank: of adapters.
      stream: dtype of what layers add to.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    outputs: int
    batch: int
    length: int
    rank: int
    causal: bool
    stream: str

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Of a layer."""
        wide, hidden = self.width, self.hidden
        square = wide, wide
        shapes = {"query": square, "key": square, "value": square, "out": square}
        if self.causal:
            shapes["gate"] = wide, hidden
        return {**shapes, "up": (wide, hidden), "down": (hidden, wide)}


MODELS = {
    "ViT-B": Model(12, 768, 3072, 12, 100, 64, 197, 4, causal=False, stream="float32"),
    "LLaMA-7B": Model(32, 4096, 11008, 32, 32000, 4, 640, 64, causal=True, stream="bfloat16"),
}

# ---------------------------------------------------------------- API


def train(model: Model, tuned: Tuned, form: Form) -> jaxmem.Job:
    """A train step of AdamW over what is trained, for `jaxmem.memory_report`."""
    trained, frozen = _weights(model, tuned, form)
    batch = _batch(model)
    optimizer = optax.adamw(1e-4)
    of_batch = functools.partial(_loss, model)
    if form != "plain":
        of_batch = jaxmem.low_memory(of_batch, exact=form == "norms")

    def step(trained: Any, state: Any, frozen: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(of_batch)(trained, frozen, batch)
        updates, state = optimizer.update(gradient, state, trained)
        return value, optax.apply_updates(trained, updates), state

    state = jax.eval_shape(optimizer.init, trained)
    return jaxmem.Job(step, (trained, state, frozen, batch), donate_argnums=(0, 1))


# ---------------------------------------------------------------- implementation


def _weights(model: Model, tuned: Tuned, form: Form) -> tuple[Any, Any]:
    """What is trained, and what is not."""
    wide, layers = model.width, model.layers
    kept = "float32" if tuned == "all" else "bfloat16"

    def spec(*shape: int, dtype: str = kept) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    stack: dict[str, Any] = {name: spec(layers, *shape) for name, shape in model.matrices.items()}
    ends: dict[str, Any] = {"head": spec(wide, model.outputs)}
    ends |= {"embedding": spec(model.outputs, wide)} if model.causal else {}
    if not model.causal:
        stack |= {f"{name} bias": spec(layers, out) for name, (_, out) in model.matrices.items()}
        ends |= {"patches": spec(16 * 16 * 3, wide), "positions": spec(model.length, wide)}
    if form != "merged":
        norms = ("attention norm", "norm")
        stack |= {name: spec(layers, wide) for name in norms}
        ends |= {"norm": spec(wide)}
        if not model.causal:
            stack |= {f"{name} bias": spec(layers, wide) for name in norms}
            ends |= {"norm bias": spec(wide)}
    if tuned == "all":
        return {"layers": stack, "ends": ends}, {"layers": {}, "ends": {}}
    adapted = ("query", "value") if tuned == "query, value" else tuple(model.matrices)
    adapters: dict[str, Any] = {}
    for name in adapted:
        rows, columns = model.matrices[name]
        adapters[f"{name} A"] = spec(layers, rows, model.rank, dtype="float32")
        adapters[f"{name} B"] = spec(layers, model.rank, columns, dtype="float32")
    # The head of a classifier is new.
    head = {} if model.causal else {"head": spec(wide, model.outputs, dtype="float32")}
    left = {name: one for name, one in ends.items() if name not in head}
    return {"layers": adapters, "ends": head}, {"layers": stack, "ends": left}


def _batch(model: Model) -> Any:
    if model.causal:
        return jax.ShapeDtypeStruct((model.batch, model.length + 1), "int32")
    images = jax.ShapeDtypeStruct((model.batch, model.length - 1, 16 * 16 * 3), "bfloat16")
    return images, jax.ShapeDtypeStruct((model.batch,), "int32")


def _loss(model: Model, trained: Any, frozen: Any, batch: Any) -> jax.Array:
    """The mean cross-entropy."""
    ends = frozen["ends"] | trained["ends"]
    if model.causal:
        x, labels = ends["embedding"][batch[:, :-1]], batch[:, 1:]
    else:
        images, labels = batch
        x = images @ ends["patches"].astype(images.dtype)
        # The place of the class is in front.
        x = jnp.pad(x, ((0, 0), (1, 0), (0, 0))) + ends["positions"]

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return _layer(model, x, p), None

    x = jax.lax.scan(layer, x.astype(model.stream), frozen["layers"] | trained["layers"])[0]
    if not model.causal:
        x = x[:, 0]
    logits = _product(_normal(model, x, ends, "norm"), ends, "head").astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def _layer(model: Model, x: jax.Array, p: Any) -> jax.Array:
    h = _normal(model, x, p, "attention norm")
    shape = *h.shape[:-1], model.heads, -1
    q, k, v = (_product(h, p, name).reshape(shape) for name in ("query", "key", "value"))
    if model.causal:
        q, k = _turned(q), _turned(k)
    attended = _attention(model.causal, q, k, v).reshape(h.shape)
    x = x + _product(attended, p, "out")
    h = _normal(model, x, p, "norm")
    up = _product(h, p, "up")
    if model.causal:
        hidden = jax.nn.silu(_product(h, p, "gate")) * up
    else:
        hidden = jax.nn.gelu(up, approximate=False)
    return x + _product(hidden, p, "down")


def _product(x: jax.Array, p: Any, name: str) -> jax.Array:
    """With a bias and an adapter, where there are such."""
    y = x @ p[name].astype(x.dtype)
    if f"{name} bias" in p:
        y = y + p[f"{name} bias"].astype(x.dtype)
    if f"{name} A" in p:
        y = y + (x @ p[f"{name} A"].astype(x.dtype)) @ p[f"{name} B"].astype(x.dtype)
    return y


def _normal(model: Model, x: jax.Array, p: Any, name: str) -> jax.Array:
    """Computed in float32, and bfloat16."""
    wide = x.astype(jnp.float32)
    if model.causal:
        y = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    else:
        mean = wide.mean(-1, keepdims=True)
        variance = ((wide - mean) ** 2).mean(-1, keepdims=True)
        y = (wide - mean) * jax.lax.rsqrt(variance + 1e-6)
    if name in p:
        y = y * p[name]
    if f"{name} bias" in p:
        y = y + p[f"{name} bias"]
    return y.astype(jnp.bfloat16)


def _turned(x: jax.Array) -> jax.Array:
    """With rotary positions."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * rates)[:, None]
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    parts = left * cosine - right * sine, right * cosine + left * sine
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


@functools.partial(jax.checkpoint, static_argnums=0)
def _attention(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)
