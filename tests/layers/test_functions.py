"""Functions that keep less: the plain ones' values, and gradients as promised, from fewer bytes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import layers
from jaxmem.layers.activations import GELU, SILU
from jaxmem.layers.bits import packed, packed_bytes, unpacked

Spec = jax.ShapeDtypeStruct

PLAIN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "regelu2": (layers.regelu2, jax.nn.gelu),
    "regelu2 exact": (
        functools.partial(layers.regelu2, approximate=False),
        functools.partial(jax.nn.gelu, approximate=False),
    ),
    "resilu2": (layers.resilu2, jax.nn.silu),
    "relu": (layers.relu, jax.nn.relu),
}


def layer_norm(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, "float32"))
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (wide**2).mean(-1, keepdims=True) - mean**2)
    return ((wide - mean) * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype)


def rms_norm(x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, "float32"))
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + epsilon)).astype(x.dtype)


EXACT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": PLAIN["relu"],
    "layer norm": (layers.ms_layer_norm, layer_norm),
    "rms norm": (layers.ms_rms_norm, rms_norm),
}


def numbers(shape: tuple[int, ...], dtype: Any = "float32", scale: float = 3.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(0.5, scale, shape), dtype)


def weighted(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A loss whose gradient is another at each element."""

    def loss(x: jax.Array, *args: Any) -> jax.Array:
        y = f(x, *args)
        return (y * jnp.cos(jnp.arange(y.size, dtype="float32")).reshape(y.shape)).sum()

    return loss


def with_odd_ones(x: jax.Array) -> jax.Array:
    """With NaN and infinities in three rows."""
    rows = np.array(x).reshape(-1, x.shape[-1])
    rows[:3, 2] = np.array([np.nan, np.inf, -np.inf])
    return jnp.asarray(rows.reshape(x.shape))


# ---------------------------------------------------------------- bits


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    bits=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 9),
)
@settings(max_examples=8)
def test_what_is_packed_comes_back(shape: tuple[int, ...], bits: int, seed: int) -> None:
    given = np.random.default_rng(seed).integers(0, 2**bits, shape, np.uint8)
    codes = packed(jnp.asarray(given), bits)
    assert codes.nbytes == packed_bytes(shape, bits)
    np.testing.assert_array_equal(unpacked(codes, bits, shape), given)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("name", PLAIN | EXACT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_are_those_of_the_plain_function_bit_for_bit(name: str, dtype: str) -> None:
    mine, plain = (PLAIN | EXACT)[name]
    x = with_odd_ones(numbers((3, 5, 7), dtype))
    found, expected = jax.jit(mine)(x), jax.jit(plain)(x)
    assert found.dtype == expected.dtype == x.dtype
    np.testing.assert_array_equal(found.astype("float32"), expected.astype("float32"))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", [(3, 5, 8), (4, 1), (2, 0)], ids=str)
def test_exact_gradients_are_those_of_the_plain_function(
    name: str, shape: tuple[int, ...], strict: None
) -> None:
    mine, plain = EXACT[name]
    x = numbers(shape)
    for derivative in (jax.grad, jax.jacfwd):
        found, expected = (jax.jit(derivative(weighted(f)))(x) for f in (mine, plain))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", EXACT)
def test_gradients_of_nan_and_infinity_are_those_of_the_plain_function(name: str) -> None:
    mine, plain = EXACT[name]
    x = with_odd_ones(numbers((4, 8)))
    found, expected = (jax.jit(jax.grad(weighted(f)))(x) for f in (mine, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", EXACT)
def test_second_derivatives_of_the_exact_ones(name: str) -> None:
    mine, plain = EXACT[name]
    x = numbers((5,))
    found, expected = (
        jax.jit(jax.hessian(lambda x, f=f: jnp.sin(f(x)).sum()))(x) for f in (mine, plain)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mine", "steps"), [(layers.regelu2, GELU), (layers.resilu2, SILU)])
def test_the_approximate_gradient_is_the_step_function_forwards_and_backwards(
    mine: Any, steps: Any
) -> None:
    at = np.array(steps.at, np.float32)
    x = jnp.concatenate([numbers((50,)), at, np.nextafter(at, np.float32(9))])
    values = np.array([0, *np.cumsum(steps.weights)], np.float32)
    expected = values[(np.asarray(x)[:, None] > at).sum(1)]
    np.testing.assert_array_equal(jax.grad(lambda x: mine(x).sum())(x), expected)
    np.testing.assert_array_equal(jax.jvp(mine, (x,), (jnp.ones_like(x),))[1], expected)
    assert abs(sum(steps.weights) - 1) < 1e-6


@pytest.mark.parametrize(
    ("plain", "steps", "of_values", "of_derivatives"),
    [(jax.nn.gelu, GELU, 0.0441, 0.1784), (jax.nn.silu, SILU, 0.0841, 0.2380)],
    ids=["gelu", "silu"],
)
def test_how_far_the_approximations_are(
    plain: Any, steps: Any, of_values: float, of_derivatives: float
) -> None:
    """In the mean over a standard normal; and as published, the squares are about the least.

    Weights and places of ReLUs were fitted to the function, in the mean square over all inputs.
    """
    x = jnp.linspace(-12, 12, 24001)
    density = jnp.exp(-(x**2) / 2) / jnp.sqrt(2 * jnp.pi) * (x[1] - x[0])

    def relus(at: Any, weights: Any) -> jax.Array:
        return sum((a * jnp.maximum(x - c, 0) for a, c in zip(weights, at, strict=True)), 0 * x)

    def squares(at: Any, weights: Any) -> float:
        return float(((relus(at, weights) - plain(x)) ** 2).sum())

    error = jnp.abs(relus(steps.at, steps.weights) - plain(x))
    assert abs(float((error * density).sum()) - of_values) < 1e-3
    error = jnp.abs(jax.vmap(jax.grad(plain))(x) - steps(x))
    assert abs(float((error * density).sum()) - of_derivatives) < 1e-3
    least = squares(steps.at, steps.weights)
    assert least < squares((0.0,), (1.0,)) / 6  # of ReLU itself
    for k in range(3):
        for moved in (-0.5, 0.5):
            at = [c + moved * (j == k) for j, c in enumerate(steps.at)]
            assert squares(at, steps.weights) > least


@pytest.mark.slow
def test_float64() -> None:
    with jax.enable_x64():
        x = numbers((4, 8), "float64")
        for mine, plain in (PLAIN | EXACT).values():
            assert mine(x).dtype == jax.grad(weighted(mine))(x).dtype == jnp.float64
            np.testing.assert_array_equal(mine(x), plain(x))
        for mine, plain in EXACT.values():
            found, expected = (jax.jit(jax.grad(weighted(f)))(x) for f in (mine, plain))
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_dropout_makes_its_mask_again() -> None:
    x, key = numbers((6, 8)), jax.random.key(7)

    def plain(x: jax.Array, key: Any) -> jax.Array:
        mask = jax.random.bernoulli(key, 0.75, (6, 1))
        return jnp.where(mask, x / 0.75, 0.0)

    mine = functools.partial(layers.dropout, broadcast_dims=(-1,))
    drop: Any = lambda x, key: mine(x, 0.25, key)  # noqa: E731
    for either in (key, jax.random.key_data(key)):
        np.testing.assert_array_equal(drop(x, either), plain(x, key))
    found, expected = (jax.jit(jax.grad(weighted(f)))(x, key) for f in (drop, plain))
    np.testing.assert_array_equal(found, expected)
    keys = jax.random.split(key, 3)
    several = jnp.stack([x, 2 * x, -x])
    found, expected = (
        jax.jit(jax.grad(weighted(jax.vmap(f, (0, 0), 1))))(several, keys) for f in (drop, plain)
    )
    np.testing.assert_array_equal(found, expected)
    assert layers.dropout(x, 0.0, key) is x
    assert not layers.dropout(x, 1.0, key).any()


def test_a_norm_folded_into_the_linear_behind_it() -> None:
    x, kernel, bias = numbers((4, 8)), numbers((8, 5)), numbers((5,))
    scale, shift = numbers((8,)), numbers((8,)) + 1

    def plain(x: Any, kernel: Any, bias: Any, scale: Any, shift: Any) -> Any:
        return layers.ms_layer_norm(x, scale, shift) @ kernel + bias

    def folded(x: Any, kernel: Any, bias: Any, scale: Any, shift: Any) -> Any:
        y = layers.ms_layer_norm(x)
        return layers.norm_linear(y, kernel, bias, norm_scale=scale, norm_bias=shift)

    args = x, kernel, bias, scale, shift
    found, expected = (
        jax.jit(jax.grad(weighted(f), tuple(range(5))))(*args) for f in (folded, plain)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected
    )
    kept = jaxmem.saved_residuals(folded, *args)
    # Not the scaled kernel, and the normalised input once.
    assert sorted(row.bytes for row in kept if row.kind == "computed" and row.bytes > 32) == [128]
    alone = jaxmem.saved_residuals(layers.norm_linear, x, kernel)
    assert alone.total_bytes == 0


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (layers.regelu2, {"regelu2": 4 * 6 * 16 // 4}),
        (layers.resilu2, {"resilu2": 4 * 6 * 16 // 4}),
        (layers.relu, {"relu_mask": 4 * 6 * 16 // 8}),
        (lambda x: layers.dropout(x, 0.5, jax.random.key(0)), {"dropout_key": 8}),
        (layers.ms_layer_norm, {"norm": 4 * 6 * 16 * 2, "norm_rstd": 4 * 6 * 4}),
        (layers.ms_rms_norm, {"norm": 4 * 6 * 16 * 2, "norm_rstd": 4 * 6 * 4}),
        # The next layer keeps y anyway: one value for both.
        (lambda x: layers.ms_rms_norm(x) * layers.ms_rms_norm(x), {"norm": 768, "norm_rstd": 96}),
    ],
    ids=["regelu2", "resilu2", "relu", "dropout", "layer norm", "rms norm", "shared"],
)
def test_residual_bytes(f: Any, expected: dict[str, int]) -> None:
    """As derived by hand, of [4, 6, 16] in bfloat16; alone, in a vmap, and in a scan of three."""
    x = Spec((4, 6, 16), "bfloat16")

    def found(fn: Any, times: int = 1) -> dict[str, int]:
        rows = [row for row in jaxmem.saved_residuals(fn, x) if row.name in expected]
        return {row.name: row.bytes // times for row in rows}

    assert found(f) == expected
    assert jaxmem.saved_residuals(f, x).total_bytes <= 2 * sum(expected.values())
    if "dropout_key" not in expected:
        assert found(jax.vmap(f)) == expected
        assert (
            found(lambda x: jax.lax.scan(lambda h, _: (f(h), None), x, None, 3)[0], 3) == expected
        )


def test_policies_keep_the_names() -> None:
    w, x = Spec((3, 16, 16), "float32"), Spec((4, 16), "float32")

    def model(w: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return layers.regelu2(layers.ms_layer_norm(h) @ w), None

        return jax.lax.scan(layer, x, w)[0].sum()

    for policy, names in (
        (jaxmem.policies.names(save=["regelu2", "norm"]), {"regelu2", "norm"}),
        (jaxmem.policies.names(save=["norm"]), {"norm"}),
        (jaxmem.policies.full(), set()),
    ):
        small = jaxmem.remat(model, policy)
        kept = {row.name for row in jaxmem.saved_residuals(small, w, x)}
        assert kept & {"regelu2", "norm", "norm_rstd"} == names
        arrays = numbers(w.shape), numbers(x.shape)
        found, expected = (jax.jit(jax.grad(f))(*arrays) for f in (small, model))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- over devices


@pytest.mark.parametrize("axis", [0, 2])
def test_over_devices_nothing_is_sent_but_for_means(axis: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    spec = PartitionSpec(*("x" if k == axis else None for k in range(3)))
    x = jax.device_put(numbers((8, 4, 64)), NamedSharding(mesh, spec))

    def loss(x: Any) -> Any:
        return weighted(lambda x: layers.relu(layers.resilu2(layers.regelu2(x))))(x)

    step = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(
        step(x), jax.jit(jax.grad(loss))(jnp.asarray(np.asarray(x))), rtol=1e-6
    )
    text = step.lower(x).compile().as_text()
    assert text is not None
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))


def test_in_a_shard_map() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    x = numbers((8, 16))

    def each(x: Any) -> Any:
        return layers.relu(layers.ms_layer_norm(layers.regelu2(x)))

    spread = jax.shard_map(
        each, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")
    )
    found, expected = (jax.jit(jax.grad(weighted(f)))(x) for f in (spread, each))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda layers: layers.regelu2(jnp.arange(3)),
            r"regelu2 takes an array of floats, got int32",
        ),
        (
            lambda layers: layers.relu("x"),
            "relu takes an array of floats, got an object of type str",
        ),
        (lambda layers: layers.ms_rms_norm(jnp.arange(3)), "ms_rms_norm takes an array of floats"),
        (
            lambda layers: layers.ms_layer_norm(jnp.ones(3), axis=1),
            "axis 1 is none of an array of 1 dim",
        ),
        (lambda layers: layers.ms_layer_norm(jnp.ones(())), "axis -1 is none of an array of 0 dim"),
        (
            lambda layers: layers.ms_layer_norm(jnp.ones(3), axis="a"),
            "takes axis as a whole number",
        ),
        (
            lambda layers: layers.ms_layer_norm(jnp.ones((2, 3)), jnp.ones(2)),
            r"scale has shape \(2,\), and must have \(3,\), that of the axes that are normalised",
        ),
        (
            lambda layers: layers.ms_layer_norm(jnp.ones(3), dtype=int),
            "ms_layer_norm takes a dtype of floats, got int",
        ),
        (
            lambda layers: layers.dropout(jnp.ones(3), 2, jax.random.key(0)),
            "a rate from 0 to 1, got 2",
        ),
        (
            lambda layers: layers.dropout(jnp.ones(3), "a", jax.random.key(0)),
            "a Python number from 0",
        ),
        (
            lambda layers: layers.regelu2(jnp.ones(3), approximate="none"),
            "approximate must be True or False, got 'none' of type str",
        ),
        (
            lambda layers: layers.norm_linear(jnp.ones((2, 3)), jnp.ones((4, 5))),
            r"got \(2, 3\) and \(4, 5\)",
        ),
        (
            lambda layers: layers.norm_linear(jnp.ones(3), jnp.ones((3, 5)), jnp.ones(3)),
            r"bias has shape \(3,\), and must have \(5,\), that of the kernel's columns",
        ),
        (lambda layers: layers.relu(jnp.ones(3) * 1j), "real and imaginary part by themselves"),
        (
            lambda layers: layers.ms_layer_norm(jnp.ones(3), dtype="foo"),
            "takes a dtype of floats, such as jnp.bfloat16 or its name, got 'foo'",
        ),
        (
            lambda layers: layers.ms_rms_norm(jnp.ones(3), epsilon="a"),
            "ms_rms_norm takes epsilon as a Python number, got 'a'",
        ),
        (
            lambda layers: jax.jit(lambda e: layers.ms_rms_norm(jnp.ones(3), epsilon=e))(1e-3),
            "takes epsilon as a Python number, got an array that is traced",
        ),
        (
            lambda layers: layers.dropout(jnp.ones(3), 0.5, None),
            "dropout takes a key of jax.random, got NoneType",
        ),
        (
            lambda layers: layers.dropout(jnp.ones(3), 0.5, jnp.ones(3)),
            r"dropout takes a key of jax.random, got float32 of shape \(3,\)",
        ),
        (
            lambda layers: layers.dropout(jnp.ones(3), 0.5, jax.random.split(jax.random.key(0), 2)),
            r"takes one key, got keys of shape \(2,\)",
        ),
        (
            lambda layers: layers.max_pool(jnp.ones((2, 2, 1)), (2, 2), padding=1),
            'takes padding as "VALID", "SAME" or pairs, got 1',
        ),
    ],
)
def test_errors(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(layers)
