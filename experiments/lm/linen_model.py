"""The transformer in Flax linen: pre-norm blocks stacked by `nn.scan`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmem
from jaxmem.policies import Policy
from lm import data
from lm.attention import attend
from lm.config import Config


class Block(nn.Module):
    """Attention and a feed-forward branch, each normalised before and added after."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> tuple[jax.Array, None]:
        c = self.config
        # The two branches of every layer add up: 1 / (2 layers) keeps the sum's variance at 1.
        small = nn.initializers.variance_scaling(0.5 / c.layers, "fan_in", "truncated_normal")
        drop = nn.Dropout(c.dropout, deterministic=not train)
        y = nn.LayerNorm(name="norm_1")(x)
        y = attend(nn.Dense(3 * c.width, use_bias=False, name="qkv")(y), c.heads)
        x = x + drop(nn.Dense(c.width, kernel_init=small, name="out")(y))
        y = nn.LayerNorm(name="norm_2")(x)
        y = nn.gelu(nn.Dense(4 * c.width, name="up")(y))
        return x + drop(nn.Dense(c.width, kernel_init=small, name="down")(y)), None


class Encoder(nn.Module):
    """The layer stack: what a policy is for."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        stack = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=self.config.layers,
        )
        x, _ = stack(self.config, name="blocks")(x, train)
        return x


class Transformer(nn.Module):
    """Tokens [B, T] to logits [B, T, 256]."""

    config: Config
    policy: Policy

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        x = nn.Embed(data.VOCABULARY, self.config.width, name="embed")(tokens)
        x = jaxmem.remat(Encoder, self.policy)(self.config, name="encoder")(x, train)
        return nn.Dense(data.VOCABULARY, name="head")(nn.LayerNorm(name="norm")(x))


def init(config: Config, key: jax.Array) -> Any:
    """Parameters; they are those of every policy."""
    tokens = jnp.zeros((1, config.sequence), jnp.int32)
    model = Transformer(config, jaxmem.policies.none())
    return model.init(key, tokens, False)["params"]


def logits(
    config: Config, policy: Policy, params: Any, tokens: jax.Array, key: jax.Array | None
) -> jax.Array:
    """Logits [B, T, 256]; with a key, dropout is on."""
    model = Transformer(config, policy)
    rngs = None if key is None else {"dropout": key}
    return model.apply({"params": params}, tokens, key is not None, rngs=rngs)  # pyright: ignore[reportReturnType]
