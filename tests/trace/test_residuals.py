"""`saved_residuals` against cases whose residuals are known, and against what jax passes."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.trace.residuals import Residual, Residuals, saved_residuals

N, B, W = 7, 4, 16
CARRY = B * W * 4  # bytes
POLICIES = jax.checkpoint_policies


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    z = checkpoint_name(x @ w, "z")
    return jnp.sin(z), None


def stack(body=layer, policy=None, remat=False):
    if remat:
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    return lambda w, x: jnp.sum(jax.lax.scan(body, x, w)[0])


def names_and_counts(kept: Residuals) -> list[tuple[str, int]]:
    return sorted((row.name, row.count) for row in kept if row.kind == "computed")


# ---------------------------------------------------------------- known cases


def test_a_chain_of_tanh_keeps_what_each_derivative_needs():
    def chain(x):
        for _ in range(5):
            x = jnp.tanh(x)
        return x.sum()

    kept = saved_residuals(chain, spec(8, 32))
    # One value for each tanh, 1 - tanh^2 or tanh itself as the release has it; no input.
    per_tanh = {row.shape for row in kept}
    assert per_tanh == {(8, 32)}
    assert len(kept) in (5, 10)
    assert kept.total_bytes == len(kept) * 8 * 32 * 4
    assert kept.argument_bytes == 0


def test_a_product_keeps_its_factors_which_are_arguments():
    kept = saved_residuals(lambda a, b: (a * b).sum(), spec(3, 5), spec(3, 5))
    assert [(row.name, row.kind) for row in kept] == [
        ("argument 'a'", "argument"),
        ("argument 'b'", "argument"),
    ]
    assert kept.total_bytes == 0
    assert kept.argument_bytes == 2 * 3 * 5 * 4


def test_a_linear_function_keeps_nothing():
    assert len(saved_residuals(lambda x: 3 * x.sum(), spec(4))) == 0


def test_a_scan_is_told_per_layer_times_its_length():
    kept = saved_residuals(stack(), spec(N, W, W), spec(B, W))
    assert names_and_counts(kept) == [("carry", N), ("cos", N)]
    assert {row.shape for row in kept if row.kind == "computed"} == {(B, W)}
    assert kept.total_bytes == 2 * N * CARRY
    assert [row.name for row in kept if row.kind == "argument"] == ["argument 'w'"]
    assert kept.argument_bytes == N * W * W * 4


def test_scans_in_scans_multiply():
    def outer(x, ws):
        return jax.lax.scan(layer, x, ws)[0], None

    kept = saved_residuals(stack(outer), spec(3, N, W, W), spec(B, W))
    assert names_and_counts(kept) == [("carry", 3 * N), ("cos", 3 * N)]
    assert kept.total_bytes == 2 * 3 * N * CARRY


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, [("carry", N)]),
        (POLICIES.nothing_saveable, [("carry", N)]),
        (POLICIES.dots_saveable, [("carry", N), ("z", N)]),
        (POLICIES.dots_with_no_batch_dims_saveable, [("carry", N), ("z", N)]),
        (POLICIES.save_only_these_names("z"), [("carry", N), ("z", N)]),
        (POLICIES.save_only_these_names("other"), [("carry", N)]),
    ],
)
def test_jax_checkpoint_policies(policy, expected):
    kept = saved_residuals(stack(policy=policy, remat=True), spec(N, W, W), spec(B, W))
    assert names_and_counts(kept) == expected
    assert kept.total_bytes == len(expected) * N * CARRY


def test_an_unnamed_product_goes_by_its_operation():
    def body(x, w):
        return jnp.sin(x @ w), None

    f = stack(body, POLICIES.dots_saveable, remat=True)
    kept = saved_residuals(f, spec(N, W, W), spec(B, W))
    assert names_and_counts(kept) == [("carry", N), ("dot_general", N)]


def test_offloaded_values_are_counted_apart():
    policy = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["z"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    kept = saved_residuals(stack(policy=policy, remat=True), spec(N, W, W), spec(B, W))
    assert {row.name: row.place for row in kept if row.kind == "computed"} == {
        "carry": "device",
        "z": "host",
    }
    assert (kept.total_bytes, kept.host_bytes) == (N * CARRY, N * CARRY)
    assert "z (on the host)" in str(kept)


def test_a_named_carry_has_its_name():
    def body(x, w):
        return jnp.sin(checkpoint_name(x, "kept") @ w), None

    kept = saved_residuals(stack(body, remat=True), spec(N, W, W), spec(B, W))
    assert names_and_counts(kept) == [("kept", N)]


def test_custom_vjp_keeps_what_its_forward_rule_returns():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), checkpoint_name(x * 2, "twice")), lambda twice, g: (g * twice,))
    kept = saved_residuals(lambda x: f(x).sum(), spec(6))
    assert [(row.name, row.bytes) for row in kept] == [("twice", 24)]

    def body(x, w):
        return f(x) * w, None

    kept = saved_residuals(stack(body), spec(N), spec(6))
    assert ("twice", N) in names_and_counts(kept)


def test_custom_jvp_and_jit_are_looked_through():
    kept = saved_residuals(jax.jit(lambda x: jnp.sum(jax.nn.relu(x) ** 2)), spec(6))
    shapes = {(row.dtype, row.shape) for row in kept if row.kind == "computed"}
    assert ("bool", (6,)) in shapes  # where x > 0
    assert "jit" not in {row.name for row in kept}
    assert "custom_jvp_call" not in {row.name for row in kept}


def test_a_value_made_in_a_branch_is_named_by_the_branch():
    def f(flag, x):
        return jax.lax.cond(flag, lambda x: x, lambda x: checkpoint_name(x * x, "y") * x, x).sum()

    kept = saved_residuals(f, spec(dtype="bool"), spec(6))
    names = {row.name for row in kept}
    assert "y" in names
    assert "cond" not in names


def test_what_is_filled_in_is_no_activation():
    kept = saved_residuals(lambda x: (x * jnp.zeros((8, 8))).sum(), spec(8, 8))
    assert {row.kind for row in kept} <= {"constant"}
    assert kept.total_bytes == 0


def test_loops_by_count_are_scans():
    kept = saved_residuals(
        lambda x: jax.lax.fori_loop(0, 5, lambda _, y: jnp.sin(y), x).sum(), spec(8, 4)
    )
    assert names_and_counts(kept) == [("cos", 5)]


def test_shard_map_is_looked_through():
    axis = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((1,), ("data",), axis_types=(axis,))
    split = jax.sharding.PartitionSpec("data")
    f = jax.shard_map(lambda x: jnp.sin(x) * x, mesh=mesh, in_specs=split, out_specs=split)
    kept = saved_residuals(f, spec(8, 4))
    assert {(row.name, row.shape) for row in kept} == {
        ("sin", (8, 4)),
        ("cos", (8, 4)),
        ("argument 'x'", (8, 4)),
    }


def test_a_value_used_twice_is_kept_once():
    @jax.jit
    def inner(y):
        return y * y, y

    def f(x):
        y = checkpoint_name(jnp.exp(x), "y")
        a, same = inner(y)
        return (a * same * y).sum()

    kept = saved_residuals(f, spec(10))
    assert [row.name for row in kept].count("y") == 1


def test_a_convolution_keeps_its_input_and_reads_its_kernel():
    def f(kernel, image):
        hidden = checkpoint_name(jnp.exp(image), "hidden")
        return jax.lax.conv(hidden, kernel, (1, 1), "SAME").sum()

    kept = saved_residuals(f, spec(8, 3, 3, 3), spec(2, 3, 16, 16))
    assert {row.name for row in kept} == {"hidden", "argument 'kernel'"}
    assert kept.total_bytes == 2 * 3 * 16 * 16 * 4


def test_bfloat16_takes_two_bytes_and_a_cast_is_a_value_of_its_own():
    kept = saved_residuals(stack(), spec(N, W, W, dtype="bfloat16"), spec(B, W, dtype="bfloat16"))
    assert {row.dtype for row in kept} == {"bfloat16"}
    assert kept.total_bytes == 2 * N * CARRY // 2

    def mixed(w, x):
        return jnp.sum(jnp.sin(x.astype("bfloat16") @ w.astype("bfloat16")))

    kept = saved_residuals(mixed, spec(W, W), spec(B, W))
    names = {row.name for row in kept}
    assert "convert_element_type of argument 'w'" in names
    assert "convert_element_type of argument 'x'" in names


def test_closed_over_arrays_are_constants():
    table = jnp.arange(12.0)
    kept = saved_residuals(lambda x: (x * table).sum(), spec(12))
    assert [(row.kind, row.bytes) for row in kept] == [("constant", 48)]
    assert (kept.total_bytes, kept.argument_bytes) == (0, 48)


def test_it_lists_what_jax_hands_to_the_backward_pass():
    """The bytes of the vjp function's own leaves, from a real run, as an independent count."""

    def loss(w, x):
        def body(x, w):
            h = jax.nn.gelu(x @ w)
            h = h - h.mean(-1, keepdims=True)
            return x + h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6), None

        return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)

    w = jax.random.normal(jax.random.key(0), (N, W, W))
    x = jax.random.normal(jax.random.key(1), (B, W))
    held = jax.tree.leaves(jax.vjp(loss, w, x)[1])
    unique = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in held}
    kept = saved_residuals(loss, w, x)
    assert sum(row.bytes for row in kept) == sum(unique.values())
    assert {(row.count, *row.shape) if row.count > 1 else row.shape for row in kept} == {
        leaf.shape for leaf in held
    }


# ---------------------------------------------------------------- arguments


def test_what_is_no_array_is_static_by_itself():
    def f(params, x, mode, train=False, rng=None):
        assert mode == "plain"
        return (jnp.sin(x) if train else x).sum() * params["w"]

    x = spec(5)
    assert len(saved_residuals(f, {"w": spec()}, x, "plain", train=True)) > len(
        saved_residuals(f, {"w": spec()}, x, "plain", train=False)
    )


def test_integers_are_passed_and_not_differentiated():
    def f(table, ids):
        return jnp.sin(table[ids]).sum()

    kept = saved_residuals(f, spec(10, 4), spec(3, dtype="int32"))
    assert kept.total_bytes > 0
    assert jnp.float32.dtype in {jnp.dtype(row.dtype) for row in kept}


def test_random_keys_are_passed():
    def f(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0).sum()

    kept = saved_residuals(f, jnp.ones((4, 4)), jax.random.key(0))
    assert [(row.dtype, row.shape) for row in kept if row.kind == "computed"] == [("bool", (4, 4))]


def test_paths_and_positions_name_arguments():
    def f(params, *rest):
        return (params["Dense_0"]["kernel"] * rest[0] * rest[1]["deep"][0]).sum()

    kept = saved_residuals(f, {"Dense_0": {"kernel": spec(2)}}, spec(2), {"deep": [spec(2)]})
    names = {row.name for row in kept if row.kind == "argument"}
    assert "argument 'params/Dense_0/kernel'" in names
    assert "argument 'rest[1]/deep/0'" in names
    kept = saved_residuals(lambda *, scale, x: (x * scale).sum(), x=spec(2), scale=spec(2))
    assert {row.name for row in kept} == {"argument 'x'", "argument 'scale'"}


def test_wrong_calls_say_so():
    with pytest.raises(TypeError, match=r"saved_residuals\(fn, \*args\), not fn\(\*args\)"):
        saved_residuals(jnp.ones(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no argument is an array of floats"):
        saved_residuals(lambda n: n, jnp.arange(3))
    with pytest.raises(ValueError, match=r"jnp\.asarray"):
        saved_residuals(jnp.sin, 1.0)


# ---------------------------------------------------------------- what plans keep


def carries(kept: Residuals) -> list[tuple[int, tuple[int, ...], str]]:
    return [(row.count, row.shape, row.place) for row in kept if row.name == "jaxmem_carry"]


@pytest.mark.parametrize("n", [16, 61, 64])
@pytest.mark.parametrize("segments", [2, 4, (4, 2)])
def test_a_periodic_plan_keeps_a_carry_for_each_cut(n, segments):
    plan = jaxmem.Plan.periodic(n, segments)
    kept = saved_residuals(jaxmem.remat(stack(), plan), spec(n, W, W), spec(B, W))
    assert carries(kept) == [(-(-n // plan.lengths[0]), (B, W), "device")]
    assert kept.total_bytes == carries(kept)[0][0] * CARRY
    assert {row.name for row in kept if row.kind == "argument"} == {"argument 'w'", "argument 'x'"}


def test_revolve_keeps_its_slots_and_the_last_tape():
    kept = saved_residuals(
        jaxmem.remat(stack(), jaxmem.policies.revolve(8)), spec(64, W, W), spec(B, W)
    )
    assert carries(kept) == [(8, (B, W), "device")]
    tape = [row for row in kept if row.kind == "computed" and row.name != "jaxmem_carry"]
    assert tape
    assert {row.count for row in tape} == {1}


@pytest.mark.filterwarnings("ignore::jaxmem.OffloadWarning")
def test_offload_keeps_carries_on_the_host():
    kept = saved_residuals(
        jaxmem.remat(stack(), jaxmem.policies.offload("z")), spec(N, W, W), spec(B, W)
    )
    assert carries(kept) == [(N, (B, W), "host")]
    assert {row.name: row.place for row in kept if row.kind == "computed"}["z"] == "host"
    assert (kept.total_bytes, kept.host_bytes) == (0, 2 * N * CARRY)


@pytest.mark.parametrize("policy", ["none", "full", "dots"])
def test_policies_of_layers_keep_what_jax_keeps(policy):
    by_hand = {
        "none": stack(),
        "full": stack(remat=True),
        "dots": stack(policy=POLICIES.dots_saveable, remat=True),
    }[policy]
    args = spec(N, W, W), spec(B, W)
    ours = saved_residuals(jaxmem.remat(stack(), policy), *args)
    assert ours.total_bytes == saved_residuals(by_hand, *args).total_bytes
    assert {row.count for row in ours if row.kind == "computed"} == {N}


# ---------------------------------------------------------------- flax


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(W)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.gelu(x), None


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        scanned = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=N,
        )
        return scanned()(x, train)[0].sum()


def test_flax_linen_values_tell_their_module():
    model, x = Encoder(), jnp.ones((B, W))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(variables, x, key):
        return model.apply(variables, x, train=True, rngs={"dropout": key})

    kept = saved_residuals(loss, variables, x, jax.random.key(1))
    assert "argument 'variables/params/ScanBlock_0/Dense_0/kernel'" in {row.name for row in kept}
    modules = {row.module.rpartition("/")[2] for row in kept if row.kind == "computed"}
    assert {"Dropout_0"} <= modules
    assert {row.count for row in kept if row.kind == "computed"} == {N}
    assert all(row.source.startswith("test_residuals.py:") for row in kept if row.source)


def test_flax_nnx_modules_are_arguments_like_others():
    model = nnx.Linear(W, W, rngs=nnx.Rngs(0))
    kept = saved_residuals(lambda model, x: jnp.sin(model(x)).sum(), model, jnp.ones((B, W)))
    assert any(row.name.startswith("argument 'model/kernel") for row in kept)
    assert kept.total_bytes == CARRY


# ---------------------------------------------------------------- how it looks


def test_source_lines_are_those_of_the_user():
    kept = saved_residuals(stack(), spec(N, W, W), spec(B, W))
    rows = {row.name: row for row in kept}
    line = layer.__code__.co_firstlineno + 2
    assert rows["cos"].source == f"test_residuals.py:{line} (layer)"
    # jitted library code has no line of the user's inside; the call has.
    kept = saved_residuals(lambda x: jax.nn.softmax(x).sum(), spec(9))
    assert all(
        row.source.startswith("test_residuals.py:") for row in kept if row.kind == "computed"
    )


def test_of_what_is_not_differentiated_nothing_is_kept():
    """An adapter beside frozen weights: jax's own residuals of that gradient."""

    def loss(adapter, weights, x, *, scale):
        h = jnp.sin(x @ weights["a"]) * scale
        return ((h @ adapter) @ weights["b"]).sum()

    frozen = {"a": spec(W, W), "b": spec(2, W)}
    args = spec(W, 2), frozen, spec(B, W)
    scale = spec(W)
    alone = saved_residuals(loss, *args, scale=scale, argnums=0)
    # h, of B x W, for the adapter's gradient; b is an argument; sin's derivative is not needed.
    assert alone.total_bytes == CARRY
    assert alone.argument_bytes == 2 * W * 4
    every = saved_residuals(loss, *args, scale=scale)
    assert every.total_bytes > 2 * CARRY
    without_scale = saved_residuals(loss, *args, scale=scale, argnums=(0, 1, -1))
    assert alone.total_bytes < without_scale.total_bytes <= every.total_bytes
    assert saved_residuals(loss, *args, scale=scale, argnums=[-3]) == alone


@pytest.mark.parametrize(
    ("argnums", "kind", "text"),
    [
        (2, TypeError, "argnums names argument 2, and saved_residuals got 2 positional arguments"),
        ("w", TypeError, "takes argnums as a position or several, got 'w' of type str"),
        (True, TypeError, "takes argnums as a position or several, got True of type bool"),
        (1, ValueError, r"none of the arguments \(1,\) is an array of floats"),
    ],
)
def test_positions_that_are_none(argnums, kind, text):
    with pytest.raises(kind, match=text):
        saved_residuals(lambda x, n: x[n].sum(), spec(3), spec(2, dtype="int32"), argnums=argnums)


def test_the_table():
    def loss(params, x):
        return stack()(params["w"], x)

    text = str(saved_residuals(loss, {"w": spec(N, W, W)}, spec(B, W))).splitlines()
    assert text[0] == (
        "3.5 KiB kept for the backward pass in 2 values; also 7.0 KiB of arguments in 1 value"
    )
    assert text[1].split() == ["7.0", "KiB", f"float32[{N},{W},{W}]", "argument", "'params/w'"]
    assert "7 x float32[4,16]" in text[2]
    assert len({line.index("float32") - len("7 x ") * ("7 x" in line) for line in text[1:]}) == 1


def test_a_long_table_says_what_it_leaves_out():
    rows = tuple(Residual(1024, (256,), "float32", f"v{k}", "") for k in range(60))
    text = str(Residuals(rows))
    assert text.splitlines()[-1] == "  … and 10 more, 10.0 KiB"
    assert text.startswith("60.0 KiB kept for the backward pass in 60 values\n")


def test_rows_are_sorted_and_add_up():
    kept = saved_residuals(stack(), spec(N, W, W), spec(B, W))
    sizes = [row.bytes for row in kept]
    assert sizes == sorted(sizes, reverse=True)
    assert len(kept) == len(kept.rows)
    for row in kept:
        assert row.bytes == math.prod(row.shape) * row.count * jnp.dtype(row.dtype).itemsize
    assert hash(kept) == hash(saved_residuals(stack(), spec(N, W, W), spec(B, W)))


def test_nothing_of_the_arguments_size_is_allocated():
    # A petabyte: a run would fail.
    kept = saved_residuals(lambda x: jnp.sin(x).sum(), spec(2**48))
    assert kept.total_bytes == 2**50
    assert "1024.0 TiB" in str(kept)
