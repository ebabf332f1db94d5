"""The order of a backward pass: what is recomputed stands where it is read, and waits there."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.menagerie import assert_same, exact_jit
from helpers.unrolled_code import SHAPES, arrays, code_of
from jax import lax

import jaxmem
from jaxmem import _jax
from jaxmem.estimate.backward import backward_of, interleaved_pullback, tied
from jaxmem.estimate.roofline import Roofline
from jaxmem.estimate.values import graph_of
from jaxmem.solve.keep import menu
from jaxmem.stacked import state
from jaxmem.trace import context
from jaxmem.trace.layer import Layer
from jaxmem.unrolled import Piece, UnrolledPlan, run

ANY = Roofline(matrix_peak=1e15, bandwidth=1e12)


@functools.cache
def layers(shape: str) -> list[Layer]:
    """The code of a function as one layer, keeping less and less."""
    code = code_of(SHAPES[shape], *arrays())
    layer = code.layer(0, len(code))
    return [layer.keeping(keep.kept) for keep in menu(graph_of(layer, ANY), points=2)]


def inputs(shape: str) -> list[jax.Array]:
    """What such a layer takes, in its order."""
    code = code_of(SHAPES[shape], *arrays())
    values = dict(zip(code.closed.jaxpr.invars, jax.tree.leaves(arrays()), strict=True))
    return [values[var] for var in code.reads(0, len(code))]


# ---------------------------------------------------------------- barriers


def test_on_tpus_a_barrier_that_nothing_waits_at_is_for_one_value() -> None:
    """XLA for TPUs refuses some programs with such for several, see `tied`.

    A BERT of three layers was one, at which `fit` ended.
    """
    values = [jnp.ones(4), jnp.ones(4), jnp.ones(3)]

    def barriers(first: int, platform: str) -> list[int]:
        with context.recording(platform):
            closed = jax.make_jaxpr(lambda *all: tied(all[:first], all[first:]))(*values)
        return [
            len(eqn.outvars)
            for eqn in closed.jaxpr.eqns
            if eqn.primitive.name == "optimization_barrier"
        ]

    assert barriers(0, "tpu") == [1, 1, 1]
    assert barriers(1, "tpu") == barriers(0, "gpu") == [3]


# ---------------------------------------------------------------- the order


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_read_was_made_before(shape: str) -> None:
    for layer in layers(shape):
        backward = backward_of(layer, interleaved=True)
        jaxpr = backward.closed.jaxpr
        known = {*jaxpr.invars, *jaxpr.constvars}
        made = []
        for eqn in jaxpr.eqns:
            assert all(_jax.is_literal(atom) or atom in known for atom in eqn.invars)
            known.update(eqn.outvars)
            made += eqn.outvars
        assert len(made) == len(set(made))
        assert all(_jax.is_literal(atom) or atom in known for atom in jaxpr.outvars)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_recomputed_once(shape: str) -> None:
    for layer in layers(shape):
        ways = backward_of(layer), backward_of(layer, interleaved=True)
        few, many = ([str(e.primitive) for e in way.closed.jaxpr.eqns] for way in ways)
        assert few.count("dot_general") == many.count("dot_general")
        assert len(few) <= len(many) <= 3 * len(few)


def test_elementwise_results_are_computed_for_each_reader() -> None:
    def fn(w, h):
        y = h @ w
        z = jax.nn.relu(y - y.mean(-1, keepdims=True))
        return (z @ w).sum()

    w, h = arrays()[0]["ws"][0], arrays()[1]
    code = code_of(fn, w, h)
    layer = code.layer(0, len(code))
    products = [
        place
        for place, var in enumerate(layer.values)
        if (eqn := layer.made_by(var)) is not None and eqn.primitive.name == "dot_general"
    ]
    backward = backward_of(layer.keeping(products), interleaved=True)
    names = [str(eqn.primitive) for eqn in backward.closed.jaxpr.eqns]
    # Once for the product that reads z, once for the derivative of the relu.
    assert names.count("sub") == 2
    # So is the mean, in the same kernel; on TPUs it is as good as a kernel's result, and stays.
    few = [str(e.primitive) for e in backward_of(layer.keeping(products)).closed.jaxpr.eqns]
    assert names.count("reduce_sum") == few.count("reduce_sum") + 1
    with context.recording("tpu"):
        there = backward_of(layer.keeping(products), interleaved=True)
    names = [str(eqn.primitive) for eqn in there.closed.jaxpr.eqns]
    assert names.count("reduce_sum") == few.count("reduce_sum")
    assert "dot_general" in {names[step.operation] for step in backward.steps if step.waits}


def test_what_is_recomputed_waits_for_a_gradient_and_not_for_a_wider_copy_of_it() -> None:
    """Which would be in memory for nothing but the barrier: here normalisations work in float32."""

    def fn(w: jax.Array, b: jax.Array, h: jax.Array) -> jax.Array:
        y = (h @ w).astype("float32")
        y = (y - y.mean(0)) * jax.lax.rsqrt(jnp.var(y, 0) + 1e-5) + b
        return jax.nn.relu(y.astype(h.dtype) + h)

    w, b, h = (jnp.ones(shape, "bfloat16") for shape in ((64, 64), (64,), (256, 64)))
    code = code_of(lambda w, b, h: fn(w, b, fn(w, b, h)), w, b.astype("float32"), h)
    layer = code.layer(0, len(code))
    joins = [
        place
        for place, var in enumerate(layer.values)
        if (eqn := layer.made_by(var)) is not None
        and eqn.primitive.name == "add"
        and var.aval.shape == h.shape
        and var.aval.dtype == h.dtype
    ]
    backward = backward_of(layer.keeping(joins), interleaved=True)
    waited = [var for step in backward.steps for var in step.waits]
    pulled = [var for var in waited if var.aval.shape != w.shape]
    assert len(joins) == len(pulled) == 2
    assert len(waited) == 3  # of the matrix whose gradient is made in between, too
    assert all(var.aval.dtype == h.dtype for var in waited)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    weights *= jax.random.bernoulli(key, 0.9, weights.shape)
    return jnp.einsum("bqk,bkd->bqd", weights, v)


def test_what_is_recomputed_waits_for_arrays_that_are_there() -> None:
    """For a product, and not for what is elementwise behind it, which would be an array as well."""
    like = jax.ShapeDtypeStruct((2, 64, 8), "float32")
    layer = keeping_least(attention, like, like, like, jax.random.key(0))
    backward = backward_of(layer, interleaved=True)
    eqns = backward.closed.jaxpr.eqns
    kinds = {var: eqn.primitive.name for eqn in eqns for var in eqn.outvars}
    waited = {kinds.get(var, "given") for step in backward.steps for var in step.waits}
    assert waited == {"given", "dot_general"}
    # Random bits are arrays, and not made before the gradient that they are for is there.
    made = [
        step
        for step in backward.steps
        if any(eqns[at].primitive.name == "random_bits" for at in step.recomputed)
    ]
    assert made
    assert all(step.waits for step in made)


def test_products_of_what_is_kept_and_elementwise_are_not_put_off() -> None:
    """A compiler computes the tanh where it is read, and holds the product before it till then."""

    def fn(w: Any, h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ w["up"]) @ w["down"]

    w = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    code = code_of(fn, w, jnp.ones((32, 16)))
    layer = code.layer(0, len(code))
    names = [layer.made_by(var) for var in layer.values]
    kept = [place for place, eqn in enumerate(names) if eqn and eqn.primitive.name == "tanh"]
    backward = backward_of(layer.keeping(kept), interleaved=True)
    first = [backward.closed.jaxpr.eqns[s.operation] for s in backward.steps if s.first]
    assert [eqn.outvars[0].aval.shape for eqn in first] in ([(16, 64)], [(64, 16)])


def test_what_is_kept_is_done_with_before_larger_gradients_are_pulled_further() -> None:
    """The probabilities, for the gradient of the values: then their own gradient is read."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    like = jnp.ones((2, 64, 4, 8))
    code = code_of(fn, like, like, like)
    layer = code.layer(0, len(code))
    large = [k for k, var in enumerate(layer.values) if var.aval.shape == (2, 4, 64, 64)]
    backward = backward_of(layer.keeping(large), interleaved=True)
    of_values = next(step for step in backward.steps if step.first)
    eqn = backward.closed.jaxpr.eqns[of_values.operation]
    assert eqn.primitive.name == "dot_general"
    assert eqn.outvars[0].aval.size == like.size
    assert [var.aval.shape for var in of_values.first] == [(2, 4, 64, 64)]


@pytest.mark.parametrize(("rows", "waited"), [(512, True), (4, False)])
def test_gradients_of_matrices_are_made_before_more_is_recomputed(rows: int, waited: bool) -> None:
    """Nobody else waits for them, and what they read would be held; unless they are larger."""

    def fn(ws: Any, h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ ws["first"]) @ ws["second"] @ ws["third"]

    shapes = {"first": (64, 128), "second": (128, 32), "third": (32, 96)}
    code = code_of(fn, {name: jnp.ones(s) for name, s in shapes.items()}, jnp.ones((rows, 64)))
    layer = code.layer(0, len(code))
    kept = [k for k, var in enumerate(layer.values) if var.aval.shape in ((rows, 64), (rows, 32))]
    backward = backward_of(layer.keeping(kept), interleaved=True)
    waits = {var.aval.shape for step in backward.steps for var in step.waits}
    assert ({(32, 96), (96, 32)} & waits != set()) == waited
    assert (rows, 32) in waits


def products(layer: Layer) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes of what is multiplied, in the backward pass."""
    eqns = backward_of(layer, interleaved=True).closed.jaxpr.eqns
    found = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    return [tuple(var.aval.shape for var in eqn.invars) for eqn in found]


def keeping_least(fn: Any, *args: Any) -> Layer:
    code = code_of(fn, *args)
    layer = code.layer(0, len(code))
    return layer.keeping(menu(graph_of(layer, ANY), points=0)[-1].kept)


def test_thin_products_are_computed_for_each_reader() -> None:
    """Those of few operations for what they make: an expensive one is recomputed once, and kept."""

    def two_readers(params: tuple[jax.Array, ...], h: jax.Array) -> jax.Array:
        first, second, third = params
        wide = jnp.tanh(h @ first)
        return (jnp.tanh(wide @ second) @ third + wide @ third).sum()

    def again(channels: int) -> int:
        shapes = (channels, 256), (256, 256), (256, 256)
        layer = keeping_least(two_readers, tuple(map(jnp.ones, shapes)), jnp.ones((32, channels)))
        return products(layer).count(((32, channels), (channels, 256)))

    assert again(48) == 1
    assert again(3) > 2


def test_chains_of_thin_products_are_recomputed_once() -> None:
    """Else each would be again with all before it, for each that reads it."""

    def deep(ws: list[jax.Array], h: jax.Array) -> jax.Array:
        for w in ws:
            h = jnp.tanh(h @ w)
        return jnp.square(h).mean()

    layer = keeping_least(deep, [jnp.ones((16, 16))] * 24, jnp.ones((512, 16)))
    of_layers = products(layer).count(((512, 16), (16, 16)))
    assert of_layers <= 24 + 24  # what pulls gradients back has these shapes, too


def test_long_chains_of_small_operations() -> None:
    def fn(h):
        for _ in range(1500):
            h = jnp.sin(h)
        return h

    code = code_of(fn, arrays()[1])
    layer = code.layer(0, len(code))
    assert backward_of(layer.keeping(()), interleaved=True).steps


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_layer(shape: str) -> None:
    flat = inputs(shape)
    for layer in layers(shape)[1::2]:  # with everything kept there is little to put in order
        consts, _, x = layer.body.split_in(flat)
        outs, _, tape = jax.jit(layer.tape)(consts, flat[len(consts) :], x)

        def pulled(pull, layer=layer, consts=consts, x=x, tape=tape):
            cts = [jnp.full(aval.shape, 0.5, aval.dtype) for aval in layer.body.jaxpr.out_avals]
            cts = [ct for ct, wrt in zip(cts, layer.wrt.outs, strict=True) if wrt]
            split = sum(layer.wrt.outs[: layer.body.num_carry])
            return exact_jit(lambda *given: pull(layer, *given))(
                consts, x, tape, cts[:split], cts[split:]
            )

        assert_same(pulled(interleaved_pullback), pulled(Layer.pullback))
        assert outs is not None


# ---------------------------------------------------------------- memory


@pytest.mark.slow
def test_what_waits_is_not_live_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are kept, and norms between them recomputed: each in its turn, one at a time."""

    def fn(ws, h):
        for w in ws:
            y = h @ w
            y = y - y.mean(-1, keepdims=True)
            h = jax.nn.relu(y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5))
        return jnp.square(h).mean()

    width, rows, depth = 1024, 16384, 7
    spec = (
        [jax.ShapeDtypeStruct((width, width), jnp.float32)] * depth,
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
    )
    code = code_of(fn, *spec)
    products = [at for at, e in enumerate(code.eqns) if e.primitive.name == "dot_general"]
    plan = UnrolledPlan(len(code), (Piece(0, len(code), keep=tuple(products)),))

    def loss(ws, h):
        return run(code, plan, jax.tree.leaves((ws, h)))[0]

    def needed() -> int:
        return jaxmem.memory_report(jax.grad(loss), *spec, target="h100-80g").temp_bytes

    interleaved = needed()
    monkeypatch.setattr(state, "interleaved_pullback", lambda *given, **_: Layer.pullback(*given))
    at_once = needed()
    array = rows * width * 4
    assert interleaved < at_once - 4 * array
    assert np.isfinite(interleaved)
