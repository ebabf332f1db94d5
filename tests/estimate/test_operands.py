"""What products read."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.estimate.operands import may_pad


@pytest.mark.parametrize(
    ("length", "width", "dtype", "padded"),
    [
        (197, 64, "bfloat16", True),
        (1024, 60, "float16", True),
        (1024, 64, "bfloat16", False),
        (197, 64, "float32", False),
    ],
)
def test_products_of_heads_may_be_padded_to_rows_of_16_bytes(
    length: int, width: int, dtype: str, padded: bool
) -> None:
    heads = jax.ShapeDtypeStruct((8, length, width), dtype)
    jaxpr = jax.make_jaxpr(lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k))(heads, heads).jaxpr
    assert [may_pad(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"] == [padded]


def test_products_with_one_matrix_are_not_looked_at() -> None:
    """A head of 50257 words says nothing of the layers: GPT-2's plans are told apart well."""
    rows, head = jax.ShapeDtypeStruct((64, 8), "bfloat16"), jax.ShapeDtypeStruct((8, 9), "bfloat16")
    jaxpr = jax.make_jaxpr(jnp.dot)(rows, head).jaxpr
    assert not any(map(may_pad, jaxpr.eqns))
