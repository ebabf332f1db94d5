"""`jaxmem.mixed_precision`: numbers of a cast ahead, gradients in float32, and casts made twice."""

import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers.compiled import compiled
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem

mixed_precision: Any = jaxmem.mixed_precision
N, D, F, B = 6, 8, 16, 5
HALF = jnp.bfloat16
Half = pytest.mark.parametrize("half", ["bfloat16", "float16"])


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) * 0.3


PARAMS = {
    "in": normal(0, D, D),
    "layers": {"scale": normal(1, N, D) + 1, "up": normal(2, N, D, F), "down": normal(3, N, F, D)},
}
X = normal(4, B, D)


def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
    return h + jax.nn.gelu(h * p["scale"] @ p["up"]) @ p["down"], None


def scanned(params: Any, x: jax.Array) -> jax.Array:
    h, _ = jax.lax.scan(layer, x @ params["in"], params["layers"])
    return (h @ params["in"].T).astype(jnp.float32).var()


def unrolled(params: Any, x: jax.Array) -> jax.Array:
    h = x @ params["in"]
    for k in range(N):
        h, _ = layer(h, jax.tree.map(lambda w, k=k: w[k], params["layers"]))
    return (h @ params["in"].T).astype(jnp.float32).var()


def checkpointed(params: Any, x: jax.Array) -> jax.Array:
    again = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
    h, _ = jax.lax.scan(again, x @ params["in"], params["layers"])
    return (h @ params["in"].T).astype(jnp.float32).var()


def indexed(params: Any, x: jax.Array) -> jax.Array:
    """The stack is closed over, and a layer of it read by its number."""

    def one(k: Any, h: jax.Array) -> jax.Array:
        return layer(h, jax.tree.map(lambda w: w[k], params["layers"]))[0]

    h = jax.lax.fori_loop(0, N, one, x @ params["in"])
    return (h @ params["in"].T).astype(jnp.float32).var()


def jitted(params: Any, x: jax.Array) -> jax.Array:
    """In calls, conditions and nested scans."""

    def four(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return jax.lax.scan(jax.jit(layer), h, p)

    split = jax.tree.map(lambda w: w.reshape(2, N // 2, *w.shape[1:]), params["layers"])
    h, _ = jax.lax.scan(four, x @ params["in"], split)
    h = jax.lax.cond(h.sum() > -1e3, lambda w: h @ w, lambda w: h, params["in"].T)
    return h.astype(jnp.float32).var()


MODELS = {f.__name__: f for f in (scanned, unrolled, checkpointed, indexed, jitted)}
Models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def ahead(model: Any, half: Any) -> Any:
    def run(params: Any, x: jax.Array) -> jax.Array:
        return model(*jax.tree.map(lambda w: w.astype(half), (params, x)))

    return run


@Models
@Half
def test_numbers_are_those_of_a_cast_ahead(model: Any, half: str):
    mixed = mixed_precision(model, half)
    expected, plain = jax.jit(jax.value_and_grad(ahead(model, half)))(PARAMS, X)
    value, gradients = jax.jit(jax.value_and_grad(mixed))(PARAMS, X)
    np.testing.assert_array_equal(value, expected)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}
    # Those of parameters that one product reads are rounded once less, and else the same.
    for name in ("up", "down"):
        own, other = gradients["layers"][name], plain["layers"][name]
        error = jnp.linalg.norm(own - other) / jnp.linalg.norm(own)
        assert error < 2.0 ** -(9 if half == "float16" else 6)
        assert np.any(own != own.astype(half))
    chex.assert_trees_all_close(gradients, plain, rtol=0.05, atol=0.02)


def test_gradients_are_nearer_to_those_of_float32():
    _, exact = jax.value_and_grad(scanned)(PARAMS, X)

    def error(gradients: Any) -> float:
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True)
        return sum(float(((a - b) ** 2).sum()) for a, b in pairs)

    own = jax.jit(jax.grad(mixed_precision(scanned)))(PARAMS, X)
    assert error(own) <= error(jax.jit(jax.grad(ahead(scanned, HALF)))(PARAMS, X))


@pytest.mark.parametrize("name", ["remat_full", "remat_sqrt", "remat_dots", "remat_revolve"])
@pytest.mark.parametrize("outside", [True, False])
def test_under_every_policy_in_either_order(name: str, outside: bool):
    policy = getattr(jaxmem, name)
    policy = policy(slots=3) if name == "remat_revolve" else policy
    both = policy(mixed_precision(scanned)) if outside else mixed_precision(policy(scanned))
    expected = jax.jit(jax.value_and_grad(mixed_precision(scanned)))(PARAMS, X)
    found = jax.jit(jax.value_and_grad(both))(PARAMS, X)
    chex.assert_trees_all_close(found, expected, rtol=2e-2, atol=1e-3)
    assert len(jaxmem.stacks(both, PARAMS, X)) == 1


@Models
def test_no_cast_of_a_parameter_is_kept(model: Any):
    """Of the narrow values that jax keeps none has as many numbers as a layer's matrix."""
    batch = 3  # fewer rows than a matrix has

    def kept(fn: Any) -> list[Any]:
        x = X[:batch]
        _, vjp = jax.eval_shape(lambda p: jax.vjp(lambda p: fn(p, x), p), PARAMS)
        return [leaf for leaf in jax.tree.leaves(vjp) if leaf.dtype == HALF]

    def matrices(leaves: list[Any]) -> list[Any]:
        return [leaf for leaf in leaves if leaf.shape[-2:] in ((D, F), (F, D))]

    assert matrices(kept(ahead(model, HALF)))
    assert not matrices(kept(mixed_precision(model)))


@pytest.mark.slow
@pytest.mark.parametrize("outside", [True, False])
def test_fit_plans_layers_that_cast(outside: bool):
    auto = jaxmem.remat_auto
    model = auto(mixed_precision(scanned)) if outside else mixed_precision(auto(scanned))
    step, (params, _) = jax.grad(model), specs(jnp.float32)
    x = jax.ShapeDtypeStruct((8192, WIDE), jnp.float32)
    with jaxmem.use_policy("none"):
        report = jaxmem.memory_report(step, params, x)
    budget = report.required_bytes - 3 * report.temp_bytes // 10
    fitted = jaxmem.fit(step, params, x, budget=budget, progress=False)
    assert fitted.report.required_bytes <= budget


@pytest.mark.slow
def test_vmap_and_forward_mode():
    mixed = mixed_precision(scanned)
    each = jax.vmap(jax.value_and_grad(mixed), (None, 0))(PARAMS, jnp.stack([X, X * 2]))
    for k, x in enumerate((X, X * 2)):
        own = jax.tree.map(lambda leaf, k=k: leaf[k], each)
        chex.assert_trees_all_close(own, jax.value_and_grad(mixed)(PARAMS, x), rtol=5e-2, atol=1e-2)
    value, tangent = jax.jvp(lambda p: mixed(p, X), (PARAMS,), (PARAMS,))
    gradients = jax.grad(mixed)(PARAMS, X)
    product = optax.tree.vdot(gradients, PARAMS)
    assert (value.dtype, tangent.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(tangent, product, rtol=5e-2)
    assert jnp.isfinite(jax.jvp(jax.grad(lambda x: mixed(PARAMS, x)), (X,), (X,))[1]).all()


@pytest.mark.slow
def test_with_microbatches_and_updates():
    mixed, optimizer = mixed_precision(scanned), optax.adamw(1e-2)

    def mean(params: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(layer, x @ params["in"], params["layers"])
        return (h.astype(jnp.float32) ** 2).mean()

    mixed = mixed_precision(mean)
    x = jnp.concatenate([X[:4]] * 2)
    value, gradients = jax.jit(jax.value_and_grad(mixed))(PARAMS, x)
    parts = jax.jit(jaxmem.value_and_grad(mixed, microbatches=4))(PARAMS, x)
    chex.assert_trees_all_close(parts, (value, gradients), rtol=2e-2, atol=1e-3)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(parts)} == {"float32"}

    state = optimizer.init(PARAMS)
    updates, _ = optimizer.update(gradients, state, PARAMS)
    for microbatches in (None, 2):
        step: Any = jaxmem.value_and_update(mixed, optimizer, microbatches=microbatches)
        _, params, _ = jax.jit(step)(PARAMS, state, x)
        expected = optax.apply_updates(PARAMS, updates)
        chex.assert_trees_all_close(params, expected, rtol=1e-2, atol=2e-3)
        plan = {leaf.path: leaf.in_backward for leaf in step.explain(PARAMS, state, x).leaves}
        assert plan["layers/up"]
        assert plan["layers/down"]


def test_over_a_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {
        "in": P(),
        "layers": {"scale": P(), "up": P(None, None, "model"), "down": P(None, "model")},
    }
    params = jax.tree.map(
        lambda w, spec: jax.device_put(w, NamedSharding(mesh, spec)), PARAMS, specs
    )
    x = jax.device_put(jnp.concatenate([X[:4]] * 2), NamedSharding(mesh, P("data")))
    mixed = jax.jit(jax.value_and_grad(mixed_precision(scanned)))
    expected = mixed(PARAMS, jnp.concatenate([X[:4]] * 2))
    chex.assert_trees_all_close(mixed(params, x), expected, rtol=5e-2, atol=1e-2)

    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def sharded(params: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(layer, x @ params["in"], params["layers"])
        return jax.lax.pmean((h.astype(jnp.float32) ** 2).mean(), "data")

    def alone(params: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(layer, x @ params["in"], params["layers"])
        return (h.astype(jnp.float32) ** 2).mean()

    found = jax.jit(jax.value_and_grad(mixed_precision(sharded)))(PARAMS, x)
    expected = jax.jit(jax.value_and_grad(mixed_precision(alone)))(PARAMS, x)
    chex.assert_trees_all_close(found, expected, rtol=2e-2, atol=1e-3)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> Any:
        y = nn.relu(nn.Dense(F)(nn.LayerNorm()(x)))
        return x + nn.Dense(D)(y), None


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(D)(x))
        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=N)
        x, _ = scan()(x, None)
        return nn.Dropout(0.5, deterministic=not train)(x)


def of_linen(module: nn.Module) -> tuple[Any, Any, Any]:
    """Loss, gradients and new batch statistics of a training step."""
    variables = module.init(jax.random.key(0), X)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"float32"}

    def loss(params: Any) -> Any:
        out, state = module.apply(
            {**variables, "params": params},
            X,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(1)},
        )
        return (out.astype(jnp.float32) ** 2).mean(), (out.dtype, state)

    params = variables["params"]
    value, vjp, (dtype, state) = jax.vjp(loss, params, has_aux=True)
    (gradients,) = vjp(jnp.ones_like(value))
    assert dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves((gradients, state))} == {"float32"}
    return value, gradients, state


@pytest.mark.slow
def test_linen_classes_instances_and_methods():
    plain = of_linen(Encoder())
    expected = of_linen(mixed_precision(Encoder)())
    chex.assert_trees_all_close(expected, plain, rtol=0.2, atol=0.05)
    assert expected[0] != plain[0]

    for module in (
        mixed_precision(Encoder()),
        jaxmem.remat_sqrt(mixed_precision(Encoder))(),
        mixed_precision(jaxmem.remat_sqrt(Encoder))(),
    ):
        chex.assert_trees_all_close(of_linen(module), expected, rtol=2e-2, atol=1e-3)


def test_linen_blocks_stacked_by_the_library():
    block = mixed_precision(Block, output_dtype=None)
    stack = jaxmem.linen.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=N,
        remat="full",
    )()
    x = X.astype(HALF)
    variables = stack.init(jax.random.key(0), X, None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"float32"}
    out, _ = stack.apply(variables, x, None)
    gradients = jax.grad(lambda v: stack.apply(v, x, None)[0].astype(jnp.float32).sum())(variables)
    assert out.dtype == HALF
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients)} == {"float32"}


def test_nnx_modules_functions_and_state():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(D, D, rngs=rngs)
            self.norm = nnx.BatchNorm(D, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(self.linear(x))

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return (model(x) ** 2 * jnp.arange(D, dtype=x.dtype)).mean()

    plain = Model(nnx.Rngs(0))
    plain(X)
    found = []
    for make in (
        lambda: (mixed_precision(Model)(nnx.Rngs(0)), loss),
        lambda: (mixed_precision(Model(nnx.Rngs(0))), loss),
        lambda: (Model(nnx.Rngs(0)), mixed_precision(loss)),
        lambda: (mixed_precision(jaxmem.remat_dots(Model))(nnx.Rngs(0)), loss),
    ):
        model, fn = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jaxmem.NoStackWarning)
            value, gradients = nnx.value_and_grad(fn)(model, X)
        assert value.dtype == jnp.float32
        assert model.norm.mean[...].dtype == model.linear.kernel[...].dtype == jnp.float32
        leaves = jax.tree.leaves(gradients)
        assert {leaf.dtype.name for leaf in leaves} == {"float32"}
        np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=1e-3)
        found.append(value)
    np.testing.assert_allclose(found, found[0], rtol=2e-2)


def test_what_is_kept_and_what_is_no_number_stays():
    seen: dict[str, Any] = {}

    @mixed_precision(keep=lambda path: "scale" in path, output_dtype=None)
    def fn(params: Any, ids: jax.Array, key: jax.Array, mode: str, *, flag: bool) -> Any:
        seen.update(jax.tree.map(lambda w: w.dtype.name, params), ids=ids.dtype.name, mode=mode)
        return {"out": params["w"] * 2, "ids": ids, "mode": mode, "flag": flag, "key": key}

    params = {"w": jnp.ones(3), "scale": jnp.ones(3), "np": np.ones(3, np.float32)}
    out = fn(params, jnp.arange(3), jax.random.key(0), "train", flag=True)
    assert seen == {
        "w": "bfloat16", "scale": "float32", "np": "bfloat16", "ids": "int32", "mode": "train",
    }  # fmt: skip
    assert (out["out"].dtype, out["ids"].dtype) == (HALF, jnp.int32)
    assert (out["mode"], out["flag"]) == ("train", True)


def test_parameters_of_64_bits_and_other_widths():
    with jax.enable_x64(True):
        w = jnp.full(3, 1 / 3, jnp.float64)
        fn = mixed_precision(lambda w, x: (w * x).sum(), output_dtype="float64")
        value, gradient = jax.value_and_grad(fn)(w, jnp.ones(3, jnp.float16))
    assert (value.dtype, gradient.dtype) == (jnp.float64, jnp.float64)


def test_one_inside_another():
    """The inner one decides what it computes in."""
    inner = mixed_precision(lambda w, x: w @ x, "float16", output_dtype=None)
    seen: list[Any] = []

    @mixed_precision(output_dtype=None)
    def outer(w: jax.Array, x: jax.Array) -> jax.Array:
        out = inner(w, x)
        seen.append(out.dtype)
        return out.astype(x.dtype) * 2

    w, x = normal(0, D, D), normal(1, D)
    out, gradient = jax.value_and_grad(lambda w: outer(w, x).astype(jnp.float32).sum())(w)
    assert (seen[0], gradient.dtype) == (jnp.float16, jnp.float32)
    np.testing.assert_allclose(out, 2 * (w @ x).sum(), rtol=0.1, atol=0.05)
    same = mixed_precision(mixed_precision(scanned))
    assert same(PARAMS, X) == mixed_precision(scanned)(PARAMS, X)


def test_a_parameter_that_is_returned_is_as_it_was():
    fn = mixed_precision(lambda params, x: (params, x.sum()))
    params, _ = fn(PARAMS, X)
    chex.assert_trees_all_equal(params, PARAMS)


def test_policies_in_the_words_of_jmp():
    Precision = jaxmem.Precision
    words = "params=float32,compute=bfloat16,output=float32"
    assert Precision.parse(words) == Precision.parse("p=f32,c=bf16,o=full") == Precision()
    assert Precision.parse("float16") == Precision(compute_dtype=jnp.float16)
    assert Precision.parse(words + ",reductions=float32").reductions == jnp.float32
    assert Precision.parse("compute=bfloat16,output=none").output_dtype is None
    own = type("Policy", (), {"param_dtype": jnp.float32, "compute_dtype": jnp.float16})
    own.output_dtype = jnp.float16  # pyright: ignore[reportAttributeAccessIssue]
    assert Precision.parse(own()) == Precision("float32", "float16", "float16")
    assert hash(Precision()) == hash(Precision(jnp.float32))
    out = mixed_precision(lambda x: x * 2, words)(jnp.ones(2))
    assert out.dtype == jnp.float32
    assert mixed_precision("float16")(lambda x: x * 2)(jnp.ones(2)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("policy", "kind", "message"),
    [
        (
            "bfloat61",
            TypeError,
            "compute_dtype must be a floating-point dtype.*'bfloat61' .did you",
        ),
        ("int8", ValueError, "compute_dtype must be a floating-point dtype.*got int8"),
        ("complex64", ValueError, "got complex64"),
        ("half", ValueError, "another type on each kind of accelerator; say bfloat16 or float16"),
        ("float8_e4m3fn", ValueError, "8 bits or fewer.*flax.linen.fp8_ops"),
        ("weights=float32", ValueError, "'weights' is no part of a policy"),
        ("compute=bfloat16,c=float16", ValueError, "gives c twice"),
        (3, TypeError, "compute_dtype must be a floating-point dtype"),
        ("compute=none", TypeError, "compute_dtype must be a floating-point dtype"),
    ],
)
def test_bad_policies(policy: Any, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        mixed_precision(scanned, policy)


def test_none_is_no_dtype():
    """To numpy it is float64."""
    with pytest.raises(TypeError, match="param_dtype must be a floating-point dtype.*got None"):
        jaxmem.Precision(param_dtype=None)  # pyright: ignore[reportArgumentType]


def test_bad_targets():
    with pytest.raises(TypeError, match="takes a function, a Flax module class.*got a dict"):
        mixed_precision({"w": 1})
    with pytest.raises(TypeError, match="got class int"):
        mixed_precision(int)
    with pytest.raises(TypeError, match="methods= goes with a Flax module"):
        mixed_precision(scanned, methods="run")
    with pytest.raises(TypeError, match="Encoder has no method 'encode'"):
        mixed_precision(Encoder, methods="encode")
    with pytest.raises(TypeError, match="keep takes a function from the path"):
        mixed_precision(scanned, keep="scale")
    with pytest.raises(TypeError, match="keep must return True or False.*'0/in'"):
        mixed_precision(scanned, keep=lambda path: None)(PARAMS, X)


def test_what_is_warned_of():
    cases = [
        (lambda: mixed_precision(lambda k: k + 1)(jnp.arange(3)), "no floating-point array"),
        (lambda: mixed_precision(scanned, keep=lambda p: False)(PARAMS, X), "chooses no argument"),
        (lambda: mixed_precision(jax.grad(scanned))(PARAMS, X), "takes gradients itself"),
        (
            lambda: mixed_precision(lambda w, z: w.sum())(X, jnp.ones(2, jnp.complex64)),
            "1 .complex64. .* stays as it is",
        ),
        (
            lambda: jax.grad(lambda w: mixed_precision(lambda x: (w @ x).sum())(X[0]))(X),
            "closes over an array float32",
        ),
        (
            lambda: mixed_precision(nn.Dense)(2, param_dtype=HALF).init_with_output(
                jax.random.key(0), X
            ),
            None,
        ),
    ]
    for run, message in cases:
        if message is None:
            run()
            continue
        with pytest.warns(jaxmem.JaxmemWarning, match=message):
            run()
    dense = mixed_precision(nn.Dense)(2, param_dtype=HALF)
    variables = dense.init(jax.random.key(0), X)
    with pytest.warns(jaxmem.JaxmemWarning, match="parameter bias of .* is bfloat16, and param"):
        dense.apply(variables, X)


def attention(params: Any, x: jax.Array) -> jax.Array:
    """A softmax and a norm written by hand, in a loop."""

    def one(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        q = h @ w
        h = h + jax.nn.softmax(q @ q.T * 8) @ q
        centred = h - h.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6), None

    h, _ = jax.lax.scan(one, x, params)
    return jax.nn.logsumexp(h * 5)


@pytest.mark.slow
def test_reductions_in_float32():
    params, x = normal(0, N, D, D), normal(1, B, D) * 8
    exact = attention(params, x)
    plain, wide = (mixed_precision(attention, reductions=r) for r in (None, "float32"))

    def error(fn: Any) -> float:
        draws = [(normal(2 * k, N, D, D), normal(2 * k + 1, B, D) * 8) for k in range(10)]
        return sum(abs(float(fn(*draw) - attention(*draw))) for draw in draws)

    assert error(wide) < 0.7 * error(plain)
    gradient = jax.jit(jax.grad(wide))(params, x)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(wide(params, x), exact, rtol=2e-2)
    # No narrow exponential is left, and products stay narrow.
    text = str(jax.make_jaxpr(wide)(params, x))
    assert ":bf16" in text
    lines = [line for line in text.splitlines() if " = exp " in line or "= reduce_sum" in line]
    assert lines
    assert all(":f32" in line for line in lines)
    assert all(":bf16" in line for line in text.splitlines() if "= dot_general" in line)

    # In the type of the function's own results, and where something is wider already.
    total = mixed_precision(lambda x: x.sum(), output_dtype=None, reductions="float32")
    assert total(jnp.ones(3)).dtype == HALF
    third = mixed_precision(lambda x: jnp.mean(x), reductions="float32")
    np.testing.assert_allclose(third(jnp.array([1.0, 0.0, 0.0])), 1 / 3, rtol=1e-6)


# ---------------------------------------------------------------- memory

DEEP, WIDE = 16, 1024


def specs(dtype: Any) -> tuple[Any, Any]:
    def of(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layers = {
        "scale": of(DEEP, WIDE),
        "up": of(DEEP, WIDE, 4 * WIDE),
        "down": of(DEEP, 4 * WIDE, WIDE),
    }
    return {"in": of(WIDE, WIDE), "layers": layers}, of(128, WIDE)


P_BYTES = 4 * DEEP * 8 * WIDE * WIDE
LAYER = P_BYTES // DEEP // 2  # of one layer in 16 bits


@pytest.mark.parametrize("where", ["gpu", "tpu"])
@pytest.mark.parametrize("policy", [None, pytest.param("sqrt", marks=pytest.mark.slow)])
def test_no_copy_of_all_layers_is_made(where: str, policy: str | None):
    """At most two layers more than if parameters, and gradients, were passed in 16 bits."""

    def under(fn: Any) -> Any:
        return jax.grad(fn if policy is None else jaxmem.remat(fn, policy))

    model = mixed_precision(scanned)
    needed = compiled(where, under(model), *specs(jnp.float32)).required
    ideal = compiled(where, under(scanned), *specs(HALF)).required + P_BYTES
    copied = compiled(where, under(ahead(scanned, HALF)), *specs(jnp.float32)).required
    assert needed <= ideal + 2 * LAYER
    assert copied >= needed + 0.9 * DEEP * LAYER


@pytest.mark.parametrize("where", ["gpu", "tpu"])
def test_devices_add_up_gradients_in_float32(where: str):
    def mean(w: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)
        return (h.astype(jnp.float32) ** 2).mean()

    name = {"gpu": "h100-80g", "tpu": "v5e-16g"}[where]
    target = jaxmem.target(name, devices=8)
    mesh = target.mesh({"data": 8})

    def of(*shape: int, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    args = of(8, 256, 256, spec=P()), of(512, 256, spec=P("data"))
    for fn, dtype in ((mixed_precision(mean), "f32"), (ahead(mean, HALF), "bf16")):
        text = compiled(where, jax.grad(fn), *args, target=target, mesh={"data": 8}).hlo
        lines = [line for line in text.splitlines() if " all-reduce" in line and "256,256]" in line]
        assert lines
        assert all(f"= {dtype}[" in line for line in lines if "all-reduce(" in line)
