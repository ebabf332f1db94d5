"""State and parameters in the host's memory: the same numbers, and none of them on the device."""

from collections.abc import Callable
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


def kinds(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def moved(tree: Any, space: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(jnp.copy(leaf), space), tree)


INNER: dict[str, Any] = {
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "8 bits": jaxmem.quantize_state(optax.adam(1e-2), min_size=16, block=8),
}


@pytest.mark.parametrize("way", ["ordinary", "fused"])
@pytest.mark.parametrize("inner", INNER)
def test_the_numbers_are_those_of_the_optimizer_on_the_device(
    inner: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK", 8)
    optimizer = INNER[inner]
    offloaded = jaxmem.offload_state(optimizer, min_size=16)
    build: Callable[..., Any] = jaxmem.value_and_update if way == "fused" else ordinary
    ours = jax.jit(build(language_loss, offloaded), donate_argnums=(0, 1))
    theirs = jax.jit(build(language_loss, optimizer))
    params, state = moved(PARAMS, DEVICE), offloaded.init(PARAMS)
    expected, held = PARAMS, optimizer.init(PARAMS)
    for _ in range(3):
        value, params, state = ours(params, state, TOKENS)
        loss, expected, held = theirs(expected, held, TOKENS)
        assert float(jnp.abs(value - loss)) < 1e-5
    assert "pinned_host" in kinds(state)
    assert kinds(params) == {"device"}
    # Codes may be one apart where sums are rounded otherwise.
    assert_alike(params, expected, 1e-4 if inner == "8 bits" else 1e-6)
    if inner != "8 bits":
        assert_alike(moved(state, DEVICE), held)


@pytest.mark.parametrize("policy", ["none", "full", "sqrt", "revolve", "dots"])
def test_parameters_on_the_host_go_to_the_device_layer_by_layer(policy: str) -> None:
    # The loss is written as if they were there; embedding and state are on the host as well.
    optimizer = jaxmem.offload_state(optax.adamw(1e-2), min_size=16)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return jaxmem.remat(language_loss, policy)(params, tokens)

    ours = jax.jit(jaxmem.value_and_update(loss, optimizer), donate_argnums=(0, 1))
    theirs = jax.jit(ordinary(language_loss, optax.adamw(1e-2)))
    params, state = moved(PARAMS, HOST), optimizer.init(PARAMS)
    expected, held = PARAMS, optax.adamw(1e-2).init(PARAMS)
    for _ in range(3):
        value, params, state = ours(params, state, TOKENS)
        there, expected, held = theirs(expected, held, TOKENS)
        assert abs(float(value) - float(there)) < 1e-6
    assert kinds(params) == {"pinned_host"}
    assert_alike(moved(params, DEVICE), expected)
    assert_alike(moved(state, DEVICE), held)


def test_what_stays_on_the_device() -> None:
    state: Any = jaxmem.offload_state(
        optax.adam(1e-2), min_size=30, keep=lambda path: "nu" in path
    ).init(PARAMS)
    assert state[0].mu["layers"]["w"].sharding.memory_kind == "pinned_host"
    assert state[0].mu["layers"]["b"].sharding.memory_kind == "device"
    assert kinds(state[0].nu) == {"device"}


def test_parameters_on_the_host_with_microbatches() -> None:
    optimizer = jaxmem.offload_state(optax.adam(1e-2), min_size=16)
    ours = jax.jit(jaxmem.value_and_update(language_loss, optimizer, microbatches=2))
    theirs = jax.jit(jaxmem.value_and_update(language_loss, optax.adam(1e-2), microbatches=2))
    params, state = moved(PARAMS, HOST), optimizer.init(PARAMS)
    expected, held = PARAMS, optax.adam(1e-2).init(PARAMS)
    for _ in range(2):
        _, params, state = ours(params, state, TOKENS)
        _, expected, held = theirs(expected, held, TOKENS)
    assert kinds(params) == {"pinned_host"}
    assert_alike(moved(params, DEVICE), expected)


def test_a_cpu_says_that_it_does_nothing() -> None:
    with pytest.warns(jaxmem.OffloadWarning, match="device and host memory are one"):
        jaxmem.offload_state(optax.adam(1e-2)).init(PARAMS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((jnp.ones(3),), "takes an optax transformation"),
        ((optax.sgd(0.1),), "keep takes a function"),
    ],
)
def test_errors_say_what_to_pass(arguments: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        jaxmem.offload_state(*arguments, keep="nu")  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- memory

LAYERS, WIDTH, INNER_WIDTH, WORDS = 16, 1024, 4096, 512
MESH = jax.make_mesh(
    (1,), ("x",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,)
)
ON_HOST = NamedSharding(MESH, PartitionSpec(), memory_kind="pinned_host")


def shapes(layers: int, sharding: Any = None) -> Any:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    return {
        "embed": array(WORDS, WIDTH),
        "layers": {
            "down": array(layers, INNER_WIDTH, WIDTH),
            "up": array(layers, WIDTH, INNER_WIDTH),
        },
    }


@jaxmem.remat_full
def large_loss(params: Any, tokens: jax.Array) -> jax.Array:
    def layer(h: jax.Array, p: Any) -> Any:
        up, down = (p[name].astype(jnp.bfloat16) for name in ("up", "down"))
        return h + (jax.nn.gelu(h.astype(jnp.bfloat16) @ up) @ down).astype(h.dtype), None

    h, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    logits = h @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1)).mean()


def report(layers: int, target: str, params_on_host: bool) -> tuple[float, float]:
    """Required bytes on the device and bytes on the host, in those of the parameters."""
    params = shapes(layers)
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    optimizer = jaxmem.offload_state(optax.adam(1e-3))
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=ON_HOST if leaf.size >= 4096 else None
        ),
        jax.eval_shape(optimizer.init, params),
    )
    given = shapes(layers, ON_HOST) if params_on_host else params
    step = jaxmem.value_and_update(large_loss, optimizer)
    tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)  # of carries there is next to nothing
    found = jaxmem.memory_report(
        step, given, state, tokens, target=target, donate_argnums=(0, 1), suggest=False
    )
    device, host = found.state["mu"]
    assert device == 0
    assert host == whole
    return found.required_bytes / whole, found.host_bytes / whole


TARGETS = ["h100-80g", pytest.param("v5e-16g", marks=pytest.mark.slow)]


@pytest.mark.parametrize("target", TARGETS)
def test_the_host_holds_the_state_once_and_the_device_none_of_it(target: str) -> None:
    device, host = report(LAYERS, target, params_on_host=False)
    assert device < 1.35
    assert host < 2.05


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_with_all_on_the_host_the_device_does_not_grow_with_depth(target: str) -> None:
    (once, host), (twice, _) = (
        report(n, target, params_on_host=True) for n in (LAYERS, 2 * LAYERS)
    )
    assert once < 0.5
    assert host < 3.1
    assert 2 * twice < 1.05 * once
