"""`jaxmem.pipeline`: auxiliary outputs and state are those of microbatches one after the other."""

import dataclasses
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
from jax.sharding import AbstractMesh, AxisType

import jaxmem
from jaxmem import Weighted

WIDTH, FEATURES = 5, 3


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(0.4 * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def near(actual: Any, expected: Any, tolerance: float = 4e-6) -> None:
    actual, expected = (jax.tree.map(_numbers, tree) for tree in (actual, expected))
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def _numbers(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


# ---------------------------------------------------------------- random models


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with statistics, and with outputs of all kinds.

    Attributes:
      before, inside, after: where there are running means that activations depend on: before the
        layers, in each of them, after them.
      weighted: whether the loss is a mean over some of the rows.
      reverse: whether the first layer is the last one of the stacked parameters.
    """

    layers: int
    before: bool = True
    inside: bool = True
    after: bool = True
    weighted: bool = False
    reverse: bool = False

    @property
    def params(self) -> Any:
        return {
            "in": normal(0, FEATURES, WIDTH),
            "w": normal(1, self.layers, WIDTH, WIDTH),
            "out": normal(2, WIDTH, FEATURES),
        }

    @property
    def state(self) -> Any:
        found: Any = {"count": jnp.zeros((), jnp.int32), "same": jnp.ones(2)}
        shapes = {
            "before": (WIDTH,), "inside": (self.layers, WIDTH), "after": (WIDTH,),
        }  # fmt: skip
        kinds = [name for name in shapes if getattr(self, name)]
        return found | {name: normal(5 + len(name), *shapes[name]) for name in kinds}

    def loss(self, params: Any, x: jax.Array, state: Any) -> Any:
        new = dict(state)

        def shifted(name: str, h: jax.Array, mean: jax.Array) -> tuple[jax.Array, jax.Array]:
            return h - mean, 0.8 * mean + 0.2 * h.mean(0)

        h = x @ params["in"] * state["same"].mean()
        if self.before:
            h, new["before"] = shifted("before", h, state["before"])

        def layer(h: jax.Array, own: Any) -> Any:
            w, mean = own
            if self.inside:
                h, mean = shifted("inside", h, mean)
            y = jnp.tanh(h @ w + 0.1 * state["count"])
            return h + y, (mean, jnp.square(y).mean(), y)

        means = state["inside"] if self.inside else None
        h, (means, balance, ys) = jax.lax.scan(layer, h, (params["w"], means), reverse=self.reverse)
        if self.inside:
            new["inside"] = means
        if self.after:
            h, new["after"] = shifted("after", h, state["after"])
            new["after"] += balance.sum()
        new["count"] += 1
        errors = jnp.square(h @ params["out"] - x).mean(-1)
        more = {
            "sum": balance, "mean": balance, "stack": balance, "last": balance, "first": ys[0],
            "rows": errors, "some": Weighted(errors.sum(), (errors > 0.2).sum()),
            "one": jnp.ones((), jnp.int32),
        }  # fmt: skip
        loss: Any = errors.mean() + 0.1 * balance.sum()
        if self.weighted:
            mask = (x[:, 0] > 0).astype(jnp.float32)
            loss = Weighted((errors * mask).sum(), mask.sum()) + Weighted(0.1 * balance.sum(), 1)
        return loss, (new, more)


WORDS = {
    "sum": "sum", "mean": "mean", "stack": "stack", "last": "last", "first": "concat",
    "rows": "concat", "some": "mean", "one": "sum",
}  # fmt: skip
OPTIONS: dict[str, Any] = {"has_aux": True, "aux": ("carry", WORDS), "carry_argnums": 2}


def check(model: Model, rows: int, m: int, mesh: Any, **options: Any) -> None:
    args = model.params, normal(3, rows, FEATURES), model.state
    alone = jaxmem.value_and_grad(model.loss, microbatches=m, **OPTIONS)
    pipelined = jaxmem.pipeline(model.loss, microbatches=m, mesh=mesh, **OPTIONS, **options)
    expected = jax.jit(alone)(*args)
    near(jax.jit(jax.value_and_grad(pipelined, has_aux=True))(*args), expected)


FLAGS = ("before", "inside", "after", "weighted", "reverse")


@pytest.mark.slow
@given(
    layers=st.integers(4, 6),
    flags=st.sets(st.sampled_from(FLAGS)),
    stages=st.integers(2, 4),
    m=st.integers(1, 4),
    schedule=st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "interleaved"]),
    policy=st.sampled_from([None, "none", "sqrt"]),
    even=st.booleans(),
)
@settings(max_examples=4, derandomize=True)
def test_random_models(
    layers: int,
    flags: set[str],
    stages: int,
    m: int,
    schedule: str,
    policy: str | None,
    even: bool,
) -> None:
    options: dict[str, Any] = {"schedule": schedule, "policy": policy}
    if schedule == "interleaved":
        stages, m, even = 2, 4, True
        options["chunks"] = 2
    model = Model(layers, **{flag: flag in flags for flag in FLAGS})
    rows = 2 * m + (1 if m > 1 and not even else 0)
    check(model, rows, m, mesh_of(stage=stages), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rows", "m", "axes", "options"),
    [
        (Model(4), 7, 3, {"stage": 2}, {"schedule": "gpipe"}),
        (Model(5, weighted=True), 6, 3, {"stage": 3}, {"schedule": "1f1b"}),
        (Model(4, weighted=True), 6, 3, {"stage": 2}, {"schedule": "gpipe", "recompute": False}),
        (Model(5, reverse=True), 8, 4, {"stage": 2}, {"schedule": "interleaved", "chunks": 2}),
        (Model(5), 8, 2, {"stage": 2, "data": 2}, {}),
    ],
    ids=["gpipe", "1f1b", "kept", "interleaved", "data"],
)
def test_chosen_models(model: Model, rows: int, m: int, axes: Any, options: Any) -> None:
    check(model, rows, m, mesh_of(**axes), **options)


def test_the_value_alone_has_the_same_outputs() -> None:
    model = Model(4)
    args = model.params, normal(3, 6, FEATURES), model.state
    alone = jaxmem.value_and_grad(model.loss, microbatches=3, **OPTIONS)
    pipelined = jaxmem.pipeline(model.loss, microbatches=3, mesh=mesh_of(stage=2), **OPTIONS)
    near(jax.jit(pipelined)(*args), jax.jit(alone)(*args)[0])


def test_outputs_and_state_that_are_constants() -> None:
    """They are on no mesh, where all else is on that of the stages."""

    def loss(w: Any, x: Any, s: Any) -> Any:
        h = stack(w, x)
        new = {"mean": h.mean(), "before": s["mean"], "reset": np.float32(3)}
        return (h * (1 + s["before"])).mean(), (new, [2.0, True, np.ones(2, np.float32)])

    state = {"mean": jnp.ones(()), "before": jnp.ones(()), "reset": jnp.ones(())}
    options: Any = {"has_aux": True, "aux": ("carry", "mean"), "carry_argnums": 2}
    expected = jax.jit(jaxmem.value_and_grad(loss, microbatches=3, **options))(W, X, state)
    pipelined = jaxmem.pipeline(loss, microbatches=3, mesh=mesh_of(stage=2), **options)
    near(jax.jit(jax.value_and_grad(pipelined, has_aux=True))(W, X, state), expected)


# ---------------------------------------------------------------- modules


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        y = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
        return x + jnp.tanh(y), None


@jaxmem.remat_dots
class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False)(x)
        axes, rngs = {"params": 0, "batch_stats": 0}, {"params": True}
        stack: Any = nn.scan(Block, axes, split_rngs=rngs, length=4)  # pyright: ignore[reportArgumentType]
        return nn.BatchNorm(use_running_average=False)(stack()(x)[0])


@pytest.mark.slow
def test_batch_statistics_of_linen() -> None:
    """Before the layers, in them and after them; also where the layers have a policy already."""
    x = normal(5, 9, WIDTH)
    variables = Encoder().init(jax.random.key(0), x)

    def loss(params: Any, x: jax.Array, stats: Any) -> Any:
        own = {"params": params, "batch_stats": stats}
        y, new = Encoder().apply(own, x, mutable=["batch_stats"])
        return jnp.square(y - 1).mean(), new["batch_stats"]

    options: Any = {"microbatches": 4, "has_aux": True, "aux": "carry", "carry_argnums": -1}
    args = variables["params"], x, variables["batch_stats"]
    expected = jax.jit(jaxmem.value_and_grad(loss, **options))(*args)
    pipelined = jaxmem.pipeline(loss, mesh=mesh_of(stage=2), **options)
    near(jax.jit(jax.value_and_grad(pipelined, has_aux=True))(*args), expected, 2e-5)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.drop(self.norm(self.inner(x))))


class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.layers = nnx.vmap(Layer)(rngs.split(4))
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.norm(run(self.drop(x), self.layers))


def of_module(model: Deep, x: jax.Array) -> jax.Array:
    return jnp.square(model(x) - 1).mean()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_module_of_nnx_gets_its_state(kind: AxisType) -> None:
    """Batch statistics and counters of random keys, as `jaxmem.value_and_grad` leaves them."""
    x = normal(5, 8, WIDTH)
    models = [Deep(nnx.Rngs(0)) for _ in range(2)]
    expected = nnx.jit(jaxmem.value_and_grad(of_module, microbatches=4))(models[0], x)
    mesh = jax.make_mesh((2, 1), ("stage", "data"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        pipelined = jaxmem.pipeline(of_module, microbatches=4)
        found = nnx.jit(nnx.value_and_grad(pipelined))(models[1], x)
    near(jax.tree.leaves(found), jax.tree.leaves(expected), 1e-5)
    own, theirs = (jax.tree.leaves(nnx.state(model)) for model in reversed(models))
    near(own, theirs)


class Mean(nnx.Module):
    def __init__(self) -> None:
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = self.mean[...]
        self.mean[...] = 0.8 * mean + 0.2 * x.mean(0)
        return x - mean


class Shared(nnx.Module):
    """One module in two places, and random keys; its two weights are one."""

    def __init__(self) -> None:
        self.layers = nnx.Param(normal(7, 4, WIDTH, WIDTH))
        self.w = nnx.Param(normal(8, WIDTH, WIDTH))
        self.tied, self.first, self.rngs = self.w, Mean(), nnx.Rngs(0)
        self.second, self.same = self.first, self.rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.second(self.first(x) @ self.w + 1)
        noise = jax.random.normal(self.rngs(), x.shape) + jax.random.normal(self.same(), x.shape)
        return stack(self.layers[...], x + noise) @ self.tied.T


def test_variables_in_several_places_of_a_module() -> None:
    def loss(model: Shared, x: jax.Array) -> jax.Array:
        return jnp.square(model(x) - 1).mean()

    x = normal(5, 8, WIDTH)
    models = [Shared() for _ in range(2)]
    expected = nnx.jit(jaxmem.value_and_grad(loss, microbatches=4))(models[0], x)
    pipelined = jaxmem.pipeline(loss, microbatches=4, mesh=mesh_of(stage=2))
    found = nnx.jit(nnx.value_and_grad(pipelined))(models[1], x)
    near(jax.tree.leaves(found), jax.tree.leaves(expected), 1e-5)
    assert models[1].first is models[1].second
    own, theirs = (jax.tree.leaves(nnx.state(model)) for model in reversed(models))
    near(own, theirs)


def test_a_module_that_is_split_and_merged() -> None:
    """Merging takes the variables of the argument, which then change in place."""
    graph, params, state = nnx.split(Shared(), nnx.Param, ...)

    def loss(params: Any, x: jax.Array, state: Any) -> Any:
        model = nnx.merge(graph, params, state)
        loss = jnp.square(model(x) - 1).mean()
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    args = params, normal(5, 8, WIDTH), state
    options: Any = {"microbatches": 4, "has_aux": True, "aux": "carry", "carry_argnums": 2}
    expected = jax.jit(jaxmem.value_and_grad(loss, **options))(*args)
    pipelined = jaxmem.pipeline(loss, mesh=mesh_of(stage=2), **options)
    found = jax.jit(jax.value_and_grad(pipelined, has_aux=True))(*args)
    near(jax.tree.leaves(found), jax.tree.leaves(expected), 1e-5)


# ---------------------------------------------------------------- what it costs


def test_outputs_of_layers_stay_on_their_stage() -> None:
    """They are no part of what stages send, as what is read after the layers is."""

    def loss(w: jax.Array, x: jax.Array, is_read: bool) -> Any:
        h, ys = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, w)
        return h.mean(), (2 * ys if is_read else ys)

    w, x = jnp.ones((4, WIDTH, WIDTH)), jnp.ones((8, WIDTH))
    sizes = []
    for is_read in (False, True):
        pipelined = jaxmem.pipeline(
            lambda w, x, is_read=is_read: loss(w, x, is_read), has_aux=True, microbatches=4,
            mesh=AbstractMesh((2,), ("stage",)),
        )  # fmt: skip
        sizes.append(pipelined.explain(w, x).message_bytes)
    assert sizes == [2 * WIDTH * 4, (1 + 4) * 2 * WIDTH * 4]


# ---------------------------------------------------------------- what cannot be

MESH = AbstractMesh((2,), ("stage",))
W, X, S = jnp.ones((4, 3, 3)), jnp.ones((8, 3)), jnp.ones((4, 3))


def stack(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def of_all_layers(w: Any, x: Any, s: Any) -> Any:
    h = stack(w, x + s.mean())
    return h.mean(), s + h.mean()


def read_twice(w: Any, x: Any, s: Any) -> Any:
    def layer(h: Any, own: Any) -> Any:
        w, s = own
        return jnp.tanh(h @ w + s), s + h.mean()

    h, new = jax.lax.scan(layer, x + s.mean(), (w, s))
    return h.mean(), new


@pytest.mark.parametrize("fun", [of_all_layers, read_twice])
def test_state_that_would_make_stages_wait(fun: Any) -> None:
    pipelined = jaxmem.pipeline(fun, mesh=MESH, has_aux=True, aux="carry", carry_argnums=2)
    with pytest.raises(ValueError) as error:
        pipelined.explain(W, X, S)
    assert str(error.value) == (
        f"{fun.__name__} reads s before its last layer, and what the next microbatch gets for it "
        "depends on the layers: the first stage would wait for the last one of the microbatch "
        "before. A pipeline takes state that each layer reads and changes for itself, stacked "
        "along its leading axis as a parameter of the layers is (linen: "
        'variable_axes={"batch_stats": 0}), state that is made without the layers, and state that '
        "is read after them"
    )


def test_gradients_of_outputs_are_refused_and_not_zero() -> None:
    def loss(w: Any, x: Any) -> Any:
        h = stack(w, x)
        return h.mean(), {"norm": jnp.square(h).sum(), "count": jnp.ones((), jnp.int32)}

    pipelined = jaxmem.pipeline(loss, mesh=MESH, has_aux=True, aux="sum")

    def total(w: Any) -> Any:
        value, outputs = pipelined(w, X)
        return value + outputs["norm"]

    for run in (total, jax.jit(total)):
        with pytest.raises(ValueError, match="the gradient of auxiliary outputs is asked for, and"):
            jax.eval_shape(jax.grad(run), W)
    jax.eval_shape(jax.grad(pipelined, has_aux=True), W, X)
    jax.eval_shape(jax.grad(jax.checkpoint(pipelined), has_aux=True), W, X)


def after_layers(w: Any, x: Any, s: Any) -> Any:
    h = stack(w, x)
    return (h - s).mean(), s + h.mean()


def before_layers(w: Any, x: Any, s: Any) -> Any:
    return stack(w, x - s).mean(), s + x.mean()


@pytest.mark.parametrize("fun", [after_layers, before_layers])
def test_gradients_of_state_are_refused(fun: Any) -> None:
    pipelined = jaxmem.pipeline(fun, mesh=MESH, has_aux=True, aux="carry", carry_argnums=2)
    with pytest.raises(ValueError, match="the gradient of the batch or of state is asked for"):
        jax.eval_shape(jax.grad(pipelined, 2, has_aux=True), W, X, S[0, 0])


class Growing(nnx.Module):
    def __call__(self, w: Any, x: Any) -> Any:
        self.seen = nnx.Variable(x.mean())
        return stack(w, x)


class Widening(nnx.Module):
    def __init__(self) -> None:
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, w: Any, x: Any) -> Any:
        self.seen[...] = x.mean()
        self.seen.set_value(jnp.ones(2))
        return stack(w, x)


def in_place(batch: Any, w: Any) -> Any:
    batch["x"] = batch["x"] + 1
    return stack(w, batch["x"]).mean()


def test_state_that_is_no_array() -> None:
    def loss(w: Any, x: Any, s: Any) -> Any:
        return stack(w, x).mean(), s

    pipelined = jaxmem.pipeline(loss, mesh=MESH, has_aux=True, aux="carry", carry_argnums=2)
    with pytest.raises(TypeError) as error:
        pipelined.explain(W, X, {"name": "ema", "mean": S, "none": None, "count": 0})
    assert str(error.value) == (
        "s/name is 'ema' of type str, and a carried argument is made of arrays; pass it in another "
        "argument, or let the function close over it"
    )


def test_state_that_is_named_twice() -> None:
    options: Any = {"has_aux": True, "aux": ("carry", "carry"), "carry_argnums": (2, -1)}
    pipelined = jaxmem.pipeline(lambda w, x, s: (stack(w, x).mean(), (s, s)), mesh=MESH, **options)
    with pytest.raises(ValueError) as error:
        pipelined.explain(W, X, S)
    assert str(error.value) == (
        "carry_argnums=(2, -1) names an argument twice, of 3; name each once"
    )


def by_keyword(x: Any, *, model: Any) -> Any:
    return model(W, x).mean()


def test_changes_that_no_microbatch_can_take() -> None:
    def said(fun: Any, *args: Any, **options: Any) -> str:
        with pytest.raises(ValueError) as error:
            jaxmem.pipeline(fun, mesh=MESH, **options).explain(*args)
        return str(error.value)

    def grown(model: Any, x: Any) -> Any:
        return model(W, x).mean()

    with pytest.raises(TypeError) as error:
        jaxmem.pipeline(by_keyword, mesh=MESH, batch_argnums=0).explain(X, model=Growing())
    assert str(error.value) == (
        "model= has an NNX module in it, whose changes would be lost; pass modules by position"
    )
    assert said(grown, Growing(), X) == (
        "grown changes which arrays argument 0 holds: 0 before and 1 after, and what a "
        "microbatch leaves the next one has to take; make the variables when the module is made, "
        "or return the values with has_aux=True"
    )
    assert said(grown, Widening(), X) == (
        "grown changes model/seen/value from float32[] to float32[2]; what the next microbatch "
        "gets must be an array of the same shape and dtype"
    )
    assert said(in_place, {"x": X}, W, batch_argnums=0) == (
        "in_place changes batch/x in place, which is lost where it is in no NNX module; return the "
        'new value with has_aux=True, for the next microbatch by carry_argnums= and "carry" in aux='
    )


def test_weights_that_follow_from_state_after_the_layers() -> None:
    def loss(w: Any, x: Any, s: Any) -> Any:
        h = stack(w, x)
        return Weighted(h.sum(), jnp.square(s).sum()), s + h.mean()

    pipelined = jaxmem.pipeline(loss, mesh=MESH, has_aux=True, aux="carry", carry_argnums=2)
    with pytest.raises(ValueError, match="depends on what the layers compute, and a pipeline has"):
        jax.eval_shape(pipelined, W, X, S)
