"""Each lint of shardings on a program to which it applies, and none on well-sharded ones."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.xla_flags import quick
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._util.text import size

LAYERS, WIDTH, HIDDEN, BATCH = 8, 256, 1024, 64
STACK = LAYERS * WIDTH * HIDDEN * 4  # bytes
TARGETS = ("h100-80g", "v5e-16g")
ADAM = optax.adam(1e-3)
KINDS = {"stack-gathered", "state-replicated", "collective-repeated"}


def mesh_of(target: str, **axes: int) -> Any:
    return jaxmem.target(target, devices=8).mesh(axes)


def spec(mesh: Any, shape: tuple[int, ...], *axes: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*axes)))


def params_of(mesh: Any, up: tuple[Any, ...] = (), down: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {
        "up": spec(mesh, (LAYERS, WIDTH, HIDDEN), *up),
        "down": spec(mesh, (LAYERS, HIDDEN, WIDTH), *down),
    }


def layer(h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return jnp.tanh(h @ w["up"]) @ w["down"] + h


def loss_of(layer: Any = layer, before: Any = lambda params: params) -> Any:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (jax.lax.scan(lambda h, w: (layer(h, w), None), x, before(params))[0] ** 2).mean()

    return loss


def state_of(params: Any, sharding: Any = None) -> Any:
    """The state of Adam, split as the parameters are, or by one sharding."""
    moments = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=sharding or p.sharding), params
    )
    adam, *rest = jax.eval_shape(ADAM.init, params)
    return (adam._replace(mu=moments, nu=moments), *rest)


def adam_step(loss: Any) -> Any:
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        gradients = jax.grad(loss)(params, x)
        updates, opt_state = ADAM.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def sgd_step(loss: Any) -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    return step


def lints(target: str, fn: Any, *args: Any, donate: Any = 0) -> dict[str, jaxmem.Lint]:
    report = jaxmem.memory_report(
        fn, *args, target=target, donate_argnums=donate, compiler_options=quick(target)
    )
    shown = " ".join(str(report).split())
    for lint in report.lints:
        assert " ".join(lint.remedy.split()) in shown
    return {lint.kind: lint for lint in report.lints if lint.kind in KINDS}


# Fully sharded, as it is done well: not the layers' axis.
SPLIT = {"up": (None, "fsdp"), "down": (None, None, "fsdp")}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("again", [False, True])
def test_a_well_sharded_step_has_none(target: str, again: bool):
    mesh = mesh_of(target, fsdp=8)
    params = params_of(mesh, **SPLIT)
    step = adam_step(loss_of(jax.checkpoint(layer) if again else layer))
    x = spec(mesh, (BATCH, WIDTH), "fsdp")
    assert lints(target, step, params, state_of(params), x, donate=(0, 1)) == {}


@pytest.mark.parametrize("target", TARGETS)
def test_tensor_parallelism_with_a_state_that_is_split_too_has_none(target: str):
    mesh = mesh_of(target, fsdp=2, tensor=4)
    params = params_of(mesh, (None, "fsdp", "tensor"), (None, "tensor", "fsdp"))
    x = spec(mesh, (BATCH, WIDTH), "fsdp")
    assert lints(target, adam_step(loss_of()), params, state_of(params), x, donate=(0, 1)) == {}


def test_one_device_has_none():
    params = jax.eval_shape(
        lambda: {
            "up": jnp.ones((LAYERS, WIDTH, HIDDEN)),
            "down": jnp.ones((LAYERS, HIDDEN, WIDTH)),
        }
    )
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    args = params, jax.eval_shape(ADAM.init, params), x
    assert lints("h100-80g", adam_step(loss_of()), *args, donate=(0, 1)) == {}


@pytest.mark.parametrize("target", TARGETS)
def test_a_stack_that_a_constraint_gathers(target: str):
    mesh = mesh_of(target, fsdp=8)
    whole = NamedSharding(mesh, P())

    def before(params: Any) -> Any:
        return jax.lax.with_sharding_constraint(params, whole)

    params, x = params_of(mesh, **SPLIT), spec(mesh, (BATCH, WIDTH), "fsdp")
    lint = lints(target, sgd_step(loss_of(before=before)), params, x)["stack-gathered"]
    assert "the whole stack params/" in lint.message
    assert "is gathered over fsdp outside of its loop (test_mesh_lints.py:" in lint.message
    # A TPU gathers what it multiplies: bfloat16.
    assert ("8.0 MiB" if target == "h100-80g" else "4.0 MiB") in lint.message
    assert STACK == 8 * 2**20
    assert "a sharding constraint on the stack" in lint.message
    assert "inside of the loop's body" in lint.remedy


@pytest.mark.parametrize("target", TARGETS)
def test_a_stack_whose_axis_of_layers_is_split(target: str):
    mesh = mesh_of(target, fsdp=8)
    params = params_of(mesh, ("fsdp",), ("fsdp",))
    x = spec(mesh, (BATCH, WIDTH), "fsdp")
    lint = lints(target, sgd_step(loss_of()), params, x)["stack-gathered"]
    # The partitioner gathers all layers for each of them, in the forward and in the backward pass.
    assert f"is gathered over fsdp in each of {2 * LAYERS} iterations (" in lint.message
    assert "since its axis of layers is split over fsdp" in lint.message
    assert "with None in the first place of its PartitionSpec" in lint.remedy


@pytest.mark.parametrize("target", TARGETS)
def test_a_whole_state_beside_split_parameters(target: str):
    mesh = mesh_of(target, fsdp=8)
    params, x = params_of(mesh, **SPLIT), spec(mesh, (BATCH, WIDTH), "fsdp")
    state = state_of(params, NamedSharding(mesh, P()))
    lint = lints(target, adam_step(loss_of()), params, state, x, donate=(0, 1))["state-replicated"]
    # Two moments of two stacks.
    assert lint.message.startswith("32.0 MiB of optimizer state on each device (opt_state/0/")
    assert "and 3 more) are the same on 8 devices" in lint.message
    assert "though its parameter is split over fsdp" in lint.message
    assert "as params/" in lint.remedy
    assert "out_shardings=" in lint.remedy
    assert lint.remedy.endswith("saves 28.0 MiB on each device")


def test_a_whole_state_in_data_parallelism():
    mesh = mesh_of("h100-80g", data=8)
    params, x = params_of(mesh), spec(mesh, (BATCH, WIDTH), "data")
    args = params, state_of(params), x
    lint = lints("h100-80g", adam_step(loss_of()), *args, donate=(0, 1))["state-replicated"]
    assert "are the same on 8 devices, which hold the same of the parameters" in lint.message
    assert "ZeRO's stage 1" in lint.remedy
    assert "saves 28.0 MiB" in lint.remedy
    # Split over the model's axis, it still is the same along the data's.
    mesh = mesh_of("h100-80g", data=2, model=4)
    params = params_of(mesh, (None, None, "model"), (None, "model"))
    args = params, state_of(params), spec(mesh, (BATCH, WIDTH), "data")
    lint = lints("h100-80g", adam_step(loss_of()), *args, donate=(0, 1))["state-replicated"]
    assert lint.message.startswith("8.0 MiB of optimizer state")
    assert "the same on 2 devices" in lint.message
    assert "saves 4.0 MiB" in lint.remedy


def test_a_state_of_which_no_dimension_can_be_split_has_none():
    mesh = mesh_of("h100-80g", data=8)
    params = {"w": spec(mesh, (3, 511, 1023))}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ w.T, None), x, params["w"])[0].mean()

    args = params, state_of(params), spec(mesh, (BATCH, 511), "data")
    assert lints("h100-80g", adam_step(loss), *args, donate=(0, 1)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_sum_that_recomputation_repeats(target: str):
    mesh = mesh_of(target, data=2, model=4)

    def whole(h: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data", None)))

    def two_blocks(h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        h = h + checkpoint_name(whole(jnp.tanh(h @ w["up"]) @ w["down"]), "first")
        return h + whole(jnp.sin(h @ w["up"]) @ w["down"])

    params = params_of(mesh, (None, None, "model"), (None, "model"))
    args = params, spec(mesh, (4096, WIDTH), "data")

    def found(policy: Any) -> dict[str, jaxmem.Lint]:
        return lints(target, sgd_step(jaxmem.remat(loss_of(two_blocks), policy)), *args)

    lint = found("full")["collective-repeated"]
    assert f"recomputation repeats {LAYERS} × all-reduce over model of " in lint.message
    assert "test_mesh_lints.py:" in lint.message
    # 3/4 of the activations, twice, in each of the layers.
    assert size(LAYERS * 2 * 3 * 2048 * WIDTH * 4 // 4) in lint.message
    assert "checkpoint_name" in lint.remedy
    # What the remedy says, done.
    assert found(jaxmem.policies.names(save="first")) == {}
    assert found("none") == {}


def test_a_gather_of_weights_that_a_second_forward_pass_repeats():
    mesh = mesh_of("h100-80g", fsdp=8)
    args = params_of(mesh, **SPLIT), spec(mesh, (BATCH, WIDTH), "fsdp")

    def found(policy: Any) -> dict[str, jaxmem.Lint]:
        return lints("h100-80g", sgd_step(jaxmem.remat(loss_of(), policy)), *args)

    lint = found("sqrt")["collective-repeated"]
    assert f"recomputation repeats {LAYERS} × all-gather over fsdp of params/up" in lint.message
    # Of each device's share of one stack seven others receive a copy.
    assert f"{size(STACK * 7 // 8)} of the " in lint.message
    assert "keep the product that reads params/up" in lint.remedy
    # The one forward pass of each layer shares the gather of the backward pass.
    assert found("full") == {}
