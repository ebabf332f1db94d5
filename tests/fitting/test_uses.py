"""How often a step runs its decorated regions, and how many it holds at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.budgeted import problem, question
from helpers.menagerie import assert_close, exact_jit
from helpers.releases import SINCE_0_11
from jax import lax

import jaxmem
from jaxmem.fitting.uses import Uses

WS, H = jax.ShapeDtypeStruct((4, 16, 16), "f4"), jax.ShapeDtypeStruct((8, 16), "f4")


@jaxmem.remat_auto
def block(w: jax.Array, h: jax.Array) -> jax.Array:
    return h + jnp.tanh(jnp.sin(h @ w))


def net(ws: jax.Array, h: jax.Array, block: Callable[..., jax.Array] = block) -> jax.Array:
    for w in ws:
        h = block(w, h)
    return jnp.square(h).mean()


def in_scan(block: Callable[..., jax.Array]) -> Any:
    return lambda ws, h: jnp.square(lax.scan(lambda h, w: (block(w, h), None), h, ws)[0]).mean()


def in_scans_of_one(ws: jax.Array, h: jax.Array) -> jax.Array:
    for k in range(4):
        h = lax.scan(lambda h, w: (block(w, h), None), h, ws[k : k + 1])[0]
    return jnp.square(h).mean()


def in_branches(ws: jax.Array, h: jax.Array) -> jax.Array:
    for w in ws:
        twice = lambda w, h: block(w, block(w, h))  # noqa: E731
        h = lax.cond(h.sum() > 0, block, twice, w, h)
    return jnp.square(h).mean()


def with_a_target(ws: jax.Array, h: jax.Array) -> jax.Array:
    """What a net that is not trained says of the same."""
    return jnp.square(net(ws, h) - lax.stop_gradient(net(0.9 * ws, h)))


def scans_in_scan(ws: jax.Array, h: jax.Array) -> jax.Array:
    inner = lambda h, ws: (lax.scan(lambda h, w: (block(w, h), None), h, ws)[0], None)  # noqa: E731
    return jnp.square(lax.scan(inner, h, ws.reshape(2, 2, 16, 16))[0]).mean()


def two_gradients(ws: jax.Array, h: jax.Array) -> jax.Array:
    ws = ws - jax.grad(net)(ws, h)
    return ws - jax.grad(net)(ws, 2 * h)


def custom(ws: jax.Array, h: jax.Array) -> jax.Array:
    """With a gradient of its own, of which that of the blocks is a part."""
    own = jax.custom_vjp(lambda ws, h: net(ws, h))
    own.defvjp(
        lambda ws, h: (net(ws, h), (ws, h)),
        lambda kept, ct: (ct * jnp.clip(jax.grad(net)(*kept), -1, 1), jnp.zeros_like(kept[1])),
    )
    return own(ws, h)


@pytest.mark.filterwarnings("ignore::jaxmem.NoStackWarning")
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param(jax.grad(net), Uses(4, 4), id="a loop"),
        pytest.param(jax.jit(jax.value_and_grad(net)), Uses(4, 4), id="jit"),
        pytest.param(
            jax.grad(lambda ws, h: net(ws, h, jax.jit(block))), Uses(4, 4), id="traced once"
        ),
        pytest.param(jax.grad(in_scan(block)), Uses(4, 4, 1, 4, True), id="a scan"),
        pytest.param(jax.grad(scans_in_scan), Uses(4, 4, 3, 4, True), id="a scan in a scan"),
        pytest.param(jax.grad(in_scans_of_one), Uses(4, 4), id="scans of one turn"),
        pytest.param(jax.grad(in_branches), Uses(8, 8), id="branches"),
        pytest.param(jax.grad(with_a_target), Uses(4, 4), id="evaluated as well"),
        pytest.param(
            jax.grad(lambda ws, h: net(ws, h, jax.checkpoint(block))), Uses(4, 1), id="checkpoint"
        ),
        pytest.param(jax.grad(jax.checkpoint(net)), Uses(4, 4), id="a checkpoint around all"),
        pytest.param(
            jax.grad(in_scan(jax.checkpoint(block))), Uses(4, 1, 0, 4), id="a scan of checkpoints"
        ),
        pytest.param(two_gradients, Uses(8, 4), id="one gradient after the other"),
        pytest.param(jax.grad(custom), Uses(4, 4), id="custom_vjp"),
    ],
)
def test_uses(step: Any, expected: Uses) -> None:
    (region,) = problem(step, WS, H).regions
    assert region.uses == expected


def test_what_is_evaluated_only_is_no_hole_whatever_its_shape() -> None:
    """A teacher that looks at more rows is other code than what is trained."""

    def loss(ws: jax.Array, h: jax.Array) -> jax.Array:
        teacher = net(0.9 * ws, jnp.concatenate([h, h]))
        return jnp.square(net(ws, h) - lax.stop_gradient(teacher))

    assert [region.uses for region in problem(jax.grad(loss), WS, H).regions] == [
        Uses(0, 0),
        Uses(4, 4),
    ]


def test_a_stack_traced_once_and_written_out_twice() -> None:
    stack = jaxmem.remat_auto(
        lambda ws, h: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0]
    )
    once = jax.jit(stack, inline=True)
    (region,) = problem(jax.grad(lambda ws, h: once(ws, once(ws, h)).sum()), WS, H).regions
    assert region.uses == Uses(2, 2)


def test_who_differentiates_a_gradient_is_told_that_this_is_not_planned() -> None:
    def penalty(ws: jax.Array, h: jax.Array) -> jax.Array:
        return net(ws, h) + jnp.square(jax.grad(net, 1)(ws, h)).sum()

    with pytest.warns(
        jaxmem.NoEffectWarning, match="differentiated twice, and planned for its fir"
    ):
        problem(jax.grad(penalty), WS, H)


def test_gradients_taken_within_a_scan_are_counted_once() -> None:
    def microbatches(ws: jax.Array, hs: jax.Array) -> jax.Array:
        one = lambda total, h: (total + jax.grad(net)(ws, h), None)  # noqa: E731
        return lax.scan(one, jnp.zeros_like(ws), hs)[0]

    (region,) = problem(microbatches, WS, jax.ShapeDtypeStruct((3, 8, 16), "f4")).regions
    assert region.uses == Uses(4, 4)


@jaxmem.remat_auto
def from_ones(ws: jax.Array, context: jax.Array) -> jax.Array:
    """A stack whose carry is not differentiated at its start."""
    turn = lambda h, w: (jnp.tanh(h @ w + context), None)  # noqa: E731
    return lax.scan(turn, jnp.ones_like(context), ws)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is under remat_auto, and no plan:jaxmem.JaxmemWarning")
def test_a_stack_that_is_differentiated_otherwise_at_first() -> None:
    """A scan's body is differentiated for the stack's context once it is known to depend on it."""

    def loss(ws: jax.Array, h: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(lambda h, w: (from_ones(w, h), None), h, ws)[0]).sum()

    ws, h = jax.ShapeDtypeStruct((3, 4, 16, 16), "f4"), jax.ShapeDtypeStruct((1024, 16), "f4")
    step = jax.grad(loss)
    target = "h100-80g"
    tried = problem(step, ws, h, target=target, cost="flops")
    assert [region.uses for region in tried.regions] == [Uses(0, 0), Uses(3, 3, 1, 3, True)]
    whole = tried.report(question(step, ws, h, target=target), 0).required_bytes
    budget = 3 * whole // 5 if SINCE_0_11 else whole // 2  # one residual for a tanh there
    options: Any = {"budget": budget, "target": target, "max_compiles": 2, "progress": False}
    fitted = jaxmem.fit(step, ws, h, **options)
    assert fitted.report.required_bytes <= budget
    assert str(fitted.explain()).count("from_ones") == 1
    arrays = 0.3 * jax.random.normal(jax.random.key(0), ws.shape), jnp.ones(h.shape)
    assert_close(exact_jit(fitted.step)(*arrays), exact_jit(step)(*arrays))


def test_a_stack_that_is_differentiated_in_two_ways() -> None:
    """Traced once, called with a context that is constant and with one that is not."""
    stack = jax.jit(from_ones)

    def loss(ws: jax.Array, h: jax.Array) -> jax.Array:
        return stack(ws[1], stack(ws[0], h)).sum()

    ws, h = jax.ShapeDtypeStruct((2, 4, 16, 16), "f4"), jax.ShapeDtypeStruct((1024, 16), "f4")
    step = jax.grad(loss)
    assert [region.uses for region in problem(step, ws, h).regions] == [Uses(), Uses()]
    options: Any = {"budget": "2MiB", "target": "h100-80g", "max_compiles": 2, "progress": False}
    assert jaxmem.fit(step, ws, h, **options).report.required_bytes <= 2**21


@pytest.mark.slow
def test_scans_inside_of_layers_are_planned_with_what_is_around_them() -> None:
    """Of layers that are called one after another; as stacks of their own they would not do."""

    def layer(h: jax.Array, w: jax.Array) -> jax.Array:
        turn = jax.checkpoint(lambda _, part: (None, jnp.tanh(part @ w)))
        parts = lax.scan(turn, None, h.reshape(4, -1, h.shape[-1]))[1]
        return h + jnp.sin(jnp.cos(parts.reshape(h.shape) @ w) @ w)

    def gradient(where: Any = None) -> Any:
        @jaxmem.remat_auto(where=where)
        def stack(ws: jax.Array, h: jax.Array) -> jax.Array:
            for w in ws:
                h = layer(h, w)
            return h

        return jax.grad(lambda ws, h: jnp.square(stack(ws, h)).sum())

    args = jax.ShapeDtypeStruct((6, 64, 64), "f4"), jax.ShapeDtypeStruct((65536, 64), "f4")
    options: Any = {"target": "h100-80g", "progress": False}
    budget = "330MiB"
    with pytest.raises(jaxmem.BudgetError, match=r"the least that was reached is"):
        jaxmem.fit(gradient(where=lambda stack: True), *args, budget=budget, **options)
    fitted = jaxmem.fit(gradient(), *args, budget=budget, **options)
    assert fitted.report.required_bytes <= 330 * 2**20
    assert fitted.plan.scans == "parts"
