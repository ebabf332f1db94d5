"""What the tests of `jaxmem.value_and_grad` share: losses, a batch, and its gradient by jax."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem import Weighted

# Shapes: B rows, of F numbers each.
F = 3
W = {"kernel": jnp.linspace(-0.9, 1.1, 12).reshape(F, 4), "scale": jnp.linspace(0.5, 1.5, 4)}


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, Y, MASK = normal(0, 13, F), normal(1, 13, 4), jnp.asarray(np.arange(13) % 3 > 0, jnp.float32)
BATCH = {"x": X, "y": Y, "mask": MASK}


def errors(w: Any, batch: Any) -> jax.Array:
    """One error per row."""
    return jnp.square(jnp.tanh(batch["x"] @ w["kernel"]) * w["scale"] - batch["y"]).sum(-1)


def mean_loss(w: Any, batch: Any) -> jax.Array:
    return errors(w, batch).mean()


def masked_loss(w: Any, batch: Any) -> Weighted:
    return Weighted((errors(w, batch) * batch["mask"]).sum(), batch["mask"].sum())


def terms_loss(w: Any, batch: Any) -> Weighted:
    """Per token, per example, and a penalty that is the same in every microbatch."""
    penalty = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(w))
    return (
        masked_loss(w, batch)
        + 0.1 * Weighted(jnp.cos(batch["x"] @ w["kernel"]).sum(), batch["x"].shape[0])
        - Weighted(penalty, 1) / 50
    )


@functools.cache
def whole(fun: Callable[..., Any]) -> Callable[..., Any]:
    """What jax computes of the whole batch at once."""

    def mean(*args: Any, **kwargs: Any) -> Any:
        loss = fun(*args, **kwargs)
        return loss.mean if isinstance(loss, Weighted) else loss

    return jax.jit(jax.value_and_grad(mean))


def ours_of(fun: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Compiled as a whole: of each operation for itself, most of a test's time would be compiling.

    What follows is the same without `jit`, which some tests do without.
    """
    return jax.jit(jaxmem.value_and_grad(fun, *args, **{"microbatches": 4, **options}))


def microbatches_of(rows: int, m: int) -> list[np.ndarray]:
    """The rows of each microbatch, in the order in which they run."""
    size, larger = divmod(rows, m)
    first, rest = np.split(np.arange(rows), [larger * (size + 1)])
    return [first[j::larger] for j in range(larger)] + [
        rest[j :: m - larger] for j in range(m - larger)
    ]


def near(actual: Any, expected: Any, tolerance: float = 3e-6) -> None:
    chex.assert_trees_all_equal_structs(actual, expected)

    def wide(leaf: Any) -> np.ndarray:
        return np.asarray(leaf, np.complex128 if jnp.iscomplexobj(leaf) else np.float64)

    chex.assert_trees_all_close(
        jax.tree.map(wide, actual), jax.tree.map(wide, expected), rtol=tolerance, atol=tolerance
    )
