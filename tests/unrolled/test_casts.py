"""Parameters that are cast where products read them, as flax does: cuts, gradients, estimates."""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.budgeted import problem, question
from helpers.unrolled_code import code_of, normal

import jaxmem
from jaxmem.estimate import compiler
from jaxmem.estimate.backward import backward_of
from jaxmem.estimate.roofline import Roofline
from jaxmem.unrolled.chain import Chain

WORDS, WIDTH, LAYERS, ROWS = 8192, 512, 4, 4096


def cast(w: jax.Array) -> jax.Array:
    return w.astype(jnp.bfloat16)


def tied(params: Any, tokens: jax.Array) -> jax.Array:
    """A table of words that is looked up and, transposed and cast, multiplied by at the end."""
    h = cast(params["table"])[tokens]
    for up, down in params["layers"]:
        h = h + jnp.tanh(h @ cast(up)) @ cast(down)
    return jnp.square((h @ cast(params["table"].T)).astype(jnp.float32)).mean()


def shapes() -> Any:
    def table(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = [(table(WIDTH, 4 * WIDTH), table(4 * WIDTH, WIDTH))] * LAYERS
    params = {"table": table(WORDS, WIDTH), "layers": layers}
    return params, jax.ShapeDtypeStruct((ROWS,), jnp.int32)


def code() -> Any:
    params, _ = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes())
    return code_of(tied, params, jnp.zeros((ROWS,), jnp.int32))


def test_no_cut_parts_a_cast_from_the_product_that_reads_it() -> None:
    found = code()
    for at in found.cuts()[1:-1]:
        made = {var for eqn in found.eqns[:at] for var in eqn.outvars}
        assert not made & found._cheap & set(found.live[at]), at


def test_gradients_are_in_what_matrices_are_cast_to() -> None:
    def several(params: Any, h: jax.Array) -> jax.Array:
        h = h @ cast(params["cast"]) @ cast(params["turned"].T)
        return h @ params["plain"] + (h @ params["both"]) @ cast(params["both"])

    params = {name: normal(1, 16, 16) for name in ("both", "cast", "plain", "turned")}
    found = code_of(several, params, normal(2, 8, 16).astype(jnp.bfloat16))
    *of_params, _ = found.closed.jaxpr.invars
    names = dict(zip(of_params, sorted(params), strict=True))
    assert {names[var] for var in found.casts.only} == {"cast", "turned"}
    sizes = {name: found.gradient_bytes(var) for var, name in names.items()}
    assert sizes == {"both": 1024, "cast": 512, "plain": 1024, "turned": 512}


def test_the_gradient_of_a_tied_table_is_there_while_all_between_is_reversed() -> None:
    chain = Chain(code(), Roofline(matrix_peak=1e15, bandwidth=1e12))
    table = chain.code.closed.jaxpr.invars[-2]
    assert table.aval.shape == (WORDS, WIDTH)
    spans = list(itertools.pairwise(chain.cuts))
    readers = [k for k, span in enumerate(spans) if table in chain.code.reads(*span)]
    assert len(readers) == 2
    found = [chain._tied_bytes(k, k + 1) for k in range(len(chain))]
    # In what it is cast to.
    expected = [2 * WORDS * WIDTH if readers[0] <= k < readers[1] else 0 for k in range(len(chain))]
    assert found == expected
    assert chain._tied_bytes(0, len(chain)) == 0  # all as one stage: its own


def test_the_gradient_of_a_mean_is_not_made_an_array_by_a_barrier() -> None:
    """What is recomputed for it waits for the number that it repeats."""
    found = code()
    backward = backward_of(found.layer(0, len(found)).keeping(()), interleaved=True)
    makers = {var: eqn for eqn in backward.closed.jaxpr.eqns for var in eqn.outvars}
    waiting = [makers[var] for step in backward.steps for var in step.waits if var in makers]
    assert waiting
    assert all(eqn.primitive.name != "broadcast_in_dim" for eqn in waiting)


def step(params: Any, tokens: jax.Array) -> Any:
    gradient = jax.grad(jaxmem.remat_auto(tied))(params, tokens)
    optimizer = optax.sgd(1e-3)
    updates, _ = optimizer.update(gradient, optimizer.init(params))
    return optax.apply_updates(params, updates)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_casts_that_both_passes_read_are_predicted(place: float) -> None:
    options: Any = {"target": "h100-80g", "donate": (0,)}
    ask = question(step, *shapes(), **options)
    found = problem(step, *shapes(), **options)
    k = round(place * (len(found.front) - 1))
    required = found.report(ask, k).required_bytes
    assert found.predicted[k] == pytest.approx(required, rel=0.03)
    if not place:
        without = dataclasses.replace(compiler.GPU, holds_casts=False)
        with mock.patch.object(compiler, "GPU", without):
            less = problem(step, *shapes(), **options).predicted[0]
        assert abs(less / required - 1) > abs(found.predicted[k] / required - 1)
