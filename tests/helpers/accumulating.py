"""What the tests of accumulation share: gradients, their weighted mean in float64, and stacks."""

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import Weighted

PARAMS = {"kernel": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "bias": jnp.array([0.3, -0.2, 0.1])}


def gradients(n: int, seed: int = 0, params: Any = PARAMS) -> list[Any]:
    rng = np.random.default_rng(seed)

    def normal(leaf: jax.Array) -> jax.Array:
        found = rng.standard_normal(leaf.shape)
        if jnp.iscomplexobj(leaf):
            found = found + 1j * rng.standard_normal(leaf.shape)
        return jnp.asarray(found, leaf.dtype)

    return [jax.tree.map(normal, params) for _ in range(n)]


def weighted_mean(grads: Sequence[Any], weights: Sequence[float]) -> Any:
    """In float64, by numpy."""
    return jax.tree.map(
        lambda *leaves: np.average(
            [
                np.asarray(leaf, np.complex128 if jnp.iscomplexobj(leaf) else np.float64)
                for leaf in leaves
            ],
            axis=0,
            weights=weights,
        ),
        *grads,
    )


def near(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    chex.assert_trees_all_close(
        jax.tree.map(np.asarray, actual), expected, rtol=tolerance, atol=tolerance
    )


def filled(tree: Any, value: float) -> Any:
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), tree)


def wide_loss(scanned: bool, weighted: bool) -> Callable[..., Any]:
    """Of layers in a loop or written out; a weighted sum or a mean."""

    def loss(w: Any, x: jax.Array) -> Any:
        h = x
        if scanned:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)
        else:
            for one in w:
                h = jnp.tanh(h @ one)
        return Weighted(jnp.square(h).sum(), h.size) if weighted else jnp.square(h).mean()

    return loss


def _stack(where: str, scanned: bool, weighted: bool) -> Any:
    words = (where, "scanned" if scanned else "unrolled", "weighted" if weighted else "mean")
    # The TPU's compiler takes its time.
    marks = pytest.mark.slow if where == "tpu" else ()
    return pytest.param(where, scanned, weighted, id="-".join(words), marks=marks)


# Layers of which the memory is looked at.  Those that are written out take the TPU's compiler a
# minute, and a mean needs what a weighted loss does, less the factors.
on_each_stack = pytest.mark.parametrize(
    ("where", "scanned", "weighted"),
    [
        *(
            _stack("cpu", scanned, weighted)
            for scanned in (False, True)
            for weighted in (False, True)
        ),
        _stack("gpu", False, True),
        _stack("gpu", True, True),
        _stack("tpu", True, True),
    ],
)
