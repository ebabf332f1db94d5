"""Columns that few blocks reduce: what they are reduced from is in memory on GPUs."""

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers.budgeted import problem, question
from jax import lax

import jaxmem
from jaxmem.estimate.arrays import in_memory, reduced_in_few_blocks
from jaxmem.estimate.compiler import GPU
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.step_problem import StepProblem

PROCESSORS = GPU.processors


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def scale_gradient(x: jax.Array, ct: jax.Array) -> jax.Array:
    """Of a norm's scale: of each column the sum over all rows."""
    return jnp.sum(jnp.tanh(x) * ct, axis=range(x.ndim - 1))


def image_gradient(x: jax.Array, ct: jax.Array) -> jax.Array:
    """Of each image's scale: of each column the sum over the rows of an image."""
    return jnp.sum(jnp.tanh(x) * ct, axis=(1, 2))


def found(fn: Any, *shape: int) -> int:
    jaxpr = jax.make_jaxpr(fn)(spec(*shape), spec(*shape)).jaxpr
    return len(reduced_in_few_blocks(jaxpr, PROCESSORS))


def test_rows_and_blocks_decide() -> None:
    assert found(scale_gradient, 4096, 1024) == 1
    assert found(scale_gradient, 8, 512, 1024) == 1
    assert found(scale_gradient, 8192, 1024) == 0  # parts of the rows are reduced side by side
    assert found(scale_gradient, 4096, 8192) == 0  # 256 blocks
    assert found(image_gradient, 16, 64, 64, 128) == 1  # 64 blocks
    assert found(image_gradient, 64, 64, 64, 128) == 0


def test_casts_and_rows_are_reduced_where_they_are_read() -> None:
    x = spec(512, 256, dtype=jnp.bfloat16)
    cast = jax.make_jaxpr(lambda x: jnp.sum(x.astype(jnp.float32), axis=0))(x).jaxpr
    rows = jax.make_jaxpr(lambda x, y: jnp.sum(x * y, axis=1))(x, x).jaxpr
    for jaxpr in (cast, rows):
        assert not reduced_in_few_blocks(jaxpr, PROCESSORS)


def test_what_has_no_columns_is_not_asked_for_them() -> None:
    zero_sized = jax.make_jaxpr(lambda x: jnp.sum(x * x, axis=0))(spec(4, 0)).jaxpr
    nothing = jax.make_jaxpr(lambda x: lax.reduce_sum(x, ()))(spec())
    for jaxpr in (zero_sized, nothing.jaxpr):
        assert any(eqn.primitive.name == "reduce_sum" for eqn in jaxpr.eqns)
        assert not reduced_in_few_blocks(jaxpr, PROCESSORS)


def test_other_compilers_have_none_of_it() -> None:
    jaxpr = jax.make_jaxpr(scale_gradient)(spec(512, 256), spec(512, 256)).jaxpr
    product = jaxpr.eqns[1].outvars[0]
    assert product in in_memory(jaxpr, GPU)
    assert product not in in_memory(jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "width"), [(4096, 1024), (8192, 1024), (4096, 8192)])
def test_so_does_the_compiler(rows: int, width: int) -> None:
    norm = nn.LayerNorm(dtype=jnp.bfloat16)
    x = spec(rows, width, dtype=jnp.bfloat16)
    params = jax.eval_shape(norm.init, jax.random.key(0), x)

    def pulled_back(params: Any, x: jax.Array, ct: jax.Array) -> Any:
        return jax.vjp(norm.apply, params, x)[1](ct)

    report = jaxmem.memory_report(pulled_back, params, x, x, target="h100-80g")
    is_there = report.temp_bytes > 2 * rows * width
    assert is_there == bool(found(scale_gradient, rows, width))


class Convolutions(nn.Module):
    """As in the U-nets of diffusion models: groups of channels are normalised, image by image."""

    activation: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            h = x
            for _ in range(2):
                h = self.activation(nn.GroupNorm(32, dtype=x.dtype)(h))
                h = nn.Conv(x.shape[-1], (3, 3), dtype=x.dtype)(h)
            x = x + h
        return x


def planned(activation: Any) -> tuple[StepProblem, CompileRequest]:
    x, model = spec(16, 64, 64, 128, dtype=jnp.bfloat16), Convolutions(activation)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(params: Any, x: jax.Array) -> Any:
        forward = jaxmem.remat_auto(model.apply)
        return jax.grad(lambda p: jnp.square(forward(p, x).astype(jnp.float32)).mean())(params)

    how: Any = {"target": "h100-80g"}
    return problem(step, params, x, **how), question(step, params, x, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "places"),
    [(jax.nn.silu, (0.0, 0.8)), (jax.nn.elu, (0.0,)), (jax.nn.relu, (0.8,))],
)
def test_group_norms_are_predicted(activation: Any, places: tuple[float, ...]) -> None:
    plans, ask = planned(activation)
    for candidate in (round(place * (len(plans.front) - 1)) for place in places):
        report = plans.report(ask, candidate)
        error = plans.predicted[candidate] - report.required_bytes
        assert abs(error) <= 0.05 * report.temp_bytes


@pytest.mark.slow
def test_the_leanest_plan_is_predicted_but_for_gradients_that_are_made_early() -> None:
    plans, ask = planned(jax.nn.silu)
    leanest = len(plans.front) - 1
    report = plans.report(ask, leanest)
    module = importlib.import_module("jaxmem.unrolled.run")
    with mock.patch.object(module, "_gradients_at_once", return_value=False):
        late = plans.report(ask, leanest)
    assert abs(plans.predicted[leanest] - late.required_bytes) <= 0.05 * late.temp_bytes
    # What that spares, the estimate does not know.
    assert report.temp_bytes < 0.9 * late.temp_bytes
