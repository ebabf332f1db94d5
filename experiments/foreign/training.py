"""A train step of one of the models: AdamW, with parameters and state donated."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from foreign.nets import Net

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# ---------------------------------------------------------------- API


def job(net: Net, decorate: Decorator | None = None) -> jaxmem.Job:
    """A step of a batch; `decorate` is put around the call of the model, and nothing else."""
    forward = net.forward if decorate is None else decorate(net.forward)
    optimizer = optax.adamw(1e-4)

    def step(state: Any, inputs: Any, labels: jax.Array, key: jax.Array) -> Any:
        weights, statistics, moments = state

        def loss(weights: Any) -> Any:
            logits, changed = forward(weights, statistics, inputs, key)
            return mean_cross_entropy(logits, labels), changed

        (value, changed), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        updates, moments = optimizer.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), changed, moments), value

    state = net.weights, net.statistics, jax.eval_shape(optimizer.init, net.weights)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jaxmem.Job(step, (state, dict(net.inputs), net.labels, key), donate_argnums=0)


def mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """In float32, over the labels that are not below 0."""
    counted = labels >= 0
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), jnp.where(counted, labels, 0)
    )
    return jnp.where(counted, each, 0.0).sum() / jnp.maximum(counted.sum(), 1)
