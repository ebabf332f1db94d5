"""What reports say that memory is for, next to what is derived by hand."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.report.report import Places

GPU, TPU = "h100-80g", "v5e-16g"
LAYERS, WIDTH, INNER, BATCH = 8, 256, 1024, 2048
STACK = LAYERS * 2 * WIDTH * INNER * 4
HEAD = WIDTH * 16 * 4
CARRY, VALUE = BATCH * WIDTH * 4, BATCH * INNER * 4
OPTIMIZER = optax.adam(1e-3)


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {
    "head": spec(WIDTH, 16),
    "layers": {"up": spec(LAYERS, WIDTH, INNER), "down": spec(LAYERS, INNER, WIDTH)},
}
STATE = jax.eval_shape(OPTIMIZER.init, PARAMS)
X = spec(BATCH, WIDTH)


def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
    return h + jnp.tanh(h @ w["up"]) @ w["down"], None


def model(params: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(layer, x, params["layers"])[0]


def unrolled(params: Any, x: jax.Array) -> jax.Array:
    for k in range(2):
        x, _ = layer(x, jax.tree.map(lambda leaf, k=k: leaf[k], params["layers"]))
    return x


def loss_of(policy: str | None, model: Any = model) -> Any:
    decorated = model if policy is None else jaxmem.remat(model, policy)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return ((decorated(params, x) @ params["head"]) ** 2).mean()

    return loss


def step_of(loss: Any) -> Any:
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x)
        updates, after = OPTIMIZER.update(gradient, opt_state, params)
        return value, optax.apply_updates(params, updates), after

    return step


def report(step: Any, *args: Any, target: str = GPU, **options: Any) -> jaxmem.MemoryReport:
    found = jaxmem.memory_report(step, *args, target=target, suggest=False, **options)
    check(found)
    return found


def check(found: jaxmem.MemoryReport) -> None:
    """The parts are the whole, in each place."""
    places = list(found.parts.values())
    assert sum(p.device for p in places) == found.required_bytes
    assert sum(p.host for p in places) == found.host_bytes
    assert sum(p.on_chip for p in places) == found.on_chip_bytes
    assert all(min(p) >= 0 for p in places)


def parts(step: Any, *args: Any, **options: Any) -> dict[str, Places]:
    return report(step, *args, donate_argnums=(0, 1), **options).parts


def everywhere(part: Places) -> int:
    return part.device + part.on_chip


# ---------------------------------------------------------------- by hand

# What the backward pass reads of every layer, and after them the carry and the prediction.
KEPT = {
    # The carry, tanh and its derivative's factor, each of all layers.
    None: LAYERS * (CARRY + 2 * VALUE) + CARRY + BATCH * 16 * 4,
    # The carries; the last one has been read when the layers begin.
    "full": LAYERS * CARRY,
    # The carries and the products.
    "dots": LAYERS * (CARRY + VALUE),
}


@pytest.mark.parametrize("policy", KEPT)
def test_saved_values_are_those_of_the_policy(policy: str | None) -> None:
    found = parts(step_of(loss_of(policy)), PARAMS, STATE, X)
    # The last carry and the prediction may be live with the stacks or not.
    assert (
        0
        <= found["saved"].device - LAYERS * (KEPT[policy] // LAYERS // CARRY * CARRY)
        <= (CARRY + BATCH * 16 * 4)
    )
    for kind in ("parameters", "state/mu", "state/nu"):
        assert found[kind] == Places(device=STACK + HEAD)
    assert found["state/count"] == Places(device=4)
    assert found["arguments"] == Places(device=CARRY)


@pytest.mark.parametrize("policy", KEPT)
def test_an_ordinary_step_holds_the_gradient_of_all_layers(policy: str | None) -> None:
    found = parts(step_of(loss_of(policy)), PARAMS, STATE, X)
    # The head's is small, and may be computed later.
    assert STACK <= found["gradient"].device <= STACK + HEAD


@pytest.mark.parametrize("policy", [None, "full", "sqrt"])
def test_an_update_in_the_backward_pass_holds_that_of_one_layer(policy: str | None) -> None:
    step = jaxmem.value_and_update(loss_of(policy), OPTIMIZER)
    found = parts(step, PARAMS, STATE, X)
    gradient = found.get("gradient", Places())
    assert gradient.device <= STACK / LAYERS + HEAD
    ordinary = parts(step_of(loss_of(policy)), PARAMS, STATE, X)
    assert found["saved"].device == ordinary["saved"].device
    assert found["parameters"] == ordinary["parameters"]


def test_the_gradient_of_one_layer_is_told() -> None:
    # Too large for the compiler to compute it in partial sums.
    width, inner = 2048, 8192
    params = {
        "head": spec(width, 16),
        "layers": {"up": spec(LAYERS, width, inner), "down": spec(LAYERS, inner, width)},
    }
    state = jax.eval_shape(OPTIMIZER.init, params)
    step = jaxmem.value_and_update(loss_of("full"), OPTIMIZER)
    found = parts(step, params, state, spec(1024, width))
    # One of its two products is updated before the other is computed.
    assert found["gradient"].device in (width * inner * 4, 2 * width * inner * 4)


def test_carries_that_are_offloaded_are_on_the_host() -> None:
    found = parts(step_of(loss_of("offload")), PARAMS, STATE, X)
    assert found["saved"].host == LAYERS * CARRY
    assert found["saved"].device <= CARRY


def test_every_second_carry_is_half_of_them() -> None:
    policy = jaxmem.policies.sqrt(segments=LAYERS // 2)
    decorated = jaxmem.remat(model, policy)
    found = parts(step_of(loss_of(None, decorated)), PARAMS, STATE, X)
    assert LAYERS // 2 * CARRY <= found["saved"].device <= (LAYERS // 2 + 1) * CARRY
    assert found["recomputed"].device >= VALUE


def test_values_of_unrolled_layers_are_saved_ones() -> None:
    found = parts(step_of(loss_of(None, unrolled)), PARAMS, STATE, X)
    assert 2 * VALUE <= found["saved"].device <= 2 * VALUE + 3 * CARRY


@pytest.mark.slow  # another target
@pytest.mark.parametrize("policy", KEPT)
def test_the_same_on_a_tpu(policy: str | None) -> None:
    found = parts(step_of(loss_of(policy)), PARAMS, STATE, X, target=TPU)
    # Some of it is on the chip, and what only products read is stored in half the bytes.
    assert found["parameters"] == found["state/mu"]
    assert 0.9 * STACK / 2 <= everywhere(found["gradient"]) <= 1.3 * STACK
    assert KEPT[policy] / 2 <= everywhere(found["saved"]) <= KEPT[policy]


# ---------------------------------------------------------------- other programs


def test_a_gradient_in_the_place_of_a_result_is_told() -> None:
    found = report(jax.value_and_grad(loss_of("full")), PARAMS, X).parts
    assert found["gradient"].device >= STACK
    assert found.get("results", Places()).device < STACK
    assert found["saved"].device >= LAYERS * CARRY


def test_accumulated_gradients_are_gradients() -> None:
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, gradient = jaxmem.value_and_grad(loss_of(None), microbatches=4)(params, x)
        updates, after = OPTIMIZER.update(gradient, opt_state, params)
        return value, optax.apply_updates(params, updates), after

    found = parts(step, PARAMS, STATE, X)
    # One layer's is added at a time.
    assert STACK <= found["gradient"].device <= STACK * (1 + 1 / LAYERS) + HEAD


def test_what_has_the_form_of_an_activation_is_not_claimed() -> None:
    # A product's gradient and a layer's cotangent are alike here: batch and width are.
    alike = spec(WIDTH, WIDTH)
    found = parts(step_of(loss_of(None, unrolled)), PARAMS, STATE, alike)
    assert "gradient" not in found
    # Of stacks that the backward pass writes there is no doubt.
    found = parts(step_of(loss_of(None)), PARAMS, STATE, alike)
    assert found["gradient"].device >= STACK


def test_merged_axes_of_an_activation_are_not_claimed() -> None:
    # Of a table of as many rows as there are tokens, 8 × 256.
    params = {**PARAMS, "table": spec(BATCH, WIDTH)}
    state = jax.eval_shape(OPTIMIZER.init, params)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = x + params["table"].reshape(x.shape)
        h, _ = jax.lax.scan(layer, h, params["layers"])
        return ((h @ params["head"]) ** 2).mean()

    tokens = spec(8, BATCH // 8, WIDTH)
    found = parts(step_of(loss), params, state, tokens)
    assert STACK <= found["gradient"].device < STACK + CARRY


def test_a_program_without_a_gradient_has_arguments_results_and_a_rest() -> None:
    found = report(lambda x: jnp.tanh(x @ x.T), X)
    assert set(found.parts) <= {"arguments", "results", "rest"}
    assert found.parts["arguments"].device == CARRY
    assert "what it is for" not in str(found)


def test_a_function_of_parameters_alone_saves_nothing() -> None:
    found = report(lambda params, x: model(params, x), PARAMS, X).parts
    assert "saved" not in found
    assert "gradient" not in found


def test_shares_of_several_devices() -> None:
    eight = jaxmem.target(GPU, devices=8)
    mesh = eight.mesh({"data": 8})
    sharding = jax.sharding.NamedSharding

    def on(leaf: jax.ShapeDtypeStruct, *axes: str | None) -> jax.ShapeDtypeStruct:
        placed = sharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    whole = [jax.tree.map(on, tree) for tree in (PARAMS, STATE)]
    x = on(spec(8 * BATCH, WIDTH), "data")
    found = jaxmem.memory_report(
        step_of(loss_of("full")), *whole, x, target=eight, suggest=False, donate_argnums=(0, 1)
    )
    check(found)
    assert found.parts["saved"].device >= LAYERS * CARRY
    assert found.parts["gradient"].device >= STACK


def test_a_state_on_the_host_is_counted_on_each_device_and_only_if_it_is_read() -> None:
    eight = jaxmem.target(GPU, devices=8)
    mesh = eight.mesh({"data": 8})

    def on(leaf: jax.ShapeDtypeStruct, kind: str | None) -> jax.ShapeDtypeStruct:
        axes = jax.sharding.PartitionSpec(*[None] * (leaf.ndim - 1), "data")
        placed = jax.sharding.NamedSharding(mesh, axes, memory_kind=kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    def step(x: jax.Array, momentum: jax.Array) -> Any:
        after = 0.9 * jax.device_put(momentum, jax.memory.Space.Device) + x
        return x + after, jax.device_put(after, jax.memory.Space.Host)

    x, momentum = on(spec(BATCH, WIDTH), None), on(spec(BATCH, WIDTH), "pinned_host")
    options: dict[str, Any] = {"target": eight, "suggest": False, "optimizer_state": "momentum"}
    found = jaxmem.memory_report(step, x, momentum, donate_argnums=(0, 1), **options)
    assert found.parts["state/momentum"] == Places(host=CARRY // 8)
    idle = jaxmem.memory_report(lambda x, momentum: x + 1, x, momentum, **options)
    assert "state/momentum" not in idle.parts


# ---------------------------------------------------------------- named by the caller


def own_step(weights: Any, mine: Any, x: jax.Array) -> Any:
    gradient = jax.grad(loss_of("full"))(weights, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, mine["momentum"], gradient)
    after = {"momentum": momentum, "count": mine["count"] + 1}
    return jax.tree.map(lambda w, m: w - m, weights, momentum), after


OWN = {"momentum": PARAMS, "count": spec(dtype="int32")}


def test_a_state_that_is_no_named_tuple_is_named() -> None:
    untold = parts(own_step, PARAMS, OWN, X)
    assert not {"parameters", "gradient", "state/momentum"} & set(untold)
    found = parts(own_step, PARAMS, OWN, X, optimizer_state=1)
    assert found["state/momentum"] == found["parameters"] == Places(device=STACK + HEAD)
    assert found["state/count"] == Places(device=4)
    assert found["gradient"].device >= STACK
    by_path = parts(own_step, PARAMS, OWN, X, optimizer_state="mine", parameters="weights")
    assert by_path == found


def test_a_job_names_its_state_and_its_parameters() -> None:
    job = jaxmem.Job(
        own_step, (PARAMS, OWN, X), donate_argnums=(0, 1), optimizer_state=-2, parameters=0
    )
    assert (job.optimizer_state, job.parameters) == ((1,), (0,))
    found = job.report(GPU, suggest=False)
    assert found.state["momentum"] == (STACK + HEAD, 0)
    assert found.parts["parameters"].device == STACK + HEAD
    text = str(found)
    assert "optimizer state: momentum" in text
    with pytest.raises(ValueError, match="Job: optimizer_state=3, but args has 3 entries, 0 to 2"):
        jaxmem.Job(own_step, (PARAMS, OWN, X), optimizer_state=3)
    with pytest.raises(TypeError, match="Job: parameters takes positions of args, whole numbers"):
        jaxmem.Job(own_step, (PARAMS, OWN, X), parameters=1.5)  # type: ignore[arg-type]


def test_a_path_of_no_argument_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="optimizer_state='opt' is no array among the arguments, which are weights, mine, x; "
        "give the position of one, or a path as the report prints it, such as 'state/mu'",
    ):
        report(own_step, PARAMS, OWN, X, optimizer_state="opt")


# ---------------------------------------------------------------- in JSON and on a page


def test_parts_are_in_json_and_older_files_are_read() -> None:
    found = report(step_of(loss_of("full")), PARAMS, STATE, X, donate_argnums=(0, 1))
    again = jaxmem.MemoryReport.from_json(found.to_json())
    assert again.parts == found.parts
    data = json.loads(found.to_json())
    assert data["parts"]["state/mu"] == {
        "device": STACK + HEAD,
        "on_chip": 0,
        "host": 0,
        "disk": 0,
    }
    del data["parts"]
    for buffer in data["buffers"]:
        del buffer["role"], buffer["is_stack"]
    older = jaxmem.MemoryReport.from_json(json.dumps(data))
    assert older.parts == {}
    assert "optimizer state" in str(older)


def test_the_lint_of_a_large_state_counts_the_gradient() -> None:
    # Layers of 4096 × 16384, 48 of them: 24 GiB of parameters.
    params = {
        "head": spec(4096, 16),
        "layers": {"up": spec(48, 4096, 16384), "down": spec(48, 16384, 4096)},
    }
    state = jax.eval_shape(OPTIMIZER.init, params)
    found = report(step_of(loss_of("full")), params, state, spec(4096, 4096), donate_argnums=(0, 1))
    text = {lint.kind: str(lint) for lint in found.lints}["large-state"]
    assert "quantize_state(optimizer) saves 36.0 GiB" in text
    assert "offload_state(optimizer) up to 48.0 GiB, which go to the host" in text
    assert "value_and_update(loss, optimizer) saves 23.5 GiB of gradient" in text


def test_a_difference_explains_what_a_policy_saves() -> None:
    kept, recomputed = (
        report(step_of(loss_of(policy)), PARAMS, STATE, X, donate_argnums=(0, 1))
        for policy in (None, "full")
    )
    less = recomputed - kept
    assert less.parts["saved"].device <= -LAYERS * 2 * VALUE
    assert "parameters" not in less.parts
    assert sum(part.device for part in less.parts.values()) == less.required_bytes
    text = str(less)
    assert "what it is for, at the peak" in text
    assert "saved values" in text
    assert json.loads(less.to_json())["parts"]["saved"]["device"] == less.parts["saved"].device


def test_a_page_shows_places_only_if_anything_is_in_them() -> None:
    here = report(step_of(loss_of("full")), PARAMS, STATE, X, donate_argnums=(0, 1))
    table = str(here).partition("what it is for, at the peak")[2].partition("\n\n")[0]
    assert "host" not in table
    assert "disk" not in table
    there = report(step_of(loss_of("offload")), PARAMS, STATE, X, donate_argnums=(0, 1))
    lines = str(there).partition("what it is for, at the peak")[2].splitlines()
    assert lines[1].split() == ["device", "host"]
    assert next(line for line in lines if "saved" in line).split()[-2:] == ["16.0", "MiB"]
    assert ">saved values<" in there._repr_html_()
