"""Nets in which each layer reads all before it: what gradients are sums of is added up early."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.budgeted import assert_plans_give, problem, question

import jaxmem
from jaxmem.unrolled import gradients
from jaxmem.unrolled.code import Code

Spec = jax.ShapeDtypeStruct
Params = Any


def convolved(h: jax.Array, kernel: jax.Array) -> jax.Array:
    sides = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=sides)


def layer(params: Params, h: jax.Array) -> jax.Array:
    """BatchNorm, ReLU and a convolution, as in DenseNet."""
    (scale, kernel), dtype = params, h.dtype
    wide = h.astype(jnp.float32)
    centred = wide - wide.mean((0, 1, 2))
    h = jax.nn.relu(centred * jax.lax.rsqrt(jnp.square(centred).mean((0, 1, 2)) + 1e-5) * scale)
    return convolved(h.astype(dtype), kernel.astype(dtype))


def grown(params: Params, h: jax.Array) -> jax.Array:
    """As `keras` has it: what there is, and one more."""
    for one in params:
        h = jnp.concatenate([h, layer(one, h)], -1)
    return h.mean((1, 2))


def listed(params: Params, h: jax.Array) -> jax.Array:
    """All that there are, joined anew by each layer."""
    found = [jnp.tanh(h)]
    for one in params:
        found.append(layer(one, jnp.concatenate(found, -1)))
    return jnp.concatenate(found, -1).mean((1, 2))


NETS = {"grown": grown, "listed": listed}


def specs(layers: int, batch: int, side: int, width: int, more: int, dtype: str = "float32") -> Any:
    widths = [width + more * at for at in range(layers)]
    params = [(Spec((w,), "float32"), Spec((3, 3, w, more), "float32")) for w in widths]
    return params, Spec((batch, side, side, width), dtype)


def loss(net: Any) -> Any:
    return lambda *args: jnp.square(net(*args).astype(jnp.float32)).mean()


def barriers(fn: Any, *args: Any) -> list[int]:
    """Of how many gradients each barrier is that the code has on its way back."""
    code = Code(jax.make_jaxpr(fn)(*args))
    reads = code.reads(0, len(code))

    def total(*values: Any) -> jax.Array:
        return code.run(0, len(code), values, sums=True)[0].sum()

    gradient = jax.grad(total, tuple(range(len(reads))))
    eqns = jax.make_jaxpr(gradient)(*(var.aval for var in reads)).eqns
    return [len(e.invars) for e in eqns if e.primitive.name == "optimization_barrier"]


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_gradients_are_those_of_the_code(net: Any) -> None:
    random = np.random.default_rng(0)
    args = jax.tree.map(
        lambda spec: jnp.asarray(random.normal(size=spec.shape), spec.dtype),
        specs(18, 2, 4, 4, 2),
    )
    wanted = jax.jit(jax.grad(loss(net), (0, 1)))(*args)
    step = jax.grad(loss(jaxmem.remat_auto(net)), (0, 1))
    assert_plans_give(step, args, wanted, most=3, rtol=1e-4, atol=1e-6)


def test_every_other_layer_has_them_added_up() -> None:
    """From the fourth on, and in the other net none: it needs no more as it is."""
    args = specs(12, 2, 4, 4, 2)
    assert barriers(grown, *args) == [2] * 5
    assert barriers(listed, *args) == []
    with mock.patch.object(gradients, "platform", return_value="tpu"):
        assert barriers(grown, *args) == []


def test_what_is_joined_once_is_not_touched() -> None:
    """As skip connections are, and the halves of what is turned; nor what nobody else reads, as the
    steps of a recurrence."""

    def net(ws: Any, h: jax.Array) -> jax.Array:
        skipped = []
        for w in ws:
            left, right = jnp.split(jnp.tanh(h @ w), 2, -1)
            h = jnp.concatenate([-right, left], -1)
            skipped.append(h)
        for w in ws:
            h = jnp.tanh(jnp.concatenate([h, skipped.pop()], -1) @ jnp.concatenate([w, w]))
        rows = row = h[:1]
        for w in ws:
            row = jnp.tanh(row @ w)
            rows = jnp.concatenate([rows, row])
        return rows

    assert barriers(net, [Spec((8, 8), "float32")] * 6, Spec((4, 8), "float32")) == []


@pytest.mark.slow
def test_a_gpu_holds_a_few_terms() -> None:
    args = specs(12, 16, 28, 64, 32, "bfloat16")

    def step(params: Params, h: jax.Array) -> Any:
        found = jax.grad(loss(jaxmem.remat_auto(grown)))(params, h)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, found)

    def needed(share: float) -> int:
        found = problem(step, *args, target="h100-80g", donate=(0,))
        ask = question(step, *args, target="h100-80g", donate=(0,))
        return found.report(ask, round(share * (len(found.front) - 1))).temp_bytes

    for share, part in ((0.9, 0.5), (1.0, 0.7)):
        ours = needed(share)
        with mock.patch.object(gradients, "_PARTS", 10**6):
            assert ours < part * needed(share)
