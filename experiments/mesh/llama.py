"""Llama-3-8B's sizes in plain JAX, split over a mesh of fully sharded and tensor axes."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from full_finetune import Sizes
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem

# Values of a layer that policies by names may keep.
NAMES = ("q", "k", "v", "attention", "out", "gate", "up")

# Of the model and its batch over all devices.
SIZES = Sizes(batch=8, sequence=4096)

# ---------------------------------------------------------------- API


def train(mesh: Any, sizes: Sizes = SIZES, policy: Any = "auto") -> jaxmem.Job:
    """A train step with AdamW, parameters in float32 and all else in bfloat16.

    Args:
      mesh: with axes "fsdp", which splits the batch and every matrix, and "tensor", which splits
        heads, hidden layers and the vocabulary.
    """
    own = sizes
    shared = own.groups * own.width // own.heads
    wide = own.hidden
    shapes: dict[str, tuple[tuple[int, ...], PartitionSpec]] = {
        "attention_norm": ((own.width,), PartitionSpec()),
        "query": ((own.width, own.width), PartitionSpec("fsdp", "tensor")),
        "key": ((own.width, shared), PartitionSpec("fsdp", "tensor")),
        "value": ((own.width, shared), PartitionSpec("fsdp", "tensor")),
        "out": ((own.width, own.width), PartitionSpec("tensor", "fsdp")),
        "norm": ((own.width,), PartitionSpec()),
        "gate": ((own.width, wide), PartitionSpec("fsdp", "tensor")),
        "up": ((own.width, wide), PartitionSpec("fsdp", "tensor")),
        "down": ((wide, own.width), PartitionSpec("tensor", "fsdp")),
    }

    def spec(shape: tuple[int, ...], dtype: str, *parts: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*parts))
        )

    params = {
        "embedding": spec((own.vocabulary, own.width), "float32", "tensor", "fsdp"),
        "layers": {
            name: spec((own.layers, *shape), "float32", None, *parts)
            for name, (shape, parts) in shapes.items()
        },
        "norm": spec((own.width,), "float32"),
        "head": spec((own.width, own.vocabulary), "float32", "fsdp", "tensor"),
    }
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))

    def stack(layers: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            x = jax.lax.with_sharding_constraint(x, rows)
            return jax.lax.with_sharding_constraint(_layer(own, x, p), rows), None

        return jax.lax.scan(layer, x, layers)[0]

    planned = jaxmem.remat(stack, policy)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[tokens[:, :-1]]
        x = planned(params["layers"], jax.lax.with_sharding_constraint(x, rows))
        x = _normal(x, params["norm"]) @ params["head"].astype(x.dtype)
        logits = jax.nn.log_softmax(x.astype(jnp.float32))
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    optimizer = optax.adamw(1e-4)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradient, state, params)
        return value, optax.apply_updates(params, updates), state

    whole = NamedSharding(mesh, PartitionSpec())
    state = optax.tree_map_params(
        optimizer,
        lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=whole
        ),
    )
    tokens = jax.ShapeDtypeStruct((own.batch, own.sequence + 1), "int32", sharding=rows)
    return jaxmem.Job(step, (params, state, tokens), donate_argnums=(0, 1))


# ---------------------------------------------------------------- implementation


def _layer(own: Sizes, x: jax.Array, p: Any) -> jax.Array:
    def product(h: jax.Array, name: str) -> jax.Array:
        return h @ p[name].astype(h.dtype)

    rows, length, width = x.shape
    h = _normal(x, p["attention_norm"])
    q = checkpoint_name(_turned(product(h, "query").reshape(rows, length, own.heads, -1)), "q")
    k = checkpoint_name(_turned(product(h, "key").reshape(rows, length, own.groups, -1)), "k")
    v = checkpoint_name(product(h, "value").reshape(rows, length, own.groups, -1), "v")
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    attended = checkpoint_name(attended.reshape(rows, length, width), "attention")
    x = x + checkpoint_name(product(attended, "out"), "out")
    h = _normal(x, p["norm"])
    gate, up = (checkpoint_name(product(h, name), name) for name in ("gate", "up"))
    return x + product(jax.nn.silu(gate) * up, "down")


def _normal(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return (normal * scale).astype(x.dtype)


def _turned(x: jax.Array) -> jax.Array:
    """Rotary position embedding of (rows, length, heads, size)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 500_000 ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
