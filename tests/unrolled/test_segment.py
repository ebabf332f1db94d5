"""What of a stage is looked at, where it is a large part of the code and where it is not."""

import importlib
from unittest import mock

import jax
import jax.numpy as jnp

from jaxmem.estimate.compiler import GPU
from jaxmem.estimate.roofline import Roofline
from jaxmem.unrolled import Chain, Code

CHAIN = importlib.import_module("jaxmem.unrolled.chain")
WIDTH = 64


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    return jnp.sin(jnp.tanh(h @ w) @ w) + jnp.exp(h @ w)


def uneven(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """Two layers of all rows, and between them two of one of a thousand."""
    x = layer(ws[1], layer(ws[0], x))
    y = layer(ws[3], layer(ws[2], x[::1000]))
    return x + y.sum(0)


def chain() -> Chain:
    w, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((WIDTH, WIDTH), (64000, WIDTH)))
    closed = jax.make_jaxpr(uneven)([w] * 4, x)
    return Chain(Code(closed), Roofline(989e12, 3.35e12, compiler=GPU))


def test_of_small_stages_few_ways_are_looked_at() -> None:
    ours = chain()
    with mock.patch.object(CHAIN, "_RESOLVED", 1e12):
        all_ = chain()
    assert ours.cuts == all_.cuts
    for span, segment in ours.segments.items():
        ways, without = segment.stage.options, all_.segments[span].stage.options
        large = max(option.tape_bytes for option in without) > 1e6
        if large:
            assert len(ways) > 0.5 * len(without)
        else:
            assert len(ways) <= 2 or len(ways) < len(without)
        assert next(iter(ways)) == next(iter(without))
        # The one that keeps least is among them.
        assert min(one.tape_bytes for one in ways) == min(one.tape_bytes for one in without)
    count = sum(len(segment.stage.options) for segment in ours.segments.values())
    assert count < sum(len(segment.stage.options) for segment in all_.segments.values())


def test_no_plan_is_lost_that_is_worth_its_time() -> None:
    ours = chain()
    with mock.patch.object(CHAIN, "_RESOLVED", 1e12):
        all_ = chain()
    for plan in all_.plans():
        seconds = [one.seconds for one in ours.plans() if one.bytes <= 1.005 * plan.bytes]
        assert min(seconds) <= 1.05 * plan.seconds
