"""What fusion does in compiled programs: bytes by hand, lints, JSON, the roofline, the picture."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem

ROWS, WIDTH, LAYERS = 4096, 512, 12
H = ROWS * WIDTH * 4  # bytes of an activation
W = WIDTH * WIDTH * 4
V = WIDTH * 4


def spec(*shape: int, dtype: str = "float32", **options: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, **options)


def report(fn: Any, *args: Any, target: str = "h100-80g") -> jaxmem.MemoryReport:
    return jaxmem.memory_report(fn, *args, target=target)


def fusions(fn: Any, *args: Any, target: str = "h100-80g") -> jaxmem.Fusions:
    found = report(fn, *args, target=target)
    assert found.fusions is not None
    assert found.bytes_moved == found.fusions.bytes
    assert found.fusions.bytes == sum(kernel.total_bytes for kernel in found.fusions.kernels)
    return found.fusions


def lints(fn: Any, *args: Any, target: str = "h100-80g") -> dict[str, jaxmem.Lint]:
    kinds = ("chain-broken", "layout-copy", "conversion-written")
    return {
        lint.kind: lint for lint in report(fn, *args, target=target).lints if lint.kind in kinds
    }


# ---------------------------------------------------------------- Linear, norm, activation


def linear_norm_relu(x: Any, w: Any, scale: Any, shift: Any) -> Any:
    """With the statistics of batch norm folded into a scale and a shift, as for inference."""
    h = x @ w
    h = h * scale + shift
    return jax.nn.relu(h)


LINEAR = spec(ROWS, WIDTH), spec(WIDTH, WIDTH)
VECTOR = spec(WIDTH)


@pytest.mark.parametrize("target", ["h100-80g", "v5e-16g"])
def test_linear_norm_and_activation_read_and_write_once(target: str):
    """Three kernels, each reading and writing an activation, are one that does so once."""
    found = fusions(linear_norm_relu, *LINEAR, VECTOR, VECTOR, target=target)
    kernel = max(found.kernels, key=lambda kernel: kernel.separate_bytes)
    assert kernel.work == "matmul"
    assert [one.name for one in kernel.operations] == ["dot_general", "mul", "add", "max"]
    linear, norm, activation = H + W + H, (H + V + H) + (H + V + H), H + H
    assert found.separate_bytes == kernel.separate_bytes == linear + norm + activation
    # A TPU's compiler copies the input to on-chip memory first: read once, by another kernel.
    assert (found.read_bytes, found.written_bytes) == (H + W + 2 * V, H)
    lines = [line.source for line in found.lines if line.source]
    assert len(lines) == 3
    assert all("(linear_norm_relu)" in line for line in lines)


def norm_relu_for_training(x: Any, w: Any, scale: Any, shift: Any) -> Any:
    h = x @ w
    mean = h.mean(0)
    variance = ((h - mean) ** 2).mean(0)
    h = (h - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + shift
    return jax.nn.relu(h), mean, variance


def test_statistics_of_a_batch_keep_its_kernels_apart():
    """Each reduction needs all of what is before it: the product, two sums, and what follows."""
    found = fusions(norm_relu_for_training, *LINEAR, VECTOR, VECTOR)
    by_work: dict[str, int] = {}
    for kernel in found.kernels:
        by_work[kernel.work] = by_work.get(kernel.work, 0) + kernel.total_bytes
    assert by_work["matmul"] == H + W + H
    # The sums read an activation each, and write a vector; each is then divided by the length.
    assert by_work["reduction"] == 2 * (H + V)
    # h - mean is written once for both of its readers; then all from there to the activation.
    assert by_work["elementwise"] == (H + V + H) + (H + 3 * V + H) + 2 * (2 * V)
    (last,) = (k for k in found.kernels if k.name == "max")
    assert [one.name for one in last.operations] == ["add", "rsqrt", "mul", "max"]


# ---------------------------------------------------------------- loops


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w), None


def scanned(ws: Any, h: Any) -> Any:
    return jax.lax.scan(layer, h, ws)[0]


def test_a_fusion_in_a_scan_counts_times_its_length():
    args = spec(LAYERS, WIDTH, WIDTH, dtype="bfloat16"), spec(ROWS, WIDTH, dtype="bfloat16")
    found = fusions(scanned, *args)
    (product,) = (kernel for kernel in found.kernels if kernel.work == "matmul")
    assert product.times == LAYERS
    assert [one.name for one in product.operations] == ["dot_general", "tanh"]
    assert (product.read_bytes, product.written_bytes) == (H // 2 + W // 2, H // 2)
    assert product.separate_bytes == (H + W // 2) + H, "tanh is of bfloat16, too"
    (sliced,) = (k for k in found.kernels if k.name == "dynamic_slice")
    assert (sliced.times, sliced.read_bytes, sliced.written_bytes) == (LAYERS, W // 2, W // 2)


def test_one_by_one_operations_move_the_same_on_every_target():
    """Whatever the compilers make of them: kernels, types to compute in, memory on the chip."""
    args = spec(ROWS, WIDTH, dtype="bfloat16"), spec(WIDTH, WIDTH, dtype="bfloat16")

    def gelu(x: Any, w: Any) -> Any:
        return jax.nn.gelu(x @ w)

    (line,) = {
        tuple((one.source, one.separate_bytes) for one in found.lines if one.separate_bytes)
        for found in (fusions(gelu, *args, target=name) for name in ("h100-80g", "v5e-16g"))
    }
    activation = H // 2
    # A cube (two products), four products, two sums, tanh: of one operand three times, of two
    # twice (the cube's second, the sum with it, and the last product).
    assert line[0][1] == (2 * activation + W // 2) + (6 * 2 + 3 * 3) * activation


def test_repeated_calls_of_a_function_are_one_row():
    def unrolled(ws: Any, h: Any) -> Any:
        for k in range(3):
            h = layer(h, ws[k])[0]
        return h

    found = fusions(unrolled, spec(3, WIDTH, WIDTH), spec(ROWS, WIDTH))
    (product,) = (kernel for kernel in found.kernels if kernel.work == "matmul")
    assert product.times == 3
    assert product.source.endswith("(layer)")


def test_figures_of_a_sharded_program_are_those_of_one_device():
    mesh = jaxmem.target("h100-80g", devices=8).mesh({"data": 8})

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w))

    x = spec(8 * ROWS, WIDTH, sharding=NamedSharding(mesh, P("data")))
    w = spec(WIDTH, WIDTH, sharding=NamedSharding(mesh, P()))
    found = fusions(jax.grad(loss), w, x)
    assert any(k.work == "collective" and k.name == "all-reduce" for k in found.kernels)
    # The forward product and the gradient's, each of one device's rows.
    assert all(max(k.read_bytes, k.written_bytes) < 3 * H for k in found.kernels)
    assert found.read_bytes > 2 * H


def test_transformations_on_the_attached_processor():
    def f(x: Any) -> Any:
        return jnp.tanh(x * 2) + 1

    x = spec(64, 1024)
    for fn in (f, jax.jit(f), jax.vmap(f)):
        found = jaxmem.memory_report(fn, x).fusions
        assert found is not None
        size = 64 * 1024 * 4
        assert (found.bytes, found.separate_bytes) == (2 * size, 6 * size)

    def tangent(x: Any, t: Any) -> Any:
        return jax.jvp(f, (x,), (t,))

    found = jaxmem.memory_report(tangent, x, x).fusions
    assert found is not None
    assert found.separate_bytes > found.bytes >= 4 * size


# ---------------------------------------------------------------- lints


def test_a_call_in_the_middle_of_elementwise_operations():
    """Of a library, here by FFI; the next test has one of Pallas."""
    shape = spec(ROWS, WIDTH)

    def broken(x: Any) -> Any:
        y = jnp.sin(x) * 2
        y = jax.ffi.ffi_call("my_library", shape)(y)
        return jnp.cos(y) + x

    lint = lints(broken, shape)["chain-broken"]
    assert "ffi_call (test_fusions.py:" in lint.message
    assert "mul before it and add after it" in lint.message
    # 8 MiB to the call and as much from it, each written and read; 7 activations in all.
    assert "32.0 MiB of the 56.0 MiB" in lint.message
    assert "inside of the kernel" in lint.remedy


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("target", ["h100-80g", "v5e-16g"])
def test_a_pallas_call_in_the_middle_of_elementwise_operations(target: str):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    shape = spec(65536, 1024)  # too large for a TPU's on-chip memory
    params: dict[str, Any] = {}
    if target == "h100-80g":
        params["compiler_params"] = triton.CompilerParams()

    def kernel(x: Any, out: Any) -> None:
        out[...] = jnp.tanh(x[...])

    def broken(x: Any) -> Any:
        block = pl.BlockSpec((64, 128), lambda i, j: (i, j))
        call = pl.pallas_call(
            kernel, out_shape=shape, grid=(1024, 8), in_specs=[block], out_specs=block, **params
        )
        return jnp.cos(call(jnp.sin(x) * 2)) + x

    lint = jaxmem.memory_report(broken, shape, target=target).lints[-1]
    assert lint.kind == "chain-broken"
    assert "pallas_call (test_fusions.py:" in lint.message
    assert "1.0 GiB of the 1.8 GiB" in lint.message


def test_a_layout_copy():
    def convolution(order: str) -> Any:
        def apply(x: Any, w: Any) -> Any:
            numbers = (order, "HWIO", order)
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

        return apply

    w = spec(3, 3, 64, 64)
    found = report(convolution("NCHW"), spec(16, 64, 64, 64), w).lints
    copies = [lint for lint in found if lint.kind == "layout-copy"]
    for lint, value in zip(copies, ("x", "conv_general_dilated"), strict=True):
        assert f"the compiler copies {value}, f32[16,64,64,64]" in lint.message
        assert "32.0 MiB of the 96.4 MiB" in lint.message
        assert "(test_fusions.py:" in lint.message
        assert "NHWC" in lint.remedy
    assert lints(convolution("NHWC"), spec(16, 64, 64, 64), w) == {}


def test_a_conversion_that_is_written_to_memory():
    def body(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w.astype(jnp.bfloat16)), None

    def whole(ws: Any, h: Any) -> Any:
        return jax.lax.scan(body, h, ws.astype(jnp.bfloat16))[0]

    def by_layer(ws: Any, h: Any) -> Any:
        return jax.lax.scan(body, h, ws)[0]

    args = spec(LAYERS, WIDTH, WIDTH), spec(256, WIDTH, dtype="bfloat16")
    lint = lints(whole, *args)["conversion-written"]
    assert "the conversion of ws from f32 to bf16[12,512,512] (test_fusions.py:" in lint.message
    assert f"{LAYERS * W * 1.5 / 2**20:.1f} MiB of the" in lint.message
    assert "inside of the loop" in lint.remedy
    assert lints(by_layer, *args) == {}


def test_ordinary_programs_have_none():
    def loss(ws: Any, h: Any) -> Any:
        return (scanned(ws, h).astype(jnp.float32) ** 2).mean()

    args = spec(LAYERS, WIDTH, WIDTH, dtype="bfloat16"), spec(ROWS, WIDTH, dtype="bfloat16")
    for target in ("h100-80g", "v5e-16g"):
        assert lints(jax.value_and_grad(loss), *args, target=target) == {}
        assert lints(linear_norm_relu, *LINEAR, VECTOR, VECTOR, target=target) == {}


def test_what_is_small_is_no_lint():
    small = spec(64, 64)

    def broken(x: Any) -> Any:
        return jnp.cos(jax.ffi.ffi_call("my_library", small)(jnp.sin(x)))

    found = fusions(broken, small)
    assert [one.kind for one in found.unfused] == ["custom call"]
    assert lints(broken, small) == {}


def test_the_fusion_of_a_processor_is_not_that_of_accelerators():
    found = jaxmem.memory_report(lambda x: jnp.sort(x.astype(jnp.bfloat16)), spec(2048, 2048))
    assert found.fusions is not None
    assert any(one.total_bytes > found.fusions.bytes // 20 for one in found.fusions.unfused)
    assert not any(lint.kind == "conversion-written" for lint in found.lints)


# ---------------------------------------------------------------- the report


def made() -> jaxmem.MemoryReport:
    return report(linear_norm_relu, *LINEAR, VECTOR, VECTOR)


def test_json_there_and_back_and_from_the_cache():
    first = made()
    again = made()
    assert again.cached
    assert again.fusions == first.fusions
    read = jaxmem.MemoryReport.from_json(first.to_json())
    assert read == first
    assert hash(read.fusions) == hash(first.fusions)
    data = json.loads(first.to_json())["fusions"]
    assert data["kernels"][0]["operations"][0]["name"] == "dot_general"


def test_a_report_without_kernels_says_so(tmp_path: Path):
    data = json.loads(made().to_json())
    del data["fusions"], data["roofline"]  # as an older jaxmem wrote it
    older = jaxmem.MemoryReport.from_json(json.dumps(data))
    assert older.fusions is None
    assert "(estimate)" in str(older)
    with pytest.raises(ValueError, match="has no kernels to draw.*jaxmem.memory_report"):
        older.plot_fusions(tmp_path / "fusions.png")
    assert not list(tmp_path.iterdir())


def test_the_roofline_is_of_the_same_figures():
    found = made()
    roofline = found.roofline
    assert roofline is not None
    assert roofline.bytes == found.bytes_moved == H + W + 2 * V + H
    assert roofline.matmul_flops == found.matmul_flops == 2 * ROWS * WIDTH * WIDTH
    assert roofline.bound == "memory"
    assert found.estimated_seconds == roofline.memory_seconds > roofline.compute_seconds
    assert roofline.intensity == pytest.approx(roofline.matmul_flops / roofline.bytes)
    assert roofline.intensity is not None
    assert roofline.intensity < roofline.ridge
    sent = dataclasses.replace(roofline, communication_seconds=1.0)
    assert sent.bound == "communication"
    assert dataclasses.replace(roofline, bytes=0).intensity is None


def test_text():
    found = made()
    assert found.fusions is not None
    text = str(found.fusions)
    assert text.startswith("1 kernel moves 17.0 MiB in one call (read 9.0 MiB, written 8.0 MiB); ")
    assert "one by one their operations would move 65.0 MiB, 3.8 times as much" in text
    assert "dot_general, mul, add, max" in text
    assert all(len(line) <= 80 for line in text.splitlines()[1:])
    assert "17.0 MiB; 65.0 MiB if nothing were fused" in str(found)
    assert "kernels that move most" not in str(found), "only where it is asked for"
    assert "<table" in found.fusions._repr_html_()


def test_a_picture(tmp_path: Path):
    found = made()
    for name in ("fusions.png", "fusions.svg"):
        found.plot_fusions(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    drawn = (tmp_path / "fusions.svg").read_text()
    for words in ("roofline of the step", "by line", "time at the target"):
        assert f"<!-- {words}" in drawn
    here = jaxmem.memory_report(linear_norm_relu, *LINEAR, VECTOR, VECTOR)
    assert len(here.plot_fusions().axes) == 1, "the peaks of this processor are not known"
    with pytest.raises(ValueError, match="PNG or SVG"):
        found.plot_fusions(tmp_path / "fusions.jpg")
