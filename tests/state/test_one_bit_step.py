"""`jaxmem.one_bit_step`: what it computes, what it sends and holds, and how a run goes on."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers.menagerie import exact_jit
from helpers.one_bit import mesh_of
from helpers.updating import assert_alike, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.hlo.collectives import Collective, collectives
from jaxmem.hlo.text import parse

PARAMS = {"b": normal(0, 16), "w": normal(1, 40, 16)}
BATCH = {"x": normal(2, 24, 40), "y": normal(3, 24, 16)}
MAKERS: dict[str, Any] = {"adam": jaxmem.one_bit_adam, "lamb": jaxmem.one_bit_lamb}
BOTH = pytest.mark.parametrize("name", sorted(MAKERS))


def loss(params: Any, batch: Any) -> jax.Array:
    guess = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    return ((guess - batch["y"]) ** 2).mean()


def masked(params: Any, batch: Any) -> jaxmem.Weighted:
    guess = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    error = ((guess - batch["y"]) ** 2).sum(-1)
    return jaxmem.Weighted((batch["mask"] * error).sum(), batch["mask"].sum())


def batch(step: int) -> Any:
    return {"x": normal(10 + step, 24, 40), "y": normal(90 + step, 24, 16)}


def trained(step: Any, begun: Any, steps: range, compiled: Any = None) -> Any:
    """Parameters and state after these steps."""
    params, state = begun
    run = compiled or exact_jit(step)
    for k in steps:
        _, params, state = run(params, state, jax.device_put(batch(k), step.batch))
    return params, state


def step_of(name: str = "adam", devices: int = 4, warm_up: int = 3, **options: Any) -> Any:
    optimizer = MAKERS[name](1e-2, warmup_steps=warm_up)
    return jaxmem.one_bit_step(loss, optimizer, mesh=mesh_of(devices), **options)


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_warm_up_is_the_step_of_one_device(kind: AxisType) -> None:
    """Also for rows of unequal weight, in microbatches and under explicit axes."""
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    mask = np.float32(np.arange(24) % 7 < 2) * np.arange(24)
    data = BATCH | {"mask": jnp.asarray(mask)}
    optimizer = jaxmem.one_bit_adam(1e-2, warmup_steps=9, weight_decay=0.1)
    step = jaxmem.one_bit_step(masked, optimizer, mesh=mesh, microbatches=2)
    params, state = step.init(PARAMS)
    train = exact_jit(step)
    plain = optax.adamw(1e-2, weight_decay=0.1)
    theirs, held = PARAMS, plain.init(PARAMS)
    for _ in range(3):
        value, params, state = train(params, state, jax.device_put(data, step.batch))
        expected, gradient = jax.value_and_grad(lambda p: masked(p, data).mean)(theirs)
        updates, held = plain.update(gradient, held, theirs)
        theirs = optax.apply_updates(theirs, updates)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_alike(jax.tree.map(np.asarray, params), jax.tree.map(np.asarray, theirs), 1e-5)


def test_devices_draw_random_numbers_of_their_own_and_a_chain_sees_their_gradients() -> None:
    def noisy(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        return (w * jax.random.normal(key, w.shape)).mean() + 0 * x.mean()

    def note(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, jax.tree.map(lambda s, g: s + jax.lax.all_gather(g, "data"), state, updates)

    transformation: Any = optax.GradientTransformation
    seen = transformation(lambda params: {"w": jnp.zeros((4, *params["w"].shape))}, note)
    optimizer = optax.chain(seen, jaxmem.one_bit_adam(1e-2, warmup_steps=1))
    step = jaxmem.one_bit_step(
        lambda p, x, key: noisy(p["w"], x, key), optimizer, mesh=mesh_of(4), rng_argnums=-1
    )
    params, state = step.init({"w": jnp.ones(8)})
    key = jax.random.key(0)
    _, _, state = exact_jit(step)(params, state, jnp.ones((4, 2)), key)
    norms = np.asarray(state[0]["w"])
    assert len(np.unique(norms, axis=0)) == 4
    np.testing.assert_allclose(norms[0], jax.random.normal(key, (8,)) / 8, rtol=1e-5)


# ---------------------------------------------------------------- what is sent and held


def _phases(compiled: Any, devices: int) -> list[tuple[Collective, ...]]:
    """The collectives of the two phases, from the compiled program: those that send less first."""
    module = parse(compiled.as_text())
    found = []
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode == "conditional":
                for name in instruction.all_called():
                    branch = dataclasses.replace(module, entry=name)
                    found.append(collectives(branch, [("data", devices)]))
    return sorted((f for f in found if f), key=lambda f: sum(c.total_bytes for c in f))


@pytest.mark.parametrize("devices", [4, 8])
def test_signs_are_a_thirtieth_of_what_an_all_reduce_sends(devices: int) -> None:
    params = {"b": jnp.zeros(256), "w": jnp.zeros((256, 512)), "v": jnp.zeros((512, 40))}
    step = jaxmem.one_bit_step(
        lambda p, x: ((x @ p["w"] + p["b"].sum()) @ p["v"]).mean(),
        jaxmem.one_bit_adam(1e-2, warmup_steps=3),
        mesh=mesh_of(devices),
    )
    x = jax.device_put(jnp.ones((8, 256)), step.batch)
    compiled = jax.jit(step).lower(*step.init(params), x).compile()
    signs, whole = _phases(compiled, devices)
    assert sorted(c.kind for c in signs) == ["all-gather", "all-to-all"]
    sent, plain = (sum(c.total_bytes for c in part) for part in (signs, whole))
    scales = 2 * (devices - 1) * 4 * len(params)
    assert plain / (sent - scales) >= 30
    plan = step.explain(params)
    assert (sent, plain) == (plan.compressed_bytes, plan.warmup_bytes)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert plain == pytest.approx(8 * numbers * (devices - 1) / devices)


@BOTH
def test_the_state_on_a_device_is_what_is_said_and_reported(name: str) -> None:
    step = step_of(name)
    params, state = step.init(PARAMS)
    held: dict[str, int] = {}
    for field, value in state._asdict().items():
        shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(value)]
        held[field] = sum(shard.nbytes for shard in shards)
    assert step.explain(PARAMS).state_bytes == held
    numbers = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert held["worker_error"] == held["mu"] == held["nu"] == 4 * numbers
    assert held["server_error"] == 4 * (8 + 160)  # a quarter; of 16 numbers whole bytes of signs
    assert sum(held.values()) <= 4 * numbers * (3.25 + (name == "lamb")) + 100
    report = jaxmem.memory_report(step, params, state, jax.device_put(batch(0), step.batch))
    parts = {k.removeprefix("state/"): v.device for k, v in report.parts.items()}
    for field in ("mu", "nu", "worker_error", "server_error"):
        assert parts[field] == held[field]
    assert "errors" not in str(step.explain(PARAMS))
    assert str(step.explain(PARAMS)).startswith("each of 4 devices holds ")


# ---------------------------------------------------------------- a run goes on


@BOTH
@pytest.mark.parametrize("after", [2, 5], ids=["in the warm-up", "among the signs"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(name: str, after: int, tmp_path: Path) -> None:
    step = step_of(name)
    compiled = exact_jit(step)
    whole = trained(step, step.init(PARAMS), range(8), compiled)
    half = trained(step, step.init(PARAMS), range(after), compiled)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)
        places = (NamedSharding(step.mesh, P()), step.state(shapes))
        places = (jax.tree.map(lambda _: places[0], shapes), places[1])
        like = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            half, places,
        )  # fmt: skip
        restored = checkpointer.restore(tmp_path / "state", like)
    error = restored[1].worker_error["w"]
    assert error.addressable_shards[0].data.shape == (1, 40, 16)
    assert_alike(trained(step, restored, range(after, 8), compiled), whole, tolerance=0)


@BOTH
@pytest.mark.parametrize("devices", [2, 8])
def test_a_run_goes_on_over_other_devices(name: str, devices: int) -> None:
    step = step_of(name)
    saved = jax.tree.map(np.asarray, trained(step, step.init(PARAMS), range(6)))
    state = jaxmem.redistribute_errors(saved[1], devices)
    for key in PARAMS:
        mean = saved[1].worker_error[key].mean(0)
        np.testing.assert_allclose(state.worker_error[key].mean(0), mean, atol=1e-7)
        cut = [np.ravel(part.server_error[key]) for part in (state, saved[1])]
        assert len(state.server_error[key]) == devices
        one, other_one = (part[: PARAMS[key].size] for part in cut)
        np.testing.assert_array_equal(one, other_one)
    other = step_of(name, devices)
    on = jax.device_put((saved[0], state), (NamedSharding(other.mesh, P()), other.state(PARAMS)))
    params, state = trained(other, on, range(6, 10))
    assert (int(state.count), int(state.frozen), int(state.skipped)) == (10, 3, 0)
    unbroken = trained(step, step.init(PARAMS), range(10))[0]
    assert np.abs(np.asarray(params["w"]) - np.asarray(unbroken["w"])).mean() < 0.02
    # For the same devices nothing changes, whatever it is in.
    chained = (optax.EmptyState(), saved[1])
    assert_alike(jaxmem.redistribute_errors(chained, 4), chained, tolerance=0)


# ---------------------------------------------------------------- errors

one_bit_step: Any = jaxmem.one_bit_step
adam = jaxmem.one_bit_adam(1e-2, warmup_steps=2)


def _rows() -> None:
    step = step_of()
    step(*step.init(PARAMS), {"x": jnp.ones((6, 40)), "y": jnp.ones((6, 16))})


def _terms() -> None:
    def two(params: Any, batch: Any) -> Any:
        return masked(params, batch) + masked(params, batch)

    step = one_bit_step(two, adam, mesh=mesh_of(4))
    jax.eval_shape(step, *step.init(PARAMS), BATCH | {"mask": jnp.ones(24)})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: step_of(devices=1),
            "one_bit_step sends signs between the devices of 'data', and there is one; the mesh is "
            "{'data': 1}.  Pass a mesh in which it has several, or train with optax.adamw",
        ),
        (
            lambda: one_bit_step(loss, adam, mesh=mesh_of(4), axis="batch"),
            "the batch lies over the axis 'batch', and the mesh has 'data'; pass the axis",
        ),
        (
            lambda: one_bit_step(loss, adam, mesh=jax.make_mesh((2, 4), ("data", "tensor"))),
            "parameters are whole on each device, and the mesh has {'tensor': 4} as well; name all",
        ),
        (
            _rows,
            "one_bit_step: x of argument 1 is float32[6, 40], and its 6 rows cannot lie evenly "
            "over the 4 devices of 'data'; pass a batch that they divide",
        ),
        (_terms, "the loss is a sum of several jaxmem.Weighted, which are divided by weights of"),
        (lambda: one_bit_step(loss, adam), "one_bit_step has no mesh, and none is set; pass mesh="),
        (lambda: one_bit_step(loss, 3, mesh=mesh_of(4)), "one_bit_step takes an optax transform"),
        (lambda: jaxmem.redistribute_errors(3, 4), "takes the state of one_bit_adam or one_bit_l"),
        (lambda: jaxmem.redistribute_errors(3, 1), "devices must be at least 2: on one device"),
    ],
)
def test_what_cannot_be_is_told_with_the_remedy(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert said in str(caught.value)
