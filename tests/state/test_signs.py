"""Signs in place of numbers: packed, exchanged, and what they get wrong is kept."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.menagerie import exact_jit
from helpers.one_bit import Arrays, mesh_of, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxmem.state import signs


@functools.cache
def exchanging(devices: int, feedback: bool, check_vma: bool = False) -> Any:
    """The exchange as all devices run it, from arrays with a leading axis of devices."""

    def one(arrays: Any, sent: Any, owned: Any, counted: Any) -> Any:
        x, mine, held = jax.tree.map(lambda leaf: leaf[0], (arrays, sent, owned))
        due = jax.tree.map(jnp.add, x, mine)
        found = signs.exchange(due, held, counted, "data", feedback=feedback)
        errors = [
            signs.sent_error(one, found.sent[k], found.scales[k], counted[k])
            for k, one in enumerate(due)
        ]
        errors, owned = jax.tree.map(lambda leaf: leaf[None], (errors, found.owned_errors))
        return found.averages, errors, owned, found.finite

    split, whole = P("data"), P()
    return exact_jit(
        jax.shard_map(
            one, mesh=mesh_of(devices), in_specs=(split, split, split, whole),
            out_specs=(whole, split, split, whole), check_vma=check_vma,
        )
    )  # fmt: skip


def drawn(
    seed: int, devices: int, shapes: Sequence[tuple[int, ...]], share: float
) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """Arrays, errors of both kinds, and which numbers count."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    counted = [random.random(shape) < share for shape in shapes]
    arrays = [normal(devices, *shape) for shape in shapes]
    sent = [0.3 * np.where(mask, normal(devices, *mask.shape), 0) for mask in counted]
    owned = []
    for mask in counted:
        part = signs.part_size(mask.size, devices)
        is_real = np.pad(mask.ravel(), (0, devices * part - mask.size)).reshape(devices, part)
        owned.append(0.3 * np.where(is_real, normal(devices, part), 0).astype(np.float32))
    return arrays, sent, owned, counted


# ---------------------------------------------------------------- packing


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 3))
def test_signs_are_packed_eight_to_a_byte_and_come_back(bits: list[bool], rows: int) -> None:
    whole = np.resize(np.asarray(bits), (rows, 8 * -(-len(bits) // 8)))
    packed = signs.pack(jnp.asarray(whole))
    assert (packed.dtype, packed.shape) == (jnp.uint8, (rows, whole.shape[1] // 8))
    np.testing.assert_array_equal(signs.unpack(packed), whole)
    by_numpy = np.packbits(whole.reshape(rows, 8, -1), axis=1, bitorder="little")[:, 0]
    np.testing.assert_array_equal(packed, by_numpy)


@given(st.integers(0, 10**6), st.integers(2, 512))
def test_parts_are_whole_bytes_hold_all_and_pad_little(numbers: int, devices: int) -> None:
    part = signs.part_size(numbers, devices)
    assert part % 8 == 0
    assert 0 <= devices * part - numbers < 8 * devices


# ---------------------------------------------------------------- exchange

SHAPES = st.lists(
    st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=3
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 4, 8]), SHAPES,
    st.sampled_from([1.0, 1.0, 0.6, 0.0]),
)  # fmt: skip
def test_an_exchange_is_that_of_the_paper(
    seed: int, devices: int, shapes: list[tuple[int, ...]], share: float
) -> None:
    case = drawn(seed, devices, shapes, share)
    averages, sent, owned, finite = exchanging(devices, True)(*case)
    assert finite
    for found, expected in zip((averages, sent, owned), reference(*case), strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    # Nothing is lost: what is not in the average is in the errors, and is sent later.
    arrays, sent_before, owned_before, counted = case
    for k, mask in enumerate(counted):
        own = [np.asarray(part[k]).ravel()[: mask.size] for part in (owned_before, owned)]
        due = np.where(mask, (arrays[k] + sent_before[k]).mean(0), 0).ravel() + own[0]
        went = np.ravel(averages[k]) + np.asarray(sent[k]).mean(0).ravel() + own[1]
        np.testing.assert_allclose(went, due, rtol=0, atol=2e-6)


def test_without_feedback_owned_errors_are_not_added() -> None:
    arrays, sent, owned, counted = drawn(0, 4, [(3, 7)], 1.0)
    without = exchanging(4, False)(arrays, sent, owned, counted)
    zeros = [np.zeros_like(error) for error in owned]
    expected = exchanging(4, True)(arrays, sent, zeros, counted)
    np.testing.assert_array_equal(without[0], expected[0])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_all_devices_know_of_a_number_that_is_not_finite(wrong: float) -> None:
    case = drawn(0, 4, [(5,), (3, 40)], 0.9)
    case[3][1][2, 7] = True
    case[0][1][3, 2, 7] = wrong
    assert not exchanging(4, True)(*case)[-1]
    case[3][1][2, 7] = False  # which does not count
    assert exchanging(4, True)(*case)[-1]


def test_what_comes_back_is_known_to_be_the_same_on_all_devices() -> None:
    case = drawn(1, 4, [(3, 40)], 1.0)
    for one, other in zip(
        jax.tree.leaves(exchanging(4, True, True)(*case)),
        jax.tree.leaves(exchanging(4, True, False)(*case)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
