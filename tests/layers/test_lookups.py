"""The gradient of a lookup: jax's own numbers, added into zeros that are made late."""

from functools import partial
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import budgeted
from helpers.menagerie import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem import _jax
from jaxmem.unrolled import Code, Piece, UnrolledPlan, code
from jaxmem.unrolled.run import run

Spec = jax.ShapeDtypeStruct
WORDS, WIDTH = 11, 6
TABLE = jnp.sin(jnp.arange(1.0 * WORDS * WIDTH)).reshape(WORDS, WIDTH)
TOKENS = jnp.asarray([[3, 0, 3, 10], [3, 7, 1, 0]])
# Places that are there several times, behind the end, and counted from it.
LOOKUPS: dict[str, Any] = {
    "rows": lambda table: table[TOKENS],
    "columns": lambda table: table[:, TOKENS % WIDTH],
    "elements": lambda table: table[TOKENS, TOKENS % WIDTH],
    "of each row": lambda table: jnp.take_along_axis(table[:4], TOKENS[:1].T % WIDTH, 1),
    "behind the end, filled": lambda table: jnp.take(table, TOKENS + 4, 0, fill_value=2.0),
    "behind the end, clipped": lambda table: jnp.take(table, TOKENS + 4, 0, mode="clip"),
    "from the end": lambda table: table[-1 - TOKENS[0]],
    "a window": lambda table: jax.lax.dynamic_slice(table, (TOKENS[0, 0], 1), (3, 2)),
    "more than there is": lambda table: table[jnp.arange(3 * WORDS) // 3],
    "a larger image": lambda table: jax.image.resize(table, (2 * WORDS, 2 * WIDTH), "nearest"),
    "nothing": lambda table: jnp.broadcast_to(table[TOKENS[:, :0]].sum(), (1,)),
    "complex numbers": lambda table: jnp.abs(
        (table * (1 + 2j))[jnp.arange(2 * WORDS) // 2].sum(1),
    ),
}


def net(table: jax.Array, x: jax.Array, lookup: Any = LOOKUPS["rows"]) -> jax.Array:
    """A lookup, products behind it, and the table once more as the head."""
    h = jnp.sin(lookup(table)) * x
    for _ in range(2):
        h = jnp.tanh(h * 1.5 + h.mean())
    return (jnp.square(h).sum() + jnp.square(table @ table.T).mean()).astype(jnp.float32)


def in_pieces(fn: Any, *args: jax.Array) -> jax.Array:
    """A function in two pieces that are recomputed, one after the other."""
    own = Code(jax.make_jaxpr(fn)(*args))
    half = len(own) // 2
    pieces = [
        Piece(first, last, inner=(Piece(first, last),))
        for first, last in ((0, half), (half, len(own)))
    ]
    return run(own, UnrolledPlan(len(own), tuple(pieces)), list(args))[0]


def planned(table: jax.Array, x: jax.Array, lookup: Any = LOOKUPS["rows"]) -> jax.Array:
    return in_pieces(partial(net, lookup=lookup), table, x)


# ---------------------------------------------------------------- its numbers


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_it_is_jaxs_own_gradient(lookup: Any) -> None:
    found, expected = (
        jax.jit(jax.grad(partial(f, lookup=lookup)))(TABLE, jnp.float32(2)) for f in (planned, net)
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@given(
    tokens=st.lists(st.integers(-2 * WORDS, 2 * WORDS), min_size=1, max_size=9),
    mode=st.sampled_from(["clip", "fill", "wrap"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@settings(max_examples=15)
def test_of_any_places(tokens: list[int], mode: Any, dtype: str) -> None:
    """Of whole numbers, sums of which are exact."""

    def loss(table: jax.Array) -> jax.Array:
        found = jnp.take(table.astype(dtype), jnp.asarray(tokens), 0, mode=mode, fill_value=1)
        weights = jnp.arange(found.size, dtype=dtype).reshape(found.shape) % 8
        return (found * weights).sum()

    found, expected = (jax.jit(jax.grad(f))(TABLE) for f in (partial(in_pieces, loss), loss))
    assert_same(found, expected)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: jax.grad(f, (0, 1)),
        lambda f: jax.jit(lambda t, x: jax.vmap(jax.grad(f), (None, 0))(t, jnp.stack([x, -x]))),
        lambda f: jax.jit(lambda t, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([t, -t]), x)),
        lambda f: jax.jit(lambda t, x: jax.jvp(partial(f, x=x), (t,), (jnp.cos(t),))),
        lambda f: jax.jit(jax.grad(lambda t, x: jnp.square(jax.grad(f)(t, x)).sum())),
        lambda f: jax.jit(
            lambda t, x: jax.jvp(jax.grad(partial(f, x=x)), (t,), (jnp.cos(t),)),
        ),
    ],
    ids=["grad", "vmap", "vmap of tables", "forward", "twice", "forward over reverse"],
)
def test_derivatives_are_those_of_the_plain_code(transformed: Any) -> None:
    found, expected = (transformed(f)(TABLE, jnp.float32(2)) for f in (planned, net))
    chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("first", [jnp.inf, -jnp.inf, jnp.nan])
def test_gradients_that_overflow_stay_where_they_are(first: float) -> None:
    """Zeros are made of the first number of a gradient that is larger than its table."""
    weights = jnp.arange(3.0 * WORDS * WIDTH).reshape(-1, WIDTH).at[0, 0].set(first)

    def loss(table: jax.Array) -> jax.Array:
        return (LOOKUPS["more than there is"](table) * weights).sum()

    found, expected = (jax.jit(jax.grad(f))(TABLE) for f in (partial(in_pieces, loss), loss))
    assert_same(found, expected)


# ---------------------------------------------------------------- on meshes


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
def test_tables_and_tokens_may_be_spread(kind: str) -> None:
    types = jax.sharding.AxisType.Explicit if kind == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("data",), axis_types=(types,))

    def loss(f: Any, table: jax.Array, tokens: jax.Array) -> jax.Array:
        def lookup(table: jax.Array) -> jax.Array:
            if kind == "explicit":
                return table.at[tokens].get(out_sharding=PartitionSpec("data"))
            return table[tokens]

        return f(table, jnp.float32(2), lookup)

    def gradient(f: Any) -> Any:
        if kind != "manual":
            return jax.grad(partial(loss, f))
        spread = PartitionSpec("data")
        return jax.shard_map(
            jax.grad(partial(loss, f)),
            mesh=mesh,
            in_specs=(PartitionSpec(), spread),
            out_specs=PartitionSpec(),
        )

    with jax.set_mesh(mesh):
        spread = jax.device_put(TOKENS, NamedSharding(mesh, PartitionSpec("data")))
        table = jax.device_put(TABLE, NamedSharding(mesh, PartitionSpec()))
        found, expected = (jax.jit(gradient(f))(table, spread) for f in (planned, net))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- what it needs


@jaxmem.remat_sqrt
def model(params: Any, tokens: jax.Array) -> jax.Array:
    h = params["embed"].astype(jnp.bfloat16)[tokens]
    for w in params["layers"]:
        up, down = (w[name].astype(h.dtype) for name in ("up", "down"))
        h = h + jnp.tanh(h @ up) @ down
    return h @ params["head"].astype(h.dtype)


@pytest.mark.slow
def test_a_gpu_has_no_zeros_of_the_table_while_layers_are_reversed() -> None:
    words, width, inner, rows = 8192, 1024, 8192, 4096
    layer = {"up": Spec((width, inner), "float32"), "down": Spec((inner, width), "float32")}
    params = {
        "embed": Spec((words, width), "float32"),
        "head": Spec((width, words), "float32"),
        "layers": [layer] * 6,
    }

    def step(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = model(params, tokens).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    def needed() -> int:
        args: Any = params, Spec((rows,), "int32")
        options: Any = {"donate_argnums": (0,), "target": "h100-80g", "suggest": False}
        return jaxmem.memory_report(step, *args, **options).required_bytes

    late = needed()
    with mock.patch.object(code, "reversed_late", return_value=None):
        early = needed()
    assert early - late == pytest.approx(words * width * 2, rel=0.01)


@jaxmem.remat_auto
def doubling(kernels: Any, images: jax.Array) -> jax.Array:
    h = images.astype(jnp.bfloat16)
    for pair in kernels:
        batch, height, width, channels = h.shape
        h = convolved(h, pair[0])
        h = jax.image.resize(h, (batch, 2 * height, 2 * width, channels), "nearest")
        h = convolved(h, pair[1])
    return h


def convolved(h: jax.Array, kernel: jax.Array) -> jax.Array:
    sides = ("NHWC", "HWIO", "NHWC")
    kernel = kernel.astype(h.dtype)
    h = jax.lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=sides)
    return jax.nn.silu(h)


@pytest.mark.slow
def test_a_gpu_has_no_zeros_of_images_while_larger_ones_are_reversed() -> None:
    kernel, side, count = Spec((3, 3, 64, 64), "float32"), 32, 3
    kernels = [(kernel, kernel)] * count
    images = Spec((8, side, side, 64), "float32")

    def step(kernels: Any, images: jax.Array) -> Any:
        def loss(kernels: Any) -> jax.Array:
            return jnp.square(doubling(kernels, images).astype(jnp.float32)).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, kernels, jax.grad(loss)(kernels))

    def needed() -> int:
        args: Any = step, kernels, images
        options: Any = {"target": "h100-80g", "donate": (0,)}
        all_kept = budgeted.problem(*args, **options).plan(0)
        return budgeted.question(*args, **options).begin(all_kept).result().temp_bytes

    late = needed()
    with mock.patch.object(_jax, "zeros_after", return_value=_jax.zeros_of):
        early = needed()
    # Rows are looked up first, and columns of these.
    zeros = sum((1 + 2) * 4**doubled * 8 * side**2 * 64 * 2 for doubled in range(count))
    assert early - late == pytest.approx(zeros, rel=0.01)
