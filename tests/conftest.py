"""What all tests share: eight devices, random keys, and jax at its strictest."""

import itertools
from collections.abc import Callable, Iterator

import jax
import pytest

# Before any test starts a backend.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def getkey() -> Callable[[], jax.Array]:
    """A function that returns another random key at each call, the same ones in each run."""
    seeds = itertools.count()
    return lambda: jax.random.key(next(seeds))


@pytest.fixture
def strict() -> Iterator[None]:
    """No implicit promotion, of dtypes or of ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
