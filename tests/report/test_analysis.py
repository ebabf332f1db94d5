"""Analysis of the compiler's texts: sums, buffers at the peak and their names, timelines."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.compiled import PLATFORMS, Texts, compiled
from helpers.releases import SINCE_0_11
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import targets
from jaxmem.hlo.analysis import Analysis, analyse
from jaxmem.hlo.buffers import Allocation, Buffer, Schedule, Value, allocations
from jaxmem.hlo.liveness import live_bytes, thinned

LAYERS, WIDTH, BATCH = 8, 256, 512


def spec(*dims: int, dtype: str = "float32", sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


# ---------------------------------------------------------------- programs

WEIGHTS = {key: spec(LAYERS, WIDTH, WIDTH) for key in "ab"}
INPUT, FEW = spec(BATCH, WIDTH), spec(512, WIDTH)


def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    x = checkpoint_name(x, "input")
    h = jnp.tanh(x @ w["a"])
    return x + jnp.sin(h) @ w["b"], None


def loss(weights: Any, x: jax.Array, layer: Any = layer) -> jax.Array:
    return (lax.scan(layer, x, weights)[0] ** 2).sum()


def step(weights: Any, momentum: Any, x: jax.Array) -> Any:
    grads = jax.grad(loss)(weights, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda w, m: w - m, weights, momentum), momentum


def offloaded(weights: Any, x: jax.Array) -> Any:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    saved = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    return jax.grad(functools.partial(loss, layer=saved))(weights, x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            h = nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x))
            x = x + nn.relu(h)
        return nn.Dense(10)(x.mean((1, 2)))


def convolutional(variables: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> Any:
        y, state = Net().apply({**variables, "params": params}, x, mutable=["batch_stats"])
        return (y**2).sum(), state

    return jax.grad(loss, has_aux=True)(variables["params"])


def until(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda x: x.sum() < 1e3, lambda x: jnp.cos(x @ x), x)


def either(x: jax.Array, y: jax.Array, p: jax.Array) -> jax.Array:
    return lax.cond(p > 0, lambda: jnp.sin(x @ y) @ y, lambda: x + x @ y)


MESH = AbstractMesh((8,), ("data",))
WHOLE, SPLIT = NamedSharding(MESH, P()), NamedSharding(MESH, P("data"))
IMAGES = spec(8, 8, 8, 8)

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "scan": (jax.grad(loss), (WEIGHTS, INPUT), {}),
    "donated": (step, (WEIGHTS, WEIGHTS, INPUT), {"donate": range(4)}),
    "offloaded": (offloaded, (WEIGHTS, FEW), {}),
    "convolutional": (
        convolutional,
        (jax.eval_shape(Net().init, jax.random.key(0), IMAGES), IMAGES),
        {},
    ),
    "until": (until, (spec(512, 512),), {}),
    "either": (either, (spec(256, 256), spec(256, 256), spec()), {}),
    "sharded": (
        jax.grad(loss),
        (
            {key: spec(LAYERS, WIDTH, WIDTH, sharding=WHOLE) for key in "ab"},
            spec(BATCH, WIDTH, sharding=SPLIT),
        ),
        {"mesh": {"data": 8}},
    ),
}


@functools.cache
def texts(program: str, where: str, generate_code: bool = True) -> Texts:
    fn, specs, options = PROGRAMS[program]
    if where == "cpu" and program == "sharded":
        here = jax.make_mesh((8,), ("data",))
        specs = jax.tree.map(
            lambda s: spec(*s.shape, sharding=NamedSharding(here, s.sharding.spec)), specs
        )
    return compiled(where, fn, *specs, generate_code=generate_code, **options)


CASES = [(program, where) for program in PROGRAMS for where in PLATFORMS]

# ---------------------------------------------------------------- sums


@pytest.mark.parametrize("where", ["gpu", "tpu"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_all_is_known_when_buffers_are_assigned(program: str, where: str):
    stopped, complete = (texts(program, where, generate_code=code) for code in (False, True))
    assert stopped.analysis == complete.analysis
    if where == "gpu":  # of a TPU's, see below
        known = {name for name in stopped.stats if name != "peak_bytes"}
        assert {name: stopped.stats[name] for name in known} == {
            name: complete.stats[name] for name in known
        }


@pytest.mark.parametrize(("program", "where"), CASES)
def test_sums_are_the_compilers_own(program: str, where: str):
    given = texts(program, where)
    found, stats = given.analysis, given.stats
    assert sum(found.parameter_bytes.values()) == stats["argument_bytes"]
    assert found.space_bytes["host"] == (stats.get("host_temp_bytes") or 0)
    if where == "tpu":
        # What it says of temporaries is more than it places, by whole stacks of parameters
        # where these are donated; `test_the_limit_…` shows which of the two it goes by.
        assert found.space_bytes["device"] <= given.required + found.constant_bytes + 2**20
        assert found.space_bytes["on-chip"] > 0
    else:
        # Arrays that the program has in itself are in no sum of these compilers.
        assert found.space_bytes["device"] == given.required + found.constant_bytes
        assert found.space_bytes["on-chip"] == 0
    assert found.live_peak_bytes + found.fragmentation_bytes == found.space_bytes["device"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_peak_is_that_of_the_compiler(program: str):
    given = texts(program, "gpu")
    found, peak = given.analysis, given.stats["peak_bytes"]
    # It leaves out tables of pointers that are not in use at its peak, and has what is on
    # the host in it, if that is in use.
    assert found.live_peak_bytes - 1024 <= peak
    assert peak <= found.live_peak_bytes + found.space_bytes["host"]


@pytest.mark.parametrize(("program", "where"), CASES)
def test_the_buffers_at_the_peak_sum_to_it(program: str, where: str):
    found = texts(program, where).analysis
    listed = [buffer for buffer in found.buffers if buffer.place == "device"]
    assert sum(buffer.bytes for buffer in listed) + found.small_bytes == found.live_peak_bytes
    assert 0 <= found.small_bytes < 2**17
    sizes = [buffer.bytes for buffer in found.buffers]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= 1024
    assert found.padding_bytes == sum(buffer.padding_bytes for buffer in listed)
    arguments = [b for b in found.buffers if b.kind == "argument"]
    assert all(b.bytes == found.parameter_bytes[b.parameter] for b in arguments)  # type: ignore[index]


def test_the_limit_of_a_tpu_is_that_of_its_allocations():
    weights = spec(64, 128, 128)
    given = compiled("tpu", jax.grad(deep), weights, spec(2**19, 128))
    assert "exceeds available HBM" in given.message
    total = given.analysis.space_bytes["device"] / 2**30
    assert f"({total:.2f}G)" in given.message
    kept = "mul" if SINCE_0_11 else "tanh"  # its derivative
    assert given.analysis.buffers[0].name == kept, "a refused program is analysed all the same"


def deep(weights: jax.Array, x: jax.Array) -> jax.Array:
    return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2).sum()


@pytest.mark.parametrize("where", PLATFORMS)
def test_arrays_that_the_program_has_in_itself(where: str):
    table = np.random.default_rng(0).normal(size=(512, 512)).astype("float32")
    found = compiled(where, lambda x: x @ table, spec(8, 512)).analysis
    # On a TPU it is converted for the matrix unit once and for all.
    assert found.constant_bytes - table.nbytes // (2 if where == "tpu" else 1) in range(2**13)


# ---------------------------------------------------------------- names


def line(after: Any, offset: int) -> str:
    return f"test_analysis.py:{after.__code__.co_firstlineno + offset} ({after.__name__})"


def stacks(found: Analysis) -> dict[str, Buffer]:
    """The temporaries with one slice for each layer."""
    return {
        buffer.name: buffer
        for buffer in found.buffers
        if buffer.kind == "temporary" and buffer.shape == (LAYERS, BATCH, WIDTH)
    }


@pytest.mark.parametrize("where", PLATFORMS)
def test_a_stack_is_called_what_is_written_into_it(where: str):
    found = stacks(texts("scan", where).analysis)
    # tanh and sin for products, 1 - tanh² and cos for derivatives, the sum as the carry.
    assert {"sin", "cos", "add"} <= set(found)
    assert found["sin"].source == found["cos"].source == line(layer, 3)
    assert found["add"].source == line(layer, 3)
    for name in set(found) & {"tanh", "sub"}:
        assert found[name].source == line(layer, 2)
    places = {buffer.place for buffer in found.values()}
    assert places <= ({"device", "on-chip"} if where == "tpu" else {"device"})


@pytest.mark.parametrize("where", PLATFORMS)
def test_gradients_say_that_they_are_of_the_way_back(where: str):
    found = texts("scan", where).analysis.buffers
    gradients = [b for b in found if b.kind == "output"]
    assert {b.shape for b in gradients} == {(LAYERS, WIDTH, WIDTH)}
    assert [b.name for b in gradients] == ["dot_general (backward)"] * 2
    assert {b.source for b in gradients} == {line(layer, 2), line(layer, 3)}


@pytest.mark.parametrize("where", ["gpu", "tpu"])
def test_what_is_offloaded_is_on_the_host(where: str):
    (there,) = (b for b in texts("offloaded", where).analysis.buffers if b.place == "host")
    assert (there.shape, there.bytes) == ((LAYERS, 512, WIDTH), LAYERS * 512 * WIDTH * 4)
    assert (there.name, there.source) == ("add", line(layer, 3))


def test_arguments_and_their_copies():
    found = texts("donated", "tpu").analysis.buffers
    arguments = {b.parameter: b for b in found if b.kind == "argument"}
    assert set(arguments) == set(range(5))
    copies = [b for b in found if b.kind == "temporary" and b.parameter is not None]
    # The TPU compiler keeps the weights as bf16 as well.
    assert {(b.dtype, b.shape) for b in copies} >= {("bf16", (LAYERS, WIDTH, WIDTH))}
    assert {b.name for b in copies} <= {b.name for b in arguments.values()}


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_flax_modules_are_named(where: str):
    found = texts("convolutional", where).analysis
    assert found.has_convolution
    modules = {buffer.module for buffer in found.buffers}
    assert {"Net/Conv_0", "Net/Conv_1"} <= modules
    assert all("jvp" not in module and "jit" not in module for module in modules)


def masked(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Writes every other carry into a stack, as executors of uneven segments do."""

    def body(k: jax.Array, state: Any) -> Any:
        x, kept = state
        old = lax.dynamic_index_in_dim(kept, k // 2, 0, keepdims=False)
        kept = lax.dynamic_update_index_in_dim(kept, jnp.where(k % 2 == 0, x, old), k // 2, 0)
        return jnp.tanh(x @ weights), kept

    return lax.fori_loop(0, 8, body, (x, jnp.zeros((4, *x.shape))))[1]


@pytest.mark.parametrize("where", PLATFORMS)
def test_a_write_under_a_mask_is_called_what_is_written(where: str):
    found = compiled(where, masked, spec(WIDTH, WIDTH), spec(2048, WIDTH)).analysis.buffers
    (kept,) = (b for b in found if b.shape == (4, 2048, WIDTH) and b.place == "device")
    assert (kept.kind, kept.name) == ("output", "tanh")


def test_padding_of_tiles():
    found = compiled("tpu", lambda x: jnp.sin(x), spec(1000, 3)).analysis
    (argument,) = (b for b in found.buffers if b.kind == "argument")
    assert argument.bytes >= 1000 * 4 * 3
    assert argument.padding_bytes == argument.bytes - 1000 * 4 * 3
    few_channels = texts("convolutional", "tpu").analysis
    assert few_channels.padding_bytes > 0.5 * few_channels.live_peak_bytes
    assert texts("scan", "gpu").analysis.padding_bytes == 0


# ---------------------------------------------------------------- along the program


@pytest.mark.parametrize(("program", "where"), CASES)
def test_the_timeline(program: str, where: str):
    found = texts(program, where).analysis
    timeline = found.timeline
    assert timeline.steps[0] == 0
    assert list(timeline.steps) == sorted(set(timeline.steps))
    assert timeline.steps[-1] < timeline.length
    at = max(k for k, at in enumerate(timeline.steps) if at <= timeline.peak_step)
    assert timeline.bytes[at] == max(timeline.bytes) == found.live_peak_bytes
    assert timeline.peak_instruction
    for loop in timeline.loops:
        assert 0 <= loop.start < loop.end < timeline.length


@pytest.mark.parametrize("where", PLATFORMS)
def test_loops_of_the_timeline(where: str):
    forward, backward = texts("scan", where).analysis.timeline.loops
    assert forward.end <= backward.start
    assert (forward.trip_count, forward.name) == (LAYERS, "loss")
    assert (backward.trip_count, backward.name) == (LAYERS, "loss (backward)")
    (unknown,) = texts("until", where).analysis.timeline.loops
    assert unknown.trip_count is None
    assert texts("until", where).analysis.unknown_loops == 1


def test_loops_within_loops_follow_them():
    def nested(x: jax.Array) -> jax.Array:
        inner = lambda _, x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x @ x), x)  # noqa: E731
        return lax.fori_loop(0, 5, inner, x)

    outer, inner = compiled("gpu", nested, spec(128, 128)).analysis.timeline.loops
    assert (outer.trip_count, inner.trip_count) == (5, 3)
    assert outer.start <= inner.start < inner.end < outer.end


_values = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(0, 9), st.integers(0, 5)),
    max_size=8,
)


@given(_values)
def test_live_bytes_are_counted_as_if_one_by_one(places: list[tuple[int, int, int, int]]):
    length = 10
    values, ranges = [], {}
    for k, (offset, size, start, more) in enumerate(places):
        values.append(Value(f"v{k}", (), size, offset, "u8[1]"))
        ranges[f"v{k}", ()] = (start, min(start + more, length))
    heap = Allocation(0, 20, 0, None, False, False, False, tuple(values))
    kept = Allocation(1, 7, 0, 0, False, False, False, ())
    order = Schedule(tuple(f"i{k}" for k in range(length)), ranges)
    points = live_bytes([heap, kept], order)
    for step in range(length):
        used = {
            byte
            for value in values
            if ranges[value.name, ()][0] <= step <= ranges[value.name, ()][1]
            for byte in range(value.offset, value.offset + value.size)
        }
        assert [height for at, height in points if at <= step][-1] == 7 + len(used)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=300), st.integers(2, 40))
def test_a_thinned_timeline_has_the_peak(heights: list[int], most: int):
    points = list(enumerate(heights))
    found = thinned(points, len(points), most)
    assert len(found) <= max(most, 1)
    assert found[0][0] == 0
    assert max(height for _, height in found) == max(heights)
    assert [step for step, _ in found] == sorted({step for step, _ in found})


# ---------------------------------------------------------------- the rest


def test_what_the_compiler_recomputes_on_its_own():
    def chain(weights: jax.Array, x: jax.Array) -> Any:
        def loss(weights: jax.Array) -> jax.Array:
            y = x
            for k in range(4):
                y = jnp.tanh(jnp.sin(y) @ weights[k])
            return (y**2).sum()

        return jax.grad(loss)(weights)

    specs = spec(4, 64, 64), spec(2**16, 64)
    roomy = targets.target("h100-80g")
    found = compiled("gpu", chain, *specs, target=roomy).analysis
    assert (found.xla_remat_instructions, found.xla_remat_bytes) == (0, 0)
    small = dataclasses.replace(roomy, memory=found.space_bytes["device"] * 2 // 3)
    again = compiled("gpu", chain, *specs, target=small).analysis
    assert again.xla_remat_instructions > 0
    assert again.xla_remat_bytes > 0
    assert again.matmul_flops >= found.matmul_flops
    assert again.recomputed_matmul_flops == 0, "nobody asked jax for it"


def test_names_of_custom_calls():
    assert texts("convolutional", "gpu").analysis.custom_call_targets[0].startswith("__cudnn$conv")
    assert not texts("scan", "gpu").analysis.has_convolution


@pytest.mark.parametrize(("program", "where"), CASES)
def test_there_and_back(program: str, where: str):
    found = texts(program, where).analysis
    assert Analysis.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert hash(found) == hash(Analysis.from_dict(found.to_dict()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"live_peak_bytes": "1"}, "live_peak_bytes: expected a whole number, got '1'"),
        ({"more": 1}, "more: unknown key"),
        ({"parameter_bytes": {"x": 1}}, "parameter_bytes: expected whole numbers as keys, got 'x'"),
        ({"timeline": None}, "timeline: expected an object, got None"),
    ],
)
def test_reading_is_strict(change: dict[str, Any], message: str):
    data = {**texts("either", "cpu").analysis.to_dict(), **change}
    with pytest.raises(ValueError, match=message):
        Analysis.from_dict(data)


def test_texts_of_something_else():
    given = texts("either", "cpu")
    with pytest.raises(ValueError, match="no allocation in the compiler's buffer assignment"):
        analyse(given.hlo, given.live_range, given.live_range)
    with pytest.raises(ValueError, match="no entry computation"):
        analyse(given.assignment, given.assignment, given.live_range)


def test_without_live_ranges_everything_is_live():
    given = texts("either", "cpu")
    found = analyse(given.hlo, given.assignment, "")
    spaces = sum(a.size for a in allocations(given.assignment) if not a.thread_local)
    assert found.live_peak_bytes <= spaces
    assert found.timeline.length == 1
