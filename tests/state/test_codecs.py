"""`jaxmem.state.codecs`: levels, errors and layout of arrays stored in 8 bits per number."""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem
from jaxmem.state.codecs import (
    CODECS,
    Codec,
    Coded,
    Companding,
    Dynamic,
    codec,
    rows_are_apart,
    scales_shape,
)

TINY = settings(derandomize=True, max_examples=40)

BOTH = pytest.mark.parametrize("coder", [Dynamic(), Companding()], ids=sorted(CODECS, reverse=True))
SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


@functools.partial(jax.jit, static_argnums=(1, 2))
def stored(value: jax.Array, coder: Codec, signed: bool) -> Coded:
    return coder.encode(value, signed=signed)


@functools.partial(jax.jit, static_argnums=(1, 2))
def loaded(coded: Coded, coder: Codec, dtype: Any = "float32") -> jax.Array:
    return coder.decode(coded, jnp.dtype(dtype))


def numbers(seed: int, shape: tuple[int, ...], signed: bool, size: float = 1.0) -> np.ndarray:
    """Of many magnitudes, the largest of about this size."""
    random = np.random.default_rng(seed)
    value = size * random.standard_normal(shape) * 10.0 ** random.uniform(-5, 0, shape)
    return np.asarray(value if signed else np.abs(value), np.float32)


def levels(signed: bool) -> np.ndarray:
    """The map as the paper has it, in float64."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1)
        middle = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6)
        found += [*middle, *(-middle if signed else [])]
    return np.sort(np.array(found))


def all_levels(signed: bool) -> np.ndarray:
    """The map as it is decoded."""
    codes = jnp.arange(-128, 128, dtype=jnp.int8) if signed else jnp.arange(256, dtype=jnp.uint8)
    return np.asarray(loaded(Coded(codes, jnp.ones(1)), Dynamic()))


# ---------------------------------------------------------------- the dynamic map


@pytest.mark.parametrize(
    ("signed", "total", "zero", "least"),
    [(True, 1.0, 127, -0.99296874), (False, 75.10526, 0, 0.0)],
    ids=["signed", "unsigned"],
)
def test_map_is_that_of_the_paper(signed: bool, total: float, zero: int, least: float) -> None:
    found = all_levels(signed)
    np.testing.assert_array_max_ulp(found, levels(signed).astype(np.float32), 1)
    assert np.sum(found, dtype=np.float64) == pytest.approx(total, rel=1e-6)
    assert list(np.flatnonzero(found == 0)) == [zero]
    assert found[0] == pytest.approx(least, rel=1e-7)
    assert found[255] == 1


@SIGNS
def test_codes_are_of_the_nearest_levels(signed: bool) -> None:
    random = np.random.default_rng(0)
    table = levels(signed)
    halfway = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    close = [np.nextafter(halfway, np.float32(to), dtype=np.float32) for to in (-2, 2)]
    spread = 10.0 ** random.uniform(-8, 0, 20_000) * random.choice([-1, 1], 20_000)
    value = np.concatenate([random.uniform(-1, 1, 20_000), spread, halfway, *close, table])
    value = value.astype(np.float32)
    value = np.append(value if signed else np.abs(value), np.float32(1.0))
    # One block, divided by 1.
    codes = np.asarray(stored(value, Dynamic(block=len(value)), signed).codes).astype(np.int64)
    codes += 128 if signed else 0
    distance = np.abs(value.astype(np.float64)[:, None] - table)
    if not signed:
        distance[value > 0, 0] = np.inf  # what is more than 0 does not become 0
    found = np.take_along_axis(distance, codes[:, None], axis=1)[:, 0]
    # A number that is within rounding of the middle is as near to both.
    assert np.all(found <= distance.min(axis=1) + 2.0**-23 * np.abs(value))
    apart = np.sort(distance, axis=1)
    clear = apart[:, 1] - apart[:, 0] > 2.0**-22 * np.abs(value)
    assert np.array_equal(codes[clear], distance.argmin(axis=1)[clear])
    assert clear.sum() > 40_000


@SIGNS
def test_halfway_is_away_from_zero(signed: bool) -> None:
    """At 0.1 + 0.9 · 24/64, a point between two levels that is exact in binary."""
    value = np.array([0.4375, 0.4375 - 1e-6, 1.0], np.float32)
    halfway, below, _ = map(int, stored(value, Dynamic(), signed).codes)
    assert halfway == below + 1
    if signed:
        value[0] = -value[0]
        # Codes of numbers with signs are those of their levels, less 1.
        assert int(stored(value, Dynamic(), signed).codes[0]) + 1 == -(halfway + 1)


# ---------------------------------------------------------------- errors


@TINY
@given(
    seed=st.integers(0, 2**31),
    signed=st.booleans(),
    size=st.sampled_from([1e-30, 1e-12, 1e-9, 1e-3, 1.0, 7e4, 1e30]),
    block=st.sampled_from([32, 256]),
)
def test_errors_are_bounded(seed: int, signed: bool, size: float, block: int) -> None:
    value = numbers(seed, (4 * 256,), signed, size)
    largest = np.repeat(np.abs(value).reshape(-1, block).max(axis=1), block)
    for coder in (Dynamic(block), Companding(block)):
        found = np.asarray(loaded(stored(value, coder, signed), coder))
        error = np.abs(found - value)
        top = np.abs(value) == largest
        chex.assert_trees_all_close(found[top], value[top], rtol=3e-7)
        if isinstance(coder, Dynamic):
            unit = 1 if signed else 0.5
            assert np.all(error <= 0.00704 * unit * largest)
            high = np.abs(value) >= 0.1 * largest
            assert np.all(error[high] <= 0.0704 * unit * np.abs(value[high]))
            for decade in range(1, 7):  # each has half the levels
                part = np.abs(value) >= 0.1 ** (decade + 1) * largest
                bound = 0.0704 * unit * 2**decade * np.abs(value[part])
                assert np.all(error[part] <= bound)
        elif signed:
            assert np.all(error <= 0.00788 * largest)
            assert np.all(error[np.abs(value) < 0.1 * largest] <= 0.0025 * largest.max())
        else:
            roots = np.abs(np.sqrt(found) - np.sqrt(value))
            low = value < largest / 255**2  # and does not become 0
            assert np.all(roots <= np.where(low, 0.00393, 0.00197) * np.sqrt(largest))


@TINY
@given(
    seed=st.integers(0, 2**31),
    signed=st.booleans(),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e20]),
    negative=st.booleans(),
)
def test_what_is_decoded_is_encoded_to_the_same(
    seed: int, signed: bool, size: float, negative: bool
) -> None:
    """Also of blocks whose largest number is negative: the paper's −0.993 would shrink them."""
    value = numbers(seed, (3, 256), signed, size)
    if signed and negative:
        value = -np.abs(value)
    for coder in (Dynamic(), Companding()):
        once = stored(value, coder, signed)
        again = stored(loaded(once, coder), coder, signed)
        chex.assert_trees_all_equal(again, once)


@BOTH
def test_a_block_that_decays_is_followed(coder: Codec) -> None:
    """By 0.1 % a step, which 16-bit scales would round away."""
    start = value = jnp.abs(jnp.asarray(numbers(0, (256,), False))) + 1e-3
    for _ in range(200):
        value = loaded(stored(value, coder, False), coder) * 0.999
    expected = loaded(stored(start, coder, False), coder) * 0.999**200
    chex.assert_trees_all_close(value, expected, rtol=1e-4)


@BOTH
@SIGNS
def test_zeros_are_exact(coder: Codec, signed: bool) -> None:
    value = jnp.zeros((2, 512)).at[1, 300].set(3.0)
    coded = stored(value, coder, signed)
    chex.assert_trees_all_equal(loaded(coded, coder), value)
    assert coded.scales[0].max() == 0


@BOTH
@SIGNS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(coder: Codec, signed: bool, bad: float) -> None:
    bad = bad if signed else abs(bad)
    value = jnp.asarray(numbers(0, (512,), signed)).at[300].set(bad)
    found = loaded(stored(value, coder, signed), coder)
    hurt = np.arange(512) // coder.block == 300 // coder.block
    assert not np.isfinite(found[hurt]).any()
    assert np.isfinite(found[~hurt]).all()
    if np.isnan(bad):
        assert np.isnan(found[hurt]).all()
    elif isinstance(coder, Dynamic):
        assert found[300] == bad


@TINY
@given(exponents=st.lists(st.floats(-37, 0), min_size=1, max_size=8))
def test_what_is_more_than_zero_stays_so_without_signs(exponents: list[float]) -> None:
    """A second moment of 0 next to a first one that is not would be divided by."""
    value = np.zeros(256, np.float32)
    value[: len(exponents)] = 10.0 ** np.array(exponents)
    value[255] = 1
    for coder in (Dynamic(), Companding(256)):
        coded = stored(value, coder, False)
        assert np.array_equal(np.asarray(coded.codes) > 0, value > 0)
        assert np.array_equal(np.asarray(loaded(coded, coder)) > 0, value > 0)


@BOTH
def test_ones_and_their_negatives(coder: Codec) -> None:
    """Both at the end of the range."""
    value = jnp.asarray([1.0, -1.0, 0.5, -0.5])
    found = loaded(stored(value, coder, True), coder)
    chex.assert_trees_all_close(found, value, atol=0.0072)
    assert stored(value, coder, True).scales == 1


@BOTH
def test_without_signs_what_is_below_zero_is_zero(coder: Codec) -> None:
    for value in ([-1.0, 0.5, 1.0], [-1.0, -2.0]):
        found = loaded(stored(jnp.asarray(value), coder, False), coder)
        chex.assert_trees_all_close(found, jnp.maximum(jnp.asarray(value), 0), atol=0.005)


# ---------------------------------------------------------------- layout

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@settings(TINY, max_examples=12)  # each is compiled
@given(shape=SHAPES, block=st.sampled_from([1, 4, 32]))
def test_layout_of_any_shape(shape: tuple[int, ...], block: int) -> None:
    """Compared with blocks taken one by one from the merged axes."""
    leading = math.prod(scales_shape(shape, block)[:-1])
    value = numbers(1, shape, True)
    coder = Companding(block)
    coded = stored(value, coder, True)
    assert coded.codes.shape == shape
    assert coded.scales.shape == scales_shape(shape, block)
    assert loaded(coded, coder).shape == shape
    if not value.size:
        return
    flat = np.abs(value.reshape(leading, -1))
    scales = np.stack(
        [flat[:, i : i + block].max(axis=1) for i in range(0, flat.shape[1], block)], axis=1
    )
    assert np.array_equal(coded.scales, scales.reshape(coded.scales.shape))


@pytest.mark.parametrize(
    ("shape", "scales", "apart"),
    [
        ((), (1,), False),
        ((0,), (0,), False),
        ((3, 0), (0,), False),
        ((0, 512), (0, 2), True),
        ((1000,), (4,), False),
        ((4, 256), (4, 1), True),
        ((4, 257), (4, 2), True),
        ((4, 255), (4,), False),
        ((4, 3, 100), (4, 2), True),
        ((4, 3, 8, 32), (4, 3, 1), True),
    ],
    ids=str,
)
def test_shapes_of_scales(shape: Any, scales: Any, apart: bool) -> None:
    assert scales_shape(shape, 256) == scales
    assert rows_are_apart(shape, 256) is apart
    found = jax.eval_shape(functools.partial(Dynamic().encode, signed=False), jnp.zeros(shape))
    assert found.scales.shape == scales
    assert found.codes.shape == shape


@BOTH
@SIGNS
@pytest.mark.parametrize("shape", [(3, 256), (3, 300), (3, 5, 70)], ids=str)
def test_rows_are_coded_one_by_one_alike(coder: Codec, signed: bool, shape: Any) -> None:
    assert rows_are_apart(shape, coder.block)
    value = numbers(2, shape, signed)
    whole = stored(value, coder, signed)
    for i in range(3):
        row = stored(value[i : i + 1], coder, signed)
        part = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], whole)
        chex.assert_trees_all_equal(row, part)
        chex.assert_trees_all_equal(loaded(row, coder), loaded(whole, coder)[i : i + 1])


# ---------------------------------------------------------------- dtypes, transformations


@BOTH
@SIGNS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_come_and_go(coder: Codec, signed: bool, dtype: str) -> None:
    value = jnp.asarray(numbers(3, (2, 256), signed), dtype)
    coded = stored(value, coder, signed)
    chex.assert_trees_all_equal(coded, stored(value.astype(jnp.float32), coder, signed))
    assert coded.scales.dtype == jnp.float32
    found = loaded(coded, coder, dtype)
    assert found.dtype == dtype
    chex.assert_trees_all_equal(found, loaded(coded, coder).astype(dtype))


@BOTH
@SIGNS
@pytest.mark.usefixtures("strict")
def test_under_vmap_as_without(coder: Codec, signed: bool) -> None:
    value = jnp.asarray(numbers(4, (3, 2, 256), signed))
    encode = functools.partial(coder.encode, signed=signed)
    coded = jax.jit(encode)(value)
    chex.assert_trees_all_equal(coded, jax.jit(jax.vmap(encode))(value))
    decode = functools.partial(coder.decode, dtype=jnp.float32)
    chex.assert_trees_all_close(jax.jit(decode)(coded), jax.jit(jax.vmap(decode))(coded), rtol=1e-6)


@BOTH
def test_without_jit_as_with_it(coder: Codec) -> None:
    value = jnp.asarray(numbers(4, (2, 256), True))
    coded = coder.encode(value, signed=True)
    chex.assert_trees_all_equal(coded, stored(value, coder, True))
    found = coder.decode(coded, jnp.float32)
    chex.assert_trees_all_close(found, loaded(coded, coder), rtol=1e-6)


def held(fn: Any, *args: Any, **options: Any) -> int:
    return jaxmem.memory_report(fn, *args, target="h100-80g", **options).temp_bytes


@BOTH
@SIGNS
def test_coding_holds_nothing_of_the_size_of_the_array(coder: Codec, signed: bool) -> None:
    encode = functools.partial(coder.encode, signed=signed)
    value = jax.ShapeDtypeStruct((4, 2048, 512), jnp.float32)
    small = 0.01 * 4 * value.size
    assert held(lambda value: coder.encode(value, signed=signed), value) <= small
    coded = jax.eval_shape(encode, value)
    assert held(lambda coded: coder.decode(coded, jnp.float32), coded) <= small


@SIGNS
def test_companding_updates_in_place(signed: bool) -> None:
    """With `Dynamic`, XLA keeps what is decoded in float32: the array goes there by rows."""
    coder = Companding()

    def step(coded: Coded, gradient: jax.Array) -> Coded:
        value = coder.decode(coded, jnp.float32)
        return coder.encode(0.9 * value + 0.1 * gradient, signed=signed)

    value = jax.ShapeDtypeStruct((4, 2048, 512), jnp.float32)
    coded = jax.eval_shape(functools.partial(coder.encode, signed=signed), value)
    assert held(step, coded, value, donate_argnums=0) <= 0.04 * 4 * value.size


# ---------------------------------------------------------------- choice


def test_codecs_are_values() -> None:
    assert codec("dynamic") == Dynamic(256)
    assert hash(codec("companding", 64)) == hash(Companding(64))
    own = Companding(16)
    assert codec(own) is own
    assert isinstance(own, Codec)
    for coder in (Dynamic(64), Companding()):
        ones = jnp.ones((8, coder.block))
        coded = jax.eval_shape(functools.partial(coder.encode, signed=True), ones)
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in coded)
        assert total == coder.bytes_per_number * coded.codes.size


def test_errors_say_what_to_pass() -> None:
    with pytest.raises(ValueError, match="no codec 'dinamic'; pass 'dynamic' or 'companding', or"):
        codec("dinamic")
    for wrong in (8, Dynamic, None):
        with pytest.raises(TypeError, match="by its name or as a value, got .* pass 'dynamic' or"):
            codec(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="block=64 goes with the name of a codec"):
        codec(Dynamic(), 64)
    with pytest.raises(TypeError, match="Dynamic: block must be an integer, got 2.5 of type float"):
        Dynamic(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Companding: block must be at least 1, got 0"):
        codec("companding", 0)
    with pytest.raises(TypeError, match="Dynamic.encode takes .* floating-point .* int32; leave"):
        Dynamic().encode(jnp.arange(3), signed=True)


def test_codes_of_another_codec_are_refused() -> None:
    coded = stored(jnp.ones((2, 512)), Companding(), True)
    for coder in (Companding(64), Dynamic()):
        with pytest.raises(ValueError, match="cannot decode int8 codes of shape .2, 512. with"):
            coder.decode(coded, jnp.float32)
    with pytest.raises(ValueError, match="cannot decode int32 codes .* int8 or uint8 codes"):
        Companding().decode(coded._replace(codes=coded.codes.astype(jnp.int32)), jnp.float32)
