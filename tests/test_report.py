"""`memory_report` against programs whose sizes are known, and how a report reads."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.report import MemoryReport, memory_report

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
        "peak_bytes": None,
        "capacity_bytes": None,
        "fits": None,
        "arguments": {"x": 2 * MIB},
        "source": "compiled",
        "target": "a device",
        "platform": "gpu",
        "notes": (),
        "jax_version": "0.10.2",
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
    assert report.jax_version == jax.__version__


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
    assert (device.platform == "cpu") == any(
        "not predictive for unrolled code" in note for note in report.notes
    )


SHARDED = """
import jax
from jaxmem.report import memory_report

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
    with pytest.raises(ValueError, match="'h100-80g': only the attached backend is supported"):
        memory_report(saxpy, 1.0, 2.0, 3.0, target="h100-80g")


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
    fits = made(capacity_bytes=40 * 2**30, fits=True)
    assert fits.verdict == "needs 3.0 MiB of 40.0 GiB on a device: fits"
    short = made(capacity_bytes=MIB, fits=False)
    assert short.verdict == "needs 3.0 MiB of 1.0 MiB on a device: does not fit, 2.0 MiB too much"


def test_the_text():
    report = made(
        alias_bytes=512 * 1024,
        required_bytes=2 * MIB + 512 * 1024,
        peak_bytes=MIB,
        host_bytes=MIB,
        arguments={"params/w": MIB, "opt_state/w": 1023 * 1024, "x": 1024},
        notes=("one thing", "another"),
    )
    assert str(report) == (
        "needs 2.5 MiB on a device, capacity unknown\n"
        "  arguments       2.0 MiB\n"
        "  outputs         1.0 MiB\n"
        "  aliased      -512.0 KiB  outputs that reuse donated arguments\n"
        "  temporaries         0 B\n"
        "  required        2.5 MiB  2621440 bytes\n"
        "  on the host     1.0 MiB\n"
        "  peak            1.0 MiB  the compiler's own count, not portable\n"
        "arguments, largest first:\n"
        "  params/w        1.0 MiB\n"
        "  opt_state/w  1023.0 KiB\n"
        "  x               1.0 KiB\n"
        "note: one thing\n"
        "note: another"
    )
    assert repr(report) == "<MemoryReport needs 2.5 MiB on a device, capacity unknown>"


def test_many_arguments_are_cut_short():
    report = made(arguments={f"p/{k}": 1024 for k in range(20)})
    assert "… and 8 more  8.0 KiB" in str(report)


def test_it_is_frozen_hashable_and_compared_by_value():
    assert made() == made()
    assert hash(made()) == hash(made())
    assert made() != made(temp_bytes=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made().temp_bytes = 3  # pyright: ignore[reportAttributeAccessIssue]


# ---------------------------------------------------------------- JSON

counts = st.integers(0, 2**50)
reports = st.builds(
    MemoryReport,
    required_bytes=counts,
    argument_bytes=counts,
    output_bytes=counts,
    alias_bytes=counts,
    temp_bytes=counts,
    host_bytes=counts,
    peak_bytes=st.none() | counts,
    capacity_bytes=st.none() | counts,
    fits=st.none() | st.booleans(),
    arguments=st.dictionaries(st.text(), counts, max_size=4),
    source=st.sampled_from(["compiled", "measured", "estimated"]),
    target=st.text(),
    platform=st.sampled_from(["cpu", "gpu", "tpu"]),
    notes=st.lists(st.text(), max_size=3).map(tuple),
    jax_version=st.text(),
)


@given(reports)
@settings(deadline=None)
def test_json_there_and_back(report):
    assert MemoryReport.from_json(report.to_json()) == report
    str(report)


def test_json_of_a_real_report():
    report = memory_report(saxpy, spec(), spec(4), spec(4), donate_argnums=1)
    assert MemoryReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["jaxmem_report"] == 1


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(made().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{", "not JSON at line 1 column 2"),
        ("[]", "jaxmem_report: expected 1"),
        ('{"jaxmem_report": 2}', "jaxmem_report: expected 1"),
        ('{"jaxmem_report": 1}', "required_bytes: missing"),
        (changed(temp_bytes="3"), "temp_bytes: expected a whole number, got '3'"),
        (changed(temp_bytes=True), "temp_bytes: expected a whole number"),
        (changed(fits=1), "fits: expected true, false or null, got 1"),
        (changed(arguments=[1]), "arguments: expected whole numbers by path"),
        (changed(source="guessed"), "source: expected one of compiled, measured, estimated"),
        (changed(notes="text"), "notes: expected a list of texts"),
        (changed(extra=1), "extra: unknown key"),
    ],
)
def test_bad_json_says_where(text, where):
    with pytest.raises(ValueError) as error:
        MemoryReport.from_json(text)
    assert str(error.value).startswith(f"bad memory report: {where}")
