"""How an optimizer's update is taken apart: which leaves go row by row, and why others do not."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.updating import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jaxmem.state.update import (
    Known,
    Update,
    combined,
    identity,
    row_program,
    taken_apart,
    traced,
)

# Two stacks of four layers and a parameter without layers.
PARAMS = {"a": normal(0, 4, 3, 5), "b": normal(1, 4, 3, 5), "c": normal(2, 3, 5)}


def transformation(
    update: Callable[..., Any], init: Any = lambda params: ()
) -> optax.GradientTransformation:
    own: Any = lambda g, s, p=None: update(g, s, p)  # noqa: E731
    return optax.GradientTransformation(init, own)


def whole_on(mesh: Any, array: jax.Array) -> jax.Array:
    """Typed by a reshard as whole on every device of a mesh."""
    places = jax.sharding.PartitionSpec(*[None] * array.ndim)
    return jax.reshard(array, jax.sharding.NamedSharding(mesh, places))


@pytest.mark.slow
def test_a_reshard_that_leaves_rows_whole_is_done_to_rows() -> None:
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=explicit, devices=jax.devices()[:2])
    params = jax.tree.map(lambda p: jax.device_put(p, whole_on(mesh, p).sharding), PARAMS)
    with jax.set_mesh(mesh):
        for fn in (
            lambda g, p: jnp.where(p > 0, g, whole_on(mesh, jnp.zeros(g.shape))),
            lambda g, p: whole_on(mesh, -g),
        ):
            update, state = apart(each(fn), params)
            assert update.by_row == (0, 1)
            leaves = jax.tree.leaves(params)
            found = by_hand(update, leaves, state, leaves)
            expected = [fn(g, g) for g in leaves]
            chex.assert_trees_all_close(
                found[:3], [p + u for p, u in zip(leaves, expected, strict=True)]
            )

        def split(g: jax.Array, p: jax.Array) -> jax.Array:
            spec = jax.sharding.PartitionSpec("data")
            return jax.reshard(g, spec) if g.ndim == 3 else g

        update, _ = apart(each(split), params)
        assert (update.by_row, set(update.why_not)) == ((), {0, 1})
        assert all("reshard splits rows over" in why for why in update.why_not.values())


def each(fn: Callable[..., Any]) -> optax.GradientTransformation:
    """Of a function from a gradient and a parameter to an update."""
    return transformation(lambda g, s, p: (jax.tree.map(fn, g, p), s))


def with_moment(
    fn: Callable[..., Any], like: Callable[[Any], Any] = jnp.zeros_like
) -> optax.GradientTransformation:
    """Of a function from a gradient and a leaf of state to an update and that leaf."""

    def update(g: Any, s: Any, p: Any) -> Any:
        both = {name: fn(g[name], s[name]) for name in g}
        updates, state = ({name: pair[k] for name, pair in both.items()} for k in (0, 1))
        return updates, state

    return transformation(update, lambda params: jax.tree.map(like, params))


def apart(
    optimizer: Any, params: Any = PARAMS, wanted: Any = (0, 1), passes: int = 2
) -> tuple[Update, Any]:
    state = optimizer.init(params)

    def run(gradients: Any, state: Any, params: Any, value: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    closed = traced(run, params, state, params, jnp.float32(0))
    leaves = len(jax.tree.leaves(params)), len(jax.tree.leaves(state))
    return taken_apart(closed, *leaves, wanted, passes), state


def by_hand(update: Update, gradients: Any, state: Any, params: Any) -> list[Any]:
    """The update done row by row, as a backward pass does it."""
    known = Known(update, state, params)
    known.learn({update.gradient(k): g for k, g in enumerate(gradients) if k not in update.by_row})
    found: dict[Any, Any] = {}
    for number in range(update.passes):
        for leaf in update.by_row:
            held = update.held[leaf]
            sums = update.sums_of(leaf, number)
            last = number == update.passes - 1
            wanted = [update.new_param(leaf), *map(update.new_state, held)] if last else []
            names = [update.gradient(leaf), update.param(leaf), *map(update.state, held)]
            program = row_program(update, [*wanted, *sums], names)
            wholes = dict(zip(program.whole, known.whole(program.whole), strict=True))
            arrays = [gradients[leaf], params[leaf], *(state[k] for k in held)]
            rows = [
                program(wholes, dict(zip(names, [a[i : i + 1] for a in arrays], strict=True)), i)
                for i in range(params[leaf].shape[0])
            ]
            new = [jnp.concatenate([row[k] for row in rows]) for k in range(len(wanted))]
            found.update(zip([("p", leaf), *(("s", k) for k in held)], new, strict=False))
            for k, eqn in enumerate(sums):
                parts = [row[len(wanted) + k] for row in rows]
                total = functools.reduce(functools.partial(combined, eqn), parts, identity(eqn))
                known.learn({eqn.outvars[0]: total})
    outs = []
    for number, var in enumerate(update.closed.jaxpr.outvars):
        own = number - update.num_state
        key = ("s", number) if own < 0 else ("p", own)
        outs.append(found[key] if key in found else known.whole([var])[0])
    return outs


def check_rows(optimizer: Any, params: Any = PARAMS, **options: Any) -> Update:
    """That all goes row by row that is to, and gives what the whole does."""
    update, state = apart(optimizer, params, **options)
    gradients = [jnp.cos(3 * leaf) for leaf in jax.tree.leaves(params)]
    leaves = gradients, jax.tree.leaves(state), jax.tree.leaves(params)
    ours = jax.jit(lambda *leaves: by_hand(update, *leaves))(*leaves)
    flat = [leaf for part in leaves for leaf in part]
    theirs = jax.jit(jaxpr_as_fun(update.closed))(*flat, jnp.float32(0))
    ours, theirs = (
        [
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            for leaf in map(jnp.asarray, leaves)
        ]
        for leaves in (ours, theirs)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)
    return update


# ---------------------------------------------------------------- what goes

TABLE = normal(3, 4, 3, 5)
LEFT, RIGHT = normal(4, 6, 3), normal(5, 4, 5, 5)
ROW_WISE: dict[str, Any] = {
    "adamw": optax.adamw(0.1),
    "state of other shapes": with_moment(
        lambda g, m: (g / (1 + m)[..., None], m + jnp.square(g).sum(-1)),
        lambda p: jnp.zeros(p.shape[:-1]),
    ),
    "integers as state": with_moment(
        lambda g, m: (g * (m % 2), m + (g > 0)), lambda p: jnp.zeros(p.shape, jnp.int32)
    ),
    "state that begins as it goes on": with_moment(lambda g, m: (g - m, g)),
    "a table with a row for each layer": each(lambda g, p: g * TABLE + p if g.ndim == 3 else g),
    "a row that is the same for all": each(lambda g, p: g * TABLE[0] + p),
    "norms of rows": each(lambda g, p: g / jnp.sqrt(jnp.square(g).sum((-1, -2), keepdims=True))),
    "along a row": each(lambda g, p: jnp.cumsum(g, -1) + jnp.sort(p, -2) + jnp.flip(g, -1)),
    "parts of rows": each(
        lambda g, p: jnp.concatenate([p[..., 1:], jnp.split(g, (1,), -1)[0]], -1)
    ),
    "padded rows": each(lambda g, p: jnp.pad(g, [(0, 0)] * (g.ndim - 1) + [(1, 2)])[..., 1:-2]),
    "transposed and back": each(lambda g, p: jnp.moveaxis(jnp.moveaxis(g, 0, -1) * 2, -1, 0)),
    "reshaped and back": each(
        lambda g, p: jnp.square(g.reshape(*g.shape[:-2], -1)).reshape(g.shape)
    ),
    "products of all rows": each(lambda g, p: jnp.einsum("kj,...jd->...kd", LEFT, g)[..., :3, :]),
    "products within rows": each(
        lambda g, p: jnp.einsum("...jd,...kd,...ke->...je", g, p, g) if g.ndim == 3 else g
    ),
    "products with rows of a table": each(
        lambda g, p: jnp.einsum("njd,nde->nje", g, RIGHT) if g.ndim == 3 else g
    ),
    "products, rows on the right": each(lambda g, p: jnp.moveaxis(LEFT @ g, -2, -2)[..., :3, :]),
    "a choice": each(lambda g, p: lax.cond(p.size > 3, lambda g: 2 * g, lambda g: g, g)),
    "a choice at run time": transformation(
        lambda g, s, p: (
            lax.cond(s % 2 == 0, lambda: jax.tree.map(jnp.sin, g), lambda: g),
            s + 1,
        ),
        lambda params: jnp.int32(0),
    ),
    "all at once through a barrier": transformation(
        lambda g, s, p: lax.optimization_barrier((g, s)), lambda params: jnp.int32(0)
    ),
    "code that nobody reads": each(lambda g, p: (jnp.cumsum(g, 0), g)[1]),
    "random numbers of a scalar": transformation(
        lambda g, s, p: (jax.tree.map(lambda x: x * jax.random.uniform(s), g), s),
        lambda params: jax.random.key(0),
    ),
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_what_goes_row_by_row(name: str) -> None:
    update = check_rows(ROW_WISE[name])
    assert (update.by_row, update.why_not, update.passes) == ((0, 1), {}, 1)


def test_sums_over_rows_take_passes() -> None:
    norm = optax.clip_by_global_norm(0.1)
    update = check_rows(norm)
    assert (update.by_row, update.passes) == ((0, 1), 2)
    assert len(update.sums_of(0, 0)) == len(update.sums_of(1, 0)) == 1
    update, _ = apart(norm, passes=1)
    assert update.by_row == ()
    assert set(update.why_not.values()) == {
        "its update needs 2 backward passes, for norms or the like over all rows; pass passes=2 if "
        "they are worth it"
    }
    assert check_rows(optax.chain(norm, optax.scale_by_trust_ratio()), passes=5).passes == 4


def test_sums_that_only_the_state_has_take_none() -> None:
    """Collected in the last pass, and one pass more if they are of what that makes."""
    update = check_rows(optax.snapshot("norm", optax.tree.norm), passes=1)
    assert (update.by_row, update.passes) == ((0, 1), 1)
    twice = optax.chain(optax.clip_by_global_norm(0.1), optax.snapshot("norm", optax.tree.norm))
    assert check_rows(twice, passes=2).passes == 2

    def update_fn(g: Any, s: Any, p: Any) -> Any:
        mean = optax.tree.sum(g) / 100
        return g, optax.tree.norm(jax.tree.map(lambda x: x - mean, g))

    about_a_mean = transformation(update_fn, lambda params: jnp.float32(0))
    assert check_rows(about_a_mean, passes=2).passes == 2
    refused, _ = apart(about_a_mean, passes=1)
    assert refused.by_row == ()
    assert "needs 2 backward passes" in refused.why_not[0]


# ---------------------------------------------------------------- what does not

MIXED: dict[str, tuple[Any, str]] = {
    "sums along the layers": (
        each(lambda g, p: jnp.cumsum(g, 0)),
        "cumsum goes along the axis of rows",
    ),
    "layers in another order": (each(lambda g, p: jnp.flip(g, 0)), "rev goes along the axis of"),
    "the layer before": (each(lambda g, p: jnp.roll(g, 1, 0)), "slice takes some of the rows"),
    "every layer with every other": (
        each(lambda g, p: jnp.einsum("nj,mj->nm", *2 * (g.reshape(len(g), -1),)).sum() * g),
        "dot_general takes each row with each other",
    ),
    "one long vector": (
        transformation(
            lambda g, s, p: (jax.tree.map(lambda x: x.ravel()[::-1].reshape(x.shape), g), s)
        ),
        "joins or splits rows",
    ),
    "a loop": (
        each(lambda g, p: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), g)),
        "(scan|while) is not known to work row by row",
    ),
    "a choice with a loop in it": (
        transformation(
            lambda g, s, p: (
                jax.tree.map(
                    lambda x: lax.cond(
                        s > 0, lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), x), jnp.cos, x
                    ),
                    g,
                ),
                s,
            ),
            lambda params: jnp.float32(0),
        ),
        "cond is not known to work row by row",
    ),
    "numbers of layers": (
        each(lambda g, p: g * (1.0 + jnp.arange(g.shape[0]))[(...,) + (None,) * (g.ndim - 1)]),
        "a row of what iota makes whole is read",
    ),
    "noise": (
        transformation(
            lambda g, s, p: (jax.tree.map(lambda x: x + jax.random.normal(s, x.shape), g), s),
            lambda params: jax.random.key(0),
        ),
        "a row of what random_bits makes whole is read",
    ),
    "another parameter": (
        transformation(lambda g, s, p: ({**g, "a": g["b"], "b": g["a"]}, s)),
        "takes it together with another parameter",
    ),
    "state of another parameter": (
        transformation(
            lambda g, s, p: ({**g, "a": g["a"] + s["b"], "b": g["b"] + s["a"]}, g),
            lambda params: jax.tree.map(jnp.zeros_like, params),
        ),
        "takes it together with another parameter",
    ),
    "state that changes its type": (
        with_moment(lambda g, m: (g, g.astype(jnp.bfloat16))),
        r"a leaf of its state changes from float32\[4,3,5\] to bfloat16\[4,3,5\]",
    ),
    "state that changes its rows": (
        transformation(
            lambda g, s, p: (g, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), g)),
            lambda params: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), params),
        ),
        "rows along axis 1",
    ),
    "bytes that layers become": (
        each(
            lambda g, p: (
                g
                * lax.bitcast_convert_type(
                    jnp.moveaxis(jnp.signbit(g).astype(jnp.uint8), 0, -1), jnp.float32
                )
            )
        ),
        "bitcast_convert_type makes of the axis of rows another one",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_does_not_go_row_by_row_and_why(name: str) -> None:
    optimizer, reason = MIXED[name]
    update, _ = apart(optimizer, {"a": PARAMS["a"], "b": PARAMS["b"]})
    assert update.by_row == ()
    for found in update.why_not.values():
        assert re.search(reason, found), found


def test_one_parameter_that_mixes_does_not_hold_up_others() -> None:
    def fn(g: Any, s: Any, p: Any) -> Any:
        return {**g, "a": jnp.cumsum(g["a"], 0)}, jax.tree.map(jnp.add, g, s)

    mixed = transformation(fn, lambda params: jax.tree.map(jnp.zeros_like, params))
    update = check_rows(optax.chain(mixed, optax.adam(0.1)))
    assert update.by_row == (1,)
    assert set(update.why_not) == {0}


def test_a_parameter_without_layers_that_is_made_of_rows() -> None:
    """Of the same shape as a stack, and given its gradient."""
    params = {"a": PARAMS["a"], "b": PARAMS["b"]}
    swapped = transformation(lambda g, s, p: ({"a": g["a"], "b": g["a"]}, s))
    update, _ = apart(swapped, params, wanted=(0,))
    assert update.by_row == ()
    replaced = transformation(lambda g, s, p: ({"a": g["a"], "b": g["a"] - p["b"]}, s))
    update, _ = apart(replaced, params, wanted=(0,))
    assert "takes it together" in update.why_not[0] or "made of its rows" in update.why_not[0]


# ---------------------------------------------------------------- any chain of operations

SIZES = (2, 3, 4)


def _swap(x: Any, k: int) -> Any:
    return jnp.swapaxes(x, k % x.ndim, -1)


# Of an array in which some axis is that of layers; None where the operation cannot be.
STEPS: dict[str, Callable[[Any, int], Any]] = {
    "sin": lambda x, k: jnp.sin(x),
    "scaled": lambda x, k: x * (k + 1),
    "shifted by a mean": lambda x, k: x - x.mean(k % x.ndim, keepdims=True),
    "softmax": lambda x, k: jax.nn.softmax(x, k % x.ndim),
    "transposed": _swap,
    "merged": lambda x, k: x.reshape(*x.shape[:-2], -1) if x.ndim > 2 else x,
    "split": lambda x, k: x.reshape(*x.shape, 1) if k % 2 else x[None],
    "squeezed": lambda x, k: jnp.squeeze(x, tuple(d for d, n in enumerate(x.shape) if n == 1)),
    "padded": lambda x, k: jnp.pad(x, [(0, 1 if d == k % x.ndim else 0) for d in range(x.ndim)]),
    "sliced": lambda x, k: lax.slice_in_dim(x, 0, max(1, x.shape[k % x.ndim] - 1), axis=k % x.ndim),
    "flipped": lambda x, k: jnp.flip(x, k % x.ndim),
    "summed up": lambda x, k: jnp.cumsum(x, k % x.ndim),
    "sorted": lambda x, k: jnp.sort(x, k % x.ndim),
    "reduced": lambda x, k: x.max(k % x.ndim) if x.ndim > 1 else x,
    "product": lambda x, k: jnp.tensordot(
        x, jnp.ones((x.shape[k % x.ndim], 2)), ((k % x.ndim,), (0,))
    ),
    "product with itself": lambda x, k: lax.dot_general(
        x,
        jnp.cos(x),
        (((x.ndim - 1,), (x.ndim - 1,)), (tuple(range(x.ndim - 1)), tuple(range(x.ndim - 1)))),
    ),
    "repeated": lambda x, k: jnp.broadcast_to(x[None], (2, *x.shape)),
    "clipped": lambda x, k: jnp.clip(x, -0.5, 0.5),
    "chosen": lambda x, k: jnp.where(x > 0, x, -k * x),
}


@pytest.mark.slow
@settings(derandomize=True, max_examples=25)
@given(
    shape=st.permutations(SIZES),
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), min_size=1, max_size=5
    ),
)
def test_a_chain_of_operations_gives_rows_or_is_refused(shape: Any, steps: Any) -> None:
    """State that follows from the gradient in any way is what the whole array gives."""
    param = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)

    def chain(g: Any) -> Any:
        for name, k in steps:
            g = STEPS[name](g, k)
        return g

    made = jax.eval_shape(chain, param)
    if math.prod(made.shape) > 500:
        return
    optimizer = transformation(
        lambda g, s, p: (g, chain(g)), lambda params: jnp.zeros(made.shape, made.dtype)
    )
    with jax.disable_jit():
        check_rows(optimizer, param, wanted=(0,), passes=1)
