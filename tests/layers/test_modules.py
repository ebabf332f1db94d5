"""Flax modules of norms that keep less: the parameters and values of Flax's own."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxmem
from jaxmem.layers import linen as low_linen
from jaxmem.layers import nnx as low_nnx

X = jnp.asarray(np.random.default_rng(0).normal(0.5, 3, (2, 5, 8)), "float32")
PARTS = jnp.cos(jnp.arange(8.0))


def drawn(tree: Any) -> Any:
    """Other numbers than ones and zeros."""
    leaves, structure = jax.tree.flatten(tree)
    random = np.random.default_rng(1)
    return structure.unflatten([jnp.asarray(random.normal(1, 1, a.shape), a.dtype) for a in leaves])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("plain", "mine", "options"),
    [
        (nn.LayerNorm, low_linen.MSLayerNorm, {}),
        (nn.LayerNorm, low_linen.MSLayerNorm, {"use_bias": False, "use_fast_variance": False}),
        (nn.LayerNorm, low_linen.MSLayerNorm, {"use_bias": False, "use_scale": False}),
        (nn.RMSNorm, low_linen.MSRMSNorm, {}),
    ],
)
def test_linen_norms(plain: Any, mine: Any, options: dict[str, bool], dtype: Any) -> None:
    one, other = (kind(dtype=dtype, **options) for kind in (plain, mine))
    variables = one.init(jax.random.key(0), X)
    chex.assert_trees_all_equal(other.init(jax.random.key(0), X), variables)
    variables = drawn(variables)
    for x in (X, X.astype("bfloat16")):
        found, expected = (module.apply(variables, x) for module in (other, one))
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.astype("float32"), expected.astype("float32"))
    if dtype is None:
        found, expected = (
            jax.jit(jax.grad(lambda v, m=module: (m.apply(v, X) ** 2 * PARTS).sum()))(variables)
            for module in (other, one)
        )
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("plain", "mine"),
    [(nnx.LayerNorm, low_nnx.MSLayerNorm), (nnx.RMSNorm, low_nnx.MSRMSNorm)],
)
def test_nnx_norms(plain: Any, mine: Any) -> None:
    for dtype in (None, jnp.bfloat16):
        one, other = (kind(8, dtype=dtype, rngs=nnx.Rngs(0)) for kind in (plain, mine))
        state = drawn(nnx.state(one))
        nnx.update(one, state)
        nnx.update(other, state)
        for x in (X, X.astype("bfloat16")):
            found, expected = other(x), one(x)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found.astype("float32"), expected.astype("float32"))


@pytest.mark.parametrize("centered", [True, False])
def test_a_norm_and_a_dense_layer_in_one(centered: bool) -> None:
    layer = low_linen.MSNormDense(6, centered=centered)
    norm = nn.LayerNorm() if centered else nn.RMSNorm()
    plain = nn.Sequential([norm, nn.Dense(6)])
    params = drawn(layer.init(jax.random.key(0), X)["params"])

    def mine(params: Any, x: Any) -> Any:
        return layer.apply({"params": params}, x)

    def both(params: Any, x: Any) -> Any:
        renamed = {"layers_0": params["norm"], "layers_1": params["dense"]}
        return plain.apply({"params": renamed}, x)

    for derivative in (lambda f: f, lambda f: jax.grad(lambda p, x: (f(p, x) ** 2).sum(), (0, 1))):
        found, expected = (jax.jit(derivative(f))(params, X) for f in (mine, both))
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-3)
    sizes = [row.bytes for row in jaxmem.saved_residuals(mine, params, X) if row.kind == "computed"]
    assert max(sizes) == X.nbytes
    assert sum(size == X.nbytes for size in sizes) == 1

    module = low_nnx.MSNormLinear(8, 6, centered=centered, rngs=nnx.Rngs(0))
    nnx.update(module, drawn(nnx.state(module)))
    np.testing.assert_allclose(module(X), module.linear(module.norm(X)), rtol=1e-4, atol=1e-4)


def test_dropout_has_the_masks_of_flax() -> None:
    keys = {"dropout": jax.random.key(0)}
    found, expected = (
        kind(0.25, broadcast_dims=(1,), deterministic=False).apply({}, X, rngs=keys)
        for kind in (low_linen.KeyedDropout, nn.Dropout)
    )
    np.testing.assert_array_equal(found, expected)
    assert low_linen.KeyedDropout(0.25, deterministic=True).apply({}, X) is X


@pytest.mark.parametrize("source", ["own", "stream", "rngs", "key"])
def test_nnx_dropout_has_the_masks_of_flax_and_goes_on_as_its_stream_does(source: str) -> None:
    made: dict[str, Any] = {
        "own": lambda: None,
        "stream": lambda: nnx.Rngs(3)["dropout"],
        "rngs": lambda: nnx.Rngs(3),
        "key": lambda: jax.random.key(5),
    }
    one, other = (
        kind(0.25, broadcast_dims=(1,), rngs=nnx.Rngs(0))
        for kind in (low_nnx.KeyedDropout, nnx.Dropout)
    )
    twice = []
    for module in (one, other):
        given = made[source]()
        twice.append([module(X, rngs=given) for _ in range(2)])
    chex.assert_trees_all_equal(*twice)
    assert source == "key" or bool((twice[0][0] != twice[0][1]).any())
    assert one(X, deterministic=True) is X
    one.eval()
    assert one(X) is X

    def loss(module: Any, x: Any) -> Any:
        return (module(x, rngs=jax.random.key(0), deterministic=False) ** 2).sum()

    gradients = (jax.grad(lambda x, m=m: loss(m, x))(X) for m in (one, other))
    chex.assert_trees_all_close(*gradients, rtol=1e-6)
    kept = jaxmem.saved_residuals(lambda x: one(x, rngs=jax.random.key(0), deterministic=False), X)
    assert kept.total_bytes < X.nbytes / 8


def test_nnx_dropout_without_random_numbers_says_what_flax_says() -> None:
    with pytest.raises(ValueError, match="no `rngs` argument was provided"):
        low_nnx.KeyedDropout(0.5)(X)
    with pytest.raises(TypeError, match="rngs must be"):
        low_nnx.KeyedDropout(0.5, rngs=nnx.Rngs(0))(X, rngs="seed")  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {"mask": X > 0}, "MSLayerNorm takes no mask"),
        ({"axis_name": "i"}, {}, "MSLayerNorm takes no axis_name"),
        ({"feature_axes": 1}, {}, "scale and bias along the axes that it normalises"),
    ],
)
def test_what_the_modules_refuse(
    options: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        low_linen.MSLayerNorm(**options).init(jax.random.key(0), X, **given)
    with pytest.raises(ValueError, match=message):
        low_nnx.MSLayerNorm(8, **options, rngs=nnx.Rngs(0))(X, **given)
    with pytest.raises(TypeError, match="MSLayerNorm takes an array of floats, got int32"):
        low_linen.MSLayerNorm().init(jax.random.key(0), jnp.arange(3))
