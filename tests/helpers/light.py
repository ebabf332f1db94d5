"""A job that is loaded and compiled in a moment: no Flax, no optax, one stack."""

import jax
import jax.numpy as jnp

import jaxmem
from jaxmem import Job


def job(batch: int = 64, accum: int = 1, layers: int = 6):
    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w) @ w), None

    @jaxmem.remat_full
    def loss(weights, x):
        return jax.lax.scan(layer, x, weights)[0].sum()

    def step(weights, x):
        def micro(sums, x):
            return sums + jax.grad(loss)(weights, x), None

        parts = x.reshape(accum, -1, x.shape[-1])
        return weights - 0.1 * jax.lax.scan(micro, jnp.zeros_like(weights), parts)[0]

    shapes = (layers, 16, 16), (batch, 16)
    specs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return Job(step, specs, donate_argnums=0)
