"""Compiling for absent accelerators in a worker: real programs, and every failure."""

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import targets
from jaxmem.targets import CompileError, installed, refusals, spec, worker
from jaxmem.targets import client as client_module
from jaxmem.targets.pool import Died, Pool, Worker, pool

Spec = jax.ShapeDtypeStruct
GIB = 2**30


def exported(fn: Callable[..., Any], *specs: Any, platform: str, **options: Any) -> bytes:
    """A program with flat arguments and results, as `compile_for` takes it."""
    name = "cuda" if platform == "gpu" else platform
    found = export.export(jax.jit(fn, **options), platforms=[name])(*specs)
    flat = dataclasses.replace(
        found,
        in_tree=jax.tree.structure(((0,) * len(found.in_avals), {})),
        out_tree=jax.tree.structure((0,) * len(found.out_avals)),
    )
    return bytes(flat.serialize())


def compiled(name: str, fn: Callable[..., Any], *specs: Any, **options: Any) -> Any:
    target = targets.target(name)
    program = exported(fn, *specs, platform=target.platform)
    return targets.compile_for(target, program, **options)


def required(stats: dict[str, Any]) -> int:
    return (
        stats["argument_bytes"] + stats["output_bytes"] - stats["alias_bytes"] + stats["temp_bytes"]
    )


def gradients(w, x):
    def loss(w):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    return jax.grad(loss)(w)


W, X = Spec((4, 256, 256), "float32"), Spec((128, 256), "float32")
W_BYTES, X_BYTES = 4 * 256 * 256 * 4, 128 * 256 * 4


def update(w, x):
    return w - 0.1 * (x @ w[0]).sum()


@functools.cache
def small(platform: str) -> bytes:
    """A program that is compiled in a moment, a product and a sum in it."""
    return exported(update, W, X, platform=platform)


@functools.cache
def slow(platform: str) -> bytes:
    """A program whose compilation takes much longer than any test waits."""

    def sorts(x):
        return sum(jnp.sort(x[: 1000 + 3 * k], axis=0).sum() for k in range(50))

    return exported(sorts, Spec((2000, 128), "float32"), platform=platform)


# ---------------------------------------------------------------- every row


@pytest.mark.parametrize("name", list(targets.catalog()))
def test_every_row_compiles_or_says_why_not(name):
    row = targets.target(name)
    if row.unavailable:
        with pytest.raises(CompileError, match=re.escape(row.unavailable)):
            targets.compile_for(row, small(row.platform))
        row = reply_of(row.topology, small(row.platform))
        assert "error" in row or row["refused"]  # it is true
        return
    assert row.missing() == ()
    found = targets.compile_for(row, small(row.platform), donate=(0,))
    assert found.stats["argument_bytes"] == W_BYTES + X_BYTES
    assert found.stats["output_bytes"] in range(W_BYTES, W_BYTES + 4096)
    assert found.stats["alias_bytes"] == W_BYTES
    assert found.too_large_bytes is None
    assert found.hlo.startswith("HloModule jit_call")
    assert found.assignment.startswith("BufferAssignment:")
    assert found.live_range.startswith("HloLiveRange")
    assert {"jax", "jaxlib"} < set(found.versions)


def asked(worker: Worker, request: dict[str, Any], program: bytes, seconds: float) -> Any:
    worker.begin(request, program)
    return worker.finish(time.monotonic() + seconds)


def reply_of(topology: dict[str, Any], program: bytes) -> dict[str, Any]:
    """The answer of a worker, called directly."""
    request = {
        "do": "compile",
        "topology": topology,
        "devices": 1,
        "donate": [],
        "mesh_axes": [],
        "memory_kinds": None,
        "options": {},
        "settings": {},
    }
    with pool.borrowed("gpu") as worker:
        return asked(worker, request, program, 60)


@pytest.mark.parametrize(
    ("name", "devices"),
    [("h100-80g", 2), ("h100-80g", 16), ("v5e-16g", 16), ("v4-32g", 2), ("tpu7x-95g", 2)],
)
def test_slices_have_as_many_devices_as_they_say(name, devices):
    target = targets.target(name, devices=devices)
    rows = NamedSharding(target.mesh({"data": devices}), PartitionSpec("data"))
    x = Spec((1024 * devices, 128), "float32", sharding=rows)
    program = exported(lambda x: x * 2, x, platform=target.platform)
    found = targets.compile_for(target, program, mesh_axes={"data": devices})
    assert found.stats["argument_bytes"] == 1024 * 128 * 4


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("name", ["h100-80g", "v5e-16g"])
def test_sharded_figures_are_for_one_device(name):
    target = targets.target(name, devices=8)
    mesh = target.mesh({"data": 4, "model": 2})
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
    w = Spec(W.shape, W.dtype, sharding=NamedSharding(mesh, PartitionSpec(None, None, "model")))
    x = Spec(X.shape, X.dtype, sharding=NamedSharding(mesh, PartitionSpec("data")))
    program = exported(gradients, w, x, platform=target.platform)
    found = targets.compile_for(target, program, donate=(0,), mesh_axes=(("data", 4), ("model", 2)))
    assert found.stats["argument_bytes"] == W_BYTES // 2 + X_BYTES // 4
    assert "all-reduce" in found.hlo


def test_mesh_of_other_devices():
    target = targets.target("h100-80g", devices=4)
    with pytest.raises(ValueError, match=r"the mesh data=8 does not match the 4 device\(s\)"):
        targets.compile_for(target, small("gpu"), mesh_axes={"data": 8})


@pytest.mark.parametrize("name", ["a100-40g", "v6e-32g"])
def test_donation(name):
    def update(w, x):
        return w - 0.1 * x.sum()

    kept = compiled(name, update, W, X).stats
    given = compiled(name, update, W, X, donate=(0,)).stats
    assert (kept["alias_bytes"], given["alias_bytes"]) == (0, W_BYTES)
    assert required(kept) - required(given) == pytest.approx(W_BYTES, rel=0.05)


@pytest.mark.parametrize("name", ["h100-80g", "v5e-16g"])
def test_state_on_the_host(name):
    """A donated argument in pinned_host that is returned there takes no device memory."""
    target = targets.target(name)
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def update(w, x):
        return jax.device_put(jax.device_put(w, device) + x.sum(), host)

    on_host = NamedSharding(target.mesh({"one": 1}), PartitionSpec(), memory_kind="pinned_host")
    program = exported(
        update, Spec(W.shape, W.dtype, sharding=on_host), X, platform=target.platform
    )
    found = targets.compile_for(
        target, program, donate=(0,), memory_kinds=(("pinned_host", None), ("pinned_host",))
    ).stats
    assert found["argument_bytes"] == X_BYTES
    assert found["host_argument_bytes"] == W_BYTES
    assert found["host_output_bytes"] == W_BYTES
    assert found["host_alias_bytes"] == W_BYTES


def test_argument_on_the_host():
    """Counted separately on a TPU; `client.py` says how it is counted on a GPU."""

    def product(w, x):
        return x @ jax.device_put(w, jax.memory.Space.Device)[0]

    target = targets.target("v5e-16g")
    on_host = NamedSharding(target.mesh({"one": 1}), PartitionSpec(), memory_kind="pinned_host")
    program = exported(product, Spec(W.shape, W.dtype, sharding=on_host), X, platform="tpu")
    kinds = (("pinned_host", None), (None,))
    found = targets.compile_for(target, program, memory_kinds=kinds).stats
    assert (found["argument_bytes"], found["host_argument_bytes"]) == (X_BYTES, W_BYTES)


@pytest.mark.parametrize("name", ["h100-80g", "v5e-16g"])
def test_offloaded_residuals_are_on_the_host(name):
    from jax.ad_checkpoint import checkpoint_name

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["carry"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(w, x):
        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
        def layer(x, w):
            x = checkpoint_name(x, "carry")
            return x + jnp.sin(jnp.tanh(x @ w)), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    w, x = Spec((8, 256, 256), "float32"), Spec((512, 256), "float32")
    found = compiled(name, jax.grad(loss), w, x).stats
    assert found["host_temp_bytes"] == 8 * 512 * 256 * 4


def test_64_bit_types_stay():
    with jax.enable_x64(True):
        found = compiled("h100-80g", lambda x: x + 1, Spec((1000,), "float64"))
    assert found.stats["argument_bytes"] == 8000


@pytest.mark.parametrize(
    "name", ["h100-80g", pytest.param("a100-40g", marks=pytest.mark.slow), "t4-16g"]
)
def test_sums_from_the_table_are_the_compilers_own(name):
    """They replace it where the compiler stops after buffer assignment."""
    found = compiled(name, gradients, W, X, donate=(0,))
    assert found.stats["temp_bytes"] >= 4 * X_BYTES
    again = refusals.stats_of(found.assignment, "gpu")
    for kind in ("argument", "output", "alias", "temp"):
        assert again[f"{kind}_bytes"] == found.stats[f"{kind}_bytes"]


def test_compiler_without_an_assembler_still_gives_figures(monkeypatch):
    """A compute capability that the assembler does not support is as if there were none."""
    old = targets.target("v100-16g")
    monkeypatch.setattr(installed, "dropped", lambda capability: "")
    found = targets.compile_for(old, small("gpu"), donate=(0,), generate_code=True)
    assert not found.assembled
    assert found.message
    assert found.stats["argument_bytes"] == W_BYTES + X_BYTES
    assert found.stats["alias_bytes"] == W_BYTES
    assert found.stats["temp_bytes"]


# ---------------------------------------------------------------- too large


@pytest.mark.parametrize(
    ("fn", "specs", "gib"),
    [
        (lambda x, y: x.sum() + y.sum(), [Spec((3 * GIB,), "float32")] * 2, 24),
        (lambda x: jnp.broadcast_to(x, (24, GIB // 4)), [Spec((), "float32")], 24),
        (
            lambda x: jnp.sort(x[:, None] * x[None, :], axis=0)[0],
            [Spec((1 << 17,), "float32")],
            None,
        ),
    ],
    ids=["arguments", "outputs", "temporaries"],
)
def test_tpu_program_too_large(fn, specs, gib):
    found = compiled("v5e-16g", fn, *specs)
    assert found.too_large_space == "hbm"
    assert found.available_bytes == round(15.75 * GIB)
    assert found.too_large_bytes == required(found.stats) > found.available_bytes
    if gib is not None:
        assert found.too_large_bytes == pytest.approx(gib * GIB, rel=1e-6)
    assert found.message.startswith("RESOURCE_EXHAUSTED")
    assert found.hlo.startswith("HloModule")
    assert found.assignment.startswith("BufferAssignment:")


@pytest.mark.slow
def test_donation_lets_a_tpu_program_fit():
    x = Spec((3 * GIB,), "float32")
    assert compiled("v5e-16g", lambda x: x + 1, x).too_large_bytes == pytest.approx(24 * GIB)
    assert compiled("v5e-16g", lambda x: x + 1, x, donate=(0,)).too_large_bytes is None


@pytest.mark.slow
def test_tpu_kernel_too_large_for_the_chip():
    from jax.experimental import pallas as pl

    def double(x):
        def kernel(x, out):
            out[...] = x[...] * 2

        return pl.pallas_call(kernel, out_shape=Spec(x.shape, x.dtype))(x)

    found = compiled("v4-32g", double, Spec((16384, 1024), "float32"), generate_code=True)
    assert found.too_large_space == "vmem"
    assert found.available_bytes == 16 * 2**20
    assert found.too_large_bytes >= 64 * 2**20


@pytest.mark.parametrize(
    ("message", "required", "available", "space"),
    [
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (2.50T) "
            "exceeds available HBM (15.75G).",
            2.5 * 1024 * GIB,
            15.75 * GIB,
            "hbm",
        ),
        (
            "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 16.58G "
            "of 15.48G hbm. Exceeded hbm capacity by 1.10G.\n\nTotal hbm usage >= 17.10G:\n",
            16.58 * GIB,
            15.48 * GIB,
            "hbm",
        ),
        (
            "XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 64.00M "
            "of 63.94M vmem. Exceeded vmem capacity by 64.0K.",
            64 * 2**20,
            63.94 * 2**20,
            "vmem",
        ),
        (
            "E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while "
            "allocating on stack for %k = f32[8]{0} custom-call(%x). Scoped allocation with size "
            "64.00M and limit 16.00M exceeded scoped vmem limit by 48.00M.",
            64 * 2**20,
            16 * 2**20,
            "vmem",
        ),
        (
            "Allocation (size=33554432) would exceed memory (size=16777216) :: #allocation2 "
            "[shape = 'u8[33554432]{0}', space=vmem, size = 0x2000000]",
            33554432,
            16777216,
            "vmem",
        ),
    ],
    ids=["hbm", "hbm used", "vmem used", "vmem scoped", "vmem allocation"],
)
def test_sizes_in_refusals(message, required, available, space):
    found = refusals.too_large(f"RESOURCE_EXHAUSTED: {message}")
    assert found is not None
    assert (found.required, found.available, found.space) == (
        round(required),
        round(available),
        space,
    )
    assert refusals.too_large(f"INTERNAL: {message}") is None


def test_first_line_says_something():
    found = refusals.first_line("RESOURCE_EXHAUSTED: E1001: Oom:\n\nRan out of memory.\nmore")
    assert found == "Ran out of memory."


def test_gpu_program_too_large_is_compiled_and_said_so():
    w, x = Spec((64, 4096, 4096), "float32"), Spec((1 << 16, 4096), "float32")
    found = compiled("rtx-4090-24g", gradients, w, x)
    assert found.too_large_bytes is None
    assert required(found.stats) > targets.target("rtx-4090-24g").memory
    assert "rematerialization" in found.log


# ---------------------------------------------------------------- what goes wrong


def test_texts_are_whole_when_all_are_there_and_none_grows(tmp_path: Path):
    found = worker.Texts(str(tmp_path))
    names = [*worker._TEXTS.values(), "-memory-usage-report.txt"]
    for name in names[::-1]:  # in any order
        assert not any(found.are_whole() for _ in range(5))
        (tmp_path / f"module_0001.jit_call.after{name}").write_text("a")
    for text in ("ab", "abc"):
        assert not any(found.are_whole() for _ in range(worker._LOOKS - 1))
        (tmp_path / f"module_0001.jit_call.after{names[0]}").write_text(text)
    assert [found.are_whole() for _ in range(worker._LOOKS)] == [False] * (worker._LOOKS - 1) + [
        True
    ]


@pytest.mark.parametrize("generate_code", [False, True])
@pytest.mark.parametrize("has_buffers", [False, True])
def test_refused_when_memory_is_known_counts_if_code_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generate_code: bool, has_buffers: bool
):
    """A compiler that is quick looks for libraries before anyone sees that it may be stopped."""
    refused = {"refused": "No FFI handler registered", "stats": {}, "hlo": "", "stopped": False}
    (answer := tmp_path / "answer").write_text(json.dumps(refused))
    if has_buffers:
        for name in (*worker._TEXTS.values(), "-memory-usage-report.txt"):
            (tmp_path / f"module_0001.jit_call.after{name}").write_text("a")
    with subprocess.Popen(["true"]) as compiler:
        monkeypatch.setattr(worker, "_child", compiler.pid)
        monkeypatch.setattr(worker.Texts, "are_whole", lambda texts: False)
        request = {"generate_code": generate_code, "room": None}
        found = worker.awaited(request, str(tmp_path), str(answer))
        compiler.returncode = 0  # it was waited for
    assert found["stopped"] == (has_buffers and not generate_code)
    assert found["refused"] == ("" if found["stopped"] else refused["refused"])


def test_garbage_for_a_program():
    with pytest.raises(CompileError, match="the compiler for h100-80g refused the program: "):
        targets.compile_for(targets.target("h100-80g"), b"garbage")
    assert targets.compile_for(targets.target("h100-80g"), small("gpu")).stats


def test_program_for_another_platform():
    with pytest.raises(CompileError, match="exported for platforms") as caught:
        targets.compile_for(targets.target("h100-80g"), small("tpu"))
    assert "Traceback" not in str(caught.value)


def test_unknown_option():
    with pytest.raises(CompileError, match="No such compile option: 'xla_nonsense'"):
        compiled("h100-80g", gradients, W, X, compiler_options={"xla_nonsense": 1})


def test_options_and_flags_are_passed_on(monkeypatch):
    x = Spec((512, 512), "bfloat16")
    plain = compiled("h100-80g", lambda x: x @ x, x)
    assert "__triton" in plain.hlo
    option = {"xla_gpu_enable_triton_gemm": False}
    assert "__triton" not in compiled("h100-80g", lambda x: x @ x, x, compiler_options=option).hlo
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert "__triton" not in compiled("h100-80g", lambda x: x @ x, x).hlo


@pytest.mark.parametrize(
    ("variable", "name"), [("XLA_FLAGS", "h100-80g"), ("LIBTPU_INIT_ARGS", "v5e-16g")]
)
def test_unknown_flag(monkeypatch, variable, name):
    monkeypatch.setenv(variable, "--xla_nonsense=true")
    with pytest.raises(CompileError, match=f"^{variable}='--xla_nonsense=true' has a flag that"):
        targets.compile_for(targets.target(name), small(targets.target(name).platform))


def test_not_installed(monkeypatch):
    monkeypatch.setattr(installed, "_version", lambda name: None)
    with pytest.raises(CompileError, match='libtpu is not installed: pip install "libtpu'):
        targets.compile_for(targets.target("v5e-16g"), b"")
    targets.warm_up(targets.target("v5e-16g"))  # not the place to complain


def test_incomplete_target_kills_no_more_than_the_worker(monkeypatch):
    """With three fields the compiler divides by zero."""
    fields = "core_count: 132 cuda_compute_capability { major: 9 }"
    text = f'gpu_device_info {{ {fields} }} platform_name: "CUDA"'
    monkeypatch.setattr(spec, "_gpu_text", lambda target, spec: text)
    with pytest.raises(CompileError, match=r"the compiler for h100-80g crashed \(SIGFPE\)"):
        targets.compile_for(targets.target("h100-80g"), small("gpu"))
    monkeypatch.undo()
    assert targets.compile_for(targets.target("h100-80g"), small("gpu")).stats


def busy(workers: Pool = pool) -> list[Worker]:
    return [worker for worker in workers._all if worker.pending]


@pytest.mark.slow
def test_worker_killed_while_compiling():
    program, target = slow("gpu"), targets.target("h100-80g")
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(targets.compile_for, target, program, generate_code=True)
        while not busy():
            time.sleep(0.05)
        (worker,) = busy()
        time.sleep(0.5)
        assert not result.done()
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(CompileError, match=r"was killed \(SIGKILL\): most likely this machine"):
            result.result(timeout=10)
    assert not os.path.exists(worker.folder)
    assert targets.compile_for(target, small("gpu")).stats


@pytest.mark.slow
def test_two_compilations_at_once_and_one_that_nobody_wants():
    target = targets.target("h100-80g")
    expected = targets.compile_for(target, small("gpu")).stats
    long = targets.Compilation(target, slow("gpu"), generate_code=True)
    quick = targets.Compilation(target, small("gpu"))
    assert quick.answered(60)
    assert not long.answered(0)
    (worker,) = set(busy()) - {quick._worker}
    assert quick.output().stats == expected
    long.stop()
    assert not busy()
    assert not os.path.exists(worker.folder)
    assert targets.compile_for(target, small("gpu")).stats == expected


def test_a_worker_that_dies_has_answered():
    target = targets.target("h100-80g")
    begun = targets.Compilation(target, slow("gpu"), generate_code=True)
    os.kill(begun._worker.process.pid, signal.SIGKILL)
    assert begun.answered(10)
    with pytest.raises(CompileError, match=r"was killed \(SIGKILL\)"):
        begun.output()
    assert not busy()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100-80g", "v5e-16g"])
def test_timeout(name):
    target = targets.target(name)
    program = slow(target.platform)
    targets.warm_up(target)
    before = time.monotonic()
    with pytest.raises(CompileError, match="took more than 1 s and was stopped; pass timeout="):
        targets.compile_for(target, program, generate_code=True, timeout=1)
    assert time.monotonic() - before < 5
    assert not busy()
    assert targets.compile_for(target, small(target.platform)).stats


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool of its own, whose workers end before they have loaded a compiler."""
    own = Pool()
    monkeypatch.setattr(client_module, "pool", own)
    yield own
    own.close()


def test_interrupt_ends_the_worker(mine, monkeypatch):
    def interrupted(worker, deadline):
        assert mine._all == [worker]
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "_read_on", interrupted)
    with pytest.raises(KeyboardInterrupt):
        targets.compile_for(targets.target("h100-80g"), small("gpu"))
    assert mine._all == []


def test_worker_that_died_at_rest_is_replaced():
    target = targets.target("h100-80g")
    targets.compile_for(target, small("gpu"))
    with pool.borrowed("gpu") as worker:
        pass
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    assert targets.compile_for(target, small("gpu")).stats
    assert worker not in pool._all


def test_worker_ends_when_idle():
    worker = Worker(idle=0.2)
    try:
        assert worker.process.wait(timeout=20) == 0
        with pytest.raises(Died) as caught:
            asked(worker, {"do": "warm", "topology": {}}, b"", 5)
        assert caught.value.code == 0
    finally:
        worker.end()


def test_no_room_for_files(mine, monkeypatch):
    with mine.borrowed("gpu") as worker:  # what a full disk does, at the first file
        monkeypatch.setattr(worker, "folder", os.path.join(worker.folder, "log", "none"))
    folder = str(Path(worker.folder).parents[1])
    with pytest.raises(CompileError, match="is .* on a full disk\\? TMPDIR sets the folder"):
        targets.compile_for(targets.target("h100-80g"), small("gpu"))
    shutil.rmtree(folder)


# ---------------------------------------------------------------- several at once


@pytest.mark.slow
def test_threads_get_workers_of_their_own():
    names = ["h100-80g", "v5e-16g", "v4-32g"]
    rows = [targets.target(name) for name in names]
    programs = [small(row.platform) for row in rows]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(targets.compile_for, rows, programs))
    for row, output in zip(rows, found, strict=True):
        assert output.stats == targets.compile_for(row, small(row.platform)).stats


def test_warm_up_does_not_wait_and_is_used(mine):
    topology = targets.target("h100-80g").topology
    before = time.monotonic()
    mine.warm_up("gpu", {"do": "warm", "topology": topology})
    mine.warm_up("gpu", {"do": "warm", "topology": topology})
    assert time.monotonic() - before < 0.5
    (started,) = mine._all
    with mine.borrowed("gpu") as worker:
        assert worker is started
    mine.close()
    assert not started.alive
    assert not os.path.exists(started.folder)


@pytest.mark.slow
def test_close_ends_workers_that_are_at_work(mine):
    target = targets.target("v5e-16g")
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(targets.compile_for, target, slow("tpu"), generate_code=True)
        while not busy(mine):
            time.sleep(0.05)
        mine.close()
        with pytest.raises(CompileError):
            result.result(timeout=10)
    assert targets.compile_for(target, small("tpu")).stats


PROCESS = """
import os, sys, warnings
from pathlib import Path
from jaxmem import targets
from jaxmem.targets.pool import pool

folder = Path(sys.argv[1])

def figure(name):
    target = targets.target(name)
    output = targets.compile_for(target, (folder / target.platform).read_bytes())
    return output.stats["argument_bytes"]

print(figure("v5e-16g"))
pool.close()
first = figure("h100-80g")
(worker,) = pool._all
warnings.simplefilter("ignore")
child = os.fork()
if not child:
    fresh = pool._all == []
    own = figure("h100-80g")
    os._exit(0 if fresh and own == first and worker not in pool._all else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(figure("h100-80g") == first and pool._all == [worker])
print(worker.process.pid, worker.folder, flush=True)
worker.send({"do": "warm", "topology": targets.target("h100-80g", 8).topology})
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], int]:
    """What another process says that compiles, forks and dies, and its exit code."""
    folder = tmp_path_factory.mktemp("programs")
    for platform in ("gpu", "tpu"):
        (folder / platform).write_bytes(small(platform))
    paths = [str(Path(targets.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    one = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
    )
    for name in ("v5e-16g", "h100-80g"):  # this one compiles, too
        target = targets.target(name)
        assert targets.compile_for(target, small(target.platform)).stats
    said, _ = one.communicate(timeout=120)
    return said.splitlines(), one.returncode


@pytest.mark.slow
def test_two_processes_compile_at_once(process):
    assert process[0][0] == str(W_BYTES + X_BYTES)


def test_fork_begins_with_no_worker(process):
    assert process[0][1:3] == ["0", "True"]


def test_worker_ends_with_its_parent(process):
    said, code = process
    assert code == -signal.SIGKILL
    pid, folder = said[3].split()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (Path(f"/proc/{pid}").exists() or Path(folder).exists()):
        time.sleep(0.05)
    assert not Path(folder).exists()


def test_settings_of_jax_are_passed_on():
    """They are read by name, so a name that jax no longer knows would be dropped silently."""
    assert {
        "jax_use_shardy_partitioner",
        "jax_optimization_level",
        "jax_memory_fitting_level",
        "jax_compiler_enable_remat_pass",
    } <= set(targets.settings())
    assert targets.settings()["jax_use_shardy_partitioner"] is True
    assert set(targets.settings()) <= set(client_module._SETTINGS)
