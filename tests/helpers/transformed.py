"""A small stack, and jax's derivatives of a function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

N, B, D = 7, 4, 6


def layer(h: Any, p: Any) -> Any:
    h = h + jnp.sin(h @ p["w"] + jnp.broadcast_to(p["b"], h.shape))
    return h, h.mean()


def loss(params: Any, x: Any) -> jax.Array:
    h, means = lax.scan(layer, x, params)
    return jnp.mean(jnp.linspace(0.5, 1.5, h.size).reshape(h.shape) * h**2) + means @ means


def make(seed: int = 0, lead: tuple[int, ...] = ()) -> Any:
    """Parameters and inputs of the model, with more axes in front if asked for."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(0.5 * rng.standard_normal((*lead, *shape)), jnp.float32)

    return {"w": normal(N, D, D), "b": normal(N, D)}, normal(B, D)


def dot(a: Any, b: Any) -> Any:
    return jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, a, b))


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f,
    "value_and_grad": lambda f: jax.value_and_grad(f, (0, 1)),
    "linearize": lambda f: lambda p, x: jax.linearize(f, p, x)[1](p, jnp.cos(x)),
    "vjp": lambda f: lambda p, x: jax.vjp(f, p, x)[1](jnp.float32(2)),
    "jvp": lambda f: lambda p, x: jax.jvp(f, (p, x), (p, jnp.cos(x))),
    "jvp of carry": lambda f: lambda p, x: jax.jvp(lambda x: f(p, x), (x,), (jnp.cos(x),)),
    "jacfwd": lambda f: jax.jacfwd(f, 1),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "forward over reverse": lambda f: (
        lambda p, x: jax.jvp(jax.grad(f, (0, 1)), (p, x), (p, jnp.cos(x)))
    ),
    "reverse over forward": lambda f: (
        lambda p, x: jax.grad(
            lambda p, x: jax.jvp(f, (p, x), (p, jnp.cos(x)))[1],
            (0, 1),
        )(p, x)
    ),
    "reverse over reverse": lambda f: jax.grad(
        lambda p, x: dot(jax.grad(f, (0, 1))(p, x), (p, jnp.cos(x))), (0, 1)
    ),
    "forward over forward": lambda f: (
        lambda p, x: jax.jvp(
            lambda p, x: jax.jvp(f, (p, x), (p, jnp.cos(x)))[1], (p, x), (p, jnp.sin(x))
        )
    ),
    "hessian": lambda f: lambda p, x: jax.hessian(lambda b: f(p | {"b": b}, x[:1]))(p["b"]),
}
