"""From parameters and tokens to a loss, whichever framework the model is written in."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from jaxmem.policies import Policy
from lm import data, linen_model, nnx_model
from lm.config import Config

_FRAMEWORKS = {"linen": linen_model, "nnx": nnx_model}


def init(config: Config, key: jax.Array) -> Any:
    """Parameters as nested dictionaries; they are those of every policy."""
    return _FRAMEWORKS[config.framework].init(config, key)


def loss(
    config: Config, policy: Policy, params: Any, tokens: jax.Array, key: jax.Array | None
) -> jax.Array:
    """Mean nats per byte of guessing each next token of [B, T + 1]; with a key, dropout is on."""
    return _losses(config, policy, params, tokens, key).mean()


def ragged_loss(
    config: Config, policy: Policy, params: Any, tokens: jax.Array, key: jax.Array | None
) -> jaxmem.Weighted:
    """The same over the tokens that are no padding, as their sum and their number."""
    real = tokens[:, 1:] != data.PADDING
    losses = jnp.where(real, _losses(config, policy, params, tokens, key), 0.0)
    return jaxmem.Weighted(losses.sum(), real.sum())


# ---------------------------------------------------------------- implementation


def _losses(
    config: Config, policy: Policy, params: Any, tokens: jax.Array, key: jax.Array | None
) -> jax.Array:
    """Nats of each guess, [B, T]."""
    framework = _FRAMEWORKS[config.framework]
    logits = framework.logits(config, policy, params, tokens[:, :-1], key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
