"""Max-pooling that keeps places: values and gradients of Flax's, bits that are kept, bad input."""

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem
from jaxmem.layers import max_pool

HOWS: list[tuple[Any, ...]] = [
    ((2, 2), (2, 2)),
    ((2, 2),),
    ((3, 3), (2, 2), "SAME"),
    ((3, 2), None, ((1, 0), (0, 1))),
    ((7, 9), (7, 9)),
    ((1, 2), (3, 1), "same"),
]


def drawn(shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    """With many equal elements."""
    return jnp.asarray(np.random.default_rng(0).integers(-3, 3, shape), dtype)


def of(pool: Any, how: Any) -> Any:
    """A function whose gradient differs from window to window."""

    def loss(x: jax.Array) -> jax.Array:
        y = pool(x, *how)
        return (jnp.arange(1, 1 + y.size).reshape(y.shape) % 7 * y.astype("float32") ** 3).sum()

    return loss


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_flax(how: Any, dtype: str) -> None:
    x = drawn((2, 7, 9, 3), dtype)
    plain = (how[0], how[1] if len(how) > 1 else None, *(p.upper() if isinstance(p, str) else p for p in how[2:]))  # fmt: skip # noqa: E501
    chex.assert_trees_all_equal(max_pool(x, *how), nn.max_pool(x, *plain))
    found, expected = (
        jax.jit(jax.grad(of(pool, args)))(x)
        for pool, args in ((max_pool, how), (nn.max_pool, plain))
    )
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == "float32" else 2e-2
    chex.assert_trees_all_close(
        found.astype("float32"), expected.astype("float32"), rtol=tolerance, atol=1e-3
    )


@pytest.mark.slow
@settings(max_examples=15)
@given(
    lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2),
)
def test_windows_of_any_kind(lengths: Any, window: Any, strides: Any, padding: Any) -> None:
    x = drawn((2, *lengths, 2)) + 0.25 * jnp.cos(jnp.arange(4.0 * lengths[0] * lengths[1])).reshape(
        2, *lengths, 2
    )
    # A window of padding alone has no greatest element.
    padding = tuple(tuple(min(p, n - 1) for p in pair) for pair, n in zip(padding, window, strict=True))  # fmt: skip # noqa: E501
    how = window, strides, padding
    expected = nn.max_pool(x, *how)
    chex.assert_trees_all_equal(max_pool(x, *how), expected)
    if expected.size and bool(jnp.isfinite(expected).all()):
        one, other = (jax.grad(of(pool, how))(x) for pool in (max_pool, nn.max_pool))
        chex.assert_trees_all_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_under_vmap_and_forward_mode_and_in_second_order() -> None:
    x, how = drawn((2, 4, 6, 3)) + jnp.cos(jnp.arange(144.0)).reshape(2, 4, 6, 3), HOWS[0]
    for through in (
        lambda pool: jax.vmap(jax.grad(of(pool, how)))(x),
        lambda pool: jax.jvp(of(pool, how), (x,), (jnp.cos(x),)),
        lambda pool: jax.grad(lambda x: (jax.grad(of(pool, how))(x) ** 2).sum())(x),
    ):
        chex.assert_trees_all_close(through(max_pool), through(nn.max_pool), rtol=1e-5)


@pytest.mark.parametrize(("how", "bits"), [(HOWS[0], 2), (((2,), (2,)), 1), (HOWS[2], 4), (((5, 5), (5, 5)), 8)])  # fmt: skip # noqa: E501
def test_keeps_so_many_bits_of_each_window(how: Any, bits: int) -> None:
    x = jax.ShapeDtypeStruct((8, 40, 40, 16), "bfloat16")
    windows = jax.eval_shape(lambda x: max_pool(x, *how), x).size
    kept = jaxmem.saved_residuals(lambda x: max_pool(x, *how), x)
    assert kept.total_bytes == windows * bits // 8
    assert [row.name for row in kept] == ["pool_places"]


def test_needs_less_on_a_gpu_than_the_plain_form() -> None:
    """Two convolutional layers in front of each of two poolings."""
    weights = [jax.ShapeDtypeStruct((3, 3, 32, 32), "bfloat16")] * 2

    def net(pool: Any, weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            for _ in range(2):
                x = jax.lax.conv_general_dilated(
                    x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                x = jax.nn.relu(x)
            x = pool(x, (2, 2), (2, 2))
        return (x.astype("float32") ** 2).mean()

    x = jax.ShapeDtypeStruct((16, 64, 64, 32), "bfloat16")
    plain, low = (
        jaxmem.memory_report(
            jax.grad(lambda w, x, pool=pool: net(pool, w, x)), weights, x, target="h100-80g",
            suggest=False,
        )
        for pool in (nn.max_pool, max_pool)
    )  # fmt: skip
    assert low.temp_bytes < 0.7 * plain.temp_bytes
    assert low.bytes_moved is not None
    assert plain.bytes_moved is not None
    assert low.bytes_moved < 0.8 * plain.bytes_moved


def test_not_a_number_is_the_greatest_as_in_flax_and_no_windows_are_none() -> None:
    x = drawn((1, 4, 4, 1)).at[0, 1, 1, 0].set(jnp.nan)
    chex.assert_trees_all_equal(max_pool(x, (2, 2), (2, 2)), nn.max_pool(x, (2, 2), (2, 2)))
    found, expected = (
        jax.grad(lambda x, pool=pool: (2 * pool(x, (2, 2), (2, 2))).sum())(x)
        for pool in (max_pool, nn.max_pool)
    )
    chex.assert_trees_all_equal(found, expected)
    assert max_pool(jnp.zeros((1, 1, 4, 2)), (2, 2)).shape == (1, 0, 3, 2)
    assert jax.grad(lambda x: max_pool(x, (2, 2)).sum())(jnp.zeros((1, 1, 4, 2))).shape == (
        1, 1, 4, 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "kind", "text"),
    [
        ((jnp.zeros((2, 4, 4, 1), int), (2, 2)), TypeError, "takes an array of floats, got int"),
        ((X := jnp.zeros((2, 4, 4, 1)), (2, 2, 2, 2)), ValueError, "a window of 1 to 3 dimensions"),
        ((X, ()), ValueError, "a window of 1 to 3 dimensions"),
        ((X, (2, 0)), ValueError, "takes window_shape as whole numbers from 1 on, got (2, 0)"),
        ((X, (2, 2), (2,)), ValueError, "takes as many strides as the window (2, 2), got (2,)"),
        ((X, (2, 2), (2, 2.5)), ValueError, "takes strides as whole numbers from 1 on"),
        ((X, (2, 2), None, "FULL"), ValueError, 'padding as "VALID", "SAME" or pairs'),
        ((X, (2, 2), None, ((1, 1),)), ValueError, "one pair for each dimension"),
        ((X, (2, 2), None, ((1, 1), (0, -1))), ValueError, "padding as whole numbers from 0 on"),
        ((X, (17, 16)), ValueError, "one of (17, 16) has 272 elements, more than 256"),
    ],
)
def test_bad_input(args: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        max_pool(*args)
