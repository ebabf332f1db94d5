"""What the tests of `jaxmem.value_and_update` share: a small model, and the ordinary step."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.menagerie import CAN_BE_EXACT, exact_jit
from jaxmem import Weighted

# Shapes: B rows of T tokens out of V, width D, N layers.
V, D, N, B, T = 7, 5, 4, 6, 3

STEPS = 5


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(0.5 * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


PARAMS = {"embed": normal(0, V, D), "layers": {"b": normal(1, N, D), "w": normal(2, N, D, D)}}
TOKENS = jnp.asarray(np.random.default_rng(3).integers(V, size=(B, T)), jnp.int32)


def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
    return h + jnp.tanh(h @ p["w"] + jnp.broadcast_to(p["b"], h.shape)), None


def body(params: Any, tokens: jax.Array) -> jax.Array:
    return jax.lax.scan(layer, params["embed"][tokens], params["layers"])[0]


def language_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Next token, from an embedding that is the head as well."""
    logits = (body(params, tokens) @ params["embed"].T).astype(jnp.float32)
    target = jnp.roll(tokens, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()


def ordinary(fun: Callable[..., Any], optimizer: Any, has_aux: bool = False) -> Callable[..., Any]:
    """The step that `value_and_update` stands for."""

    def loss(*args: Any) -> Any:
        out = fun(*args)
        value, aux = out if has_aux else (out, None)
        value = value.mean if isinstance(value, Weighted) else value
        return (value, aux) if has_aux else value

    def step(params: Any, state: Any, *args: Any) -> Any:
        value, gradients = jax.value_and_grad(loss, has_aux=has_aux)(params, *args)
        extra = {}
        if isinstance(optimizer, optax.GradientTransformationExtraArgs):
            extra = {"value": value[0] if has_aux else value}
        updates, state = optimizer.update(gradients, state, params, **extra)
        return value, optax.apply_updates(params, updates), state

    return step


def run(
    step: Callable[..., Any], optimizer: Any, params: Any, *args: Any, steps: int = STEPS
) -> tuple[list[Any], Any, Any]:
    """Losses, parameters and state after some steps, compiled as a whole."""
    step, state, values = exact_jit(step), optimizer.init(params), []
    for _ in range(steps):
        value, params, state = step(params, state, *args)
        values.append(value)
    return values, params, state


def assert_alike(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Equal trees, types and arrays, up to so much of an array's largest number; 0 for all bits."""
    chex.assert_trees_all_equal_structs(actual, expected)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, b), a in zip(leaves, jax.tree.leaves(actual), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), jax.tree_util.keystr(path)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        if tolerance == 0 and CAN_BE_EXACT:
            np.testing.assert_array_equal(a, b, jax.tree_util.keystr(path))
        elif b.size:
            wide = np.complex128 if np.iscomplexobj(b) else np.float64
            a, b = a.astype(wide), b.astype(wide)
            largest = np.abs(b).max()
            distance = np.abs(a - b).max()
            assert distance <= (tolerance or 1e-6) * largest, (
                f"{jax.tree_util.keystr(path)}: {distance / largest:.1e} of the largest apart"
            )
