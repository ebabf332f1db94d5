"""Matrices that many steps read: what their gradients are sums of is added up as it is made."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.budgeted import assert_plans_give, problem, question

import jaxmem
from jaxmem.unrolled.code import Code
from jaxmem.unrolled.gradients import TERMS


def recurrence(params: Any, xs: jax.Array) -> jax.Array:
    """A gated recurrence, written out in Python: each step reads the same three matrices."""
    h = jnp.zeros_like(xs[0])
    for x in xs:
        gate = jax.nn.sigmoid(x @ params["gate"] + h @ params["kept"])
        h = gate * h + (1 - gate) * jnp.tanh(x @ params["new"])
    return h


def loss(fn: Any) -> Any:
    return lambda params, xs: jnp.square(fn(params, xs)).mean()


def specs(width: int, batch: int, steps: int) -> tuple[Any, Any]:
    matrix = jax.ShapeDtypeStruct((width, width), jnp.float32)
    xs = jax.ShapeDtypeStruct((steps, batch, width), jnp.float32)
    return dict.fromkeys(("gate", "kept", "new"), matrix), xs


def drawn(spec: Any, seed: int = 0) -> Any:
    leaves, tree = jax.tree.flatten(spec)
    random = np.random.default_rng(seed)
    return tree.unflatten([jnp.asarray(random.normal(size=s.shape) / 4, s.dtype) for s in leaves])


def test_gradients_are_those_of_the_code() -> None:
    args = drawn(specs(8, 4, 11))
    wanted = jax.jit(jax.grad(loss(recurrence)))(*args)
    step = jax.grad(loss(jaxmem.remat_auto(recurrence)))
    assert_plans_give(step, args, wanted, most=4, rtol=1e-5, atol=1e-6)


def test_only_matrices_that_are_differentiated_count() -> None:
    def code(w: jax.Array, b: jax.Array, table: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(TERMS + 1):
            x = (x @ w + b) * table.astype(x.dtype)
        return x

    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (4,))]
    table, x = jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2, 4), jnp.float32)
    code_ = Code(jax.make_jaxpr(code)(*floats, table, x))
    w, *_ = code_.closed.jaxpr.invars
    assert code_.summed == {w}
    assert code_.times_read(0, len(code_)) == {w: TERMS + 1}


@pytest.mark.slow
def test_terms_of_a_gradient_are_not_all_there_at_once() -> None:
    steps, width = 24, 512
    step, args = jax.grad(loss(jaxmem.remat_auto(recurrence))), specs(width, 16, steps)
    ask = question(step, *args, target="h100-80g")
    found = problem(step, *args, target="h100-80g")
    term, leanest = 4 * width * width, len(found.front) - 1
    # The leanest plan is nested: at no level of it does a sum wait for what is inside.
    assert found.plan(leanest).regions[0].plan.pieces[0].inner  # pyright: ignore[reportAttributeAccessIssue]
    assert found.report(ask, leanest).temp_bytes < 8 * term < steps * term
