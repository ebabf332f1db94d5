"""Layers that are equal but for numbers that are written into them are traced once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.budgeted import plans
from helpers.menagerie import assert_close
from helpers.unrolled_code import arrays, code_of

import jaxmem
from jaxmem.trace import layer as layers

# ---------------------------------------------------------------- models


def dropout(params: Any, h: jax.Array) -> jax.Array:
    """As Flax has it: a key for each layer, made of one key and the layer's own number."""
    key = jax.random.key(7)
    for number, w in enumerate(params["ws"]):
        own = jax.random.fold_in(key, 0x9E3779B9 * (number + 1) % 2**32)
        kept = jax.random.bernoulli(own, 0.75, h.shape)
        h = h + jnp.where(kept, jnp.tanh(h @ w) / 0.75, 0.0)
    return jnp.square(h).mean()


def scaled(params: Any, h: jax.Array) -> jax.Array:
    """A layer's attention may be divided by its number."""
    for number, w in enumerate(params["ws"]):
        h = h + jnp.tanh(h @ w) * jnp.float32(1 / (number + 1))
    return jnp.square(h).mean()


MODELS = {"dropout": dropout, "scaled": scaled}

# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("name", MODELS)
def test_equal_layers_have_one_body_and_numbers_of_their_own(name: str) -> None:
    code = code_of(MODELS[name], *arrays())
    (run,) = code.runs
    assert run.count >= 7
    spans = list(zip(run.places, run.places[1:], strict=False))
    bodies = [code.body(*span)[0] for span in spans]
    assert all(body is bodies[0] for body in bodies)
    numbers = [[float(value) for value in code.numbers(*span).values()] for span in spans]
    assert len(set(map(tuple, numbers))) == len(spans)


def test_numbers_that_are_the_same_in_all_layers_stay_in_them() -> None:
    def halved(params: Any, h: jax.Array) -> jax.Array:
        for w in params["ws"]:
            h = h + 0.5 * jnp.tanh(h @ w)
        return jnp.square(h).mean()

    code = code_of(halved, *arrays())
    (run,) = code.runs
    assert code.numbers(run.first, run.after) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_takes_a_layer_apart_once_and_changes_no_value(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = jax.value_and_grad(jaxmem.remat_auto(MODELS[name]))
    params, h = arrays()
    expected = jax.jit(jax.value_and_grad(MODELS[name]))(params, h)
    traced: list[int] = []
    trace = layers.Layer._trace

    def counted(self: layers.Layer) -> None:
        traced.append(len(self.body.jaxpr.jaxpr.eqns))
        trace(self)

    for plan in plans(step, params, h, most=4):
        traced.clear()
        with monkeypatch.context() as patch, jaxmem.use_plan(plan):
            patch.setattr(layers.Layer, "_trace", counted)
            found = jax.jit(step)(params, h)
        assert_close(found, expected)
        # Layers of one kind, and what stands in front of and behind them.
        assert len(traced) <= 4, traced


def test_numbers_are_passed_on_to_the_last_bit() -> None:
    code = code_of(dropout, *arrays())
    (run,) = code.runs
    found = [int(value) for value in code.numbers(run.first, run.after).values()]
    assert len(found) == run.count
    expected = [0x9E3779B9 * (number + 1) % 2**32 for number in range(9)]
    assert set(found) <= set(expected)
    assert all(value.dtype == np.uint32 for value in code.numbers(run.first, run.after).values())
