"""Causal attention with rotary positions (Su et al. 2021), for both frameworks."""

import jax
import jax.numpy as jnp


def attend(projected: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention.

    Args:
      projected: queries, keys and values side by side, [B, T, 3 D].
      heads: how many heads share D.

    Returns:
      What the heads found, [B, T, D].
    """
    batch, length, width = projected.shape
    q, k, v = jnp.split(projected.reshape(batch, length, 3 * heads, -1), 3, axis=2)
    found = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    return found.reshape(batch, length, width // 3)


def _rotate(x: jax.Array) -> jax.Array:
    """Turn each pair of values of [B, T, H, K] by an angle that grows with the position."""
    length, pairs = x.shape[1], x.shape[-1] // 2
    slowness = 10_000.0 ** (jnp.arange(pairs, dtype=x.dtype) / pairs)
    angle = jnp.arange(length, dtype=x.dtype)[:, None, None] / slowness
    cos, sin = jnp.cos(angle)[None], jnp.sin(angle)[None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
