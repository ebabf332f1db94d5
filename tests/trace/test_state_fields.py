"""Which arguments are an optimizer's state, and what reports say of them."""

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jaxmem
from jaxmem.report.report import Places
from jaxmem.trace.state_fields import StateLeaf, state_fields, state_leaves

PARAMS = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}


def test_fields_are_found_in_any_container() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    train = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=optimizer)
    assert state_fields(train) == [None, None, "count", "mu", "nu"]
    several = jaxmem.MultiSteps(optimizer, 2).init({"w": jnp.ones(3)})
    assert {"mu", "nu", "count"} <= set(state_fields(several))


def test_codes_and_scales_are_of_their_field() -> None:
    state = jaxmem.quantize_state(optax.adam(1e-3)).init({"w": jnp.ones((64, 512))})
    assert state_fields(state) == ["count", "mu", "mu", "nu", "nu"]


def test_a_report_tells_the_state_by_its_fields() -> None:
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(optimizer.init, PARAMS)
    report = jaxmem.memory_report(optimizer.update, PARAMS, state, PARAMS)
    assert report.state == {"mu": (2**21, 0), "nu": (2**21, 0), "count": (4, 0)}
    assert "optimizer state" in str(report)
    assert jaxmem.MemoryReport.from_json(report.to_json()).state == report.state


def test_a_large_state_in_wide_numbers_on_a_full_device_is_told() -> None:
    params = {"w": jax.ShapeDtypeStruct((2**15, 175_000), jnp.float32)}

    def lints(optimizer: optax.GradientTransformation) -> dict[str, str]:
        def step(params: dict[str, jax.Array], state: optax.OptState) -> object:
            updates, after = optimizer.update(params, state, params)
            return optax.apply_updates(params, updates), after

        state = jax.eval_shape(optimizer.init, params)
        report = jaxmem.memory_report(
            step, params, state, donate_argnums=(0, 1), target="h100-80g", suggest=False
        )
        return {lint.kind: str(lint) for lint in report.lints}

    text = lints(optax.adam(1e-3))["large-state"]
    assert "(mu, nu) has 42.7 GiB; jaxmem.quantize_state(optimizer) saves 32.0 GiB" in text
    assert "large-state" not in lints(optax.sgd(1e-3))


@jax.tree_util.register_pytree_node_class
class Elsewhere:
    """An array in a file, as a state on disk has it."""

    bytes_on_disk = 2**21

    def __init__(self, step: object) -> None:
        self.step = step

    def tree_flatten(self) -> tuple[list[object], None]:
        return [self.step], None

    @classmethod
    def tree_unflatten(cls, aux: None, children: list[object]) -> "Elsewhere":
        return cls(*children)


def test_what_is_on_disk_is_counted_there() -> None:
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    state = optax.TraceState({"w": Elsewhere(scalar)})  # type: ignore[arg-type]
    assert state_leaves(state) == [StateLeaf("trace", 2**21)]

    def step(params: object, state: optax.TraceState) -> object:
        return params, jax.tree.map(lambda step: step + 1, state)

    report = jaxmem.memory_report(step, PARAMS, state)
    assert report.parts["state/trace"] == Places(device=4, disk=2**21)
    assert sum(part.disk for part in report.parts.values()) == 2**21
    text = str(report)
    assert "disk" in text
    assert "2.0 MiB" in text
    assert jaxmem.MemoryReport.from_json(report.to_json()).parts == report.parts
