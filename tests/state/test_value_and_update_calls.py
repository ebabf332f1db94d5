"""`jaxmem.value_and_update` in its settings: microbatches, modules, plans, meshes, `explain`."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.menagerie import exact_jit
from helpers.updating import (
    PARAMS,
    STEPS,
    TOKENS,
    B,
    D,
    N,
    T,
    V,
    assert_alike,
    body,
    language_loss,
    layer,
    ordinary,
    run,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import Weighted
from jaxmem.stacked.stack import Tangent
from jaxmem.trace.context import recording

SGD = optax.sgd(0.1)
ADAM = optax.adam(0.01)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))


@functools.cache
def expected() -> Any:
    return run(ordinary(language_loss, ADAM), ADAM, PARAMS, TOKENS)


# ---------------------------------------------------------------- calls


def test_a_run_can_go_from_one_step_to_the_other() -> None:
    steps = [
        exact_jit(jaxmem.value_and_update(language_loss, ADAM)),
        exact_jit(ordinary(language_loss, ADAM)),
    ]
    params, state, values = PARAMS, ADAM.init(PARAMS), []
    for number in range(STEPS):
        value, params, state = steps[number % 2](params, state, TOKENS)
        values.append(value)
    assert_alike((values, params, state), expected(), 0.0)


@pytest.mark.slow
def test_without_jit() -> None:
    step = jaxmem.value_and_update(language_loss, SGD)
    ours = step(PARAMS, SGD.init(PARAMS), TOKENS)
    theirs = jax.jit(ordinary(language_loss, SGD))(PARAMS, SGD.init(PARAMS), TOKENS)
    assert_alike(ours, theirs)


def test_donated_arrays_are_used_again() -> None:
    """By names and by positions, which are those of the step and not those of the loss."""
    step = jaxmem.value_and_update(lambda params: language_loss(params, TOKENS), ADAM)
    donating: list[dict[str, Any]] = [
        {"donate_argnums": (0, 1)},
        {"donate_argnames": ("params", "state")},
    ]
    for options in donating:
        params = jax.tree.map(jnp.copy, PARAMS)
        state = ADAM.init(params)
        jitted = jax.jit(step, **options)
        before = params["layers"]["w"].unsafe_buffer_pointer()
        _, params, state = jitted(params, state)
        assert params["layers"]["w"].unsafe_buffer_pointer() == before
        jitted(params, state)
        with pytest.raises(
            (RuntimeError, ValueError), match=r"deleted or donated|has been deleted"
        ):
            jitted(params, state)


def test_arguments_of_any_kind() -> None:
    def loss(params: Any, tokens: Any, options: Any, scale: float, *, power: int = 1) -> Any:
        assert isinstance(tokens, np.ndarray)
        assert options["words"] == ["a"]
        value = options["activation"](language_loss(params, jnp.asarray(tokens)))
        return value * scale**power

    step = jaxmem.value_and_update(loss, SGD)
    options = {"words": ["a"], "activation": jnp.tanh, "nothing": None}
    state = SGD.init(PARAMS)
    value, _, _ = step(PARAMS, state, np.asarray(TOKENS), options, scale=0.5, power=2)
    assert_alike(value, jnp.tanh(language_loss(PARAMS, TOKENS)) * 0.25)
    assert vars(step)["__name__"] == "loss"


def test_aux_is_anything() -> None:
    def loss(params: Any, tokens: jax.Array) -> Any:
        h = body(params, tokens)
        aux = {"h": h, "word": "mean", "number": 3, "nothing": None, "key": jax.random.key(0)}
        return jnp.square(h).mean(), aux

    step = jaxmem.value_and_update(loss, SGD, has_aux=True)
    (value, aux), _, _ = step(PARAMS, SGD.init(PARAMS), TOKENS)
    assert aux["word"] == "mean"
    assert aux["number"] == 3
    assert aux["nothing"] is None
    assert aux["key"] == jax.random.key(0)
    assert_alike((value, aux["h"]), (jnp.square(aux["h"]).mean(), body(PARAMS, TOKENS)))


def weighted(params: Any, tokens: jax.Array) -> Weighted:
    """Over tokens that are not 0, and a penalty."""
    logits = body(params, tokens) @ params["embed"].T
    target = jnp.roll(tokens, -1, axis=1)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    counted = (target > 0).astype(jnp.float32)
    penalty = jnp.square(params["embed"]).sum()
    return Weighted((each * counted).sum(), counted.sum()) + 0.1 * Weighted(penalty, 1)


def test_numbers_among_parameters() -> None:
    """Python's, which become arrays in the first step, as they do in the ordinary one."""
    params = PARAMS | {"scale": 2.0}

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return language_loss(params, tokens) * params["scale"]

    ours = jaxmem.value_and_update(loss, SGD)(params, SGD.init(params), TOKENS)
    assert_alike(ours, jax.jit(ordinary(loss, SGD))(params, SGD.init(params), TOKENS))


# ---------------------------------------------------------------- microbatches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "optimizer"),
    [
        pytest.param(1, ADAM, id="1", marks=pytest.mark.slow),
        pytest.param(2, ADAM, id="2", marks=pytest.mark.slow),
        pytest.param(4, ADAM, id="4"),
        pytest.param(4, CLIPPED, id="4, two passes"),
    ],
)
@pytest.mark.parametrize("fun", [language_loss, weighted], ids=lambda fun: fun.__name__)
def test_microbatches(fun: Any, m: int, optimizer: Any) -> None:
    """Of six rows: in four parts, two have one row more."""
    step = jaxmem.value_and_update(fun, optimizer, microbatches=m)
    ours = run(step, optimizer, PARAMS, TOKENS)
    whole = jaxmem.value_and_grad(fun, microbatches=m)

    def ordinary_step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradients = whole(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    assert_alike(ours, run(ordinary_step, optimizer, PARAMS, TOKENS), 1e-6)
    plan = step.explain(PARAMS, optimizer.init(PARAMS), TOKENS)
    assert [leaf.in_backward for leaf in plan.leaves] == [False, True, True]


def called(params: Any, tokens: jax.Array) -> jax.Array:
    """The layers of `body` one after the other, without a stack."""
    h = params["embed"][tokens]
    for k in range(N):
        h, _ = layer(h, jax.tree.map(lambda leaf, k=k: leaf[k], params["layers"]))
    return h


def called_loss(params: Any, tokens: jax.Array) -> jax.Array:
    return jnp.square(called(params, tokens) @ params["embed"].T).mean()


def called_weighted(params: Any, tokens: jax.Array) -> Weighted:
    counted = (tokens > 0).astype(jnp.float32)
    return Weighted((jnp.square(called(params, tokens)).sum(-1) * counted).sum(), counted.sum())


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("fun", [called_loss, called_weighted], ids=lambda fun: fun.__name__)
@pytest.mark.filterwarnings("ignore:value_and_update. no parameter is updated")
def test_microbatches_of_code_without_a_stack(fun: Any, m: int) -> None:
    """All of them are in the loop: none has anything to update in its backward pass."""
    step = jaxmem.value_and_update(fun, CLIPPED, microbatches=m)
    both = jaxmem.value_and_grad(fun, microbatches=m)

    def ordinary_step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradients = both(params, tokens)
        updates, state = CLIPPED.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    ours = run(step, CLIPPED, PARAMS, TOKENS)
    assert_alike(ours, run(ordinary_step, CLIPPED, PARAMS, TOKENS), 1e-6)
    plan = step.explain(PARAMS, CLIPPED.init(PARAMS), TOKENS)
    assert not any(leaf.in_backward for leaf in plan.leaves)


@pytest.mark.slow
@pytest.mark.parametrize("model", [body, called], ids=["a stack", "no stack"])
@pytest.mark.filterwarnings("ignore:value_and_update. no parameter is updated")
def test_everything_that_microbatches_have(model: Any) -> None:
    """Keys, a carry, outputs in parts, sums in a dtype, weights, arguments by name, a policy."""

    @jaxmem.remat_sqrt
    def loss(params: Any, tokens: jax.Array, key: jax.Array, mean: jax.Array) -> Any:
        h = model(params, tokens)
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        value = jnp.square(jnp.where(keep, h, 0)).mean() * (1 + mean)
        return value, {"rows": h.sum((1, 2)), "mean": 0.9 * mean + 0.1 * h.mean()}

    options: dict[str, Any] = {
        "has_aux": True,
        "microbatches": 4,
        "rng_argnums": 2,
        "carry_argnums": 3,
        "aux": {"rows": "concat", "mean": "carry"},
        "accumulator_dtype": None,
        "return_weight": True,
    }
    step = jaxmem.value_and_update(loss, CLIPPED, **options)
    both = jaxmem.value_and_grad(loss, **options)
    key, mean = jax.random.key(0), jnp.float32(0.1)
    state = CLIPPED.init(PARAMS)

    @exact_jit
    def expected(params: Any, state: Any) -> Any:
        value, gradients = both(params, TOKENS, key, mean)
        updates, state = CLIPPED.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    ours = exact_jit(step)(PARAMS, state, TOKENS, key=key, mean=mean)
    assert_alike(ours, expected(PARAMS, state))
    value, batch = ours[0]
    assert (int(batch.weight), batch.aux["rows"].shape, value.shape) == (B, (B,), ())


# ---------------------------------------------------------------- modules


class Block(nn.Module):
    @nn.compact
    def __call__(self, h: jax.Array, _: Any) -> Any:
        h = h + jnp.tanh(nn.Dense(D)(h))
        return nn.Dropout(0.3, deterministic=False)(h), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(V, D)
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=N,
        )
        return embed.attend(blocks()(embed(tokens), None)[0])


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(None, id="plain"),
        pytest.param(jaxmem.remat_sqrt, id="sqrt", marks=pytest.mark.slow),
    ],
)
def test_linen(policy: Any) -> None:
    model, key = Model(), jax.random.key(0)
    params = jax.jit(model.init)({"params": key, "dropout": key}, TOKENS)["params"]

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    planned = policy(loss) if policy else loss
    step = jaxmem.value_and_update(planned, ADAM)
    plan = step.explain(params, ADAM.init(params), TOKENS, key)
    assert {leaf.path: leaf.in_backward for leaf in plan.leaves} == {
        "Embed_0/embedding": False,
        "ScanBlock_0/Dense_0/bias": True,
        "ScanBlock_0/Dense_0/kernel": True,
    }
    ours = run(step, ADAM, params, TOKENS, key, steps=2)
    assert_alike(ours, run(ordinary(loss, ADAM), ADAM, params, TOKENS, key, steps=2), 1e-6)


def test_a_layer_that_makes_an_array_of_a_number_is_updated_for_a_tpu() -> None:
    def layer(h: Any, w: Any) -> Any:
        mask = jnp.broadcast_to(2.0, h.shape)
        return h + mask * (h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)), None

    @jaxmem.remat_full
    def loss(weights: Any, x: Any) -> Any:
        return lax.scan(layer, x, weights)[0].mean()

    weights, optimizer = jnp.ones((3, 4, 4)), optax.adam(0.1)
    step = jaxmem.value_and_update(loss, optimizer)
    with recording("tpu"):
        closed = jax.make_jaxpr(step)(weights, optimizer.init(weights), jnp.ones((2, 4)))
    assert "reduce_precision" in str(closed)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        return h + jnp.tanh(self.dense(self.norm(h)))


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(V, D, rngs=rngs)

        @nnx.split_rngs(splits=N)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(rngs)

        self.layers = make(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def each(h: jax.Array, layer: Layer) -> jax.Array:
            return layer(h)

        return self.embed.attend(each(self.embed(tokens), self.layers))


def numbers(module: Any, *filters: Any) -> Any:
    found: Any = nnx.state(module, *filters)
    return nnx.to_pure_dict(found)


def net_loss(model: Net, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()


@pytest.mark.slow
@pytest.mark.parametrize("m", [None, 3], ids=["whole", "three"])
def test_nnx_modules_and_their_optimizer_are_updated_in_place(m: int | None) -> None:
    mine, theirs = Net(), Net()
    own, other = (nnx.Optimizer(model, CLIPPED, wrt=nnx.Param) for model in (mine, theirs))
    step = jaxmem.value_and_update(net_loss, CLIPPED, microbatches=m)
    plan = step.explain(mine, own, TOKENS)
    assert {leaf.path: leaf.in_backward for leaf in plan.leaves} == {
        "embed/embedding": False,
        "layers/dense/bias": True,
        "layers/dense/kernel": True,
        "layers/norm/bias": True,
        "layers/norm/scale": True,
    }
    ours = nnx.jit(step)
    if m is None:
        both = nnx.value_and_grad(net_loss)
    else:
        both = jaxmem.value_and_grad(net_loss, microbatches=m)

    @nnx.jit
    def expected(model: Net, optimizer: Any, tokens: jax.Array) -> Any:
        value, gradients = both(model, tokens)
        optimizer.update(model, gradients)
        return value

    before = numbers(mine, nnx.BatchStat)
    for _ in range(3):
        assert_alike(ours(mine, own, TOKENS), expected(theirs, other, TOKENS), 1e-5)
    for found, wanted in ((mine, theirs), (own, other)):
        assert_alike(numbers(found), numbers(wanted), 1e-5)
    moved = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), before, numbers(mine, nnx.BatchStat)
    )
    assert min(jax.tree.leaves(moved)) > 1e-4
    assert int(own.step[...]) == 3


def test_nnx_with_outputs_and_only_some_variables() -> None:
    def loss(model: Net, tokens: jax.Array) -> Any:
        return net_loss(model, tokens), "word"

    mine, theirs = Net(), Net()
    only = nnx.All(nnx.Param, nnx.PathContains("layers"))
    own, other = (nnx.Optimizer(model, ADAM, wrt=only) for model in (mine, theirs))
    value, word = jaxmem.value_and_update(loss, ADAM, has_aux=True)(mine, own, TOKENS)
    assert word == "word"
    expected, gradients = nnx.value_and_grad(net_loss, argnums=nnx.DiffState(0, only))(
        theirs, TOKENS
    )
    other.update(theirs, gradients)
    assert_alike(value, expected)
    assert_alike(numbers(mine), numbers(theirs), 1e-5)


# ---------------------------------------------------------------- plans


def test_a_plan_that_fit_found() -> None:
    loss = jaxmem.remat_auto(language_loss)
    step = jaxmem.value_and_update(loss, ADAM)
    args = PARAMS, ADAM.init(PARAMS), TOKENS
    fitted = jaxmem.fit(step, *args, budget="1MiB", target="local", progress=False)
    assert_alike(exact_jit(fitted.step)(*args), exact_jit(ordinary(language_loss, ADAM))(*args), 0)
    assert str(fitted.explain()).startswith("stack 0: 4 layers")
    with jaxmem.use_plan(fitted.plan):
        ours = run(jaxmem.value_and_update(loss, ADAM), ADAM, PARAMS, TOKENS)
    assert_alike(ours, expected(), 0.0)


def test_a_schedule_that_kept_what_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gradients of the stack are then there at once, and are gone through row by row."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        one = lambda h, p: (jnp.tanh(h @ p["w"] + p["b"]), jnp.exp(h))  # noqa: E731
        return jnp.square(lax.scan(one, params["embed"][tokens], params["layers"])[0]).mean()

    theirs = run(ordinary(loss, CLIPPED), CLIPPED, PARAMS, TOKENS)
    monkeypatch.setattr(Tangent, "without", lambda self, used: None)
    ours = run(jaxmem.value_and_update(loss, CLIPPED), CLIPPED, PARAMS, TOKENS)
    assert_alike(ours, theirs)


def test_what_a_schedule_kept_and_does_not_need() -> None:
    """A layer's ys have no cotangent, and one of them an infinite derivative."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        def layer(h: jax.Array, p: Any) -> Any:
            y = jnp.sqrt(h - h)
            return h + jnp.tanh(h @ p["w"] + p["b"]), y.sum()

        h, _ = lax.scan(layer, params["embed"][tokens], params["layers"])
        return jnp.square(h).mean()

    theirs = run(ordinary(loss, CLIPPED), CLIPPED, PARAMS, TOKENS)
    assert np.isfinite(theirs[0]).all()
    for policy in (lambda loss: loss, jaxmem.remat_dots):
        ours = run(jaxmem.value_and_update(policy(loss), CLIPPED), CLIPPED, PARAMS, TOKENS)
        assert_alike(ours, theirs)


# ---------------------------------------------------------------- meshes


@pytest.mark.slow
def test_parameters_that_are_sharded() -> None:
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = {"embed": P(None), "layers": {"b": P("model"), "w": P("model")}}
    params = jax.device_put(
        PARAMS, jax.tree.map(lambda own: jax.sharding.NamedSharding(mesh, own), spec)
    )
    ours = run(jaxmem.value_and_update(language_loss, CLIPPED), CLIPPED, params, TOKENS)
    theirs = run(ordinary(language_loss, CLIPPED), CLIPPED, PARAMS, TOKENS)
    assert_alike(jax.device_get(ours), jax.device_get(theirs), 1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(ADAM, id="adam", marks=pytest.mark.slow), pytest.param(CLIPPED, id="clipped")],
)
def test_inside_shard_map(optimizer: Any) -> None:
    """Devices that train parameters of their own, each on its rows."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    each = [jax.tree.map(lambda leaf, k=k: leaf * (1 + k), PARAMS) for k in range(2)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(optimizer.init, each))
    tokens = TOKENS.reshape(2, -1, T)
    step = jaxmem.value_and_update(language_loss, optimizer)

    def own(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], step(*jax.tree.map(lambda x: x[0], args)))

    mapped = jax.shard_map(own, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"))
    value, after, _ = jax.jit(mapped)(params, state, tokens)
    for k in range(2):
        theirs = jax.jit(ordinary(language_loss, optimizer))(
            each[k], optimizer.init(each[k]), tokens[k]
        )
        assert_alike((value[k], jax.tree.map(lambda x, k=k: x[k], after)), theirs[:2], 1e-5)


# ---------------------------------------------------------------- explain


def test_explain_says_which_and_why_in_words() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
    step = jaxmem.value_and_update(language_loss, optimizer)
    shapes = jax.eval_shape(lambda: (PARAMS, optimizer.init(PARAMS), TOKENS))
    plan = step.explain(*shapes)
    assert plan == step.explain(PARAMS, optimizer.init(PARAMS), TOKENS)
    assert plan.gradient_bytes == PARAMS["embed"].nbytes
    assert str(plan).splitlines() == [
        "2 backward passes; gradients of 140 B exist at once, parameters have 620 B",
        "  embed     140 B  after it: it is not stacked over the layers of one scan that alone "
        "reads it",
        "  layers/b   80 B  in the backward pass",
        "  layers/w  400 B  in the backward pass",
    ]
    assert plan.leaves[1] == jaxmem.UpdatedLeaf("layers/b", 80, True, "")
