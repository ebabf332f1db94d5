"""Programs as one device of a mesh runs them: shapes, FLOPs, and what devices send each other."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem._jax import local_shape
from jaxmem.estimate.costs import costs
from jaxmem.parallel.messages import Message, per_device
from jaxmem.parallel.partition import partition

ROWS, WIDTH, WIDE = 16, 32, 64
MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def spec(shape: Sequence[int], *parts: Any, mesh: Any = MESH) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*parts))
    )


def on_one_device(fn: Any, *args: Any) -> Any:
    closed = jax.jit(fn).trace(*args).jaxpr
    found = partition(closed, [arg.sharding for arg in args])
    assert found is not None
    return found.closed


def messages(closed: Any) -> list[Message]:
    return [message for eqn in closed.jaxpr.eqns for message in per_device(eqn).messages]


def test_a_product_that_is_split_in_its_sum_is_reduced_over_the_devices() -> None:
    local = on_one_device(
        lambda x, up, down: jnp.tanh(x @ up) @ down,
        spec((ROWS, WIDTH), "data"),
        spec((WIDTH, WIDE), None, "model"),
        spec((WIDE, WIDTH), "model"),
    )
    shapes = [eqn.outvars[0].aval.shape for eqn in local.jaxpr.eqns]
    assert shapes == [(ROWS // 2, WIDE // 4), (ROWS // 2, WIDE // 4), (ROWS // 2, WIDTH)]
    (one,) = messages(local)
    assert one == Message("all-reduce", ROWS // 2 * WIDTH * 4, ("model",), 4)
    assert one.wire_bytes == 2 * one.bytes * 3 // 4
    assert costs(local).matmul_flops == 2 * 2 * ROWS * WIDTH * WIDE // 8


def test_what_a_composite_is_made_of_stays() -> None:
    """A function that nobody calls, and that the composite names."""
    cosine = jax.lax.composite(jnp.cos, name="example.cosine")
    local = on_one_device(lambda x: (jnp.sin(x), cosine(x)), spec((ROWS, WIDTH), "data"))
    assert local.out_avals[0].shape == (ROWS // 2, WIDTH)


def test_a_weight_that_is_split_like_the_batch_is_gathered() -> None:
    local = on_one_device(
        lambda x, w: x @ w, spec((ROWS, WIDTH), "data"), spec((WIDTH, WIDE), "data")
    )
    (one,) = messages(local)
    assert one == Message("all-gather", WIDTH * WIDE * 4, ("data",), 2, 1, (0,))
    assert one.wire_bytes == one.bytes // 2
    assert costs(local).matmul_flops == 2 * ROWS * WIDTH * WIDE // 2


def test_a_gradient_that_is_split_like_its_weight_is_reduce_scattered() -> None:
    def gradient(x: jax.Array, g: jax.Array) -> jax.Array:
        found = jnp.einsum("bi,bo->io", x, g)
        sharding = NamedSharding(MESH, PartitionSpec("data"))
        return jax.lax.with_sharding_constraint(found, sharding)

    local = on_one_device(gradient, spec((ROWS, WIDTH), "data"), spec((ROWS, WIDE), "data"))
    (one,) = messages(local)
    assert one == Message("reduce-scatter", WIDTH * WIDE * 4, ("data",), 2)
    assert costs(local).matmul_flops == 2 * ROWS * WIDTH * WIDE // 2


def test_what_a_constraint_moves_to_another_dimension_is_exchanged() -> None:
    def turned(x: jax.Array) -> jax.Array:
        sharding = NamedSharding(MESH, PartitionSpec(None, "model"))
        return jax.lax.with_sharding_constraint(jnp.sin(x), sharding)

    (one,) = messages(on_one_device(turned, spec((ROWS, WIDTH), "model")))
    assert (one.kind, one.axes) == ("all-to-all", ("model",))


def test_inside_of_a_loop_values_are_of_one_device_too() -> None:
    def stack(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    args = spec((ROWS, WIDTH), "data"), spec((5, WIDTH, WIDTH), None, None, "model")
    local = on_one_device(stack, *args)
    assert costs(local).matmul_flops == 5 * 2 * ROWS * WIDTH * WIDTH // 8


@pytest.mark.parametrize("kind", ["explicit", "manual"])
def test_of_other_kinds_of_axes(kind: str) -> None:
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    args = spec((ROWS, WIDTH), "data", mesh=mesh), spec((WIDTH, WIDE), None, "model", mesh=mesh)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    def mapped(x: jax.Array, w: jax.Array) -> jax.Array:
        specs = PartitionSpec("data"), PartitionSpec(None, "model")
        out = PartitionSpec("data", "model")
        return jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=out)(x, w)

    local = on_one_device({"explicit": product, "manual": mapped}[kind], *args)
    chex.assert_shape(local.out_avals[0], (ROWS // 2, WIDE // 4))


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=3),
    st.lists(st.sampled_from([(), ("data",), ("model",), ("data", "model")]), max_size=3),
)
def test_parts_hold_the_whole(shape: list[int], axes: list[tuple[str, ...]]) -> None:
    split = tuple(axes[d] if d < len(axes) else () for d in range(len(shape)))
    local = local_shape(shape, split, {"data": 2, "model": 4})
    counts = [{(): 1, ("data",): 2, ("model",): 4, ("data", "model"): 8}[one] for one in split]
    for size, part, count in zip(shape, local, counts, strict=True):
        assert part * count >= size > (part - 1) * count
