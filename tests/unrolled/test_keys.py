"""Keys of random numbers in unrolled code are made once, outside of what is planned."""

from collections.abc import Callable, Iterator
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers import budgeted

import jaxmem
from jaxmem import _jax

LAYERS, ROWS, WIDTH = 6, 64, 32


class Net(nn.Module):
    """Layers written out, a mask in each, whose key flax makes of the one it is given."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = x + nn.Dropout(0.5, deterministic=False)(nn.gelu(nn.Dense(WIDTH)(x)))
        return x


def flax_loss(params: Any, key: jax.Array, x: jax.Array) -> jax.Array:
    out: Any = Net().apply(params, x, rngs={"dropout": key})
    return jnp.square(out).mean()


def split_loss(params: Any, key: jax.Array, x: jax.Array) -> jax.Array:
    """Keys split off one after the other, each from the rest of the last."""
    for w in jax.tree.leaves(params, is_leaf=lambda leaf: "kernel" in leaf):
        key, own = jax.random.split(key)
        x = x + jnp.tanh(x @ w["kernel"] + w["bias"]) * jax.random.bernoulli(own, 0.5, x.shape)
    return jnp.square(x).mean()


def arrays() -> tuple[Any, jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    params = Net().init({"params": jax.random.key(0), "dropout": jax.random.key(2)}, x)
    return params, jax.random.key(3), x


def planned(loss: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Gradients by whole layers, and by plans of single values, the last with the fewest bytes."""
    yield jax.grad(jaxmem.remat_sqrt(loss))
    step = jax.grad(jaxmem.remat_auto(loss))
    for plan in budgeted.plans(step, *arrays(), most=2):
        yield under(plan, step)


def under(plan: jaxmem.StepPlan, step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jaxmem.use_plan(plan):
            return step(*args)

    return run


def made(fn: Callable[..., Any], *args: Any) -> int:
    """How many keys a function makes of others."""
    closed = jax.make_jaxpr(fn)(*args)
    names = [eqn.primitive.name for eqn in _jax.all_equations(closed.jaxpr)]
    return names.count("random_fold_in") + names.count("random_split")


@pytest.mark.parametrize("loss", [flax_loss, split_loss])
def test_keys_are_made_once_and_masks_are_the_same(loss: Callable[..., Any]) -> None:
    plain = jax.grad(loss)
    count = made(plain, *arrays())
    assert count >= LAYERS
    for fn in planned(loss):
        assert made(fn, *arrays()) == count
        chex.assert_trees_all_close(
            jax.jit(fn)(*arrays()), jax.jit(plain)(*arrays()), rtol=1e-5, atol=1e-6
        )
