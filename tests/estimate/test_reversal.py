"""What a compiler has in memory while layers outside of loops are reversed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from budgeted_models import MODELS
from helpers.budgeted import problem, question
from helpers.releases import SINCE_0_11
from jax import lax

import jaxmem
from budgets import nets
from jaxmem.estimate import compiler
from jaxmem.estimate.compiler import ANY, GPU, TPU, Compiler
from jaxmem.estimate.liveness import peak_live_bytes
from jaxmem.estimate.reversal import freed_early, without_checkpoint
from jaxmem.estimate.roofline import Roofline
from jaxmem.estimate.values import graph_of
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.regions import StackRegion
from jaxmem.fitting.step_problem import StepProblem
from jaxmem.trace.layer import Layer
from jaxmem.unrolled import Code

TARGET = "h100-80g"
Spec = jax.ShapeDtypeStruct
KERNEL, IMAGES = Spec((3, 3, 32, 32), "float32"), Spec((64, 64, 64, 32), "float32")


def conv(h: jax.Array, kernel: jax.Array) -> jax.Array:
    axes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=axes)


def halved(h: jax.Array) -> jax.Array:
    batch, height, width, channels = h.shape
    return h.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))


def pooled(kernels: list[jax.Array], h: jax.Array) -> jax.Array:
    for kernel in kernels:
        h = halved(jax.nn.relu(conv(h, kernel)))
    return h


def kept(fn, *specs, compiler: Compiler = ANY) -> dict[str, str]:
    """What is kept without a checkpoint, type by the operation that makes it."""
    code = Code(jax.make_jaxpr(fn)(*specs))
    layer = code.layer(0, len(code))
    graph = graph_of(layer, Roofline(989e12, 3.35e12, compiler=compiler))
    keep = without_checkpoint(layer, graph, 1, compiler)
    return dict(_described(layer, place) for place in keep.kept)


def _described(layer: Layer, place: int) -> tuple[str, str]:
    var = layer.values[place]
    eqn = layer.made_by(var)
    while eqn is not None and eqn.primitive.name in ("name", "reshape"):
        eqn = layer.made_by(eqn.invars[0])
    return "input" if eqn is None else eqn.primitive.name, var.aval.str_short()


def test_masks_are_made_where_they_are_read() -> None:
    """Small as they are next to what they compare."""
    found = kept(lambda k, h: pooled([k], h), KERNEL, IMAGES)
    assert not any("bool" in shape for shape in found.values()), found
    assert found["conv_general_dilated"] == "float32[64,64,64,32]"


def test_casts_of_kernels_are_there_for_both_passes() -> None:
    """The gradient of the images is a convolution with the kernel reversed, by the library."""

    def net(kernels: list[jax.Array], h: jax.Array) -> jax.Array:
        for kernel in kernels:
            h = jnp.tanh(conv(h, kernel.astype(h.dtype)))
        return h

    images = Spec(IMAGES.shape, "bfloat16")
    found = kept(net, [KERNEL, KERNEL], images, compiler=GPU)
    assert found["convert_element_type"] == "bfloat16[3,3,32,32]"


def test_what_has_no_result_changes_nothing() -> None:
    def net(kernel: jax.Array, h: jax.Array, show: bool) -> jax.Array:
        h = jnp.tanh(conv(h, kernel))
        if show:
            jax.debug.print("{}", h[0, 0, 0, 0])
        return h

    plain, shown = (
        kept(functools.partial(net, show=show), KERNEL, IMAGES) for show in (False, True)
    )
    assert plain == shown


def dropped(h: jax.Array, number: int) -> jax.Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(number), 0.9, h.shape), h / 0.9, 0)


def test_random_numbers_are_made_again_on_a_tpu_alone() -> None:
    def net(kernel: jax.Array, h: jax.Array) -> jax.Array:
        return conv(dropped(jax.nn.relu(conv(h, kernel)), 0), kernel)

    gpu, tpu = (kept(net, KERNEL, IMAGES, compiler=compiler) for compiler in (GPU, TPU))
    assert any("bool" in shape for shape in gpu.values()), gpu
    assert not any("bool" in shape for shape in tpu.values()), tpu


# What is elementwise, and how many arrays are kept of it.
ELEMENTWISE = {
    "tanh of two bytes": (lambda h, _: jax.nn.gelu(h), jnp.bfloat16, 3.0),
    "tanh of four bytes": (lambda h, _: jax.nn.gelu(h), jnp.float32, 2.0),
    "error function": (lambda h, _: jax.nn.gelu(h, approximate=False), jnp.bfloat16, 3.0),
    "exponential": (lambda h, _: jax.nn.silu(h), jnp.bfloat16, 2.0),
    "mask": (dropped, jnp.bfloat16, 1.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ELEMENTWISE)
def test_what_takes_long_to_compute_is_not_computed_twice(what: str) -> None:
    """Without a checkpoint; each layer keeps its input as well, a quarter of what is inside."""
    fn, dtype, arrays = ELEMENTWISE[what]
    h = Spec((8192, 1024), dtype)
    ws = [(Spec((1024, 4096), dtype), Spec((4096, 1024), dtype))] * 3

    def net(ws, h):
        for number, (up, down) in enumerate(ws):
            h = h + fn(h @ up, number) @ down
        return h

    step = jax.grad(lambda ws, h: jnp.square(jaxmem.remat_auto(net)(ws, h)).sum())
    found, ask = problem(step, ws, h, target=TARGET), question(step, ws, h, target=TARGET)
    kept = found.report(ask, 0).temp_bytes / (8192 * 4096 * jnp.dtype(dtype).itemsize)
    assert abs(kept - 3 * (arrays + 0.25)) < 0.3
    assert abs(off_of(found, ask, 0.0)) < 0.05


def normalised(h: jax.Array) -> jax.Array:
    x = h.astype(jnp.float32)
    variance = (x * x).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2
    return ((x - x.mean(-1, keepdims=True)) * lax.rsqrt(variance + 1e-6)).astype(h.dtype)


def behind_norms(activation: Callable[[jax.Array], jax.Array], ws: Any, h: jax.Array) -> jax.Array:
    for up, down in ws:
        h = h + activation(normalised(h @ up)) @ down
    return h


# An activation in so many bytes, and whether it is kept behind a norm.
BEHIND_A_NORM = {
    "exponential of two bytes": (jax.nn.silu, jnp.bfloat16, False),
    "exponential of four bytes": (jax.nn.silu, jnp.float32, False),
    "tanh of two bytes": (jax.nn.gelu, jnp.bfloat16, True),
    "tanh of four bytes": (jax.nn.gelu, jnp.float32, True),
}


@pytest.mark.parametrize("what", BEHIND_A_NORM)
def test_a_norm_is_computed_twice_with_what_is_not_too_long(what: str) -> None:
    activation, dtype, is_kept = BEHIND_A_NORM[what]
    width, net = Spec((512, 512), dtype), functools.partial(behind_norms, activation)
    found = kept(net, [(width, width)], Spec((1024, 512), dtype), compiler=GPU)
    elementwise = found.keys() & {"logistic", "tanh"}
    assert bool(elementwise) == is_kept, found


@pytest.mark.slow
@pytest.mark.parametrize("what", BEHIND_A_NORM)
def test_so_the_compiler_does(what: str) -> None:
    activation, dtype, _ = BEHIND_A_NORM[what]
    h, up, down = (Spec(shape, dtype) for shape in ((8192, 1024), (1024, 4096), (4096, 1024)))
    net = functools.partial(behind_norms, activation)
    step = jax.grad(lambda ws, h: jnp.square(jaxmem.remat_auto(net)(ws, h)).sum())
    found, ask = plans_of(jaxmem.Job(step, ([(up, down)] * 3, h)))
    assert abs(off_of(found, ask, 0.0)) < 0.05


@pytest.mark.parametrize("place", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_what_is_read_behind_a_barrier_is_not_written_over(place: float) -> None:
    """Scores in float32 are as large as their gradient, and there next to it."""
    found, ask = attention()
    assert abs(off_of(found, ask, place)) < 0.03


@functools.cache
def attention() -> tuple[StepProblem, CompileRequest]:
    """Three layers that attend in float32."""

    def net(layers: Any, h: jax.Array) -> jax.Array:
        for q, k, v in layers:
            queries, keys = (_heads(h @ w).astype(jnp.float32) for w in (q, k))
            shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / 8)
            taken = jnp.einsum("bhqk,bkhd->bqhd", shares.astype(h.dtype), _heads(h @ v))
            h = h + taken.reshape(h.shape)
        return jnp.square(h.astype(jnp.float32)).mean()

    w, h = Spec((256, 256), jnp.bfloat16), Spec((4, 1024, 256), jnp.bfloat16)
    return plans_of(jaxmem.Job(jax.grad(jaxmem.remat_auto(net)), ([(w, w, w)] * 3, h)))


def _heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], 4, 64)


@pytest.mark.parametrize("place", [0.0, pytest.param(0.7, marks=pytest.mark.slow), 1.0])
def test_convolutions_and_poolings_are_predicted(place: float) -> None:
    found, ask = vgg()
    assert abs(off_of(found, ask, place)) < 0.1


@functools.cache
def vgg() -> tuple[StepProblem, CompileRequest]:
    net = nets.vgg((2, 2), batch=64, image=64, width=32, hidden=64)
    return plans_of(nets.job(net, decorate=jaxmem.remat_auto))


@functools.cache
def unet() -> tuple[StepProblem, CompileRequest]:
    return plans_of(MODELS["unet"]())


@functools.cache
def for_a_tpu(model: str) -> tuple[StepProblem, CompileRequest]:
    return plans_of(MODELS[model](), target="v5e-16g", donate=(0,))


def plans_of(job: jaxmem.Job, **options: Any) -> tuple[StepProblem, CompileRequest]:
    """The plans of a job, and what the compiler is asked with them."""
    options = {"target": TARGET, **options}
    return problem(job.step, *job.args, **options), question(job.step, *job.args, **options)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(0.6, marks=pytest.mark.slow),
        pytest.param(0.85, marks=pytest.mark.slow),
        1.0,
    ],
)
def test_what_a_skip_connection_carries_is_held_by_those_who_read_it_later(place: float) -> None:
    """Where the U-Net's last level is reversed, what passed by is still there for the first.

    Of what is live, that is: the heap has gaps as well, here of 7 %.
    """
    found, ask = unet()
    candidate = round(place * (len(found.front) - 1))
    report = found.report(ask, candidate)
    fixed = report.required_bytes - report.temp_bytes
    live = sum(one.bytes for one in report.buffers if one.kind == "temporary")
    assert abs((found.predicted[candidate] - fixed) / live - 1) < 0.03


@pytest.mark.slow
def test_plans_of_a_whole_net_go_by_its_peak() -> None:
    """A U-Net in half of its memory, for next to no matmul FLOPs."""
    job = MODELS["unet"]()
    found = problem(job.step, *job.args, target=TARGET, cost="flops")
    ask = question(job.step, *job.args, target=TARGET)
    everything = found.report(ask, 0)
    candidate = next(k for k, bytes in enumerate(found.predicted) if bytes < 1.15e9)
    half = found.report(ask, candidate)
    assert half.required_bytes < 0.5 * everything.required_bytes
    assert everything.matmul_flops is not None
    assert half.matmul_flops is not None
    assert half.matmul_flops < 1.03 * everything.matmul_flops


def test_results_of_a_library_are_not_written_over() -> None:
    """A GPU's convolutions are calls into a library, which return their workspace, too."""
    last = Spec((3, 3, 32, 1), "float32")

    def through(h: jax.Array, kernel: jax.Array, last: jax.Array) -> jax.Array:
        return conv(jnp.tanh(conv(h, kernel)), last)

    closed = jax.make_jaxpr(through)(IMAGES, KERNEL, last)
    size = 4 * IMAGES.size
    predicted = (
        peak_live_bytes(closed, compiler=GPU),
        peak_live_bytes(closed, compiler=TPU),
    )
    report = jaxmem.memory_report(through, IMAGES, KERNEL, last, target=TARGET)
    assert predicted[0] == 2 * size
    assert predicted[1] < 1.1 * size
    assert abs(report.temp_bytes / predicted[0] - 1) < 0.05


def test_convolutions_with_swapped_operands_read_copies() -> None:
    """Padding makes the images larger, so that for XLA they are the kernel of its own gradient."""

    def loss(kernels: list[jax.Array], h: jax.Array) -> jax.Array:
        axes = ("NHWC", "HWIO", "NHWC")
        for kernel in kernels:
            h = lax.conv_general_dilated(h, kernel, (1, 1), [(2, 2)] * 2, dimension_numbers=axes)
            h = jnp.tanh(h)
        return h.sum()

    step = jax.grad(jaxmem.remat_auto(loss))
    found = problem(step, [KERNEL] * 3, IMAGES, cost="flops", target=TARGET)
    ask = question(step, [KERNEL] * 3, IMAGES, target=TARGET)
    assert abs(off_of(found, ask, 1.0)) < 0.01


def stacked(ws: jax.Array, h: jax.Array) -> jax.Array:
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return lax.scan(layer, h, ws)[0]


def test_gradients_of_a_stack_are_not_there_before_its_loops_are_reversed() -> None:
    """The last layer stands behind the loop, and keeps more than all others together."""
    ws = {"up": Spec((8, 1024, 4096), "float32"), "down": Spec((8, 4096, 1024), "float32")}
    h = Spec((16384, 1024), "float32")

    def step(ws, h):
        loss = lambda ws: jnp.square(jaxmem.remat_auto(stacked)(ws, h)).sum()  # noqa: E731
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))

    found = problem(step, ws, h, target=TARGET, donate=(0,))
    ask = question(step, ws, h, target=TARGET, donate=(0,))
    tails = [
        number
        for number, candidate in enumerate(found.front)
        if found.candidates[0][candidate.picks[0]].runs[1:] == ((1, 0),)
    ]
    assert tails
    assert abs(off_of(found, ask, place=tails[-1] / (len(found.front) - 1))) < 0.1


def looked_at(target: str) -> StackRegion:
    ws = {"up": Spec((8, 256, 1024), "float32"), "down": Spec((8, 1024, 256), "float32")}
    step = jax.grad(lambda ws, h: jnp.square(jaxmem.remat_auto(stacked)(ws, h)).sum())
    (region,) = problem(step, ws, Spec((4096, 256), "float32"), target=target).regions
    assert isinstance(region, StackRegion)
    return region


def test_stacks_hold_rounded_what_only_products_read_on_a_tpu() -> None:
    """What the layer was given; not the tanh, four times as large, if its derivative reads it.

    Since jax 0.11 that is kept beside it, and the tanh is read by a product alone.
    """
    unit = 4096 * 256 * 4
    gpu, tpu = looked_at("h100-80g"), looked_at("v5e-16g")
    assert gpu.choices[0].bytes == (1 + 4 + 4) * unit
    assert tpu.choices[0].bytes == (0.5 + (2 if SINCE_0_11 else 4) + 4) * unit
    weights = 8 * 2 * 256 * 1024 * 4
    assert (gpu.param_copies, tpu.param_copies) == (0, weights // 2)


@pytest.mark.slow  # the TPU's compiler takes its time
@pytest.mark.parametrize(
    ("model", "place"),
    [
        ("matrix_chain", 0.2),
        ("matrix_chain", 0.6),
        ("matrix_chain", 1.0),
        ("fused_tpu", 0.6),
        ("experts", 0.2),  # whose residuals are laid out anew in their loop
        ("towers", 0.51),  # where products read copies of what is recomputed from, one of each
    ],
)
def test_programs_for_a_tpu_are_predicted(model: str, place: float) -> None:
    assert abs(off_of(*for_a_tpu(model), place)) < 0.15


def off_of(found: StepProblem, ask: CompileRequest, place: float) -> float:
    """How far the temporaries of a candidate are from their prediction."""
    candidate = round(place * (len(found.front) - 1))
    report = found.report(ask, candidate)
    fixed = report.required_bytes - report.temp_bytes
    return (found.predicted[candidate] - fixed) / report.temp_bytes - 1


def test_gradients_of_parameters_come_as_soon_as_what_they_read_is_there() -> None:
    def product(a: jax.Array, b: jax.Array, *axes: int) -> jax.Array:
        return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())))

    def backward(w: jax.Array, h: jax.Array, made: jax.Array, gradient: jax.Array) -> Any:
        before = product(gradient, w, 1, 1)
        of_w = product(made, gradient, 0, 0).astype("float32")
        return product(jnp.tanh(before), w, 1, 1), of_w, product(h, before, 0, 0)

    closed = jax.make_jaxpr(backward)(*[Spec((8, 8), "bfloat16")] * 4)
    before, of_w, cast, tanh, last, of_before = closed.jaxpr.eqns
    order = freed_early(closed).jaxpr.eqns
    assert order == [of_w, before, of_before, cast, tanh, last]


@pytest.mark.slow
def test_experts_are_predicted_with_gradients_of_parameters_first() -> None:
    """Of 256 MiB arrays, what the second product reads is gone when its gradient is made."""
    job = MODELS["experts"]()
    step: tuple[Any, ...] = (job.step, *job.args)
    how: Any = {"target": TARGET, "donate": (0,)}
    ask = question(*step, **how)
    found = problem(*step, **how, cost="flops")
    assert abs(off_of(found, ask, 1.0)) < 0.05  # of other plans up to 11 %
    late = dataclasses.replace(GPU, frees_early=False)
    with mock.patch.object(compiler, "GPU", late):
        other = problem(*step, **how, cost="flops")
    leanest = [_leanest(one).work_bytes for one in (found, other)]
    assert leanest[1] - leanest[0] > 128 * 2**20


def _leanest(found: StepProblem) -> Any:
    (region,) = found.regions
    assert isinstance(region, StackRegion)
    return region.choices[-1]
