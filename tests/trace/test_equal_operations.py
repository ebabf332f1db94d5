"""What a layer does several times to the same values is one value, as it is to compilers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.budgeted import plans
from helpers.menagerie import assert_close, exact_jit
from helpers.unrolled_code import code_of
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

import jaxmem
from jaxmem import _jax


def operations(f: Callable[..., Any], *args: Any) -> list[str]:
    """What is left of a function, by name; it computes the same as before."""
    closed = jax.make_jaxpr(f)(*args)
    once = _jax.with_equal_once(_jax.inlined(closed))
    flat = jax.tree.leaves(args)
    for before, after in zip(*(jaxpr_as_fun(one)(*flat) for one in (closed, once)), strict=True):
        np.testing.assert_array_equal(before, after)
    return [eqn.primitive.name for eqn in once.jaxpr.eqns]


X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def test_equal_operations_are_one_and_so_is_what_follows_equally() -> None:
    found = operations(lambda x: jnp.sin(x * 2) + jnp.sin(x * 2) * jnp.exp(jnp.sin(x * 2)), X)
    assert sorted(found) == ["add", "exp", "mul", "mul", "sin"]


def test_results_are_still_as_many() -> None:
    assert operations(lambda x: (jnp.sin(x), jnp.sin(x), x), X) == ["sin"]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum(0).sum() + x.sum(1).sum(),
        lambda x: x * 2.0 + x * 3.0,
        lambda x: x * 0.0 + x * -0.0,
        lambda x: x.astype("bfloat16").sum() + x.astype("float16").sum().astype("bfloat16"),
        lambda x: x - 1.0 + (1.0 - x),
    ],
    ids=["parameters", "numbers", "zeros", "types", "sides"],
)
def test_what_differs_stays(f: Callable[..., Any]) -> None:
    assert len(operations(f, X)) == len(_jax.inlined(jax.make_jaxpr(f)(X)).jaxpr.eqns)


def test_names_that_users_give_stay() -> None:
    def f(x: jax.Array) -> jax.Array:
        return checkpoint_name(jnp.sin(x), "a") * checkpoint_name(jnp.sin(x), "b")

    assert operations(f, X) == ["sin", "name", "name", "mul"]


def test_names_for_places_are_one() -> None:
    def f(x: jax.Array) -> jax.Array:
        return _jax.named(jnp.sin(x), _jax.place_name(3)) * _jax.named(
            jnp.sin(x), _jax.place_name(5)
        )

    assert operations(f, X) == ["sin", "name", "mul"]


def test_barriers_loops_and_what_has_effects_stay() -> None:
    def f(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: None, x)
        jax.debug.callback(lambda v: None, x)
        sums = [jax.lax.scan(lambda c, row: (c + row, None), x[0], x)[0] for _ in range(2)]
        return jax.lax.optimization_barrier(x) + jax.lax.optimization_barrier(x) + sum(sums)

    found = operations(f, X)
    for name in ("scan", "optimization_barrier", "debug_callback"):
        assert found.count(name) == 2, name


def test_draws_that_no_key_is_for_stay() -> None:
    def f(low: jax.Array, high: jax.Array) -> jax.Array:
        return jax.lax.rng_uniform(low, high, (2,)) + jax.lax.rng_uniform(low, high, (2,))

    closed = jax.make_jaxpr(f)(0.0, 1.0)
    names = [eqn.primitive.name for eqn in _jax.with_equal_once(closed).jaxpr.eqns]
    assert names.count("rng_uniform") == 2


# ---------------------------------------------------------------- layers

WIDTH, ROWS, LAYERS = 64, 256, 4


def layer(h: jax.Array, w: Any) -> jax.Array:
    """Queries, keys and values of which each product casts its own operand, as flax's do."""
    q, k, v = (jnp.tanh(h.astype(jnp.bfloat16) @ w[n].astype(jnp.bfloat16)) for n in "qkv")
    return h + (q * k * v).astype(jnp.float32)


def scanned(ws: Any, h: jax.Array) -> jax.Array:
    return jnp.square(jax.lax.scan(lambda h, w: (layer(h, w), None), h, ws)[0]).mean()


def written_out(ws: Any, h: jax.Array) -> jax.Array:
    for at in range(LAYERS):
        h = layer(h, jax.tree.map(lambda w, at=at: w[at], ws))
    return jnp.square(h).mean()


def arrays() -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    ws = {
        n: jax.random.normal(k, (LAYERS, WIDTH, WIDTH)) / 8
        for n, k in zip("qkv", keys[:3], strict=True)
    }
    return ws, jax.random.normal(keys[3], (ROWS, WIDTH))


@pytest.mark.parametrize("loss", [scanned, written_out])
def test_gradients_are_those_of_the_function(loss: Any) -> None:
    """Each of the casts has a gradient of its own, and they are summed up in float32."""
    args = arrays()
    plain = exact_jit(jax.grad(loss, argnums=(0, 1)))(*args)
    step = jax.grad(jaxmem.remat_auto(loss), argnums=(0, 1))
    for plan in plans(step, *args, most=3):
        with jaxmem.use_plan(plan):
            assert_close(exact_jit(step)(*args), plain)


def test_a_cast_that_three_products_read_is_one_value() -> None:
    ws, h = arrays()
    code = code_of(lambda ws, h: layer(jnp.cumsum(h, 0), ws), jax.tree.map(lambda w: w[0], ws), h)
    found = code.layer(0, len(code))
    casts = [
        eqn
        for eqn in found.linearised.jaxpr.eqns
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.shape == h.shape
    ]
    assert sorted(str(eqn.outvars[0].aval.dtype) for eqn in casts) == ["bfloat16", "float32"]
    (cast,) = (eqn.outvars[0] for eqn in casts if eqn.outvars[0].aval.dtype == jnp.bfloat16)
    kept = [found.values[place] for place in found.kept if place is not None]
    behind = [eqn.invars[0] for var in kept if (eqn := found.made_by(var)) is not None]
    assert [*kept, *behind].count(cast) == 1
