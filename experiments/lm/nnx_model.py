"""The transformer in Flax NNX: pre-norm blocks made by `nnx.vmap`, run by `nnx.scan`."""

from typing import Any

import jax
from flax import nnx

import jaxmem
from jaxmem.policies import Policy
from lm import data
from lm.attention import attend
from lm.config import Config


class Block(nnx.Module):
    """Attention and a feed-forward branch, each normalised before and added after."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        width = config.width
        # The two branches of every layer add up: 1 / (2 layers) keeps the sum's variance at 1.
        small = nnx.initializers.variance_scaling(0.5 / config.layers, "fan_in", "truncated_normal")
        self.heads = config.heads
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, kernel_init=small, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=small, rngs=rngs)
        self.drop = nnx.Dropout(config.dropout)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = (None, None) if key is None else jax.random.split(key)
        y = self.out(attend(self.qkv(self.norm_1(x)), self.heads))
        x = x + self.drop(y, deterministic=key is None, rngs=keys[0])
        y = self.down(nnx.gelu(self.up(self.norm_2(x))))
        return x + self.drop(y, deterministic=key is None, rngs=keys[1])


class Encoder(nnx.Module):
    """The layer stack: what a policy is for."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.layers = config.layers
        self.blocks = stacked(rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        keys = None if key is None else jax.random.split(key, self.layers)

        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, block: Block, key: jax.Array | None) -> jax.Array:
            return block(x, key)

        return run(x, self.blocks, keys)


class Transformer(nnx.Module):
    """Tokens [B, T] to logits [B, T, 256]."""

    def __init__(self, config: Config, policy: Policy, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(data.VOCABULARY, config.width, rngs=rngs)
        self.encoder = jaxmem.remat(Encoder, policy)(config, rngs=rngs)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, data.VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        return self.head(self.norm(self.encoder(self.embed(tokens), key)))


def init(config: Config, key: jax.Array) -> Any:
    """Parameters; they are those of every policy."""
    model = Transformer(config, jaxmem.policies.none(), rngs=nnx.Rngs(key))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def logits(
    config: Config, policy: Policy, params: Any, tokens: jax.Array, key: jax.Array | None
) -> jax.Array:
    """Logits [B, T, 256]; with a key, dropout is on."""
    abstract = nnx.eval_shape(lambda: Transformer(config, policy, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)(tokens, key)
