"""Compiled figures for absent accelerators, compared with figures seen elsewhere.

The figures are MiB; a target's compiler is called anew in each run, never the cache.
"""

import csv
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import verify_predictions
from helpers.releases import SINCE_0_11
from helpers.xla_flags import quick
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem import MemoryReport
from jaxmem.trace.context import recording

GPU, TPU = "h100-80g", "v5e-16g"
MIB = 2**20
# The TPU's compiler takes its time.
ANOTHER = pytest.param(TPU, marks=pytest.mark.slow)
Layer = Callable[[jax.Array, jax.Array], tuple[jax.Array, None]]


def report(fn: Callable[..., Any], *args: Any, target: Any, **options: Any) -> MemoryReport:
    return jaxmem.memory_report(fn, *args, target=target, cache=False, suggest=False, **options)


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# ---------------------------------------------------------------- which form of √n


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    for _ in range(3):
        h = jnp.tanh(h @ w)
    return h, None


def recomputed(layer: Layer, policy: Any = None, prevent_cse: bool = False) -> Layer:
    return jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)


def scanned(layer: Layer) -> Callable[..., jax.Array]:
    return lambda weights, x: jax.lax.scan(layer, x, weights)[0]


def segmented(layer: Layer) -> Callable[..., jax.Array]:
    """Textbook √n: four segments, each recomputed as a whole."""

    def stack(weights: jax.Array, x: jax.Array) -> jax.Array:
        segment = recomputed(lambda h, ws: jax.lax.scan(layer, h, ws))
        return jax.lax.scan(segment, x, weights.reshape(4, -1, *weights.shape[1:]))[0]

    return stack


def unrolled(layer: Layer) -> Callable[..., jax.Array]:
    def stack(weights: jax.Array, x: jax.Array) -> jax.Array:
        for w in weights:
            x, _ = layer(x, w)
        return x

    return stack


FORMS: dict[str, Callable[..., jax.Array]] = {
    "none": scanned(layer),
    "each layer recomputed": scanned(recomputed(layer)),
    "dots saved": scanned(recomputed(layer, jax.checkpoint_policies.dots_saveable)),
    "√n, layers kept": segmented(layer),
    "√n, layers recomputed": segmented(recomputed(layer)),
    "around the scan": jax.checkpoint(scanned(layer), prevent_cse=False),
    "unrolled": unrolled(layer),
    "unrolled, barriers off": unrolled(recomputed(layer)),
    "unrolled, barriers on": unrolled(recomputed(layer, prevent_cse=True)),
}


@functools.cache
def required(
    stack: Callable[..., jax.Array],
    target: str,
    layers: int = 16,
    width: int = 1024,
    batch: int = 4096,
) -> float:
    """MiB that the gradient of a stack needs."""
    loss = lambda weights, x: (stack(weights, x) ** 2).sum()  # noqa: E731
    arguments = spec(layers, width, width), spec(batch, width)
    return report(jax.grad(loss), *arguments, target=target).required_bytes / MIB


SEEN = {
    GPU: {
        "none": 1796 if SINCE_0_11 else 2044,
        "dots saved": 1292,
        "√n, layers kept": 796,
        "each layer recomputed": 524,
        "√n, layers recomputed": 412,
    },
    TPU: {
        "none": 1296 if SINCE_0_11 else 1808,
        "dots saved": 1040,
        "√n, layers kept": 624,
        "√n, layers recomputed": 288,
        "each layer recomputed": 272,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("target", [GPU, ANOTHER])
def test_forms_of_a_scan_are_in_the_order_seen_before(target: str) -> None:
    seen = SEEN[target]
    found = {form: required(FORMS[form], target) for form in seen}
    # Two of them are close on TPU, and their order is the scheduler's.
    for larger, smaller in itertools.permutations(seen, 2):
        if seen[larger] > 1.1 * seen[smaller]:
            assert found[larger] > found[smaller], (larger, smaller)
    for form in ("none", "dots saved", "each layer recomputed"):
        assert found[form] == pytest.approx(seen[form], rel=0.05), form


def test_a_checkpoint_around_the_scan_saves_nothing() -> None:
    assert required(FORMS["around the scan"], GPU) >= required(FORMS["none"], GPU)


def decorated(policy: str, target: str, **options: Any) -> float:
    return required(jaxmem.remat(FORMS["none"], policy, **options), target)


def test_decorators_need_what_the_hand_written_forms_need() -> None:
    each = required(FORMS["each layer recomputed"], GPU)
    assert decorated("full", GPU) == each
    assert decorated("dots", GPU) == required(FORMS["dots saved"], GPU)
    # The cut is chosen for the sizes of this layer, so that it cannot lose to no cut.
    assert decorated("sqrt", GPU) <= 1.001 * each
    assert decorated("sqrt", GPU, levels=2) < required(FORMS["√n, layers recomputed"], GPU)


@pytest.mark.slow  # of jax's checkpoint alone, written out at size
def test_unrolled_layers_need_barriers_on_gpu() -> None:
    none, off, on = (
        required(FORMS[form], GPU)
        for form in ("unrolled", "unrolled, barriers off", "unrolled, barriers on")
    )
    scanned = {form: required(FORMS[form], GPU) for form in SEEN[GPU]}
    assert off == none
    assert scanned["dots saved"] > none > scanned["√n, layers kept"]
    assert scanned["√n, layers kept"] > on > scanned["each layer recomputed"]


@pytest.mark.slow  # another target
def test_unrolled_layers_need_barriers_on_tpu() -> None:
    # Small layers and few, since each of them is compiled by itself.
    off, on = (
        required(FORMS[f"unrolled, barriers {word}"], TPU, layers=3, width=128, batch=32768)
        for word in ("off", "on")
    )
    assert off > 2 * on


# ---------------------------------------------------------------- the reference transformer

# No remat, and under three policies of jax: temporaries on H100.  Since jax 0.11 the compiler
# orders loops for time, see the lint "ordered-for-time".
REFERENCE = {
    "none": 35548,
    "dots_saveable": 17633,
    "dots_with_no_batch_dims_saveable": 5271 if SINCE_0_11 else 4977,
    "nothing_saveable": 2231 if SINCE_0_11 else 1842,
}


@pytest.mark.slow  # a published model at its own size
@pytest.mark.parametrize("checkpoint", REFERENCE)
def test_reference_transformer_on_gpu(checkpoint: str) -> None:
    job = programs.transformer(checkpoint=checkpoint)
    found = job.report(GPU, cache=False, suggest=False, generate_code=True)
    assert found.temp_bytes / MIB == pytest.approx(REFERENCE[checkpoint], rel=0.05)
    assert found.peak_bytes is not None
    assert found.required_bytes >= found.peak_bytes
    assert found.fits


# ---------------------------------------------------------------- offload


def carries(policy: str, layers: int, target: str) -> MemoryReport:
    """A stack whose carry, 16384 × 1024, is large compared with the weights of a layer."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]), None

    model = jaxmem.remat(lambda ws, x: jax.lax.scan(layer, x, ws)[0].sum(), policy)
    weights = spec(layers, 2, 1024, 1024, dtype="bfloat16")
    x = spec(16384, 1024, dtype="bfloat16")
    return report(jax.value_and_grad(model), weights, x, target=target)


CARRY = 16384 * 1024 * 2


def test_offload_moves_every_carry_on_gpu() -> None:
    on_device, on_host = (
        {layers: carries(policy, layers, GPU) for layers in (16, 24)}
        for policy in ("full", "offload")
    )
    for layers in (16, 24):
        assert on_device[layers].host_bytes == 0
        assert on_host[layers].host_bytes == layers * CARRY
    # A further layer costs its carry, on the one side or on the other, and not a byte else.
    assert on_device[24].temp_bytes - on_device[16].temp_bytes == 8 * CARRY
    assert on_host[24].temp_bytes == on_host[16].temp_bytes


def test_offload_moves_carries_of_second_derivatives_too() -> None:
    def model(ws: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, ws)[0] ** 2).sum()

    def second(policy: str) -> MemoryReport:
        first = jax.grad(jaxmem.remat(model, policy))

        def step(ws: jax.Array, x: jax.Array) -> jax.Array:
            return jax.grad(lambda ws: (first(ws, x) ** 2).sum())(ws)

        return report(step, spec(16, 256, 256), spec(4096, 256), target=GPU)

    on_device, on_host = second("full"), second("offload")
    assert on_device.host_bytes == 0
    # The carries of the stack, and those of its gradient, which is a stack itself.
    assert on_host.host_bytes == 2 * 16 * 4096 * 256 * 4
    assert on_host.temp_bytes < on_device.temp_bytes


@pytest.mark.slow  # another target
def test_offload_moves_every_carry_on_tpu() -> None:
    on_device, on_host = (carries(policy, 16, TPU) for policy in ("full", "offload"))

    def stacked(found: MemoryReport, place: str) -> list[int]:
        shape = (16, 16384, 1024)
        return [b.bytes for b in found.buffers if b.shape == shape and b.place == place]

    assert stacked(on_device, "device") == stacked(on_host, "host") == [16 * CARRY]
    assert stacked(on_device, "host") == stacked(on_host, "device") == []
    assert on_host.host_bytes == 16 * CARRY
    # What comes back takes room of a carry or two for a moment; that is the scheduler's choice.
    assert on_device.temp_bytes - on_host.temp_bytes >= 14 * CARRY


# ---------------------------------------------------------------- several devices


@pytest.mark.parametrize("target", [GPU, ANOTHER])
def test_sharded_program_is_counted_per_device(target: str) -> None:
    eight = jaxmem.target(target, devices=8)
    mesh = eight.mesh({"data": 8})
    job = programs.mlp(layers=2)

    def shard(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = {0: (), 2: ("data",), 3: (None, None, "data")}[leaf.ndim]
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    options: dict[str, Any] = {
        "donate_argnums": job.donate_argnums,
        "compiler_options": quick(target),
    }
    one = report(job.step, *job.args, target=target, **options)
    found = report(job.step, *jax.tree.map(shard, job.args), target=eight, **options)
    assert (one.devices, found.devices) == (1, 8)
    whole = {name: 1 if name.endswith("count") else 8 for name in one.arguments}
    assert found.arguments == {name: one.arguments[name] // whole[name] for name in whole}
    assert sum(found.arguments.values()) == found.argument_bytes
    assert found.temp_bytes < one.temp_bytes
    # Results take the place of the donated arguments, here as there, but for the table of them.
    for each in (one, found):
        donated_bytes = sum(n for name, n in each.arguments.items() if name != "x")
        assert each.alias_bytes == donated_bytes
        assert 0 <= each.output_bytes - each.alias_bytes <= 4096


# ---------------------------------------------------------------- the programs

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 8, "width": 16, "layers": 3},
    "convnet": {"batch": 4, "size": 16, "width": 4, "blocks": 2},
    "transformer": {
        "batch": 4,
        "sequence": 8,
        "width": 16,
        "layers": 2,
        "heads": 2,
        "form": "step",
    },
    "rnn": {"batch": 4, "steps": 6, "width": 8},
}


def small(name: str, dtype: str = "float32", **settings: Any) -> jaxmem.Job:
    return getattr(programs, name)(**SMALL[name], dtype=dtype, **settings)


def arrays(job: jaxmem.Job) -> tuple[Any, ...]:
    def made(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        seed = sum(jax.tree_util.keystr(path).encode())
        return abs(0.1 * jax.random.normal(jax.random.key(seed), leaf.shape, leaf.dtype))

    params, opt_state, state, batch = job.args
    opt_state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), opt_state)
    made_up = jax.tree.map_with_path(made, (params, state, batch))
    return made_up[0], opt_state, made_up[1], made_up[2]


@pytest.mark.parametrize("name", SMALL)
def test_programs_step(name: str) -> None:
    job = small(name)
    assert job.allocated_bytes == 0
    assert job.donate_argnums == (0, 1, 2)
    given = arrays(job)
    results = jax.jit(job.step)(*given)
    chex.assert_trees_all_equal_shapes_and_dtypes(results, given[:3])
    chex.assert_tree_all_finite(results)
    moved = jax.tree.map(lambda new, old: bool((new != old).any()), results[0], given[0])
    assert any(jax.tree.leaves(moved))


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("name", SMALL)
def test_a_step_keeps_every_dtype(name: str, accum: int) -> None:
    job = small(name, dtype="bfloat16", accum=accum)
    results = jax.eval_shape(job.step, *job.args)
    chex.assert_trees_all_equal_shapes_and_dtypes(results, job.args[:3])
    assert {leaf.dtype for leaf in jax.tree.leaves(results[0])} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("name", ["mlp", "transformer", "rnn"])  # batch norm sees its microbatch
def test_accumulated_step_is_the_step(name: str) -> None:
    whole, parts = small(name), small(name, accum=2)
    given = arrays(whole)
    batch = given[-1].reshape(parts.args[-1].shape)
    expected = jax.jit(whole.step)(*given)
    found = jax.jit(parts.step)(*given[:-1], batch)
    # Of the moments, not of the parameters: adamw divides by the size of the gradient.
    chex.assert_trees_all_close(found[1], expected[1], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("name", SMALL)
def test_policies_reach_the_programs(name: str) -> None:
    job = small(name)
    with jaxmem.use_policy("revolve", slots=2), recording() as record:
        jax.make_jaxpr(job.step)(*job.args)
    assert record.plans
    assert {policy for policy, _ in record.plans} == {jaxmem.policies.revolve(slots=2)}


def test_programs_of_other_experiments() -> None:
    state = programs.states("8-bit Adam, dynamic", "host state, fused", layers=2, width=256)
    assert state.donate_argnums == (0, 1)
    assert state.allocated_bytes == 0
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.args[1]) if leaf.sharding}
    assert kinds == {"pinned_host"}
    with pytest.raises(ValueError, match=r"'by hand' is none of 'ordinary', 'fused', "):
        programs.states(way="by hand")
    plain, less = (programs.keeping_less(form, layers=2) for form in ("plain", "both"))
    assert jax.eval_shape(plain.step, *plain.args) == jax.eval_shape(less.step, *less.args)


@pytest.mark.slow
def test_donation_is_worth_the_state() -> None:
    kept, donated = (
        programs.mlp(layers=2, donate=donate).report(
            GPU, cache=False, suggest=False, generate_code=True, compiler_options=quick(GPU)
        )
        for donate in (False, True)
    )
    state = sum(n for name, n in kept.arguments.items() if name != "x")
    assert (kept.alias_bytes, donated.alias_bytes) == (0, state)
    assert donated.required_bytes < kept.required_bytes
    for found in (kept, donated):
        assert found.peak_bytes is not None
        assert found.required_bytes >= found.peak_bytes


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="mlp: a batch of 8 cannot be cut into accum=3 equal part"):
        small("mlp", accum=3)
    assert np.prod(small("mlp", accum=4).args[-1].shape) == 8 * 16


# ---------------------------------------------------------------- the table of predictions


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_predictions_without_a_gpu_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAXMEM_CACHE", "0")
    path = tmp_path / "deep" / "table.csv"
    options = verify_predictions.Options(path, only="mlp dots")
    assert verify_predictions.main(options) == 0
    said = capsys.readouterr().out
    assert "predictions only, for h100-80g: measuring needs an attached NVIDIA GPU" in said
    (row,) = table(path)
    expected = programs.mlp(dtype="bfloat16")
    with jaxmem.use_policy("dots"):
        predicted = expected.report(GPU, suggest=False).required_bytes
    assert int(row["predicted_bytes"]) == predicted >= int(row["compiler_peak_bytes"])
    assert row["measured_bytes"] == row["error"] == "not measured"
    assert row["hardware"] == "NVIDIA H100 80GB HBM3 (absent)"
    assert f"jax {jax.__version__}," in row["versions"]

    # What is there is not made again, unless other versions made it; other rows stay.
    def with_versions(text: str) -> None:
        kept = {**row, "notes": "seen", "versions": text}
        other = {**row, "policy": "none", "settings": ""}
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, row)
            writer.writeheader()
            writer.writerows([other, kept])

    with_versions(row["versions"])
    assert verify_predictions.main(options) == 0
    assert [found["notes"] for found in table(path)] == ["", "seen"]
    with_versions("jax 0.1")
    assert verify_predictions.main(options) == 0
    assert table(path)[1] == row


def test_the_list_of_predictions_is_wide() -> None:
    cases = verify_predictions.CASES
    assert len({case.key for case in cases}) == len(cases) >= 20
    assert {case.program for case in cases} == {*SMALL, "states", "keeping_less"}
    policies = {case.policy.partition(":")[0] for case in cases}
    assert policies == {
        "own",
        "none",
        "full",
        "dots",
        "dots_no_batch",
        "sqrt",
        "revolve",
        "offload",
        "names",
    }
    for setting in ("donate=False", "accum=", "dtype=bfloat16", "attention=fused"):
        assert any(setting in case.text for case in cases), setting
