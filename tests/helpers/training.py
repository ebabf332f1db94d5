"""Jobs for the tests of the command line: a training step of Flax and optax, and faulty ones."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from jaxmem import Job


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, _):
        h = jnp.tanh(nn.Dense(4 * self.width)(x))
        return x + nn.Dense(self.width)(h), None


class Encoder(nn.Module):
    width: int
    layers: int

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        return nn.Dense(1)(stack(self.width)(x, None)[0])


def _job(model, batch, accum):
    tx = optax.adam(1e-3)

    def init(key):
        params = model.init(key, jnp.zeros((1, model.width)))
        return params, tx.init(params)

    def train_step(state, x, y):
        params, opt_state = state

        def loss(params, x, y):
            return jnp.mean((model.apply(params, x)[:, 0] - y) ** 2)

        def micro(sums, xy):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, *xy)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        split = x.reshape(accum, -1, model.width), y.reshape(accum, -1)
        (value, grads), _ = jax.lax.scan(micro, zeros, split)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    state = jax.eval_shape(init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((batch, model.width), "float32")
    y = jax.ShapeDtypeStruct((batch,), "float32")
    return Job(train_step, (state, x, y), donate_argnums=0)


def job(batch: int = 64, accum: int = 1, layers: int = 6):
    return _job(jaxmem.remat_full(Encoder)(16, layers), batch, accum)


def with_policy(policy: str = "full", batch: int = 64):
    return _job(jaxmem.remat(Encoder, policy)(16, 6), batch, 1)


def undecorated():
    return _job(Encoder(16, 6), 64, 1)


def too_large():
    """More than any accelerator has."""

    def double(x):
        return x * 2

    return Job(double, (jax.ShapeDtypeStruct((2**36,), "float32"),))


def dropout(rate: float = 0.5):
    """A random key, whole numbers, a flag that the program never reads, and a keyword."""

    def step(key, tokens, table, *, unused):
        keep = jax.random.bernoulli(key, 1 - rate, tokens.shape)
        return jnp.where(keep, table[tokens].sum(-1), 0.0), tokens + 1

    return Job(
        step,
        (
            jax.eval_shape(jax.random.key, 0),
            jax.ShapeDtypeStruct((4, 8), "int32"),
            jax.ShapeDtypeStruct((32, 16), "bfloat16"),
        ),
        kwargs={"unused": jax.ShapeDtypeStruct((1024,), "bool")},
        donate_argnums=1,
    )


ready = Job(jnp.sin, (jax.ShapeDtypeStruct((4,), "float32"),), name="sine")

limit = 12


def sometimes(batch: int = 8):
    if batch > 16:
        raise ValueError("no batch above 16")
    return job(batch)


def fails_in_step():
    def step(x):
        return x @ jnp.zeros((3, 3))

    return Job(step, (jax.ShapeDtypeStruct((4, 4), "float32"),))


def returns_a_tuple():
    return jnp.sin, (1,)


def needs_batch(batch):
    return job(batch)


def with_arrays():
    return Job(jnp.sum, (np.zeros(2**23, np.float32),))


def bad_donation():
    return Job(jnp.sin, (jax.ShapeDtypeStruct((4,), "float32"),), donate_argnums=1)
