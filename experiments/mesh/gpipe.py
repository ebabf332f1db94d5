"""The Transformer of GPipe's Table 1 (Huang et al. 2019, arXiv 1811.06965), and a step of Adam."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem

WIDTH, HIDDEN, HEADS, LENGTH, BATCH, VOCABULARY = 2048, 8192, 32, 1024, 32, 32_768
MATRICES = {
    **dict.fromkeys("qkvo", (WIDTH, WIDTH)),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}

# ---------------------------------------------------------------- API


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Of a language model with a tied embedding, in bfloat16 but for the logits."""
    x = params["embedding"][tokens].astype(jnp.bfloat16)
    x = jax.lax.scan(_layer, x, params["layers"])[0]
    head = params["embedding"].T.astype(jnp.bfloat16)
    logits = (_normal(x, params["norm"]) @ head).astype(jnp.float32)
    wanted = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - wanted).mean()


def train(loss_and_grad: Any, layers: int, mesh: Any = None) -> jaxmem.Job:
    """A step of Adam, its arguments by shape.

    Args:
      loss_and_grad: of parameters and tokens.
      mesh: with an axis "stage", over which the layers lie, and the rows of the embedding; None for
        one device.
    """

    def spec(shape: tuple[int, ...], *parts: Any, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        place = None if mesh is None else NamedSharding(mesh, PartitionSpec(*parts))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    shapes = {**MATRICES, "norm 1": (WIDTH,), "norm 2": (WIDTH,)}
    params = {
        "embedding": spec((VOCABULARY, WIDTH), "stage"),
        "norm": spec((WIDTH,)),
        "layers": {name: spec((layers, *shape), "stage") for name, shape in shapes.items()},
    }
    optimizer = optax.adam(1e-3)

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        names = [str(getattr(key, "key", "")) for key in path]
        split = "layers" in names or "embedding" in names
        return spec(leaf.shape, *(("stage",) if split else ()), dtype=leaf.dtype)

    state = jax.tree_util.tree_map_with_path(placed, jax.eval_shape(optimizer.init, params))

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradient = loss_and_grad(params, tokens)
        updates, state = optimizer.update(gradient, state, params)
        return value, optax.apply_updates(params, updates), state

    tokens = spec((BATCH, LENGTH), dtype="int32")
    return jaxmem.Job(step, (params, state, tokens), donate_argnums=(0, 1))


# ---------------------------------------------------------------- implementation


def _normal(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def _layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
    p = {name: value.astype(x.dtype) for name, value in p.items()}
    rows, length, _ = x.shape
    y = _normal(x, p["norm 1"])
    q, k, v = ((y @ p[n]).reshape(rows, length, HEADS, WIDTH // HEADS) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32)
    scores = jnp.where(jnp.tri(length, dtype=bool), scores / math.sqrt(WIDTH // HEADS), -1e9)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["o"]
    return x + jax.nn.relu(_normal(x, p["norm 2"]) @ p["up"]) @ p["down"], None
