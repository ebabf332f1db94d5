"""Code without a scan, in the shapes that models have."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.unrolled import Code

B, D = 64, 16


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / 4, jnp.float32)


def chain(params: Any, h: jax.Array) -> jax.Array:
    for w in params["ws"]:
        h = jnp.tanh(h @ w)
    return jnp.square(h).mean()


def residual(params: Any, h: jax.Array) -> jax.Array:
    for w in params["ws"]:
        h = h + jnp.tanh(h @ w)
    return jnp.square(h).mean()


def unet(params: Any, h: jax.Array) -> jax.Array:
    *down, last = params["ws"]
    passed = []
    for w in down[:4]:
        h = jax.nn.gelu(h @ w)
        passed.append(h)
    h = jnp.sin(h @ last)
    for w in down[4:8]:
        h = jax.nn.gelu(jnp.concatenate([h, passed.pop()], 0) @ w)
        h = h[: h.shape[0] // 2] + h[h.shape[0] // 2 :]
    return jnp.square(h).mean()


def towers(params: Any, h: jax.Array) -> jax.Array:
    ws = iter(params["ws"])
    for _ in range(3):
        branches = []
        for depth in (1, 2):
            y = h
            for _ in range(depth):
                y = jnp.tanh(y @ next(ws))
            branches.append(y)
        h = h + sum(branches)
    return jnp.square(h).mean()


def tied(params: Any, h: jax.Array) -> jax.Array:
    for w in params["ws"][:5]:
        h = jnp.tanh(h @ w)
    for w in params["ws"][4::-1]:
        h = jnp.tanh(h @ w.T)
    return jnp.square(h).mean()


def branches(params: Any, h: jax.Array) -> jax.Array:
    for k, w in enumerate(params["ws"]):
        h = lax.cond(h[0, 0] > k, lambda h, w: jnp.tanh(h @ w), lambda h, w: jnp.sin(h @ w), h, w)
        h = jax.jit(lambda h: h - h.mean())(h)
    return jnp.square(h).mean()


SHAPES: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (chain, residual, unet, towers, tied, branches)
}


def arrays(layers: int = 9) -> tuple[Any, jax.Array]:
    return {"ws": [normal(k, D, D) for k in range(layers)]}, normal(99, B, D)


def code_of(fn: Callable[..., Any], *args: Any) -> Code:
    return Code(jax.make_jaxpr(fn)(*args))
