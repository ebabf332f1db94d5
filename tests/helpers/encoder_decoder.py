"""An encoder and a decoder that reads its results in each layer, written out, with a loss on top.

Shapes: B batch, T positions of the encoder, U of the decoder, D width, H heads, V words.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

B, T, U, D, H, V, LAYERS = 4, 1024, 128, 128, 2, 512, 3

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# ---------------------------------------------------------------- API


def specs() -> tuple[Any, Any, Any]:
    """Parameters in float32, and the words that encoder and decoder read."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    attention = {name: array(D, D) for name in ("q", "k", "v", "out")}
    feed = {"up": array(D, 4 * D), "down": array(4 * D, D)}
    params = {
        "words": array(V, D),
        "encoder": [{"self": attention, **feed} for _ in range(LAYERS)],
        "decoder": [{"self": attention, "cross": attention, **feed} for _ in range(LAYERS)],
    }
    source, target = (jax.ShapeDtypeStruct((B, length), jnp.int32) for length in (T, U))
    return params, source, target


def step(around: Decorator, around_layers: Decorator = lambda f: f) -> Callable[..., Any]:
    """A step of gradient descent; with decorators around the model and around each layer."""
    encode, decode = around_layers(_encoder_layer), around_layers(_decoder_layer)

    @around
    def logits(params: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        x = params["words"][source].astype(jnp.bfloat16)
        for p in params["encoder"]:
            x = encode(p, x)
        memory, y = _normal(x), params["words"][target].astype(jnp.bfloat16)
        for p in params["decoder"]:
            y = decode(p, y, memory)
        return _dense(params["words"].T, _normal(y))

    def loss(params: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        scores = logits(params, source, target).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, target).mean()

    def step(params: Any, source: jax.Array, target: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, source, target)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return step


# ---------------------------------------------------------------- implementation


def _encoder_layer(p: Any, x: jax.Array) -> jax.Array:
    y = _normal(x)
    x = x + _attention(p["self"], y, y)
    return x + _feed(p, _normal(x))


def _decoder_layer(p: Any, x: jax.Array, memory: jax.Array) -> jax.Array:
    y = _normal(x)
    x = x + _attention(p["self"], y, y, jnp.tril(jnp.ones((U, U), bool)))
    x = x + _attention(p["cross"], _normal(x), memory)
    return x + _feed(p, _normal(x))


def _attention(p: Any, x: jax.Array, memory: jax.Array, mask: Any = None) -> jax.Array:
    q, k, v = _heads(p["q"], x), _heads(p["k"], memory), _heads(p["v"], memory)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    read = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return _dense(p["out"], read.reshape(x.shape))


def _heads(w: jax.Array, x: jax.Array) -> jax.Array:
    return _dense(w, x).reshape(*x.shape[:2], H, D // H)


def _feed(p: Any, x: jax.Array) -> jax.Array:
    return _dense(p["down"], jax.nn.gelu(_dense(p["up"], x)))


def _dense(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w.astype(jnp.bfloat16)


def _normal(x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    return (y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
