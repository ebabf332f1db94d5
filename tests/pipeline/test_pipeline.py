"""`jaxmem.pipeline`: loss and gradients are those of the function on one device."""

import collections
import dataclasses
import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import Weighted

WIDTH, WORDS, LENGTH = 6, 7, 3


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(0.4 * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def near(actual: Any, expected: Any, tolerance: float = 2e-6) -> None:
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- random models


@dataclasses.dataclass(frozen=True)
class Model:
    """A small language model.

    Attributes:
      tied: whether the embedding is the head as well.
      counts: whether layers carry a whole number next to the activations, and use it.
      masked: whether layers read a mask, which is made of the batch before them.
      auxiliary: whether layers have ys, of which the loss has some.
      reverse: whether the first layer is the last one of the stacked parameters.
      weighted: whether the loss is a mean over some of the words.
    """

    layers: int
    tied: bool = True
    counts: bool = False
    masked: bool = False
    auxiliary: bool = False
    reverse: bool = False
    weighted: bool = False

    @property
    def params(self) -> Any:
        n = self.layers
        found = {
            "embedding": normal(0, WORDS, WIDTH),
            "layers": {"w": normal(1, n, WIDTH, WIDTH), "b": normal(2, n, WIDTH)},
        }
        return found if self.tied else {**found, "head": normal(3, WIDTH, WORDS)}

    def loss(self, params: Any, tokens: jax.Array) -> Any:
        mask = (tokens > 1).astype(jnp.float32)
        x = params["embedding"][tokens]

        def layer(carry: Any, p: Any) -> Any:
            h, count = carry
            y = jnp.tanh(h @ p["w"] + p["b"])
            if self.masked:
                y = y * mask[..., None]
            if self.counts:
                y, count = y / (1 + count), count + 1
            out = ((h * y).mean(), y) if self.auxiliary else None
            return (h + y, count), out

        start = jnp.zeros((), jnp.int32)
        (h, _), ys = jax.lax.scan(layer, (x, start), params["layers"], reverse=self.reverse)
        head = params["embedding"].T if self.tied else params["head"]
        errors = -jnp.take_along_axis(jax.nn.log_softmax(h @ head), tokens[..., None], -1)[..., 0]
        more = 0.0
        if self.auxiliary:
            more = 0.1 * ys[0].sum() + jnp.square(ys[1][-1]).mean()
        if not self.weighted:
            return errors.mean() + more
        found = Weighted((errors * mask).sum(), mask.sum())
        return found + Weighted(more * len(tokens), len(tokens)) if self.auxiliary else found


@functools.cache
def tokens(rows: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(4).integers(WORDS, size=(rows, LENGTH)), jnp.int32)


@functools.cache
def alone(model: Model, rows: int) -> Any:
    """On one device, the whole batch at once."""

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        found = model.loss(params, batch)
        return found.mean if isinstance(found, Weighted) else found

    return jax.jit(jax.value_and_grad(loss))(model.params, tokens(rows))


def check(model: Model, rows: int, stages: int, **options: Any) -> None:
    pipelined = jaxmem.pipeline(model.loss, **{"mesh": mesh_of(stage=stages), **options})
    found = jax.jit(jax.value_and_grad(pipelined))(model.params, tokens(rows))
    near(found, alone(model, rows))


FLAGS = ("tied", "counts", "masked", "auxiliary", "reverse", "weighted")


@pytest.mark.slow
@given(
    layers=st.integers(4, 7),
    flags=st.sets(st.sampled_from(FLAGS)),
    stages=st.integers(2, 4),
    m=st.integers(1, 5),
    schedule=st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "interleaved"]),
    policy=st.sampled_from([None, "none", "dots", "sqrt"]),
    even=st.booleans(),
)
@settings(max_examples=6, derandomize=True)
def test_random_models(
    layers: int,
    flags: set[str],
    stages: int,
    m: int,
    schedule: str,
    policy: str | None,
    even: bool,
) -> None:
    options: dict[str, Any] = {"schedule": schedule, "policy": policy, "microbatches": m}
    if schedule == "interleaved":
        options |= {"chunks": 2, "microbatches": (m := 4)}
        stages = 2
    model = Model(layers, **{flag: flag in flags for flag in FLAGS})
    # The mean over the rows of ys of unlike microbatches is another one.
    rows = 2 * m + (1 if m > 1 and not even and "auxiliary" not in flags else 0)
    if schedule == "interleaved":
        rows = 2 * m
    check(model, rows, stages, **options)


@pytest.mark.parametrize(
    ("model", "stages", "rows", "options"),
    [
        (Model(4, masked=True, auxiliary=True, counts=True), 2, 4, {"schedule": "1f1b"}),
        (Model(5, tied=False, reverse=True), 3, 5, {"schedule": "eager-1f1b", "microbatches": 3}),
        (Model(4, auxiliary=True), 4, 4, {"schedule": "gpipe", "recompute": False}),
        (
            Model(7, weighted=True, counts=True),
            2,
            6,
            {"schedule": "interleaved", "chunks": 2, "microbatches": 2},
        ),
        (Model(4), 2, 4, {"schedule": "1f1b", "layers": (1, 3), "policy": "sqrt"}),
        (Model(6, reverse=True, auxiliary=True), 2, 4, {"schedule": "gpipe", "layers": "cost"}),
    ],
    ids=["1f1b", "uneven", "kept", "interleaved", "sizes", "cost"],
)
def test_chosen_models(model: Model, stages: int, rows: int, options: Any) -> None:
    check(model, rows, stages, **{"microbatches": 4, **options})


def test_a_mesh_with_explicit_axes() -> None:
    mesh = jax.make_mesh((2, 2), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
    model, batch = Model(4), jax.device_put(tokens(4), NamedSharding(mesh, P("data")))
    params = jax.device_put(model.params, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        pipelined = jaxmem.pipeline(model.loss, microbatches=2)
        assert pipelined.explain(params, batch).rows == (2,)
        found = jax.jit(jax.value_and_grad(pipelined))(params, batch)
    near(found, alone(model, 4))


def test_the_value_alone_and_with_gradients_of_some() -> None:
    """Not differentiated it makes no gradient; of what is closed over there is one."""
    model = Model(4, tied=False)
    mesh = mesh_of(stage=2)
    frozen = model.params["layers"]["w"]

    def value(params: Any, other: Any) -> jax.Array:
        def loss(params: Any, batch: jax.Array) -> Any:
            layers = {"w": frozen, "b": other}
            return model.loss({**params, "layers": layers}, batch)

        return jaxmem.pipeline(loss, mesh=mesh, microbatches=2)(params, tokens(4))

    params = {name: model.params[name] for name in ("embedding", "head")}
    expected, gradients = alone(model, 4)
    near(jax.jit(value)(params, model.params["layers"]["b"]), expected)
    of_params, of_other = jax.jit(jax.grad(value, (0, 1)))(params, model.params["layers"]["b"])
    near(of_params, {name: gradients[name] for name in params})
    near(of_other, gradients["layers"]["b"])
    text = str(jax.make_jaxpr(value)(params, model.params["layers"]["b"]))
    assert text.count("ppermute") == 1


def test_each_layer_is_computed_as_often_as_the_schedule_says() -> None:
    """Forward, and recomputed: once as a stage, and once more as a layer that keeps nothing.

    The last stage does no forward pass before its backward pass.
    """
    layers, stages, m = 4, 2, 3
    seen: collections.Counter[int] = collections.Counter()

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, own: Any) -> Any:
            number, w = own
            jax.debug.callback(lambda number: seen.update([int(number)]), number)
            return jnp.tanh(h * w), None

        return jax.lax.scan(layer, x, (jnp.arange(layers), w))[0].mean()

    for policy, expected in (("full", (3, 2)), ("none", (2, 1))):
        seen.clear()
        pipelined = jaxmem.pipeline(
            loss, microbatches=m, policy=policy, mesh=mesh_of(stage=stages), schedule="1f1b"
        )
        jax.block_until_ready(jax.jit(jax.grad(pipelined))(jnp.ones(layers), jnp.ones(2 * m)))
        jax.effects_barrier()
        assert seen == {k: m * expected[k // 2] for k in range(layers)}, policy


def test_a_key_that_layers_pass_on() -> None:
    def loss(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        def layer(carry: Any, w: jax.Array) -> Any:
            h, key = carry
            key, own = jax.random.split(key)
            return (jnp.tanh(h @ w) * jax.random.bernoulli(own, 0.7, h.shape), key), None

        return jnp.square(jax.lax.scan(layer, (x, key), w)[0][0]).mean()

    args = normal(0, 4, WIDTH, WIDTH), normal(1, 6, WIDTH), jax.random.key(2)
    options: Any = {"microbatches": 3, "rng_argnums": 2}
    expected = jax.jit(jaxmem.value_and_grad(loss, **options))(*args)
    pipelined = jaxmem.pipeline(loss, mesh=mesh_of(stage=2), **options)
    near(jax.jit(jax.value_and_grad(pipelined))(*args), expected)


# ---------------------------------------------------------------- modules


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> Any:
        y = nn.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.3, deterministic=not train)(y), None


@jaxmem.remat_dots
class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        rngs, broadcast = {"params": True, "dropout": True}, nn.broadcast
        stack: Any = nn.scan(Block, {"params": 0}, split_rngs=rngs, in_axes=broadcast, length=4)  # pyright: ignore[reportArgumentType]
        return nn.Dense(2)(stack()(nn.Dense(WIDTH)(x), train)[0])


@pytest.mark.slow
def test_linen_with_dropout() -> None:
    """Keys are those of `jaxmem.value_and_grad` with the same microbatches, over data axes too."""
    x, key = normal(5, 8, 3), jax.random.key(1)
    params = Encoder().init(key, x, train=False)

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.square(Encoder().apply(params, x, train=True, rngs={"dropout": key})).mean()

    options: Any = {"microbatches": 4, "rng_argnums": 2}
    expected = jax.jit(jaxmem.value_and_grad(loss, **options))(params, x, key)
    mesh = mesh_of(stage=2, data=2)
    pipelined = jaxmem.pipeline(loss, mesh=mesh, **options)
    assert pipelined.explain(params, x, key).policy == "Dots(batch=True)"
    rows = jax.device_put(x, NamedSharding(mesh, P("data")))
    near(jax.jit(jax.value_and_grad(pipelined))(params, rows, key), expected)


def test_nnx() -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + jnp.tanh(self.inner(x))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.vmap(Layer)(rngs.split(4))
            self.out = nnx.Linear(WIDTH, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.out(run(x, self.layers))

    model, x = Model(nnx.Rngs(0)), normal(5, 8, WIDTH)

    def loss(model: Model, x: jax.Array) -> jax.Array:
        return jnp.square(model(x)).mean()

    expected = nnx.jit(nnx.value_and_grad(loss))(model, x)
    pipelined = jaxmem.pipeline(loss, microbatches=4, mesh=mesh_of(stage=2))
    found = nnx.jit(nnx.value_and_grad(pipelined))(model, x)
    near(jax.tree.leaves(found), jax.tree.leaves(expected))


# ---------------------------------------------------------------- other axes


@pytest.mark.parametrize("is_set", [True, False])
def test_beside_data_and_tensor_axes(is_set: bool) -> None:
    """Within `jaxmem.value_and_grad`, with constraints on shardings in the layers."""
    mesh = mesh_of(stage=2, data=2, tensor=2)
    params = {"up": normal(6, 4, WIDTH, 8), "down": normal(7, 4, 8, WIDTH)}
    x = normal(8, 8, WIDTH)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> Any:
            h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data")))
            y = jnp.tanh(h @ p["up"])
            y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data", "tensor")))
            return h + y @ p["down"], None

        return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()

    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    places = {"up": P("stage", None, "tensor"), "down": P("stage", "tensor")}
    own = {name: jax.device_put(params[name], NamedSharding(mesh, places[name])) for name in places}
    rows = jax.device_put(x, NamedSharding(mesh, P("data")))
    if is_set:
        with jax.set_mesh(mesh):
            found = jax.jit(jax.value_and_grad(jaxmem.pipeline(loss, microbatches=2)))(own, rows)
    else:
        pipelined = jaxmem.pipeline(loss, microbatches=2, mesh=mesh)
        found = jax.jit(jaxmem.value_and_grad(pipelined, microbatches=2))(own, rows)
    near(found, expected)
    for name, gradient in found[1].items():
        assert gradient.sharding.spec[0] == "stage", name


@pytest.mark.parametrize("axes", [{"stage": 3}, {"stage": 3, "data": 2}], ids=str)
def test_what_idle_stages_compute_is_in_no_sum(axes: dict[str, int]) -> None:
    """Nor are layers that are not there: at zero the derivative of these is NaN.

    With other axes in the mesh, all stages compute in each tick.
    """

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> Any:
            h = h / jnp.sqrt(jnp.square(h).sum(-1, keepdims=True))
            return h + jnp.tanh(h @ w), (h * w.sum()).mean()

        h, ys = jax.lax.scan(layer, x @ params["in"], params["w"])
        return jnp.square(h @ params["in"].T - x).mean() + ys.sum()

    params, x = {"in": normal(0, 4, WIDTH), "w": normal(1, 5, WIDTH, WIDTH)}, normal(2, 6, 4)
    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    pipelined = jaxmem.pipeline(loss, microbatches=3, mesh=mesh_of(**axes))
    assert pipelined.explain(params, x).branches == (len(axes) == 1)
    near(jax.jit(jax.value_and_grad(pipelined))(params, x), expected)
    near(jax.jit(pipelined)(params, x), expected[0])
