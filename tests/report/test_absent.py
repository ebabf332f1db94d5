"""`memory_report` for absent accelerators: figures, advice, cache, errors."""

import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.releases import SINCE_0_11
from helpers.xla_flags import quick
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.compile import compiling

LAYERS, WIDTH, BATCH = 24, 256, 512


def spec(*shape: int, dtype: str = "float32", sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def scanned(weights: Any, h: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ w["a"]) @ w["b"] + h, None

    return (jax.lax.scan(layer, h, weights)[0] ** 2).mean()


def step_of(loss: Any) -> Any:
    def step(params: Any, momentum: Any, batch: jax.Array) -> Any:
        grads = jax.grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return optax.apply_updates(params, momentum), momentum

    return step


PARAMS = {"a": spec(LAYERS, WIDTH, WIDTH), "b": spec(LAYERS, WIDTH, WIDTH)}
BYTES = 2 * LAYERS * WIDTH * WIDTH * 4


def report(loss: Any = scanned, batch: int = BATCH, **options: Any) -> jaxmem.MemoryReport:
    options = {"target": "h100-80g", "donate_argnums": (0, 1), **options}
    options = {"compiler_options": quick(options["target"]), **options}
    return jaxmem.memory_report(step_of(loss), PARAMS, PARAMS, spec(batch, WIDTH), **options)


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("target", ["h100-80g", "v5e-16g"])
def test_the_sum_is_that_of_its_parts_and_arguments_are_split_by_path(target: str):
    found = report(jaxmem.remat_full(scanned), target=target, compiler_options={})
    assert found.required_bytes == (
        found.argument_bytes + found.output_bytes - found.alias_bytes + found.temp_bytes
    )
    half = BYTES // 2
    assert {name: found.arguments[name] for name in ("params/a", "momentum/b", "batch")} == {
        "params/a": half,
        "momentum/b": half,
        "batch": BATCH * WIDTH * 4,
    }
    assert sum(found.arguments.values()) == found.argument_bytes
    assert found.alias_bytes == 2 * BYTES
    assert found.fits
    assert found.capacity_bytes == jaxmem.target(target).memory
    # Of the two products of a layer the backward pass needs one again, next to six in all.
    assert found.recompute_overhead == pytest.approx(1 / 6)
    assert (found.source, found.target, found.devices) == ("compiled", target, 1)
    assert {"jax", "jaxlib", "jaxmem"} < set(found.versions)
    # A roofline: no faster than the matrix peak allows.
    assert found.estimated_seconds is not None
    assert found.matmul_flops is not None
    assert found.estimated_seconds >= found.matmul_flops / jaxmem.target(target).matrix_peak


def test_buffers_have_the_users_names_and_lines():
    found = report()
    temporary = [b for b in found.buffers if b.kind == "temporary"]
    stacks = [b for b in temporary if b.shape == (LAYERS, BATCH, WIDTH)]
    assert {b.name for b in stacks} >= {"tanh"}
    assert all("test_absent.py" in b.source for b in stacks)
    assert {b.name for b in found.buffers if b.kind == "argument"} >= {"params/a", "momentum/b"}
    timeline = found.timeline
    assert timeline is not None
    assert max(timeline.bytes) <= found.required_bytes
    assert any(loop.trip_count == LAYERS for loop in timeline.loops)
    # What is listed is what is live there, but for the small.
    listed = sum(b.bytes for b in found.buffers if b.place == "device")
    assert listed == pytest.approx(max(timeline.bytes), rel=0.01)


@pytest.mark.parametrize("target", ["local", "h100-80g"])
def test_residuals_are_called_by_the_names_that_they_were_given(target: str):
    def named(weights: Any, h: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
            up = checkpoint_name(jnp.tanh(h @ w["a"]), "up")
            return jnp.sin(up @ w["b"]) + h, None

        return (jax.lax.scan(layer, h, weights)[0] ** 2).mean()

    stacks = [b for b in report(named, target=target).buffers if b.shape == (LAYERS, BATCH, WIDTH)]
    assert "up" in {b.name for b in stacks}
    assert "tanh" not in {b.name for b in stacks}


def test_policies_are_ordered_as_their_memory():
    needs = {
        name: report(jaxmem.remat(scanned, name)).temp_bytes
        for name in ("none", "full", "sqrt", "revolve")
    }
    assert needs["revolve"] < needs["sqrt"] <= needs["full"] < needs["none"]


@pytest.mark.parametrize("target", ["h100-80g", "v5e-16g"])
def test_figures_of_a_sharded_program_are_for_one_device(target: str):
    eight = jaxmem.target(target, devices=8)
    mesh = eight.mesh({"data": 8})
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    params = jax.tree.map(lambda s: spec(*s.shape, sharding=whole), PARAMS)
    batch = spec(BATCH, WIDTH, sharding=rows)
    step = step_of(jaxmem.remat_full(scanned))
    args = params, params, batch
    options: Any = {"donate_argnums": (0, 1), "compiler_options": quick(target)}
    found = jaxmem.memory_report(step, *args, target=eight, **options)
    assert found.devices == 8
    assert found.arguments["batch"] == BATCH * WIDTH * 4 // 8
    assert found.arguments["params/a"] == BYTES // 2
    assert "figures are for one of 8 devices" in found.notes
    alone = report(jaxmem.remat_full(scanned), target=target)
    for work in ("flops", "matmul_flops"):
        assert getattr(found, work) == pytest.approx(getattr(alone, work) / 8, rel=0.01)
    # A target asked for by name alone has as many devices as the mesh.
    again = jaxmem.memory_report(step, *args, target=target, **options)
    assert (again.required_bytes, again.cached) == (found.required_bytes, True)
    with pytest.raises(ValueError, match=r"sharded over 8 device\(s\).*has 4"):
        jaxmem.memory_report(step, *args, target=jaxmem.target(target, devices=4))


@pytest.mark.parametrize("target", ["local", "h100-80g", "v5e-16g"])
def test_arguments_that_nothing_reads_are_not_charged(target: str):
    """In any position; and arguments that are read keep their path, donation and place."""
    unused, used = spec(1024, 1024), spec(256, 256)

    def f(first: Any, a: Any, middle: Any, b: Any, last: Any) -> Any:
        return {"a": a * 2, "b": jnp.zeros(b.shape) + first["shape only"].shape[0]}

    args = {"shape only": unused}, used, unused, used, unused
    found = jaxmem.memory_report(f, *args, target=target, donate_argnums=(0, 1, 2))
    assert found.arguments["a"] == used.size * 4
    assert sum(found.arguments.values()) == found.argument_bytes < 2 * used.size * 4
    assert found.alias_bytes == used.size * 4
    assert {b.name for b in found.buffers if b.kind == "argument"} == {"a"}


def test_unused_arguments_of_a_sharded_program_are_not_charged():
    eight = jaxmem.target("h100-80g", devices=8)
    mesh = eight.mesh({"data": 4, "model": 2})
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    unused, x = spec(2048, 2048, sharding=whole), spec(4096, 1024, sharding=rows)
    w = spec(1024, 1024, sharding=whole)
    found = jaxmem.memory_report(lambda u, x, w: jnp.tanh(x @ w), unused, x, w, target=eight)
    assert found.arguments == {"u": 0, "x": 4096 * 1024, "w": 4 * 1024 * 1024}
    # Half of the devices do again what the others do: no recomputation of the program's own.
    assert found.recompute_overhead == 0


@pytest.mark.parametrize("target", ["local", "h100-80g", "v5e-16g"])
def test_a_function_without_arguments(target: str):
    found = jaxmem.memory_report(lambda: jnp.zeros((1024, 1024)), target=target)
    assert (found.argument_bytes, found.arguments) == (0, {})
    assert found.output_bytes == 2**22


def test_arguments_in_host_memory_stay_there():
    mesh = jaxmem.target("v5e-16g").mesh({"d": 1})
    there = NamedSharding(mesh, P(), memory_kind="pinned_host")
    x = spec(1024, 1024, sharding=there)

    def fetch(unread: Any, x: Any, mode: str = "a") -> Any:
        return jax.device_put(x, jax.memory.Space.Device) * 2

    jitted = jax.jit(fetch, static_argnames="mode")
    for found in (
        jaxmem.memory_report(fetch, x, x, target="v5e-16g"),
        jaxmem.memory_report(jitted, x, x, target="v5e-16g", mode="b"),
    ):
        assert found.host_bytes == 2**22
        assert found.argument_bytes < 2**16


def test_what_a_jitted_function_donates_holds_next_to_what_is_donated_here():
    jitted = jax.jit(lambda w, x: (w + 1, x * 2), donate_argnums=0)
    args = spec(256, 256), spec(512, 256)
    found = jaxmem.memory_report(jitted, *args, target="h100-80g", donate_argnums=1)
    assert found.alias_bytes == found.argument_bytes
    assert found.lints == ()


def test_concrete_arrays_do_as_well_and_nothing_is_run():
    def loud(x: jax.Array) -> jax.Array:
        return x * 2

    x = np.ones((256, 256), np.float32)
    found = jaxmem.memory_report(loud, x, target="h100-80g")
    assert found.arguments == {"x": x.nbytes}


@pytest.mark.parametrize("target", ["local", "h100-80g", "v5e-16g"])
def test_arrays_that_a_function_closes_over_are_counted(target: str):
    table = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    found = jaxmem.memory_report(lambda x: x @ table, spec(8, 1024), target=target)
    assert found.arguments["x"] == 8 * 1024 * 4
    assert sum(found.arguments.values()) == found.argument_bytes
    # A TPU multiplies bf16, and keeps the table so.
    held = table.nbytes // (2 if target.startswith("v5e") else 1)
    assert found.argument_bytes == pytest.approx(held + 8 * 1024 * 4, rel=0.01)
    assert found.required_bytes >= held


def test_on_a_tpu_donation_counts_once():
    """The sums of this compiler count donated arguments twice; the allocations do not."""
    donated = report(jaxmem.remat_full(scanned), target="v5e-16g")
    kept = report(jaxmem.remat_full(scanned), target="v5e-16g", donate_argnums=())
    assert donated.required_bytes <= kept.required_bytes - BYTES


# ---------------------------------------------------------------- what to do about it


def test_advice_for_undecorated_code_names_the_stack():
    found = report(batch=2**20, target="l4-24g")
    assert found.fits is False
    assert "decorate the code that scans over the 24 layers (test_absent.py:" in found.verdict
    assert found.suggestion is None


@pytest.mark.slow
def test_advice_for_decorated_code_is_the_next_policy_that_fits():
    found = report(jaxmem.remat(scanned, "none"), batch=2**20, target="l4-24g")
    assert found.suggestion is not None
    assert found.capacity_bytes is not None
    assert found.suggestion.required_bytes <= found.capacity_bytes
    assert f"{found.suggestion.policy} would" in found.verdict
    assert found.suggestion.policy == "@jaxmem.remat_sqrt(levels=2)"
    again = report(jaxmem.remat_sqrt(levels=2)(scanned), batch=2**20, target="l4-24g")
    assert (again.required_bytes, again.fits) == (found.suggestion.required_bytes, True)
    quiet = report(jaxmem.remat(scanned, "none"), batch=2**20, target="l4-24g", suggest=False)
    assert (quiet.fits, quiet.suggestion, quiet.advice) == (False, None, "")


def test_where_nothing_helps_it_says_what_is_left():
    found = report(jaxmem.remat_full(scanned), batch=2**25, target="l4-24g")
    assert found.suggestion is None
    assert "arguments and results alone are too large" in found.verdict


def test_a_tpu_program_that_is_too_large_is_a_report():
    found = report(batch=2**20, target="v5e-16g", suggest=False)
    assert found.fits is False
    assert found.capacity_bytes is not None
    assert found.required_bytes > found.capacity_bytes
    assert any("refused the program" in note for note in found.notes)


# ---------------------------------------------------------------- the cache


def wide(weights: Any, h: jax.Array) -> jax.Array:
    """Without a product, so that it is compiled in a moment."""
    return (jnp.sin(h) * weights["a"].sum((0, 1))).mean() + weights["b"].sum()


def test_the_second_time_is_from_the_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    first, second = report(wide), report(wide)
    assert (first.cached, second.cached, second.compile_seconds) == (False, True, 0.0)
    assert first.buffers == second.buffers
    assert first.required_bytes == second.required_bytes
    # Another function, other options or no cache compile again.
    assert not report(lambda weights, h: wide(weights, 2 * h)).cached
    latency = {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert not report(wide, compiler_options=latency).cached
    assert not report(wide, cache=False).cached
    start = time.process_time()
    report(wide)
    assert time.process_time() - start < 5


# ---------------------------------------------------------------- what goes wrong


def test_options_and_arguments_of_the_same_name_are_told_apart():
    def decode(x: jax.Array, cache: jax.Array) -> jax.Array:
        return x @ cache

    with pytest.raises(TypeError, match=r"cache= takes True or False.*goes by position"):
        jaxmem.memory_report(decode, spec(8, 8), target="h100-80g", cache=spec(8, 8))  # pyright: ignore[reportArgumentType]
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="positive number of seconds"):
            jaxmem.memory_report(decode, spec(8, 8), spec(8, 8), timeout=wrong)
    with pytest.raises(TypeError, match="timeout= takes a number"):
        jaxmem.memory_report(decode, spec(8, 8), spec(8, 8), timeout="5")  # pyright: ignore[reportArgumentType]


def test_absent_devices_want_a_target():
    mesh = jaxmem.target("h100-80g", devices=8).mesh({"data": 8})
    x = spec(8, 8, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match="name the accelerator"):
        jaxmem.memory_report(jnp.sin, x)


def test_functions_that_flax_jits_are_refused_with_advice():
    module = nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"nnx\.split"):
        jaxmem.memory_report(nnx.jit(lambda m, x: m(x)), module, spec(4, 8), target="h100-80g")


def test_what_jax_cannot_lower_for_the_target_is_a_compile_error():
    with pytest.raises(jaxmem.CompileError):
        jaxmem.memory_report(jnp.linalg.eigvals, spec(8, 8), target="v5e-16g")


def test_results_of_other_code_are_not_taken(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    report(wide)
    monkeypatch.setattr(compiling, "_reader_digest", lambda: "another")
    assert not report(wide).cached


def test_what_cannot_be_exported_is_said():
    def calls_back(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, x, x)

    with pytest.raises(jaxmem.CompileError, match="calls back into Python"):
        jaxmem.memory_report(calls_back, spec(8), target="h100-80g")


def test_custom_calls_of_any_name_reach_the_compiler():
    """jax exports only those that it promises to keep; this compiler is of the same version."""

    def kernels(x: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("my_kernel$fwd", like)(x) + jax.ffi.ffi_call("other.one", like)(x)

    report = jaxmem.memory_report(kernels, spec(256, 256), target="h100-80g")
    assert report.required_bytes >= 2 * 256 * 256 * 4
    with pytest.raises(jaxmem.CompileError, match=r"refused the program.*No FFI handler"):
        jaxmem.memory_report(kernels, spec(256, 256), target="h100-80g", generate_code=True)


def test_hand_written_kernels_are_compiled_to_the_end():
    """A kernel that the chip has no room for is refused, after buffers are assigned."""
    from jax.experimental import pallas as pl

    def double(x: jax.Array) -> jax.Array:
        def kernel(x: Any, out: Any) -> None:
            out[...] = x[...] * 2

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pytest.raises(jaxmem.CompileError, match="needs more on-chip memory than v4-32g has"):
        jaxmem.memory_report(double, spec(16384, 1024), target="v4-32g")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("devices", [1, 2])
def test_kernels_of_triton_are_compiled_for_the_gpu_that_is_meant(devices: int):
    """Which jax asks for since 0.12, and a mesh of that target says."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    shape = spec(512 // devices, 128)
    target = jaxmem.target("h100-80g", devices=devices)
    rows = NamedSharding(target.mesh({"data": devices}), P("data"))

    def kernel(x: Any, out: Any) -> None:
        out[...] = jnp.tanh(x[...])

    def tanh(x: Any) -> Any:
        params = triton.CompilerParams()
        return pl.pallas_call(kernel, out_shape=shape, compiler_params=params)(x)

    def split(x: Any) -> Any:
        if devices == 1:
            return tanh(x)
        how = {"in_specs": rows.spec, "out_specs": rows.spec, "check_vma": False}
        return jax.shard_map(tanh, mesh=rows.mesh, **how)(x)

    x = jax.ShapeDtypeStruct((512, 128), "float32", sharding=rows if devices > 1 else None)
    found = jaxmem.memory_report(split, x, target=target)
    assert found.output_bytes == 4 * 512 * 128 // devices


def test_fused_attention_without_cudnn_says_what_to_install():
    def attention(q: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    with pytest.raises(jaxmem.CompileError, match="nvidia-cudnn-cu13"):
        jaxmem.memory_report(attention, spec(2, 128, 4, 64, dtype="bfloat16"), target="h100-80g")


def test_a_defect_of_the_compiler_is_avoided_and_told_of():
    """Of an absent GPU's kernels, the sizes of tiles are not tuned: here none of them suits."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8)
        y = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape)
        return x + y @ w.astype(x.dtype)

    heads = spec(128, 197, 12, 64, dtype="bfloat16")
    args = heads, heads, heads, spec(768, 768), spec(128, 197, 768, dtype="bfloat16")
    found = jaxmem.memory_report(attention, *args, target="h100-80g")
    if SINCE_0_11:  # mended there
        assert not found.flags
        assert "compiler-defect" not in [lint.kind for lint in found.lints]
        return
    assert found.flags == {"xla_gpu_enable_triton_gemm": "False"}
    [lint] = (lint for lint in found.lints if lint.kind == "compiler-defect")
    assert "compiled with xla_gpu_enable_triton_gemm=False" in lint.message
    asked: Any = {"target": "h100-80g", "compiler_options": {"xla_gpu_enable_triton_gemm": True}}
    with pytest.raises(jaxmem.CompileError, match="Couldn't find output tile sizes"):
        jaxmem.memory_report(attention, *args, **asked)


@pytest.mark.slow
def test_where_transfers_are_overlapped_at_the_cost_of_what_offload_saves_the_remedy_saves_it():
    batch, length, width, layers = 32, 1024, 1024, 16

    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        heads = (batch, length, 16, width // 16)
        q, k, v = (part.reshape(heads) for part in jnp.split(h @ w["in"], 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(h.dtype), v)
        h = h + y.reshape(h.shape) @ w["out"]
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

    @jaxmem.remat_offload
    def loss(weights: Any, h: jax.Array) -> jax.Array:
        return (jax.lax.scan(layer, h, weights)[0] ** 2).mean()

    def report_of(**options: Any) -> jaxmem.MemoryReport:
        args = weights, spec(batch, length, width, dtype="bfloat16")
        return jaxmem.memory_report(jax.grad(loss), *args, target="h100-80g", **options)

    columns = {"in": 3 * width, "out": width, "up": 4 * width}
    weights = {k: spec(layers, width, n, dtype="bfloat16") for k, n in columns.items()}
    weights["down"] = spec(layers, 4 * width, width, dtype="bfloat16")
    kind = "transfers-overlapped"
    found = report_of()
    carries = layers * batch * length * width * 2
    assert found.host_bytes == carries
    [lint] = (lint for lint in found.lints if lint.kind == kind)
    [(option, percent)] = re.findall(r'{"(\w+)": (\d+)}', lint.remedy)
    less = report_of(compiler_options={option: int(percent)})
    assert less.host_bytes == carries
    assert less.temp_bytes < found.temp_bytes - carries
    assert kind not in [lint.kind for lint in less.lints]
    # Where it does save it says nothing.
    assert kind not in [lint.kind for lint in report(jaxmem.remat_offload(scanned)).lints]


def test_where_an_order_for_time_costs_memory_the_remedy_saves_that():
    """Since jax 0.11 GPUs' compiler overlaps copies of stacks with products, also of one device."""
    batch, length, width, layers = 4, 1024, 512, 4

    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        heads = (part.reshape(batch, length, 8, -1) for part in jnp.split(h @ w["in"], 3, axis=-1))
        q, k, v = heads
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(h.dtype), v)
        h = h + y.reshape(h.shape) @ w["out"]
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

    def loss(weights: Any, h: jax.Array) -> jax.Array:
        return (jax.lax.scan(layer, h, weights)[0].astype(jnp.float32) ** 2).mean()

    columns = {"in": 3 * width, "out": width, "up": 4 * width}
    weights = {k: spec(layers, width, n, dtype="bfloat16") for k, n in columns.items()}
    weights["down"] = spec(layers, 4 * width, width, dtype="bfloat16")
    args = weights, spec(batch, length, width, dtype="bfloat16")

    def report_of(**options: Any) -> jaxmem.MemoryReport:
        full = jax.grad(jaxmem.remat_full(loss))
        return jaxmem.memory_report(full, *args, target="h100-80g", **options)

    found = report_of()
    told = [lint for lint in found.lints if lint.kind == "ordered-for-time"]
    option_in = re.compile(r"{'(\w+)': False}")
    auto = jax.grad(jaxmem.remat_auto(loss))
    with pytest.raises(jaxmem.BudgetError) as caught:
        jaxmem.fit(auto, *args, budget="50MiB", target="h100-80g", max_compiles=1)
    hints = option_in.findall(str(caught.value))
    if not SINCE_0_11:
        assert not told
        assert not hints
        return
    [option] = option_in.findall(told[0].remedy)
    assert hints == [option]
    less = report_of(compiler_options={option: False})
    assert "ordered-for-time" not in [lint.kind for lint in less.lints]
    saved = (found.temp_bytes - less.temp_bytes) / 2**20
    assert saved > 0.1 * found.temp_bytes / 2**20
    [expected] = re.findall(r"about ([\d.]+) MiB more", told[0].message)
    assert float(expected) == pytest.approx(saved, rel=0.2)


def test_offload_warns_of_the_cpu_only_on_the_cpu():
    decorated = jaxmem.remat_offload(scanned)
    found = report(decorated)  # warnings are errors here
    assert found.host_bytes >= LAYERS * BATCH * WIDTH * 4
    with pytest.warns(jaxmem.OffloadWarning):
        report(decorated, target="local")
