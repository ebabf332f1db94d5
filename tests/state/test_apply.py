"""`apply_gradients`: the step of optax, of parameters and gradients that may be on the host."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.updating import PARAMS, TOKENS, assert_alike, language_loss, ordinary
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem.state import rows

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

pytestmark = pytest.mark.filterwarnings("ignore::jaxmem.OffloadWarning")  # of a CPU


def moved(tree: Any, space: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(jnp.copy(leaf), space), tree)


def kinds(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "plateau": optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("inner", OPTIMIZERS)
def test_steps_are_those_of_optax(inner: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHUNK", 8)
    plain = OPTIMIZERS[inner]
    optimizer = jaxmem.offload_state(plain, min_size=16)
    loss = jaxmem.remat_sqrt(language_loss)
    space = HOST if where == "host" else DEVICE

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        more = {"value": value} if inner == "plateau" else {}
        return value, *jaxmem.apply_gradients(optimizer, gradients, state, params, **more)

    ours = jax.jit(step, donate_argnums=(0, 1))
    theirs = jax.jit(ordinary(language_loss, optax.with_extra_args_support(plain)))
    params, state = moved(PARAMS, space), optimizer.init(PARAMS)
    expected, held = PARAMS, plain.init(PARAMS)
    for _ in range(3):
        value, params, state = ours(params, state, TOKENS)
        there, expected, held = theirs(expected, held, TOKENS)
        assert abs(float(value) - float(there)) < 1e-6
    assert kinds(params) == {"pinned_host" if where == "host" else "device"}
    assert_alike(moved(params, DEVICE), expected)
    assert_alike(moved(state, DEVICE), held)


def test_gradients_have_the_form_of_the_parameters() -> None:
    optimizer = optax.sgd(0.1)
    with pytest.raises(ValueError, match="pass gradients of these parameters"):
        jaxmem.apply_gradients(optimizer, {"w": 1.0}, optimizer.init(PARAMS), PARAMS)


# ---------------------------------------------------------------- memory

MESH = jax.make_mesh(
    (1,), ("x",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,)
)
ON_HOST = NamedSharding(MESH, PartitionSpec(), memory_kind="pinned_host")
WIDTH, INNER = 1024, 4096


@jaxmem.remat_full
def large_loss(params: Any, h: jax.Array) -> jax.Array:
    def layer(h: jax.Array, p: Any) -> Any:
        return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None

    return (jax.lax.scan(layer, h, params)[0] ** 2).mean()


def required(layers: int, target: str) -> int:
    """Bytes on the device of a whole step, all of the training state on the host."""
    shapes = {"up": (layers, WIDTH, INNER), "down": (layers, INNER, WIDTH)}
    optimizer = jaxmem.offload_state(optax.adamw(1e-3))
    plain = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}

    def on_host(leaf: Any) -> Any:
        where = ON_HOST if leaf.ndim else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    params = jax.tree.map(on_host, plain)
    state = jax.tree.map(on_host, jax.eval_shape(optimizer.init, plain))

    def step(params: Any, state: Any, h: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(large_loss)(params, h)
        return value, *jaxmem.apply_gradients(optimizer, gradients, state, params)

    h = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    found = jaxmem.memory_report(
        step, params, state, h, target=target, donate_argnums=(0, 1), suggest=False
    )
    return found.required_bytes


@pytest.mark.parametrize("target", ["h100-80g", pytest.param("v5e-16g", marks=pytest.mark.slow)])
def test_a_step_with_all_on_the_host_does_not_grow_with_depth(target: str) -> None:
    once, twice = (required(layers, target) for layers in (8, 16))
    layer = 4 * 2 * WIDTH * INNER
    assert once < 5 * layer
    assert twice - once < 2**20
