"""Training of a net of this kind, the same under every policy but for what is recomputed."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mnist import net
from mnist.digits import Digits

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A net and how it is trained: plain gradient descent, the same batches under any policy."""

    depth: int
    width: int
    batch: int
    epochs: int
    rate: float
    seed: int

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in dataclasses.asdict(self).items())


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What came of it: a loss for each step, float32, and the share of held-out digits known."""

    losses: np.ndarray
    last_epoch: float
    accuracy: float
    seconds: float


# ---------------------------------------------------------------- API


def train(recipe: Recipe, digits: Digits, step: Callable[..., Any]) -> Outcome:
    """Train with a step of `mnist.net.step`, jitted or not."""
    began = time.perf_counter()
    params = net.start(
        recipe.depth, recipe.width, jnp.asarray(digits.images[: recipe.batch]), recipe.seed
    )
    losses = []
    for batch in _batches(recipe, len(digits.labels)):
        params, loss = step(params, digits.images[batch], digits.labels[batch])
        losses.append(loss)
    found = np.array(jax.device_get(losses))
    accuracy = _accuracy(params, digits)
    last = float(found[-len(found) // recipe.epochs :].mean())
    return Outcome(found, last, accuracy, time.perf_counter() - began)


# ---------------------------------------------------------------- implementation

# Held-out digits looked at at once.
_MANY = 512


def _batches(recipe: Recipe, count: int) -> Iterator[np.ndarray]:
    """Places of the digits of each batch; what does not fill one is left out."""
    rng = np.random.default_rng(recipe.seed)
    for _ in range(recipe.epochs):
        order = rng.permutation(count)[: count // recipe.batch * recipe.batch]
        yield from order.reshape(-1, recipe.batch)


def _accuracy(params: Any, digits: Digits) -> float:
    right = jax.jit(lambda params, x, y: (net.logits(params, x).argmax(-1) == y).sum())
    images, labels = digits.held_out_images, digits.held_out_labels
    known = sum(
        int(right(params, images[k : k + _MANY], labels[k : k + _MANY]))
        for k in range(0, len(labels), _MANY)
    )
    return known / len(labels)
