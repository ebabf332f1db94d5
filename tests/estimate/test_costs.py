"""Operations and bytes of traced functions, against arithmetic and against the compiler."""

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import menagerie
from hypothesis import given, settings
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

import jaxmem
from jaxmem import Plan
from jaxmem.estimate.costs import (
    Costs,
    costs,
    two_levels,
    unrolled_remat,
    unrolled_without_barriers,
)
from jaxmem.estimate.counting import factorisations, flops, primitives

B, D, N = 4, 8, 6  # batch, width, layers
FORWARD = 2 * B * D * D  # of one layer's product
H, WS = jnp.ones((B, D)), jnp.ones((N, D, D))


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w), None


def count(fn: Callable[..., Any], *args: Any) -> Costs:
    return costs(jax.make_jaxpr(fn)(*args))


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Of the sum of all results, with respect to all arguments, with the value."""

    def total(args: Any) -> Any:
        return sum(leaf.sum() for leaf in jax.tree.leaves(fn(*args)))

    return lambda *args: jax.value_and_grad(total)(args)


def by_compiler(fn: Callable[..., Any], *args: Any) -> dict[str, float]:
    """What the compiler counts in the program as it is passed to it."""
    found = jax.jit(fn).lower(*args).cost_analysis()
    assert isinstance(found, dict)
    return found


def normal(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# ---------------------------------------------------------------- the value


def test_costs_add_and_scale() -> None:
    a = Costs(1, 2, 3, 4, 5, 1, ("b", "a"))
    b = Costs(10, 20, 30, 40, 50, 0, ("c", "a"))
    assert a + b == Costs(11, 22, 33, 44, 55, 1, ("a", "b", "c"))
    assert a * 2 == 2 * a == Costs(2, 4, 6, 8, 10, 1, ("b", "a"))
    assert (b * 0.5).bytes == 15
    assert hash(a) == hash(Costs(1, 2, 3, 4, 5, 1, ("b", "a")))
    with pytest.raises(TypeError):
        a + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        a * a  # type: ignore[operator]


# ---------------------------------------------------------------- matrix products


@st.composite
def _dots(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """(left shape, right shape, dimension numbers), all in any order."""
    sizes = st.lists(st.integers(1, 5), max_size=2)
    batch, contracting, left, right = (draw(sizes) for _ in range(4))

    def operand(free: list[int]) -> tuple[tuple[int, ...], list[int], list[int]]:
        axes = [
            *(("b", k) for k in range(len(batch))),
            *(("c", k) for k in range(len(contracting))),
        ]
        axes += [("f", k) for k in range(len(free))]
        order = draw(st.permutations(axes))
        size = {"b": batch, "c": contracting, "f": free}
        where = {axis: position for position, axis in enumerate(order)}
        return (
            tuple(size[kind][k] for kind, k in order),
            [where["b", k] for k in range(len(batch))],
            [where["c", k] for k in range(len(contracting))],
        )

    (lhs, lhs_batch, lhs_con), (rhs, rhs_batch, rhs_con) = operand(left), operand(right)
    return lhs, rhs, ((lhs_con, rhs_con), (lhs_batch, rhs_batch))


@given(_dots())
@settings(max_examples=60)
def test_any_dot_general_costs_two_for_each_product(case: Any) -> None:
    lhs, rhs, numbers = case
    (lhs_con, rhs_con), (_, rhs_batch) = numbers
    free = [size for d, size in enumerate(rhs) if d not in (*rhs_con, *rhs_batch)]
    expected = 2 * math.prod(lhs) * math.prod(free)

    def fn(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, numbers)

    found = count(fn, normal(*lhs), normal(*rhs))
    assert found.matmul_flops == found.flops == expected
    # Both gradients are products of the same size.
    assert count(gradient(fn), normal(*lhs), normal(*rhs)).matmul_flops == 3 * expected
    if lhs_con:
        assert by_compiler(fn, normal(*lhs), normal(*rhs))["flops"] == expected


@pytest.mark.parametrize(
    ("dtype", "factor"), [("bfloat16", 1), ("int8", 1), ("float8_e4m3fn", 1), ("complex64", 4)]
)
def test_products_count_in_every_type(dtype: str, factor: int) -> None:
    x = jax.ShapeDtypeStruct((3, 5), dtype)
    y = jax.ShapeDtypeStruct((5, 7), dtype)
    assert count(lax.dot, x, y).matmul_flops == factor * 2 * 3 * 5 * 7


def test_ragged_products_cost_what_one_group_would() -> None:
    groups = jnp.array([3, 4, 1])
    found = count(lax.ragged_dot, normal(8, 5), normal(3, 5, 7), groups)
    assert found.matmul_flops == 2 * 8 * 5 * 7


CONVOLUTIONS = {
    "valid": {"padding": "VALID"},
    "same": {"padding": "SAME"},
    "strided": {"padding": "SAME", "window_strides": (2, 3)},
    "lopsided": {"padding": ((2, 0), (0, 3)), "window_strides": (1, 2)},
    "cropped": {"padding": ((-1, 0), (0, -2))},
    "regions in the window": {"padding": "SAME", "rhs_dilation": (2, 3)},
    "regions in the input": {"padding": ((2, 2), (1, 3)), "lhs_dilation": (2, 3)},
    "all": {
        "padding": ((3, 1), (0, 2)),
        "window_strides": (3, 2),
        "lhs_dilation": (2, 3),
        "rhs_dilation": (1, 2),
    },
    "groups": {"padding": "SAME", "feature_group_count": 2},
    "depthwise": {"padding": "SAME", "feature_group_count": 4, "window_strides": (2, 2)},
    "batch groups": {"padding": "SAME", "batch_group_count": 2},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("layout", ["NCHW-OIHW-NCHW", "NHWC-HWIO-NHWC"])
def test_convolutions_cost_two_for_each_product_of_inputs(name: str, layout: str) -> None:
    options = {"window_strides": (1, 1)} | CONVOLUTIONS[name]
    groups = options.get("feature_group_count", 1)
    numbers = tuple(layout.split("-"))
    sizes = {"N": 2, "C": 4, "H": 9, "W": 11}, {"O": 8, "I": 4 // groups, "H": 3, "W": 2}
    lhs, rhs = (tuple(size[c] for c in spec) for size, spec in zip(sizes, numbers[:2], strict=True))
    fn = functools.partial(lax.conv_general_dilated, dimension_numbers=numbers, **options)
    # Of ones, each result is the number of products that it is the sum of.
    expected = 2 * int(fn(jnp.ones(lhs), jnp.ones(rhs)).sum())
    assert count(fn, normal(*lhs), normal(*rhs)).matmul_flops == expected
    assert by_compiler(fn, normal(*lhs), normal(*rhs))["flops"] == expected
    if "batch_group_count" not in options:
        # Each of these products has a part in the gradient of either operand.
        both = count(gradient(fn), normal(*lhs), normal(*rhs)).matmul_flops
        assert both == 3 * expected


def test_a_long_convolution_is_counted_in_no_time() -> None:
    began = time.perf_counter()
    found = count(lambda x, w: jnp.convolve(x, w, mode="full"), normal(10**6), normal(2 * 10**5))
    assert found.matmul_flops == 2 * 10**6 * 2 * 10**5
    assert time.perf_counter() - began < 2


# ---------------------------------------------------------------- models


def test_mlp() -> None:
    sizes = [16, 32, 8]

    def mlp(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jnp.maximum(x @ w + b, 0)
        return x

    params = [(normal(m, n), normal(n)) for m, n in itertools.pairwise(sizes)]
    found = count(mlp, params, normal(5, 16))
    products = sum(2 * 5 * m * n for m, n in itertools.pairwise(sizes))
    assert found.matmul_flops == products
    assert found.flops == products + sum(2 * 5 * n for n in sizes[1:])  # bias and maximum
    step = count(jax.value_and_grad(lambda p, x: mlp(p, x).sum()), params, normal(5, 16))
    first = 2 * 5 * 16 * 32  # the input needs no gradient
    assert step.matmul_flops == 3 * products - first


def transformer(h: jax.Array, p: dict[str, jax.Array], heads: int = 4) -> tuple[jax.Array, None]:
    def norm(x: jax.Array) -> jax.Array:
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], heads, -1)

    x = norm(h)
    q, k, v = (split(x @ p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=-1)
    mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(h.shape)
    h = h + mixed @ p["o"]
    return h + jax.nn.gelu(norm(h) @ p["up"]) @ p["down"], None


def transformer_params(width: int, inner: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = dict.fromkeys("qkvo", (width, width))
    shapes |= {"up": (width, inner), "down": (inner, width)}
    return {name: normal(*shape) for name, shape in shapes.items()}


def transformer_flops(batch: int, length: int, width: int, inner: int) -> int:
    projections = 2 * batch * length * (4 * width * width + 2 * width * inner)
    return projections + 2 * (2 * batch * length * length * width)


def test_transformer_layer() -> None:
    args = normal(2, 12, 32), transformer_params(32, 64)
    expected = transformer_flops(2, 12, 32, 64)
    assert count(transformer, *args).matmul_flops == expected
    assert count(gradient(transformer), *args).matmul_flops == 3 * expected
    # All operations; the compiler counts those on integers and indices too.
    for fn in (transformer, gradient(transformer)):
        theirs = by_compiler(fn, *args)
        found = count(fn, *args).flops
        assert found == pytest.approx(theirs["flops"] + theirs["transcendentals"], rel=0.002)


def test_convolutional_net_with_batch_norm() -> None:
    def net(kernels: Any, x: Any) -> Any:
        for k in kernels:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            x = jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-5))
        return x

    kernels, images = [normal(3, 3, 8, 8)] * 3, normal(2, 12, 12, 8)
    # Along an axis of 12, windows of 3 meet the image 3·12 − 2 times.
    products = 3 * (2 * 2 * 8 * 8 * 34**2)
    assert count(net, kernels, images).matmul_flops == products
    assert count(gradient(net), kernels, images).matmul_flops == 3 * products
    for fn in (net, gradient(net)):
        theirs = by_compiler(fn, kernels, images)
        found = count(fn, kernels, images).flops
        assert found == pytest.approx(theirs["flops"] + theirs["transcendentals"], rel=0.01)


# ---------------------------------------------------------------- loops and rematerialisation


def stack(h: Any, ws: Any, body: Any = layer) -> Any:
    return lax.scan(body, h, ws)[0]


def test_loops_count_times_their_length() -> None:
    found = count(stack, H, WS)
    assert found.matmul_flops == N * FORWARD
    assert found.flops == N * (FORWARD + B * D) + 0
    assert found.recomputed_flops == 0
    assert count(gradient(stack), H, WS).matmul_flops == 3 * N * FORWARD
    assert by_compiler(stack, H, WS)["flops"] < 2 * FORWARD, "the compiler counts a loop once"


def test_loops_in_loops() -> None:
    def outer(h: Any, ws: Any) -> Any:
        return lax.scan(lambda h, _: (stack(h, ws), None), h, length=5)[0]

    assert count(outer, H, WS).matmul_flops == 5 * N * FORWARD
    assert count(lambda h, ws: jax.vmap(stack, (0, None))(h, ws), jnp.ones((3, B, D)), WS) == (
        count(stack, jnp.ones((3 * B, D)), WS)
    )
    assert count(stack, H, WS[:0]).matmul_flops == 0


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def remat3(request: pytest.FixtureRequest) -> Any:
    """Both of jax's implementations of `jax.checkpoint`."""
    before = jax.config.jax_remat3  # type: ignore[attr-defined]
    jax.config.update("jax_remat3", request.param)
    yield
    jax.config.update("jax_remat3", before)


def checkpointed(policy: Any = None, prevent_cse: bool = False) -> Any:
    return jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)


def in_segments(h: Any, ws: Any) -> Any:
    def segment(h: Any, ws: Any) -> Any:
        return lax.scan(checkpointed(), h, ws)

    cut = ws.reshape(2, N // 2, D, D)
    return lax.scan(jax.checkpoint(segment, prevent_cse=False), h, cut)[0]


def unrolled(h: Any, ws: Any, body: Any) -> Any:
    for w in ws:
        h, _ = body(h, w)
    return h


POLICIES = {
    "nothing kept": (lambda: checkpointed(), 1),
    "products kept": (lambda: checkpointed(jax.checkpoint_policies.dots_saveable), 0),
}


@pytest.mark.usefixtures("remat3")
@pytest.mark.parametrize("name", POLICIES)
def test_recomputed_products_are_told_apart(name: str) -> None:
    make, again = POLICIES[name]
    for run in (stack, unrolled):
        found = count(gradient(functools.partial(run, body=make())), H, WS)
        assert found.recomputed_matmul_flops == again * N * FORWARD
        assert found.matmul_flops == (3 + again) * N * FORWARD
        assert again * N * FORWARD < found.recomputed_flops < 2 * N * FORWARD


@pytest.mark.usefixtures("remat3")
def test_nested_checkpoints_recompute_twice() -> None:
    found = count(gradient(in_segments), H, WS)
    assert found.recomputed_matmul_flops == 2 * N * FORWARD
    assert found.matmul_flops == 5 * N * FORWARD


@pytest.mark.usefixtures("remat3")
def test_names_kept_are_not_recomputed() -> None:
    def two(h: Any, w: Any) -> Any:
        h = checkpoint_name(h @ w, "first")
        return jnp.tanh(jnp.sin(h) @ w), None

    policy = jax.checkpoint_policies.save_only_these_names("first")
    body = jax.checkpoint(two, policy=policy, prevent_cse=False)
    found = count(gradient(functools.partial(stack, body=body)), H, WS)
    assert found.recomputed_matmul_flops == N * FORWARD
    assert count(gradient(functools.partial(stack, body=two)), H, WS).matmul_flops == (
        found.matmul_flops - N * FORWARD
    )


PLANS = [
    Plan.none(12),
    Plan.full(12),
    Plan.full(12, jaxmem.policies.dots()),
    Plan.periodic(12, 3),
    Plan.periodic(13, 4),
    Plan.periodic(13, [2, 3]),
    Plan.cut(13, (6, 6)),
    Plan.revolve(12, 1),
    Plan.revolve(13, 3),
    Plan.revolve(12, 20),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.kind}-{plan.length}")
def test_plans_recompute_what_they_say(plan: Plan) -> None:
    def run(h: Any, ws: Any) -> Any:
        return jaxmem.scan(layer, h, ws, remat=plan)[0]

    n = plan.length
    extra = 0 if plan.layer != jaxmem.policies.Full() else plan.extra_forwards()
    jaxpr = jax.make_jaxpr(gradient(run))(H, jnp.ones((n, D, D)))
    found = costs(jaxpr)
    assert found.unknown_loops == 0
    assert found.recomputed_matmul_flops == extra * FORWARD
    assert found.matmul_flops == (3 * n + extra) * FORWARD
    assert two_levels(jaxpr) == (), "several levels by a plan are by intent"
    # Not differentiated it is the plain scan, whatever the plan.
    assert count(run, H, jnp.ones((n, D, D))) == count(stack, H, jnp.ones((n, D, D)))


@pytest.mark.parametrize("remat", ["full", "sqrt", "revolve"])
def test_transformers_under_policies(remat: str) -> None:
    n = 9
    one = transformer_flops(2, 12, 32, 64)
    stacked = jax.tree.map(lambda p: normal(n, *p.shape), transformer_params(32, 64))

    def run(h: Any, params: Any) -> Any:
        return jaxmem.scan(transformer, h, params, remat=remat)[0]

    found = count(gradient(run), normal(2, 12, 32), stacked)
    assert found.matmul_flops - found.recomputed_matmul_flops == 3 * n * one
    plan = jaxmem.stacks(run, normal(2, 12, 32), stacked)[0].plan
    assert plan is not None
    # The product at the end of a layer is needed for its carry alone.
    last = 2 * 2 * 12 * 32 * 64
    most = plan.extra_forwards() * one
    assert most - n * last <= found.recomputed_matmul_flops <= most


@pytest.mark.parametrize("name", menagerie.MODELS)
def test_policies_change_what_is_recomputed_alone(name: str) -> None:
    problem = menagerie.MODELS[name].make(7)
    once = set()
    for remat in ("none", "full", "sqrt", "revolve"):
        fn = menagerie.differentiate(jaxmem.remat(problem.loss, remat))
        jaxpr = jax.make_jaxpr(fn)(problem.params, problem.inputs)
        found = costs(jaxpr)
        assert (found.unknown_loops, found.uncounted) == (0, ())
        once.add(found.matmul_flops - found.recomputed_matmul_flops)
        # Only here are there two checkpoints, the policy's and the layer's own.
        assert not two_levels(jaxpr) or name == "checkpoint_inside"
    assert len(once) == 1


def test_forward_mode_of_a_stack() -> None:
    def run(h: Any, ws: Any) -> Any:
        return jaxmem.scan(layer, h, ws, remat=Plan.revolve(N, 2))[0]

    found = count(lambda h, ws: jax.jvp(run, (h, ws), (h, ws)), H, WS)
    assert found.unknown_loops == 0
    assert 3 * N * FORWARD <= found.matmul_flops <= 4 * N * FORWARD


# ---------------------------------------------------------------- while loops


def test_loops_with_bounds_that_can_be_followed() -> None:
    def body(i: Any, h: Any) -> Any:
        return h @ WS[0]

    def static(h: Any) -> Any:
        return lax.fori_loop(2, 9, body, h)

    def constants(h: Any) -> Any:
        return lax.fori_loop(jnp.int32(2), jnp.int32(9), body, h)

    def by_hand(h: Any) -> Any:
        done = lax.while_loop(lambda s: s[0] > 1, lambda s: (s[0] - 3, body(0, s[1])), (20, h))
        return done[1]

    for fn, trips in ((static, 7), (constants, 7), (by_hand, 7)):
        found = count(jax.jit(fn), H)
        assert (found.matmul_flops, found.unknown_loops) == (trips * FORWARD, 0)


def test_loops_whose_bounds_depend_on_other_loops() -> None:
    table = jnp.array([3, 1, 4, 1, 5])

    def inner(i: Any, h: Any) -> Any:
        return lax.fori_loop(0, i, lambda _, h: h @ WS[0], h)

    def triangle(h: Any) -> Any:
        return lax.fori_loop(0, 6, inner, h)

    def triangle_of_values(h: Any) -> Any:
        return lax.fori_loop(jnp.int32(0), jnp.int32(6), inner, h)

    def rows(h: Any) -> Any:
        return lax.scan(lambda h, n: (inner(n, h), None), h, table)[0]

    def indexed(h: Any) -> Any:
        return lax.fori_loop(0, 5, lambda i, h: inner(table[4 - i], h), h)

    def three(h: Any) -> Any:
        def middle(i: Any, h: Any) -> Any:
            return lax.fori_loop(0, i, lambda j, h: inner(jnp.minimum(i, j) + 1, h), h)

        return lax.fori_loop(0, 4, middle, h)

    for fn, trips in ((triangle, 15), (triangle_of_values, 15), (rows, 14), (indexed, 14)):
        found = count(fn, H)
        assert (found.matmul_flops, found.unknown_loops) == (trips * FORWARD, 0), fn.__name__
    found = count(three, H)
    trips = sum(min(i, j) + 1 for i in range(4) for j in range(i))
    assert (found.matmul_flops, found.unknown_loops) == (trips * FORWARD, 0)


def test_loops_of_unknown_length_are_counted_once_and_reported() -> None:
    def until_large(h: Any) -> Any:
        return lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ WS[0], h)

    def to(n: Any, h: Any) -> Any:
        return lax.fori_loop(0, n, lambda _, h: h @ WS[0], h)

    for fn, args in ((until_large, (H,)), (to, (3, H))):
        found = count(fn, *args)
        assert (found.matmul_flops, found.unknown_loops) == (FORWARD, 1)


# ---------------------------------------------------------------- other structure


def test_of_a_conditional_the_costlier_branch_counts() -> None:
    def fn(flag: Any, h: Any) -> Any:
        return lax.cond(flag, lambda h: h @ WS[0] @ WS[1], lambda h: h @ WS[0], h)

    def three(k: Any, h: Any) -> Any:
        return lax.switch(k, [lambda h: h, lambda h: h @ WS[0], jnp.sin], h)

    assert count(fn, True, H).matmul_flops == 2 * FORWARD
    assert count(three, 1, H).matmul_flops == FORWARD
    # Mapped over the choice, all branches are run.
    mapped = count(jax.vmap(three), jnp.arange(3), jnp.stack([H] * 3))
    assert mapped.matmul_flops == 3 * FORWARD


def test_what_no_result_needs_costs_nothing() -> None:
    def fn(h: Any, ws: Any) -> Any:
        unused = jax.jit(lambda h: h @ ws[0])(h)
        _ = unused @ ws[1]

        def body(carry: Any, w: Any) -> Any:
            h, waste = carry
            return (jnp.tanh(h @ w), waste @ w), (h @ w).sum()

        (h, _), _ = jax.jit(lambda h: lax.scan(body, (h, h), ws))(h)
        return h

    assert count(fn, H, WS).matmul_flops == N * FORWARD


def test_shards_are_counted_all() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec(None, "model")),
        out_specs=PartitionSpec("data", "model"),
    )
    def product(x: Any, w: Any) -> Any:
        return x @ w

    found = count(product, H, WS[0])
    assert found.matmul_flops == FORWARD
    # Each half of w is read by four shards, each quarter of x by two.
    assert found.bytes == 4 * (2 * B * D + 4 * D * D + B * D)


def test_custom_derivatives_are_looked_into() -> None:
    @jax.custom_vjp
    def f(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w)

    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda res, ct: (ct @ res[1].T @ WS[0], ct.T @ ct))
    g = jax.custom_jvp(lambda x: x @ WS[0])
    g.defjvps(lambda t, y, x: t @ WS[0] @ WS[1])
    assert count(f, H, WS[0]).matmul_flops == FORWARD
    # 4×8 @ 8×8 three times; (8×4 @ 4×8) as large.
    assert count(gradient(f), H, WS[0]).matmul_flops == 4 * FORWARD
    assert count(g, H).matmul_flops == FORWARD
    assert count(gradient(g), H).matmul_flops == 3 * FORWARD


def test_solvers_inside_are_looked_into() -> None:
    found = count(jnp.linalg.solve, normal(8, 8), normal(8, 3))
    # LU, and two triangular solves.
    assert found.flops == pytest.approx(2 / 3 * 8**3 + 2 * 8 * 8 * 3, rel=0.02)
    assert found.uncounted == ()


# ---------------------------------------------------------------- operations

ONE = (
    (lambda x: x + x, 35),
    (lambda x: jnp.where(x > 0, x, -x), 2 * 35),
    (lambda x: x.astype("bfloat16").T.reshape(-1), 0),
    (lambda x: x**2, 35),
    (lambda x: x**7, 4 * 35),
    (lambda x: x**-3, 3 * 35),
    (lambda x: jnp.arange(100) * 3, 0),
    (lambda x: x.sum(), 34),
    (lambda x: x.max(axis=0), 28),
    (lambda x: x.argmax(axis=1), 30),
    (lambda x: jnp.cumsum(x, axis=1), 30),
    (lambda x: lax.sort(x, dimension=1), round(35 * math.log2(7))),
    (lambda x: lax.sort(x.astype(int), dimension=1), 0),
    (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 3), (1, 1), "VALID"), 20 * 5),
    (lambda x: x.at[0].add(1.0), 7),
    (lambda x: x.at[0].set(1.0), 0),
    (lambda x: x * (1 + 1j), 6 * 35),
    (lambda x: lax.complex(x, x) + 1j, 2 * 35),
    (lambda x: jnp.fft.fft(lax.complex(x, x)), round(5 * 5 * 7 * math.log2(7))),
)


@pytest.mark.parametrize("number", range(len(ONE)))
def test_single_operations(number: int) -> None:
    fn, expected = ONE[number]
    assert count(fn, normal(5, 7)).flops == expected


N3 = 12**3
FACTORISED = {
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), N3 / 3),
    "lu": (lambda x: lax.linalg.lu(x)[0], 2 * N3 / 3),
    "qr": (lambda x: lax.linalg.qr(x, full_matrices=False), 2 * 4 / 3 * N3),
    "eigh": (lax.linalg.eigh, 9 * N3),
    "svd": (lambda x: lax.linalg.svd(x, full_matrices=False), 21 * N3),
    "singular values": (lambda x: lax.linalg.svd(x, compute_uv=False), 8 / 3 * N3),
    "triangular solve": (lambda x: lax.linalg.triangular_solve(x, x, left_side=True), N3),
    "eig": (lax.linalg.eig, 25 * N3),
    "hessenberg": (lambda x: lax.linalg.hessenberg(x)[0], 10 / 3 * N3),
    "schur": (lax.linalg.schur, 25 * N3),
    "tridiagonal": (lambda x: lax.linalg.tridiagonal(x)[0], 4 / 3 * N3),
}


@pytest.mark.parametrize("name", FACTORISED)
def test_factorisations_have_the_terms_of_the_textbook(name: str) -> None:
    fn, expected = FACTORISED[name]
    many = jax.ShapeDtypeStruct((3, 12, 12), jnp.float32)
    found = count(fn, many)
    assert found.uncounted == ()
    assert found.flops == pytest.approx(3 * expected, rel=0.02)


def test_every_primitive_is_known_or_reported() -> None:
    structure = {"call", "closed_call", "eval_jaxpr", "cond", "while", "scan", "jit", "remat2"}
    structure |= {"custom_jvp_call", "custom_vjp_call", "custom_linear_solve"}
    # Rejection sampling; a rule that only transposes; a form that jax never traces to.
    unknown = {"random_gamma", "custom_lin", "select_and_scatter"}
    known = {*flops.RULES, *flops.MATMULS, *factorisations.FACTORISATIONS}
    known |= primitives.ELEMENTWISE | primitives.FREE
    names = {
        primitive.name
        for attribute, primitive in vars(jax.extend.core.primitives).items()
        if attribute.endswith("_p")
    }
    assert names - known - structure == unknown & names


def test_references_are_counted() -> None:
    def fn(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] += 2 * x
        ref.addupdate(x)
        return ref[...]

    found = count(fn, normal(5, 7))
    assert (found.flops, found.uncounted) == (3 * 35, ())


def test_what_cannot_be_counted_is_named() -> None:
    def fn(x: Any) -> Any:
        y = jax.pure_callback(np.sin, x, x)
        return jax.ffi.ffi_call("a_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(y)

    found = count(fn, jnp.ones(3))
    assert found.uncounted == ("ffi_call", "pure_callback")
    assert found.flops == 0


def test_kernels_cost_what_they_say() -> None:
    def product(x: Any, y: Any, out: Any) -> None:
        out[...] = jnp.dot(x[...], y[...])

    def double(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def call(kernel: Any, estimate: Any) -> Any:
        shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
        return pl.pallas_call(kernel, out_shape=shape, cost_estimate=estimate)

    x = jnp.ones((16, 16))
    estimate = pl.CostEstimate(flops=8192, transcendentals=10, bytes_accessed=3072)
    assert count(call(product, estimate), x, x) == Costs(8202, 8192, 3072)
    assert count(call(double, estimate), x, x) == Costs(8202, 0, 3072)
    assert count(call(product, None), x, x) == Costs(bytes=3072, uncounted=("pallas_call",))


def test_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tracing asks for the version of a library that only machines with a GPU have.
    module = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{module}.check_compute_capability", lambda *_: True)
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    product = 2 * 2 * 4 * 128 * 256 * 64
    assert count(attention, q, k, k).matmul_flops == 2 * product
    found = count(gradient(attention), q, k, k)
    assert found.matmul_flops == 7 * product
    assert found.uncounted == ()


# ---------------------------------------------------------------- bytes

ROW = 4 * 64  # a row of 64 floats


def bytes_of(fn: Callable[..., Any], *args: Any) -> float:
    return count(fn, *args).bytes


def test_elementwise_chains_are_fused() -> None:
    x = normal(64)
    assert bytes_of(lambda x: x + 1, x) == 2 * ROW
    assert bytes_of(lambda x: jnp.sin(jnp.exp(x) * 2 + x), x) == 2 * ROW
    assert bytes_of(lambda x, y, z: x * y + z, x, x, x) == 4 * ROW
    assert bytes_of(lambda x: x, x) == 0
    assert bytes_of(jax.jit(lambda x: jax.nn.silu(x) + 1), x) == 2 * ROW
    # Two results, each with the chain in front of it.
    assert bytes_of(lambda x: (x + 1, x * 2), x) == 4 * ROW
    assert bytes_of(lambda x: jnp.broadcast_to(x, (8, 64)) + 1, x) == ROW + 8 * ROW


def test_reductions_take_the_chain_in_front_of_them() -> None:
    x = normal(64, 64)
    assert bytes_of(lambda x: jnp.exp(x).sum(axis=1), x) == 64 * ROW + ROW
    # Softmax: maximum, sum and result each read x.
    rows = 64 * ROW
    found = bytes_of(lambda x: jnp.exp(x - (m := x.max(1, keepdims=True))) + 0 * m, x)
    assert found == (rows + ROW) + (rows + ROW + rows)


def test_products_read_and_write_once() -> None:
    x, matrix = normal(64, 64), 64 * ROW
    assert bytes_of(jnp.dot, x, x) == 3 * matrix
    assert bytes_of(lambda x: x @ x.T, x) == 3 * matrix
    # What goes in must be in memory: the chain is written, and read.
    assert bytes_of(lambda x, w: jnp.tanh(x) @ w, x, x) == 2 * matrix + 3 * matrix
    assert bytes_of(lambda x, w: jnp.tanh(x @ w), x, x) == 3 * matrix + 2 * matrix


def test_slices_are_views_and_updates_are_in_place() -> None:
    x = normal(100, 64)
    assert bytes_of(lambda x: x[7] + 1, x) == 2 * ROW
    assert bytes_of(lambda x, i: lax.dynamic_index_in_dim(x, i) @ jnp.ones((64, 1)), x, 3) <= (
        ROW + 2 * ROW + 2 * ROW
    )
    assert bytes_of(lambda x, y: lax.dynamic_update_index_in_dim(x, y + 1, 3, 0), x, x) >= 2 * ROW
    update = normal(64)
    assert (
        bytes_of(lambda x, y: lax.dynamic_update_index_in_dim(x, y + 1, 3, 0), x, update) == 2 * ROW
    )
    ids = jax.ShapeDtypeStruct((5,), jnp.int32)
    assert bytes_of(lambda x, i: jnp.take(x, i, axis=0, mode="clip"), x, ids) < 13 * ROW


def test_loops_move_their_carry_each_time() -> None:
    xs = normal(10, 64)

    def total(xs: Any) -> Any:
        return lax.scan(lambda c, x: (c + x, None), jnp.zeros(64), xs)[0]

    # Two read and one written in each of ten iterations, and zeros to begin with.
    assert bytes_of(total, xs) == 10 * 3 * ROW + ROW
    forward = 4 * (B * D + D * D + B * D) + 4 * 2 * B * D  # the product, then tanh
    assert count(stack, H, WS).bytes == N * forward


def test_bytes_are_of_the_order_that_the_compiler_finds() -> None:
    args = normal(2, 64, 128), transformer_params(128, 512)
    found = count(gradient(transformer), *args).bytes
    compiled = jax.jit(gradient(transformer)).lower(*args).compile().cost_analysis()
    assert compiled is not None
    assert 0.5 < found / compiled["bytes accessed"] < 2


# ---------------------------------------------------------------- lints


@pytest.mark.usefixtures("remat3")
def test_two_levels_are_found() -> None:
    lines = two_levels(jax.make_jaxpr(gradient(in_segments))(H, WS))
    if jax.config.jax_remat3 and jax.__version_info__ < (0, 11):  # type: ignore[attr-defined]
        assert lines == (), "the known gap"
    else:
        (line,) = lines
        assert line.startswith("test_costs.py:")
        assert line.endswith("(layer)")
    for run in (stack, unrolled):
        for body in (layer, checkpointed()):
            fn = functools.partial(run, body=body)
            assert two_levels(jax.make_jaxpr(gradient(fn))(H, WS)) == ()
            # Gradients alone leave the last layer's forward evaluation dead.
            grad = jax.grad(lambda h, ws, fn=fn: fn(h, ws).sum())
            assert two_levels(jax.make_jaxpr(grad)(H, WS)) == ()


def test_two_levels_by_a_policy_and_a_checkpoint_are_found() -> None:
    def two(h: Any, w: Any) -> Any:
        return layer(h, w)

    def run(h: Any, ws: Any, remat: Any) -> Any:
        return jaxmem.scan(jax.checkpoint(two, prevent_cse=False), h, ws, remat=remat)[0]

    for remat, lines in (("none", 0), (Plan.periodic(N, 3), 1), (Plan.revolve(N, 2), 1)):
        fn = gradient(functools.partial(run, remat=remat))
        assert len(two_levels(jax.make_jaxpr(fn)(H, WS))) == lines


def test_two_levels_inside_a_full_policy_are_found() -> None:
    def first(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w)

    def second(h: Any, w: Any) -> Any:
        return jnp.sin(h @ w)

    def body(h: Any, w: Any) -> Any:
        for block in (first, second):
            h = jax.checkpoint(block, prevent_cse=False)(h, w)
        return h, None

    def run(h: Any, ws: Any) -> Any:
        return jaxmem.scan(body, h, ws, remat="full")[0]

    # What only the end of a layer is needed for, the outer checkpoint does not compute.
    (line,) = two_levels(jax.make_jaxpr(gradient(run))(H, WS))
    assert line.endswith("(first)")


def test_what_does_not_change_in_a_loop_is_not_two_levels() -> None:
    def run(h: Any, ws: Any) -> Any:
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def body(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w @ jnp.sin(WS[0] @ WS[1])), None

        return lax.scan(body, h, ws)[0]

    assert two_levels(jax.make_jaxpr(gradient(run))(H, WS)) == ()


def test_barriers_off_outside_of_loops_are_found() -> None:
    def lines(run: Any, **options: Any) -> tuple[int, int]:
        fn = functools.partial(run, body=checkpointed(**options))
        jaxpr = jax.make_jaxpr(gradient(fn))(H, WS)
        return len(unrolled_remat(jaxpr)), len(unrolled_without_barriers(jaxpr))

    assert lines(unrolled, prevent_cse=False) == (1, 1)
    assert lines(unrolled, prevent_cse=True) == (1, 0)
    assert lines(stack, prevent_cse=False) == lines(stack, prevent_cse=True) == (0, 0)
    # A compiler unrolls a loop of one iteration.
    once = functools.partial(stack, body=checkpointed())
    assert len(unrolled_without_barriers(jax.make_jaxpr(gradient(once))(H, WS[:1]))) == 1
    # Without a gradient nothing is evaluated again.
    plain = functools.partial(unrolled, body=checkpointed())
    assert unrolled_remat(jax.make_jaxpr(plain)(H, WS)) == ()
    (line,) = unrolled_remat(jax.make_jaxpr(gradient(plain))(H, WS))
    assert line.endswith("(unrolled)")


def test_unrolled_checkpoints_are_found_under_the_flag(remat3: None) -> None:
    fn = gradient(functools.partial(unrolled, body=checkpointed(prevent_cse=True)))
    jaxpr = jax.make_jaxpr(fn)(H, WS)
    gap = jax.config.jax_remat3 and jax.__version_info__ < (0, 11)  # type: ignore[attr-defined]
    assert len(unrolled_remat(jaxpr)) == (0 if gap else 1)
    assert unrolled_without_barriers(jaxpr) == ()


def test_barriers_for_some_arguments_are_barriers() -> None:
    body = jax.checkpoint(layer, prevent_cse=(True, False))
    fn = gradient(functools.partial(unrolled, body=body))
    assert unrolled_without_barriers(jax.make_jaxpr(fn)(H, WS)) == ()


# ---------------------------------------------------------------- speed


def test_an_unrolled_transformer_is_counted_in_half_a_second() -> None:
    params = [transformer_params(32, 64)] * 24

    def run(h: Any, params: Any) -> Any:
        for p in params:
            h, _ = jax.checkpoint(transformer)(h, p)
        return h

    jaxpr = jax.make_jaxpr(gradient(run))(normal(2, 12, 32), params)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        costs(jaxpr)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.5
    assert costs(jaxpr).matmul_flops > 72 * transformer_flops(2, 12, 32, 64)
