"""Softmaxes and norms are found among operations, and plans leave them whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.unrolled_code import code_of
from jax import export, lax

from jaxmem import _jax
from jaxmem.estimate import compiler
from jaxmem.estimate.arrays import in_memory
from jaxmem.estimate.normalised import Normalised
from jaxmem.estimate.operands import bytes_for_kernels
from jaxmem.estimate.roofline import Roofline
from jaxmem.estimate.values import graph_of
from jaxmem.trace.layer import Layer

H100 = Roofline(matrix_peak=989e12, bandwidth=3.35e12, compiler=compiler.GPU)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
    scores = jnp.where(mask, scores, -1e30)
    weights = jax.nn.softmax(scores) * mask
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x.astype("float32")
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)
    return (scale * (x - mean) * lax.rsqrt(variance + 1e-6)).astype("bfloat16")


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


def array(*shape: Any, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of_attention(length: int = 16) -> list[jax.ShapeDtypeStruct]:
    return [*[array(2, length, 4, 8)] * 3, array(length, length, dtype="bool")]


ROWS = [array(4, 16), array(16)]


def found_in(fn: Callable[..., Any], *args: Any) -> tuple[Normalised, list[Any]]:
    eqns = _jax.inlined(jax.make_jaxpr(fn)(*args)).jaxpr.eqns
    return Normalised(eqns), eqns


@pytest.mark.parametrize(
    ("fn", "args", "reductions"),
    [(attention, of_attention(), 2), (layer_norm, ROWS, 2), (rms_norm, ROWS, 1)],
)
def test_what_rows_are_reduced_to_is_theirs(fn: Any, args: Any, reductions: int) -> None:
    found, eqns = found_in(fn, *args)
    reduced = [eqn for eqn in eqns if eqn.outvars[0] in found.reduced]
    assert sum(eqn.primitive.name.startswith("reduce") for eqn in reduced) == reductions
    # All of one is inside, from behind the first of its reductions to the last that reads one.
    first = min(at for at, eqn in enumerate(eqns) if eqn.primitive.name.startswith("reduce"))
    last = max(
        at for at, eqn in enumerate(eqns) if found.reduced & {*filter(_jax.is_var, eqn.invars)}
    )
    assert found.inside == set(range(first + 1, last + 1))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        # Nothing is divided by what is summed up, or not by its own sum.
        (lambda x: x.sum(-1), [array(4, 16)]),
        (lambda x: x - x.max(-1, keepdims=True), [array(4, 16)]),
        (lambda x, y: x / y.sum(-1, keepdims=True), [array(4, 16), array(4, 16)]),
        # Along another axis a compiler makes several kernels.
        (lambda x: jax.nn.softmax(x, axis=0), [array(16, 16)]),
        # So it does of rows that are cut out of a padded product.
        (attention, of_attention(length=15)),
        # The rows are nowhere, and computed again from two arrays.
        (lambda x, y: rms_norm(x + y, jnp.ones(16, "bfloat16")), [array(4, 16), array(4, 16)]),
    ],
)
def test_other_sums_are_values_like_others(fn: Any, args: Any) -> None:
    found, _ = found_in(fn, *args)
    assert not found.reduced
    assert not found.inside


def test_dimensions_may_be_symbols() -> None:
    """As under `jax.export`: of rows of a known length everything else may be unknown."""
    rows, length = export.symbolic_shape("rows, length")
    found, _ = found_in(rms_norm, array(rows, 16), array(16))
    assert found.reduced
    found, _ = found_in(rms_norm, array(4, length), array(length))
    assert not found.reduced


def test_two_norms_of_the_same_rows_are_two() -> None:
    """Between them there is a place to cut."""

    def fn(x: jax.Array, scale: jax.Array, w: jax.Array) -> jax.Array:
        y = rms_norm(x, scale) @ w
        return rms_norm(x, 2 * scale) + y

    found, eqns = found_in(fn, array(4, 16), array(16), array(16, 16))
    product = next(at for at, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general")
    assert product not in found.inside
    assert {product - 3, product + 8} & found.inside


# ---------------------------------------------------------------- what it takes to compute it again


def layer_of(fn: Any, *args: Any) -> Layer:
    code = code_of(fn, *args)
    return code.layer(0, len(code))


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.tanh(x @ up) @ down


def test_an_operand_is_written_for_each_kernel_that_reads_it() -> None:
    rows, width = 32, 16
    once = layer_of(mlp, array(rows, width), array(width, 64), array(64, width))
    (size,) = {*bytes_for_kernels(once, _stored(once)).values()}
    assert size == 2 * 2 * rows * 64  # the product is read, and its tanh written

    def several(x: jax.Array, scale: jax.Array, w: jax.Array) -> jax.Array:
        y = rms_norm(x, scale)
        return (y @ w) * (y @ (2 * w)) * (y @ (3 * w))

    three = layer_of(several, array(rows, width), array(width), array(width, width))
    most = max(bytes_for_kernels(three, _stored(three)).values())
    assert 3 * 2 * 2 * rows * width <= most < 3 * 2 * 2 * rows * width * 1.1

    def convolved(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        x = jnp.tanh(jax.lax.conv(x, up, (1, 1), "SAME"))
        return jax.lax.conv(x, down, (1, 1), "SAME")

    layer = layer_of(convolved, array(2, 8, 4, 4), array(8, 8, 3, 3), array(8, 8, 3, 3))
    assert not bytes_for_kernels(layer, _stored(layer))


def _stored(layer: Layer) -> set[Any]:
    return in_memory(layer.linearised.jaxpr, compiler.GPU)


def test_a_sum_that_is_kept_costs_a_kernel() -> None:
    layer = layer_of(attention, *of_attention(64))
    here, loop = (graph_of(layer, H100, in_loop=in_loop) for in_loop in (False, True))
    scores = 2 * 4 * 64 * 64 * 2
    sums = [
        layer.places[eqn.outvars[0]]
        for eqn in layer.linearised.jaxpr.eqns
        if eqn.primitive.name.startswith("reduce") and eqn.outvars[0].aval.shape == (2, 4, 64)
    ]
    assert sums
    for place in sums:
        assert here.keep_seconds[place] > scores / H100.bandwidth
        assert loop.keep_seconds[place] > scores / H100.bandwidth
    fewest = Roofline(989e12, 3.35e12, flops_only=True, compiler=compiler.GPU)
    assert max(graph_of(layer, fewest, in_loop=False).keep_seconds[p] for p in sums) < 1e-9
