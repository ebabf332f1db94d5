"""The gradient of a pooling as GPUs make it: the same numbers, from fewer arrays."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.budgeted import problem, question
from helpers.menagerie import assert_same, exact_jit
from helpers.releases import SINCE_0_11
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export, lax
from jax.extend.core import primitives
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem.layers.pooling import by_places
from jaxmem.unrolled import Code, Piece, UnrolledPlan
from jaxmem.unrolled.run import run

Spec = jax.ShapeDtypeStruct
SAME = (1, 3, 3, 1), (1, 1, 1, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
OVERLAPPING = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (0, 1), (1, 1), (0, 0))


def pool(x: jax.Array, how: Any = OVERLAPPING) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, *how)


def how_named(how: Any) -> dict[str, Any]:
    return dict(zip(("window_dimensions", "window_strides", "padding"), how, strict=True))


# ---------------------------------------------------------------- its numbers


SHAPE = (2, 7, 6, 5)


@st.composite
def poolings(draw: st.DrawFn) -> Any:
    """A window, its strides and padding, over dimensions that stand together or not."""
    dims = draw(st.sampled_from([(1, 2), (2, 3), (1, 3), (2,), (1, 2, 3), (0, 1, 2, 3)]))
    window, strides, padding = [1] * 4, [1] * 4, [(0, 0)] * 4
    for k in dims:
        window[k] = draw(st.integers(1, 3))
        strides[k] = draw(st.integers(1, 3))
        low, high = (draw(st.integers(0, window[k] - 1)) for _ in range(2))
        padding[k] = low, high
    return tuple(window), tuple(strides), tuple(padding)


DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])


@pytest.mark.slow
@given(how=poolings(), dtype=DTYPES, seed=st.integers(0, 99))
@settings(max_examples=15)
def test_it_is_jaxs_own_gradient(how: Any, dtype: str, seed: int) -> None:
    """Of whole numbers with many ties, sums of which are exact; infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, SHAPE).astype(dtype)
    x[0, 1:4, 2:5], x[1, 5, 3], x[1, 2, 1, 4] = -np.inf, np.inf, np.nan
    gradient = rng.integers(-8, 9, jax.eval_shape(partial(pool, how=how), x).shape).astype(dtype)
    window = any(one != (1, 1, (0, 0)) for one in zip(*how, strict=True))

    def both(gradient: jax.Array, x: jax.Array) -> Any:
        for select in (lax.ge_p, lax.le_p):
            named: dict[str, Any] = {"select_prim": select, **how_named(how)}
            own = primitives.select_and_scatter_add_p.bind(gradient, x, **named)
            yield own, by_places(gradient, x, **named) if window else own

    # In one program: of each operation for itself, most of the time would be compiling.
    for own, mine in exact_jit(lambda *args: list(both(*args)))(gradient, x):
        assert_same(mine, own)


def net(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    for kernel in kernels:
        x = pool(jnp.sin(x * kernel))
        x = x + 2 * lax.reduce_window(x, jnp.inf, lax.min, (1, 3, 3, 1), (1,) * 4, "SAME")
    return jnp.square(x).sum()


KERNELS = [jnp.asarray(k, jnp.float32) for k in (1.5, -0.75, 2.0)]
IMAGES = jnp.sin(jnp.arange(2.0 * 16 * 16 * 3)).reshape(2, 16, 16, 3)


def planned(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    """Under a plan with a piece that keeps everything, and two that do not."""
    closed = jax.make_jaxpr(net)(kernels, x)
    code = Code(closed)
    a, b = code.cuts()[1], code.cuts()[-2]
    pieces = Piece(0, a), Piece(a, b, inner=(Piece(a, b),)), Piece(b, len(code), keep=())
    return run(code, UnrolledPlan(len(code), pieces), [*kernels, x])[0]


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: jax.grad(f, (0, 1)),
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.jit(
            lambda k, x: jax.vmap(jax.grad(f), (None, 0))(k, jnp.stack([x, 2 * x])),
        ),
        lambda f: jax.jit(lambda k, x: jax.jvp(partial(f, k), (x,), (jnp.cos(x),))),
        lambda f: jax.jit(jax.grad(lambda k, x: jnp.square(jax.grad(f, 1)(k, x)).sum())),
    ],
    ids=["grad", "jit", "vmap", "forward", "twice"],
)
def test_derivatives_are_those_of_the_plain_code(transformed: Any) -> None:
    """Operation by operation, and compiled as a whole, which takes less time."""
    found, expected = (transformed(f)(KERNELS, IMAGES) for f in (planned, net))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5), found, expected)


def lowered(fn: Any, *specs: Any) -> str:
    """The program for a GPU; no GPU nor compiler is needed for that."""
    return export.export(jax.jit(fn), platforms=["cuda"])(*specs).mlir_module()


def small(kernels: list[jax.Array], x: jax.Array, how: Any = OVERLAPPING) -> jax.Array:
    for kernel in kernels:
        x = pool(jnp.sin(x * kernel.astype(x.dtype)), how)
    return x.astype("float32").sum()


@jaxmem.remat_sqrt
def decorated(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    return small(kernels, x, SAME)


def test_a_gpu_is_given_places() -> None:
    def of_several(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        return jax.vmap(partial(decorated, kernels))(x).sum()

    kernels, several = KERNELS * 2, Spec((4, 2, 32, 32, 3), "float32")
    assert "select_and_scatter" in lowered(jax.vmap(jax.grad(small), (None, 0)), kernels, several)
    for text in (
        lowered(jax.grad(decorated), kernels, Spec((2, 32, 32, 3), "float32")),
        lowered(jax.grad(decorated), kernels, Spec((2, 32, 32, 3), "float16")),
        lowered(jax.vmap(jax.grad(decorated), (None, 0)), kernels, several),
        lowered(jax.grad(of_several), kernels, several),
    ):
        assert "stablehlo.scatter" in text
        assert "select_and_scatter" not in text


def test_where_there_are_no_places_it_is_jaxs_own() -> None:
    """For types that have no infinities to pad with, and of no images."""

    @jaxmem.remat_sqrt
    def with_none(kernels: list[jax.Array], x: jax.Array) -> jax.Array:
        x = jnp.sin(x)
        return small(kernels, x[:0], SAME) + small(kernels, x.astype("float8_e4m3fn"), SAME)

    text = lowered(jax.grad(with_none), KERNELS * 2, Spec((2, 32, 32, 3), "float32"))
    assert "stablehlo.scatter" not in text
    assert "select_and_scatter" in text


def test_images_and_channels_that_are_spread_over_devices_stay_there() -> None:
    mesh = jax.make_mesh((8,), ("over",))
    how: Any = {"select_prim": lax.ge_p, **how_named(OVERLAPPING)}
    for spec in (PartitionSpec("over"), PartitionSpec(None, None, None, "over")):
        spread = NamedSharding(mesh, spec)
        jitted = jax.jit(partial(by_places, **how), in_shardings=spread, out_shardings=spread)
        images = Spec((16, 32, 32, 16), "float32")
        text = jitted.lower(jax.eval_shape(pool, images), images).compile().as_text()
        assert text is not None
        assert "all-" not in text
        assert "collective" not in text


# ---------------------------------------------------------------- what it needs


def convs(kernels: list[list[jax.Array]], x: jax.Array, how: Any) -> jax.Array:
    axes = ("NHWC", "HWIO", "NHWC")
    for several in kernels:
        for kernel in several:
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=axes)
            x = jax.nn.relu(x)
        x = pool(x, how)
    return x.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stride", "whole", "part"), [(1, 0.78 if SINCE_0_11 else 0.75, 0.3), (2, 0.75, 0.5)]
)
def test_a_gpu_needs_less_than_for_jaxs_own(stride: int, whole: float, part: float) -> None:
    """With everything kept, and with what can be recomputed; and the latter is predicted."""
    padded = (2 - stride, 1)
    how = (1, 3, 3, 1), (1, stride, stride, 1), ((0, 0), padded, padded, (0, 0))
    first, kernel = (Spec((3, 3, given, 64), "float32") for given in (3, 64))
    kernels, x = (
        [[first, kernel], *[[kernel] * 2] * (3 - stride)],
        Spec((32, 128, 128, 3), "float32"),
    )
    grad = jax.grad(partial(convs, how=how))
    own = jaxmem.memory_report(grad, kernels, x, target="h100-80g", suggest=False)
    grad = jax.grad(jaxmem.remat_auto(partial(convs, how=how)))
    found = problem(grad, kernels, x, target="h100-80g")
    ask = question(grad, kernels, x, target="h100-80g")
    everything, least = found.report(ask, 0), found.report(ask, len(found.front) - 1)
    assert everything.temp_bytes < whole * own.temp_bytes
    assert least.temp_bytes < part * own.temp_bytes
    assert abs(found.predicted[-1] / least.required_bytes - 1) < (0.25 if stride == 1 else 0.03)
