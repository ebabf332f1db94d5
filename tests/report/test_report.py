"""`memory_report` of programs whose sizes are known, and the text of a report."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem import MemoryReport, memory_report
from jaxmem.hlo.collectives import Collective
from jaxmem.report.report import Lint, Suggestion

MIB = 2**20


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def saxpy(a, x, y):
    return a * x + y


def made(**changes: Any) -> MemoryReport:
    fields: dict[str, Any] = {
        "required_bytes": 3 * MIB,
        "argument_bytes": 2 * MIB,
        "output_bytes": MIB,
        "alias_bytes": 0,
        "temp_bytes": 0,
        "host_bytes": 0,
        "on_chip_bytes": 0,
        "peak_bytes": None,
        "capacity_bytes": None,
        "default_capacity_bytes": None,
        "flops": 10**9,
        "bytes_moved": 10**6,
        "matmul_flops": 4 * 10**8,
        "model_matmul_flops": 3 * 10**8,
        "estimated_seconds": None,
        "arguments": {"x": 2 * MIB},
        "buffers": (),
        "timeline": None,
        "lints": (),
        "suggestion": None,
        "advice": "",
        "source": "compiled",
        "target": "a device",
        "device": "A Device",
        "platform": "gpu",
        "devices": 1,
        "notes": (),
        "versions": {"jax": "0.10.2"},
        "flags": {},
        "compile_seconds": 1.5,
        "cached": False,
    }
    return MemoryReport(**{**fields, **changes})


# ---------------------------------------------------------------- the numbers


def test_arguments_and_outputs_are_exact():
    report = memory_report(saxpy, spec(), spec(256, 1024), spec(256, 1024))
    assert report.argument_bytes == 4 + 2 * MIB
    assert report.output_bytes == MIB
    assert report.alias_bytes == 0
    assert report.required_bytes == (
        report.argument_bytes + report.output_bytes - report.alias_bytes + report.temp_bytes
    )
    assert report.arguments == {"a": 4, "x": MIB, "y": MIB}
    assert report.source == "compiled"
    assert report.versions["jax"] == jax.__version__


def test_a_donated_argument_is_counted_once():
    x = spec(256, 1024)
    plain = memory_report(lambda x: x + 1, x)
    donated = memory_report(lambda x: x + 1, x, donate_argnums=0)
    assert (plain.required_bytes, donated.required_bytes) == (2 * MIB, MIB)
    assert donated.alias_bytes == MIB
    assert donated.arguments == {"x": MIB}
    several = memory_report(lambda x, y: (x + 1, y * 2), x, x, donate_argnums=(0, 1))
    assert several.alias_bytes == 2 * MIB


def test_temporaries_are_those_of_the_compiled_program():
    def f(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=16)[1].sum()

    report = memory_report(f, spec(256, 1024))
    assert report.temp_bytes >= 16 * MIB
    compiled: Any = jax.jit(f).lower(spec(256, 1024)).compile().memory_analysis()
    assert report.temp_bytes == compiled.temp_size_in_bytes
    assert report.peak_bytes == compiled.peak_memory_in_bytes


@pytest.mark.slow
def test_a_program_out_of_jax_own_compilation_cache_is_reported_in_full():
    """Such a program has no texts; those of conftest's cache are shared with the other tests."""

    def f(x):
        return jnp.tanh(x @ x) @ x

    assert jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    found = []
    for _ in range(2):
        jax.clear_caches()
        found.append(memory_report(f, spec(512, 512)))
    assert "/jax/compilation_cache/cache_hits" in hits
    assert found[1].buffers
    assert found[1] == dataclasses.replace(found[0], compile_seconds=found[1].compile_seconds)
    hits.clear()  # what follows is cached as before
    jax.clear_caches()
    jax.jit(f).lower(spec(512, 512)).compile()
    jax.clear_caches()
    jax.jit(f).lower(spec(512, 512)).compile()
    assert "/jax/compilation_cache/cache_hits" in hits


def test_a_policy_shows_in_the_temporaries():
    def loss(remat, w, x):
        def body(c, w):
            return jnp.sin(jnp.sin(c @ w)), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(body) if remat else body, x, w)[0])

    args = spec(16, 32, 32), spec(512, 32)
    plain, remat = (
        memory_report(jax.grad(functools.partial(loss, flag)), *args) for flag in (False, True)
    )
    assert remat.temp_bytes < 0.6 * plain.temp_bytes
    assert remat.argument_bytes == plain.argument_bytes


def test_arguments_are_split_by_path_and_sum_up():
    def step(params, opt_state, *, batch):
        grads = jax.grad(lambda p: jnp.sum((batch["x"] @ p["w"] + p["b"][None]) ** 2))(params)
        return jax.tree.map(lambda p, m, g: p - m * g, params, opt_state[0], grads)

    params = {"w": spec(64, 32), "b": spec(32)}
    report = memory_report(
        step, params, (params, spec(1000)), batch={"x": spec(128, 64), "y": spec(7, dtype="int32")}
    )
    assert report.arguments == {
        "params/b": 128,
        "params/w": 8192,
        "opt_state/0/b": 128,
        "opt_state/0/w": 8192,
        "opt_state/1": 0,  # nothing reads it, and jit drops it
        "batch/x": 128 * 64 * 4,
        "batch/y": 0,
    }
    assert sum(report.arguments.values()) == report.argument_bytes


def test_the_split_sums_up_whatever_the_dtypes():
    tree = {
        name: spec(33, dtype=name)
        for name in ("bool", "int8", "bfloat16", "float16", "int32", "complex64")
    }
    report = memory_report(
        lambda tree: jax.tree.map(lambda x: x | x if x.dtype == bool else -x, tree), tree
    )
    assert sum(report.arguments.values()) == report.argument_bytes
    assert report.arguments["tree/bfloat16"] == 66


def test_concrete_arrays_and_numbers_do_as_well():
    x = np.ones((256, 1024), np.float32)
    abstract = memory_report(saxpy, spec(), spec(256, 1024), spec(256, 1024))
    assert memory_report(saxpy, 2.0, jnp.asarray(x), x).required_bytes == abstract.required_bytes


def test_random_keys_are_arguments():
    report = memory_report(lambda key: jax.random.uniform(key, (8,)), jax.random.key(0))
    assert report.arguments == {"key": 8}
    assert report.argument_bytes == 8


def test_a_jitted_function_keeps_its_own_settings():
    jitted = jax.jit(saxpy, donate_argnums=1)
    x = spec(256, 1024)
    assert memory_report(jitted, spec(), x, x).alias_bytes == MIB
    assert memory_report(jitted, spec(), x, x).arguments == {"a": 4, "x": MIB, "y": MIB}
    # Donation given here comes on top.
    assert memory_report(jax.jit(saxpy), spec(), x, x, donate_argnums=1).alias_bytes == MIB


def test_static_arguments_are_left_out_of_the_paths():
    def f(mode, x, times, y):
        assert mode == "sum"
        return x * times + y.sum()

    expected = {"x": MIB, "y": 40}
    args = ("sum", spec(256, 1024), 3, spec(10))
    assert memory_report(f, *args, static_argnums=(0, 2)).arguments == expected
    assert memory_report(f, *args, static_argnums=(0, -2)).arguments == expected
    jitted = jax.jit(f, static_argnums=(0, 2))
    assert memory_report(jitted, *args).arguments == expected
    assert memory_report(f, *args, static_argnums=0).arguments == {**expected, "times": 4}


def test_shardings_count_for_one_device():
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((256, 1024), "float32", sharding=sharding)
    report = memory_report(lambda x: x + 1, x)
    assert report.arguments == {"x": MIB}
    assert report.argument_bytes == MIB


def test_a_report_knows_its_device():
    report = memory_report(saxpy, spec(), spec(4), spec(4))
    device = jax.devices()[0]
    assert (report.platform, report.target) == (device.platform, device.device_kind)
    capacity = (device.memory_stats() or {}).get("bytes_limit")
    assert report.capacity_bytes == capacity
    assert report.fits == (None if capacity is None else report.required_bytes <= capacity)
    # Only a CPU merges recomputation with the first computation.
    assert (device.platform == "cpu") == any(lint.kind == "cpu-numbers" for lint in report.lints)


SHARDED = """
import jax
from jaxmem import memory_report

mesh = jax.make_mesh((4,), ("data",))
split, whole = (
    jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (["data"], [])
)
batch = jax.ShapeDtypeStruct((64, 32), "float32", sharding=split)
w = jax.ShapeDtypeStruct((32, 8), "float32", sharding=whole)
report = memory_report(lambda w, batch: batch @ w, w, batch)
assert report.arguments == {"w": 32 * 8 * 4, "batch": 64 * 32 * 4 // 4}, report
assert report.argument_bytes == sum(report.arguments.values()), report
assert "figures are for one of 4 devices" in report.notes, report
"""


def test_figures_of_a_sharded_program_are_for_one_device():
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- wrong calls


def test_wrong_calls_say_what_to_pass():
    with pytest.raises(TypeError, match=r"memory_report\(fn, \*args\), not fn\(\*args\)"):
        memory_report(jnp.ones(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="h100-80g"):  # the nearest of the known names
        memory_report(saxpy, 1.0, 2.0, 3.0, target="h100-80")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_an_argument_that_is_no_array_is_named(wrap):
    def step(params, batch):
        return params["w"] + batch["x"]

    with pytest.raises(
        TypeError, match=r"argument 'batch/x' is not an array but 'text' of type str"
    ):
        memory_report(wrap(step), {"w": spec(3)}, {"x": "text"})
    with pytest.raises(TypeError, match="static_argnums="):
        memory_report(wrap(step), {"w": object()}, {"x": spec(3)})
    with pytest.raises(TypeError, match=r"argument 'params/w' .*ndarray"):
        memory_report(wrap(step), {"w": np.array(["a"])}, {"x": spec(3)})


def test_an_error_of_the_function_itself_comes_through():
    def broken(x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine"):
        memory_report(jax.jit(broken), spec(3))


# ---------------------------------------------------------------- how it reads


def test_the_verdict():
    assert made().verdict == "needs 3.0 MiB on a device, capacity unknown"
    fits = made(capacity_bytes=40 * 2**30)
    assert fits.fits
    assert fits.verdict == "needs 3.0 MiB of 40.0 GiB on a device: fits"
    short = made(capacity_bytes=MIB)
    assert short.fits is False
    assert short.verdict == "needs 3.0 MiB of 1.0 MiB on a device: does not fit, 2.0 MiB too much"
    advised = made(capacity_bytes=MIB, advice="try this")
    assert advised.verdict == short.verdict + "; try this"
    tight = made(capacity_bytes=4 * MIB, default_capacity_bytes=2 * MIB)
    assert (tight.fits, tight.fits_by_default) == (True, False)
    assert tight.verdict == (
        "needs 3.0 MiB of 4.0 MiB on a device: fits, but not in the 2.0 MiB that jax takes by "
        "default; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
    )
    assert repr(made()) == "<MemoryReport needs 3.0 MiB on a device, capacity unknown>"


def test_recomputation_is_what_the_compiled_program_has_over_the_model():
    assert made().recompute_overhead == pytest.approx(1 / 3)
    assert made(model_matmul_flops=0).recompute_overhead is None
    assert made(matmul_flops=None).recompute_overhead is None


def test_it_is_frozen_hashable_and_compared_by_value():
    assert made() == made()
    assert hash(made()) == hash(made())
    assert made() != made(temp_bytes=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made().temp_bytes = 3  # pyright: ignore[reportAttributeAccessIssue]


# ---------------------------------------------------------------- JSON

counts = st.integers(0, 2**50)
words = st.dictionaries(st.text(), st.text(), max_size=3)
collectives = st.builds(
    Collective,
    kind=st.sampled_from(["all-gather", "collective-permute"]),
    bytes=counts,
    wire_bytes=counts,
    times=counts,
    group_size=st.integers(2, 64),
    axes=st.lists(st.text(), max_size=2).map(tuple),
    dtype=st.sampled_from(["f32", "bf16"]),
    shape=st.lists(st.integers(1, 64), max_size=3).map(tuple),
    name=st.text(),
    source=st.text(),
    module=st.text(),
    parameter=st.none() | st.integers(0, 9),
    recomputed=st.booleans(),
    in_loop=st.booleans(),
    of_stack=st.booleans(),
)
reports = st.builds(
    MemoryReport,
    required_bytes=counts,
    argument_bytes=counts,
    output_bytes=counts,
    alias_bytes=counts,
    temp_bytes=counts,
    host_bytes=counts,
    on_chip_bytes=counts,
    peak_bytes=st.none() | counts,
    capacity_bytes=st.none() | counts,
    default_capacity_bytes=st.none() | counts,
    flops=st.none() | counts,
    bytes_moved=st.none() | counts,
    matmul_flops=st.none() | counts,
    model_matmul_flops=st.none() | counts,
    estimated_seconds=st.none() | st.floats(0, 1e6),
    arguments=st.dictionaries(st.text(), counts, max_size=4),
    buffers=st.just(()),
    timeline=st.none(),
    lints=st.lists(st.builds(Lint, st.text(), st.text(), st.text()), max_size=2).map(tuple),
    suggestion=st.none() | st.builds(Suggestion, st.text(), counts),
    advice=st.text(),
    source=st.sampled_from(["compiled", "measured", "estimated"]),
    target=st.text(),
    device=st.text(),
    platform=st.sampled_from(["cpu", "gpu", "tpu"]),
    devices=st.integers(1, 64),
    notes=st.lists(st.text(), max_size=3).map(tuple),
    versions=words,
    flags=words,
    compile_seconds=st.floats(0, 1e6),
    cached=st.booleans(),
    collectives=st.lists(collectives, max_size=3).map(tuple),
)


@given(reports)
def test_json_there_and_back(report):
    assert MemoryReport.from_json(report.to_json()) == report
    str(report)


def test_json_that_is_older_than_collectives():
    data = json.loads(made().to_json())
    del data["collectives"], data["collective_bytes"]
    assert MemoryReport.from_json(json.dumps(data)) == made()


def test_json_of_a_real_report():
    report = memory_report(saxpy, spec(), spec(256, 4), spec(256, 4), donate_argnums=1)
    assert report.buffers
    assert report.timeline is not None
    assert MemoryReport.from_json(report.to_json()) == report
    data = json.loads(report.to_json())
    assert data["jaxmem_report"] == 2
    assert (data["fits"], data["verdict"]) == (report.fits, report.verdict)


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(made().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{", "not JSON at line 1 column 2"),
        ("[]", "jaxmem_report: expected 2"),
        ('{"jaxmem_report": 1}', "jaxmem_report: expected 2"),
        ('{"jaxmem_report": 2}', "required_bytes: missing"),
        (changed(temp_bytes="3"), "temp_bytes: expected a whole number, got '3'"),
        (changed(temp_bytes=True), "temp_bytes: expected a whole number"),
        (changed(cached=1), "cached: expected true or false, got 1"),
        (changed(arguments=[1]), "arguments: expected an object, got [1]"),
        (changed(arguments={"x": "y"}), "arguments.x: expected a whole number, got 'y'"),
        (changed(source="guessed"), "source: expected one of 'compiled', 'measured', 'estimated'"),
        (changed(notes="text"), "notes: expected a list, got 'text'"),
        (changed(lints=[{"kind": "a"}]), "lints[0].message: missing"),
        (changed(extra=1), "extra: unknown key"),
    ],
)
def test_bad_json_says_where(text, where):
    with pytest.raises(ValueError) as error:
        MemoryReport.from_json(text)
    assert str(error.value).startswith(f"bad memory report: {where}")
