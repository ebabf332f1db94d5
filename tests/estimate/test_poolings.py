"""Poolings on GPUs: what they pool is computed in them, and so need not be in memory."""

import dataclasses
import functools
import importlib
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers.budgeted import problem, question

import jaxmem
from jaxmem.estimate import compiler
from jaxmem.estimate.arrays import in_memory
from jaxmem.estimate.compiler import GPU, Compiler
from jaxmem.fitting.compile_request import CompileRequest
from jaxmem.fitting.step_problem import StepProblem
from jaxmem.layers.pooling import reversed_by_places

OVERLAPPING = {"window_shape": (3, 3), "strides": (2, 2), "padding": "SAME"}


class Convolutions(nn.Module):
    """Two convolutions in front of each pooling, as in VGG."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (64, 128, 256):
            for _ in range(2):
                x = jax.nn.relu(nn.Conv(width, (3, 3), dtype=x.dtype)(x))
            x = nn.max_pool(x, **OVERLAPPING)
        return x


@functools.cache
def planned(rules: Compiler = GPU) -> tuple[StepProblem, CompileRequest]:
    """The plans of a step of these, by these rules of the estimate."""
    x, model = jax.ShapeDtypeStruct((32, 96, 96, 3), jnp.bfloat16), Convolutions()
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(params: Any, x: jax.Array) -> Any:
        forward = jaxmem.remat_auto(model.apply)
        return jax.grad(lambda p: jnp.square(forward(p, x).astype(jnp.float32)).mean())(params)

    with mock.patch.object(compiler, "GPU", rules):
        how: Any = {"target": "h100-80g"}
        return problem(step, params, x, **how), question(step, params, x, **how)


def off(found: StepProblem, ask: CompileRequest, candidate: int) -> float:
    report = found.report(ask, candidate)
    return (found.predicted[candidate] - report.required_bytes) / report.temp_bytes


@pytest.mark.slow
@pytest.mark.parametrize("place", [0.0, 0.4, 0.8])
def test_they_are_predicted(place: float) -> None:
    found, ask = planned()
    assert abs(off(found, ask, round(place * (len(found.front) - 1)))) < 0.06


@pytest.mark.slow
def test_what_is_pooled_would_be_counted_twice_without_the_rule() -> None:
    assert off(*planned(dataclasses.replace(GPU, pools_inside=False)), 0) > 0.2


def test_only_what_is_pooled_is_not_taken() -> None:
    def pooled(x: jax.Array) -> jax.Array:
        return nn.max_pool(jnp.tanh(x), **OVERLAPPING)

    def averaged(x: jax.Array) -> jax.Array:
        return nn.avg_pool(jnp.tanh(x), **OVERLAPPING)

    def by_jaxmem(x: jax.Array) -> jax.Array:
        jaxpr = jax.make_jaxpr(pooled)(x).jaxpr
        (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_window_max")
        found = reversed_by_places(eqn, [jnp.tanh(x)])
        assert found is not None
        return found[0]

    def multiplied(x: jax.Array) -> jax.Array:
        return nn.max_pool(jnp.tanh(x) @ jnp.tanh(x), **OVERLAPPING)

    x = jax.ShapeDtypeStruct((4, 16, 8, 8), jnp.float32)
    for fn in (pooled, averaged, by_jaxmem, multiplied):
        jaxpr = jax.make_jaxpr(fn)(x).jaxpr
        inner = {var for eqn in jaxpr.eqns if eqn.primitive.name == "tanh" for var in eqn.outvars}
        assert inner
        assert inner.isdisjoint(in_memory(jaxpr, GPU)) == (fn is not multiplied)
        assert inner <= in_memory(jaxpr)


@pytest.mark.slow
def test_gradients_of_kernels_do_not_wait_while_what_is_recomputed_is_reversed() -> None:
    found, ask = planned()
    leanest = len(found.front) - 1
    report = found.report(ask, leanest)
    module = importlib.import_module("jaxmem.unrolled.run")
    with mock.patch.object(module, "_gradients_at_once", return_value=False):
        other = found.report(ask, leanest)
    assert report.temp_bytes < 0.85 * other.temp_bytes
    assert report.matmul_flops == other.matmul_flops
