"""Code that closes over arrays: differentiated for what is asked for, and for nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.budgeted import plans
from helpers.menagerie import assert_close, exact_jit
from helpers.unrolled_code import normal

import jaxmem

WS, H, TABLE = [normal(k, 16, 16) for k in range(4)], normal(9, 64, 16), normal(10, 16)


def with_rule(table: jax.Array) -> Any:
    """A function whose rule says nothing of a derivative for what it closes over."""

    @jax.custom_vjp
    def own(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * table

    own.defvjp(
        lambda x: (jnp.tanh(x) * table, x),
        lambda x, g: (g * table * (1 - jnp.square(jnp.tanh(x))),),
    )
    return own


def step_of(decorate: Any, make: Any, table: Any = TABLE, wrt: int = 0) -> Any:
    def loss(ws: Any, table: Any, h: jax.Array) -> jax.Array:
        # Made here, so that inside of a jit the table is traced as well.
        own = make(jnp.sin(table))

        def net(ws: Any, h: jax.Array) -> jax.Array:
            for w in ws:
                h = own(h @ w)
            return h

        return jnp.square(decorate(net)(ws, h)).mean()

    return lambda ws, h: jax.grad(loss, wrt)(ws, table, h)


def plain_closure(table: jax.Array) -> Any:
    return lambda x: jnp.tanh(x) * table


@pytest.mark.parametrize(("make", "wrt"), [(with_rule, 0), (plain_closure, 0), (plain_closure, 1)])
def test_numbers_along_the_front(make: Any, wrt: int) -> None:
    step = step_of(jaxmem.remat_auto, make, wrt=wrt)
    expected = exact_jit(step_of(lambda f: f, make, wrt=wrt))(WS, H)
    found = plans(step, WS, H, most=3)
    assert found
    for plan in found:
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(step)(WS, H), expected)


@pytest.mark.parametrize("decorate", [jaxmem.remat_sqrt, jaxmem.remat_full])
@pytest.mark.filterwarnings("ignore::jaxmem.NoStackWarning")
def test_numbers_without_a_plan(decorate: Any) -> None:
    expected = exact_jit(step_of(lambda f: f, with_rule))(WS, H)
    assert_close(exact_jit(step_of(decorate, with_rule))(WS, H), expected)
