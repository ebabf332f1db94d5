"""Several stacks in one function: where the arrays are made that gradients are written into."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from helpers.budgeted import problem, question
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

import jaxmem
from jaxmem import policies


def recurrent(w: jax.Array, rows: jax.Array) -> jax.Array:
    """Along the sequence, from zeros; what it stacks is of the type of what it reads."""

    def turn(state: jax.Array, row: jax.Array) -> Any:
        state = checkpoint_name(jnp.tanh(row @ w[0]) + jnp.cos(state @ w[1]) * row, "state")
        return state, state

    return lax.scan(turn, jnp.zeros_like(rows[0]), rows)[1]


def model(ws: Any, rows: jax.Array) -> jax.Array:
    for w in ws:
        rows = rows + recurrent(w, rows)
    return jnp.square(rows).sum()


def arrays(stacks: int, length: int, batch: int, width: int) -> Any:
    keys = jax.random.split(jax.random.key(0), stacks)
    # Small enough that no rounding is amplified on the way.
    ws = [0.2 * jax.random.normal(key, (2, width, width)) * width**-0.5 for key in keys]
    return ws, jax.random.normal(jax.random.key(1), (length, batch, width))


POLICIES = {
    "full": policies.full(),
    "sqrt": policies.sqrt(),
    "revolve": policies.revolve(2),
    "names": policies.names("state"),
}


def spread(step: Any) -> Any:
    """Over two devices, each with a part of the batch."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    by_batch = PartitionSpec(None, "data")

    def of_one(ws: Any, rows: Any) -> Any:
        by_ws, by_rows = step(lax.pcast(ws, "data", to="varying"), rows)
        return lax.psum(by_ws, "data"), by_rows

    places = PartitionSpec(), by_batch
    return jax.shard_map(of_one, mesh=mesh, in_specs=places, out_specs=places)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("way", [lambda step: step, spread])
def test_gradients_through_several_stacks_are_as_without_a_policy(name: str, way: Any) -> None:
    args = arrays(3, 6, 4, 8)
    run = way(jax.grad(jaxmem.remat(model, POLICIES[name]), (0, 1)))
    wanted = jax.grad(model, (0, 1))(*args)
    chex.assert_trees_all_close(jax.jit(run)(*args), wanted, rtol=2e-5, atol=5e-4)


def test_gradients_of_rows_are_not_there_before_their_stack_is_reversed() -> None:
    """Compilers before jax 0.12's make those of all at once where nothing is in their way."""
    ws, rows = jax.eval_shape(lambda: arrays(5, 256, 64, 128))

    def step(ws: Any, rows: Any) -> Any:
        grads = jax.grad(jaxmem.remat_sqrt(model))(ws, rows)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)

    report = jaxmem.memory_report(step, ws, rows, target="h100-80g")
    # Of each stack its rows; of the last one what is made of them, and two gradients.
    assert report.temp_bytes < 8 * rows.size * rows.dtype.itemsize


def layers(h: jax.Array, ws: Any, memory: Any = None) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> Any:
        mixed = h if memory is None else h + jnp.cos(memory)
        return h + jnp.tanh(mixed @ w[0]) @ w[1], None

    return lax.scan(layer, h, ws)[0]


def test_gradients_of_parameters_are_predicted_where_they_are_made() -> None:
    """While the decoder is reversed, the encoder's gradients are not there yet."""
    weights = jax.ShapeDtypeStruct((6, 2, 512, 512), jnp.float32)
    params = {"encoder": weights, "decoder": weights}
    h = jax.ShapeDtypeStruct((512, 512), jnp.float32)

    def loss(params: Any, h: Any) -> jax.Array:
        memory = layers(h, params["encoder"])
        return jnp.square(layers(h, params["decoder"], memory)).sum()

    def step(params: Any, h: Any) -> Any:
        grads = jax.grad(jaxmem.remat_auto(loss))(params, h)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    found = problem(step, params, h, target="h100-80g", donate=(0,))
    ask = question(step, params, h, target="h100-80g", donate=(0,))
    stacks = [k for k in range(len(found.front)) if found.variant(k).scans == "stacks"]
    for place in (stacks[len(stacks) // 2], stacks[-1]):
        report = found.report(ask, place)
        assert found.predicted[place] == pytest.approx(report.required_bytes, rel=0.03)
