"""Random layers, lengths and plans: values, results and gradients are those of `lax.scan`.

A layer is drawn as a short program over a pool of values: its carries, its
slice of the xs, constants of the scan; each step appends one more value, and
carries and ys are picked from the pool.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.menagerie import assert_close, exact_jit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import jaxmem
from jaxmem import Plan, Policy, policies

pytestmark = pytest.mark.usefixtures("strict")

SIZE = 3

# ---------------------------------------------------------------- layers

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: 0.5 * (a + b),
    "multiply": lambda a, b: 0.5 * a * b,
    "matmul": lambda a, b: 0.5 * a @ b,
    "sin": lambda a, b: jnp.sin(a),
    "divide": lambda a, b: a / (2 + b * b),
    "maximum": jnp.maximum,
    "where": lambda a, b: jnp.where(a > 0, a, 0.3 * b),
    "stop": lambda a, b: lax.stop_gradient(a) + 0.1 * b,
    "transpose": lambda a, b: a.T,
    "mean": lambda a, b: jnp.full_like(a, 0.2) * a.mean(),
    "sort": lambda a, b: jnp.sort(a, axis=0),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A program: (operation, first operand, second operand), operands counted in the pool.

    The pool begins with the carries, then xs, then consts, all SIZE × SIZE.
    `carry` and `ys` say which values of the pool go out.
    """

    num_carry: int
    num_x: int
    num_const: int
    steps: tuple[tuple[str, int, int], ...]
    carry: tuple[int, ...]
    ys: tuple[int, ...]

    def __call__(self, consts: Any, carry: Any, x: Any) -> Any:
        count, *carry = carry
        pool = [*carry, *x, *consts]
        for name, a, b in self.steps:
            pool.append(OPERATIONS[name](pool[a], pool[b]))
        counted = count.astype(jnp.float32) * 0.01
        return (count + 1, *(pool[i] for i in self.carry)), (
            counted,
            *(pool[i] for i in self.ys),
        )


@st.composite
def layers(draw: Any) -> Layer:
    num_carry, num_x, num_const = (draw(st.integers(low, 2)) for low in (0, 0, 0))
    pool = num_carry + num_x + num_const
    steps = []
    for _ in range(draw(st.integers(1, 6)) if pool else 0):
        operand = st.integers(0, pool - 1)
        steps.append((draw(st.sampled_from(sorted(OPERATIONS))), draw(operand), draw(operand)))
        pool += 1
    picked = st.integers(0, max(pool - 1, 0))
    return Layer(
        num_carry,
        num_x,
        num_const,
        tuple(steps),
        tuple(draw(picked) for _ in range(num_carry)),
        tuple(draw(picked) for _ in range(draw(st.integers(0, 2)) if pool else 0)),
    )


# ---------------------------------------------------------------- plans


@st.composite
def cuts(draw: Any, n: int) -> Plan:
    """A periodic plan of any segment lengths."""
    lengths, outer = [], n
    for _ in range(draw(st.integers(1, 3))):
        outer = draw(st.integers(1, outer))
        lengths.append(outer)
    return Plan.cut(n, lengths)


def plans(n: int) -> st.SearchStrategy[Plan | Policy]:
    return st.one_of(
        cuts(n),
        st.builds(lambda slots: Plan.revolve(n, slots), st.integers(1, n + 2)),
        st.sampled_from([Plan.full(n), policies.dots(), policies.sqrt(), policies.sqrt(levels=3)]),
    )


@st.composite
def cases(draw: Any) -> Any:
    n = draw(st.integers(1, 40))
    return draw(layers()), n, draw(plans(n)), draw(st.booleans()), draw(st.integers(1, 3))


# ---------------------------------------------------------------- the property


@pytest.mark.slow
@settings(
    max_examples=30,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cases())
def test_value_and_gradients(case: Any) -> None:
    layer, n, plan, reverse, unroll = case
    rng = np.random.default_rng(n)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((*shape, SIZE, SIZE)), jnp.float32)

    args = (
        [normal() for _ in range(layer.num_const)],
        [normal() for _ in range(layer.num_carry)],
        [normal(n) for _ in range(layer.num_x)],
    )

    def total(consts: Any, init: Any, xs: Any) -> Any:
        outs = lax.scan(
            lambda carry, x: layer(consts, carry, x),
            (jnp.int32(0), *init),
            xs,
            length=n,
            reverse=reverse,
            unroll=unroll,
        )
        floats = [leaf for leaf in jax.tree.leaves(outs) if leaf.dtype == jnp.float32]
        return sum((jnp.sin(leaf).mean() for leaf in floats), jnp.float32(0)), outs

    both = [
        jax.value_and_grad(fn, argnums=(0, 1, 2), has_aux=True)
        for fn in (total, jaxmem.remat(total, plan))
    ]
    expected, actual = exact_jit(lambda *args: [fn(*args) for fn in both])(*args)
    assert_close(actual, expected)
