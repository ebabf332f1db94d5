"""`jaxmem.value_and_grad` of models of linen and NNX, and with what goes inside or around it."""

import functools
import re
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.grads import (
    BATCH,
    MASK,
    F,
    W,
    X,
    errors,
    masked_loss,
    mean_loss,
    microbatches_of,
    near,
    normal,
    ours_of,
    terms_loss,
    whole,
)
from helpers.menagerie import assert_same, exact_jit

import jaxmem
from jaxmem import Weighted

# ---------------------------------------------------------------- batch statistics, modules


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(5)(x))
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(jnp.tanh(x)))


@pytest.mark.slow
def test_batch_statistics_of_linen_are_those_of_a_loop() -> None:
    model, key = Normalised(), jax.random.key(7)
    variables = jax.jit(model.init)({"params": key, "dropout": key}, X)

    def loss(params: Any, batch: Any, stats: Any, rng: Any) -> Any:
        out, new = model.apply(
            {"params": params, "batch_stats": stats},
            batch["x"],
            mutable=["batch_stats"],
            rngs={"dropout": rng},
        )
        return jnp.square(out - batch["y"]).mean(), new["batch_stats"]

    args = variables["params"], BATCH, variables["batch_stats"], key
    ours = jaxmem.value_and_grad(
        loss, has_aux=True, microbatches=4, carry_argnums=2, rng_argnums=3, aux="carry"
    )
    (value, stats), gradient = jax.jit(ours)(*args)
    params, _, after, _ = args
    total, sums = 0.0, jax.tree.map(jnp.zeros_like, params)
    one_by_one = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for number, rows in enumerate(microbatches_of(13, 4)):
        own = jax.tree.map(lambda leaf, rows=rows: leaf[rows], BATCH)
        rng = jax.random.fold_in(key, number)
        (one, after), grads = one_by_one(params, own, after, rng)
        part = len(rows) / 13
        total += float(one) * part
        sums = jax.tree.map(lambda a, b, part=part: a + b * part, sums, grads)
    near((value, stats, gradient), (jnp.float32(total), after, sums), 1e-5)
    assert np.abs(stats["BatchNorm_0"]["mean"] - args[2]["BatchNorm_0"]["mean"]).max() > 1e-3


class Net(nnx.Module):
    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(F, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(5, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def net_loss(model: Net, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def state(model: Any) -> Any:
    """All of a module, its keys as words."""
    return jax.tree.map(
        lambda leaf: (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        ),
        nnx.to_pure_dict(nnx.state(model)),
    )


@pytest.mark.slow
def test_one_microbatch_of_a_module_is_that_of_nnx() -> None:
    mine, theirs = Net(), Net()
    ours = jaxmem.value_and_grad(net_loss, microbatches=1)(mine, BATCH)
    expected = nnx.value_and_grad(net_loss)(theirs, BATCH)
    near(ours, expected)
    assert type(ours[1]) is type(expected[1])
    near(state(mine), state(theirs))


@pytest.mark.parametrize("has_aux", [False, True], ids=["loss", "aux"])
def test_modules_are_those_of_a_loop(has_aux: bool) -> None:
    def loss(model: Net, batch: Any) -> Any:
        out = model(batch["x"])
        value = jnp.square(out - batch["y"]).mean()
        return (value, out) if has_aux else value

    mine, theirs = Net(), Net()
    ours = nnx.jit(jaxmem.value_and_grad(loss, has_aux=has_aux, microbatches=4, aux="concat"))
    value, gradient = ours(mine, BATCH)
    one_by_one = nnx.jit(nnx.value_and_grad(loss, has_aux=has_aux))
    total, sums, outs = 0.0, None, jnp.zeros((13, 4))
    for rows in microbatches_of(13, 4):
        own = jax.tree.map(lambda leaf, rows=rows: leaf[rows], BATCH)
        one, grads = one_by_one(theirs, own)
        if has_aux:
            one, out = one
            outs = outs.at[rows].set(out)
        part = len(rows) / 13
        total += float(one) * part
        grads = jax.tree.map(lambda g, part=part: g * part, grads)
        sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
    if has_aux:
        value, aux = value
        near(aux, outs, 1e-5)
    near((value, gradient), (jnp.float32(total), sums), 1e-5)
    near(state(mine), state(theirs), 1e-5)


def test_a_module_trains_under_nnx_jit() -> None:
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(0.03), wrt=nnx.Param)
    x = normal(5, 26, F)
    batch = {"x": x, "y": jnp.sin(x @ jnp.ones((F, 4)))}

    @nnx.jit
    def step(model: Net, optimizer: Any, batch: Any) -> Any:
        loss, gradient = jaxmem.value_and_grad(net_loss, microbatches=4)(model, batch)
        optimizer.update(model, gradient)
        return loss

    losses = [float(step(model, optimizer, batch)) for _ in range(30)]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    counts = [
        int(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state(model))
        if "count" in jax.tree_util.keystr(path) and "dropout" in jax.tree_util.keystr(path)
    ]
    assert counts == [30 * 4]


def test_diff_state_chooses_variables() -> None:
    only: Any = nnx.DiffState(0, nnx.PathContains("last"))
    mine, theirs = Net(), Net()
    ours = jaxmem.value_and_grad(net_loss, argnums=only, microbatches=1)(mine, BATCH)
    expected = nnx.value_and_grad(net_loss, argnums=only)(theirs, BATCH)
    near(ours, expected)
    assert set(nnx.to_pure_dict(ours[1])) == {"last"}
    near(state(mine), state(theirs))


def two_nets(first: Any, batch: Any, second: Any, scale: Any) -> Any:
    both = first(batch["x"]) - scale * second(batch["x"])
    return jnp.square(both - batch["y"]).mean()


@pytest.mark.parametrize("argnums", [0, 2, (0, 2), (2, 3), 3], ids=str)
def test_two_modules(argnums: Any) -> None:
    mine, theirs = (Net(0), Net(1)), (Net(0), Net(1))
    scale = jnp.float32(0.5)
    ours = jaxmem.value_and_grad(two_nets, argnums, microbatches=1)
    expected = nnx.value_and_grad(two_nets, argnums=argnums)
    near(ours(mine[0], BATCH, mine[1], scale), expected(theirs[0], BATCH, theirs[1], scale))
    near([*map(state, mine)], [*map(state, theirs)])


def test_modules_that_share_a_variable_are_refused() -> None:
    first, second = Net(0), Net(1)
    second.last = first.last
    ours = jaxmem.value_and_grad(two_nets, (0, 2), microbatches=4)
    text = r"arguments 0 and 2 share the variable last/(bias|kernel); pass one module that holds"
    with pytest.raises(ValueError, match=text):
        ours(first, BATCH, second, 1.0)
    with pytest.raises(TypeError, match="model= is an NNX module, Net; pass modules by position"):
        jaxmem.value_and_grad(net_loss)(model=first, batch=BATCH)


def test_arguments_next_to_a_module_by_name_and_from_the_end() -> None:
    expected = nnx.value_and_grad(net_loss)(Net(), BATCH)
    near(jaxmem.value_and_grad(net_loss, microbatches=1)(Net(), batch=BATCH), expected)
    ours = jaxmem.value_and_grad(net_loss, -2, microbatches=1, batch_argnums=-1)
    near(ours(Net(), BATCH), expected)
    text = re.escape("argnums names argument 2, and net_loss was called with 2 positional")
    with pytest.raises(TypeError, match=text):
        jaxmem.value_and_grad(net_loss, 2)(Net(), BATCH)


# ---------------------------------------------------------------- with everything else

LAYERS = 6
DEEP = {"layers": 0.5 * normal(11, LAYERS, F, F), "scale": jnp.ones(4), "kernel": W["kernel"]}
PLANS = {
    "none": None,
    "sqrt": jaxmem.remat_sqrt,
    "full": jaxmem.remat_full,
    "dots": jaxmem.remat_dots,
    "revolve": jaxmem.remat_revolve(slots=2),
}


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return h + jnp.tanh(h @ w), None


def deep_loss(w: Any, batch: Any) -> Weighted:
    h, _ = jax.lax.scan(layer, batch["x"], w["layers"])
    return masked_loss(w, batch | {"x": h})


@pytest.mark.parametrize("plan", PLANS)
def test_remat_inside(plan: str) -> None:
    decorate = PLANS[plan]
    loss = decorate(deep_loss) if decorate else deep_loss
    near(
        jax.jit(jaxmem.value_and_grad(loss, microbatches=4))(DEEP, BATCH),
        whole(deep_loss)(DEEP, BATCH),
    )
    one = exact_jit(jaxmem.value_and_grad(loss, microbatches=1))(DEEP, BATCH)
    assert_same(one, deep_in_one())


@functools.cache
def deep_in_one() -> Any:
    return exact_jit(jaxmem.value_and_grad(deep_loss, microbatches=1))(DEEP, BATCH)


@pytest.mark.parametrize("remat", ["none", "sqrt", "full"])
def test_a_planned_scan_inside(remat: str) -> None:
    def loss(w: Any, batch: Any) -> Weighted:
        h, _ = jaxmem.scan(layer, batch["x"], w["layers"], remat=remat)
        return terms_loss({"kernel": w["kernel"], "scale": w["scale"]}, batch | {"x": h})

    near(
        jax.jit(jaxmem.value_and_grad(loss, microbatches=4))(DEEP, BATCH),
        whole(loss)(DEEP, BATCH),
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> Any:
        x = x + jnp.tanh(nn.Dense(F)(x))
        return nn.Dropout(0.3, deterministic=False)(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        return blocks()(x, None)[0]


@functools.cache
def of_linen_stack(plan: str) -> Any:
    model, key = Stack(), jax.random.key(0)
    params = jax.jit(model.init)({"params": key, "dropout": key}, X)["params"]

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        out: Any = model.apply({"params": params}, batch["x"], rngs={"dropout": rng})
        return jnp.square(out - 1).mean()

    decorate = PLANS[plan]
    planned = decorate(loss) if decorate else loss
    ours = jaxmem.value_and_grad(planned, microbatches=4, rng_argnums=2)
    return jax.jit(ours)(params, BATCH, key)


@pytest.mark.parametrize("plan", ["sqrt", "full"])
def test_a_linen_stack_with_a_plan_inside(plan: str) -> None:
    near(of_linen_stack(plan), of_linen_stack("none"))


def test_jax_checkpoint_inside() -> None:
    loss = jax.checkpoint(lambda w, batch: terms_loss(w, batch).mean)
    near(ours_of(loss, microbatches=1)(W, BATCH), whole(terms_loss)(W, BATCH))
    inner = jax.checkpoint(errors)

    def masked(w: Any, batch: Any) -> Weighted:
        return Weighted((inner(w, batch) * batch["mask"]).sum(), batch["mask"].sum())

    near(ours_of(masked)(W, BATCH), whole(masked_loss)(W, BATCH))


@pytest.mark.parametrize("fun", [mean_loss, terms_loss], ids=lambda fun: fun.__name__)
def test_it_can_be_differentiated_again(fun: Callable[..., Any]) -> None:
    """Through the loss, and through the gradient: a product with the Hessian."""

    def through(of: Callable[..., Any]) -> Callable[..., Any]:
        def both(w: Any, batch: Any) -> jax.Array:
            value, gradient = of(w, batch)
            return value + sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(gradient))

        return jax.jit(jax.grad(both))

    ours = through(jaxmem.value_and_grad(fun, microbatches=4))(W, BATCH)
    theirs = through(whole(fun))(W, BATCH)
    near(ours, theirs, 2e-5)

    def forward(of: Callable[..., Any]) -> Any:
        return jax.jit(lambda w, t: jax.jvp(lambda w: of(w, BATCH), (w,), (t,)))(W, W)

    near(forward(jaxmem.value_and_grad(fun, microbatches=4)), forward(whole(fun)), 2e-5)


@pytest.mark.slow
def test_vmap_over_the_whole() -> None:
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, leaf - 1]), W)
    batches = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1] + 1, leaf]), BATCH)
    for fun, axes, args in (
        (mean_loss, (0, None), (many, BATCH)),
        (terms_loss, (0, 0), (many, batches)),
    ):
        ours = jax.jit(jax.vmap(jaxmem.value_and_grad(fun, microbatches=4), axes))
        near(ours(*args), jax.jit(jax.vmap(whole(fun), axes))(*args))


def test_with_multi_steps_outside_and_donated_states() -> None:
    """Two steps of 13 rows, 8 and 4 of them counting, are one of the 26 rows."""
    second = BATCH | {"x": X[::-1] * 2, "mask": MASK * (jnp.arange(13) < 7)}
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), BATCH, second)
    tx = jaxmem.MultiSteps(optax.adam(0.1), 2)
    ours = jaxmem.value_and_grad(masked_loss, microbatches=4, return_weight=True)

    def step(params: Any, state: Any, batch: Any) -> Any:
        (_, aux), gradient = ours(params, batch)
        updates, state = tx.update(gradient, state, params, weight=aux.weight)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, W)
    held = tx.init(params)
    for batch in (BATCH, second):
        params, held = step(params, held, batch)
    _, gradient = whole(masked_loss)(W, both)
    updates, _ = optax.adam(0.1).update(gradient, optax.adam(0.1).init(W), W)
    near(params, optax.apply_updates(W, updates), 1e-5)


def test_value_next_to_aux_and_a_bfloat16_model() -> None:
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (W, BATCH))

    def loss(w: Any, batch: Any) -> Any:
        found = errors(w, batch)
        assert found.dtype == jnp.bfloat16
        return found.mean(), found

    ours = jaxmem.value_and_grad(loss, has_aux=True, microbatches=4, aux="concat")
    (value, rows), gradient = jax.jit(ours)(*low)
    assert (value.dtype, rows.dtype) == (jnp.float32, jnp.bfloat16)
    near((value, gradient), whole(mean_loss)(W, BATCH), 0.05)
    near(rows, errors(W, BATCH), 0.1)


def test_no_promotion_that_was_not_asked_for(strict: None) -> None:
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), W)

    def loss(w: Any, batch: Any) -> Any:
        out = (batch["x"].astype(jnp.bfloat16) @ w["kernel"]).astype(jnp.float32)
        rows = jnp.square(out).sum(-1)
        total = Weighted((rows * batch["mask"]).sum(), batch["mask"].sum())
        return total + 0.5 * Weighted(rows.sum(), jnp.int32(rows.size)), rows

    for m in (1, 4):
        for word in ("concat", "stack") if m == 1 else ("concat",):
            ours = jaxmem.value_and_grad(loss, has_aux=True, microbatches=m, aux=word)
            (value, _), gradient = jax.jit(ours)(low, BATCH)
            chex.assert_tree_all_finite((value, gradient))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_loss_is_not_promoted_either(dtype: str, strict: None) -> None:
    def mean(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(x @ w).mean()

    def weighted(w: jax.Array, x: jax.Array) -> Weighted:
        total = Weighted(jnp.square(x @ w).sum(), x.shape[0])
        return total + Weighted(jnp.square(w).sum().astype(jnp.float32), 1)

    w, x = jnp.linspace(-1, 1, F).astype(dtype), X.astype(dtype)
    for fun in (mean, weighted):
        value, gradient = jax.jit(jaxmem.value_and_grad(fun, microbatches=5))(w, x)
        assert (value.dtype, gradient.dtype) == (jnp.float32, jnp.float32)
        expected = whole(fun)(w.astype(jnp.float32), x.astype(jnp.float32))
        near((value, gradient), expected, 0.05)


@pytest.mark.parametrize("empty", [{}, [], None], ids=str)
def test_no_parameters_have_no_gradients(empty: Any) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.square(batch["y"]).mean()

    expected = whole(loss)(empty, BATCH)
    near(ours_of(loss)(empty, BATCH), expected)
    both = ours_of(lambda a, b, batch: loss(a, batch), (1, 0), batch_argnums=2)
    value, (second, first) = both(empty, jnp.ones(2), BATCH)
    near((value, first), expected)
    near(second, jnp.zeros(2))


def test_leaves_that_nothing_depends_on_have_zeros() -> None:
    w = W | {"unused": jnp.ones(7)}
    for fun in (mean_loss, terms_loss):
        _, gradient = ours_of(fun)(w, BATCH)
        near(gradient, whole(fun)(w, BATCH)[1])
    constant = ours_of(lambda w, batch: jnp.float32(3))
    near(constant(W, BATCH), (jnp.float32(3), jax.tree.map(jnp.zeros_like, W)))


def test_it_is_traced_as_often_for_any_number_of_microbatches() -> None:
    def traced(m: int, fun: Callable[..., Any]) -> int:
        count = 0

        def counted(w: Any, batch: Any) -> Any:
            nonlocal count
            count += 1
            return fun(w, batch)

        jax.make_jaxpr(jaxmem.value_and_grad(counted, microbatches=m))(W, BATCH)
        return count

    # Once for each size of microbatch: 13 in 4 are of two sizes.
    for fun in (mean_loss, masked_loss, terms_loss):
        assert [traced(m, fun) for m in (1, 4, 5, 13)] == [1, 2, 2, 1]


def test_a_jitted_stack_that_is_called_twice() -> None:
    """Both calls are the same equations; each has parameters of its own."""
    stack = jax.jit(lambda w, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w) + c, None), x, w)[0])
    keys = jax.random.split(jax.random.key(0), 3)
    params = [0.4 * jax.random.normal(key, (3, 4, 4)) for key in keys[:2]]
    x = jax.random.normal(keys[2], (8, 4))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (stack(params[1], stack(params[0], x)) ** 2).mean()

    found = jax.jit(jaxmem.value_and_grad(loss, microbatches=2))(params, x)
    chex.assert_trees_all_close(found, whole(loss)(params, x), rtol=1e-4, atol=1e-5)
