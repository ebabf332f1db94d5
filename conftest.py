"""Names that the examples in docstrings may use without importing them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem


@pytest.fixture(autouse=True)
def _names_of_examples(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(jax=jax, jnp=jnp, jaxmem=jaxmem)
