"""What is kept of a function over a mesh is told as one device has it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def spec(shape: tuple[int, ...], *parts: Any) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(MESH, PartitionSpec(*parts))
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)


def test_split_and_whole_values_have_the_bytes_of_one_device() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return jnp.sin(jnp.sin(x @ p["up"]) @ p["down"]), None

        return jax.lax.scan(layer, x, params)[0].sum()

    params = {
        "up": spec((5, 32, 64), None, None, "model"),
        "down": spec((5, 64, 32), None, "model"),
    }
    kept = jaxmem.saved_residuals(loss, params, spec((16, 32), "data"))
    shapes = {row.shape: row.bytes for row in kept if row.kind == "computed" and row.count == 5}
    assert shapes[8, 16] == 5 * 8 * 16 * 4  # 64 columns over 4, 16 rows over 2
    assert shapes[8, 32] == 5 * 8 * 32 * 4
    assert set(shapes) <= {(8, 16), (8, 32)}
