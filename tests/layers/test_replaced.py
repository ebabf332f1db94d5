"""`low_memory` on models as they stand: the same outputs from the same parameters, fewer bytes."""

import functools
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jaxmem
from jaxmem import NoEffectWarning

Spec = jax.ShapeDtypeStruct


def numbers(shape: tuple[int, ...], dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(0.5, 3, shape), dtype)


def held_against(plain: Any, mine: Any, *args: Any, rtol: float = 1e-5) -> Any:
    """Outputs are the same, gradients near, and less is kept; gives what was replaced."""
    chex.assert_trees_all_equal(jax.jit(mine)(*args), jax.jit(plain)(*args))
    found = jaxmem.replacements(mine, *args)
    before, after = (jaxmem.saved_residuals(f, *args).total_bytes for f in (plain, mine))
    assert after < before

    def loss(f: Any) -> Any:
        def of(*args: Any) -> Any:
            leaves = jax.tree.leaves(f(*args))
            return sum((leaf**2 * jnp.cos(jnp.arange(leaf.shape[-1]))).sum() for leaf in leaves)

        return jax.jit(jax.grad(of))

    if found.is_exact:
        near = functools.partial(chex.assert_trees_all_close, rtol=rtol, atol=1e-4)
        near(loss(mine)(*args), loss(plain)(*args))
    return found


# ---------------------------------------------------------------- what is found


@pytest.mark.slow
def test_inside_of_a_shard_map_and_around_one() -> None:
    """With the check of what varies over devices, which is jax's default, and without it."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    norm, dropout = nn.LayerNorm(), nn.Dropout(0.2, deterministic=False)
    x, key = numbers((16, 64)), jax.random.key(0)
    params = jax.tree.map(lambda leaf: leaf + 0.5, norm.init(key, x))

    def model(params: Any, x: Any) -> Any:
        normal: Any = norm.apply(params, x)
        h = jax.nn.gelu(jax.nn.relu(normal))
        return dropout.apply({}, h, rngs={"dropout": key})

    def spread(model: Any, check: bool) -> Any:
        def mean(params: Any, x: Any) -> Any:
            return jax.lax.pmean((model(params, x) ** 2).mean(), "x")

        where = {"in_specs": (spec(), spec("x")), "out_specs": spec(), "check_vma": check}
        return jax.shard_map(mean, mesh=mesh, **where)

    for check in (True, False):
        expected = jax.jit(jax.grad(spread(model, check), (0, 1)))(params, x)
        around = jaxmem.low_memory(spread(model, check))
        assert len(jaxmem.replacements(around, params, x)) == 4
        exact = jaxmem.low_memory(spread(model, check), exact=True)
        for mine in (exact, spread(jaxmem.low_memory(model, exact=True), check)):
            assert len(jaxmem.replacements(mine, params, x)) == 3
            found = jax.jit(jax.grad(mine, (0, 1)))(params, x)
            chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_policy_on_top_of_dropout_in_a_python_loop() -> None:
    dropout = nn.Dropout(0.2, deterministic=False)

    def model(weights: Any, x: Any, key: Any) -> Any:
        for i, w in enumerate(weights):
            h = jnp.tanh(x @ w)
            x = x + dropout.apply({}, h, rngs={"dropout": jax.random.fold_in(key, i)})
        return (x**2).mean()

    args = [*numbers((4, 8, 8)) / 8], numbers((4, 8)), jax.random.key(0)
    mine = jaxmem.remat_sqrt(jaxmem.low_memory(model))
    found, expected = (jax.jit(jax.grad(f))(*args) for f in (mine, model))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_policy_on_top_of_a_function_with_a_derivative_of_its_own_and_integers() -> None:
    """Whose tangents have elements of no bytes."""

    @jax.custom_jvp
    def shifted(x: Any, n: Any) -> Any:
        return jnp.sin(x) * n

    @shifted.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, n), (tangent, _) = primals, tangents
        return shifted(x, n), jnp.cos(x) * n * tangent

    def model(w: Any, x: Any, n: Any) -> Any:
        for k in range(3):
            x = shifted(x @ w[k], n)
        return (x**2).sum()

    args = numbers((3, 16, 16)), numbers((4, 16)), jnp.arange(16)
    found, expected = (jax.grad(f)(*args) for f in (jaxmem.remat_sqrt(model), model))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-4)


def test_the_norm_of_integers_keeps_no_integers() -> None:
    """The gradient of the scale is exact for images of uint8, too."""
    norm = nn.LayerNorm()
    images = jax.random.randint(jax.random.key(0), (4, 16), 0, 256).astype(jnp.uint8)
    params = jax.tree.map(lambda leaf: leaf + 0.5, norm.init(jax.random.key(1), images))

    def loss(params: Any, images: Any) -> Any:
        normal: Any = norm.apply(params, images)
        return (normal**3).sum()

    mine = jaxmem.low_memory(loss)
    assert len(jaxmem.replacements(mine, params, images)) == 1
    found, expected = (jax.grad(f)(params, images) for f in (mine, loss))
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def written_gelu(x: Any) -> Any:
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("f", "what", "gradient"),
    [
        (jax.nn.gelu, "gelu", "approximate"),
        (functools.partial(jax.nn.gelu, approximate=False), "gelu", "approximate"),
        (written_gelu, "gelu", "approximate"),
        (lambda x: x * 0.5 * (1.0 + jax.lax.erf(x / np.sqrt(2.0))), "gelu", "approximate"),
        (jax.nn.silu, "silu", "approximate"),
        (lambda x: jax.nn.sigmoid(x) * x, "silu", "approximate"),
        (jax.nn.relu, "relu", "exact"),
    ],
    ids=["tanh", "erf", "written tanh", "written erf", "silu", "written silu", "relu"],
)
def test_activations(f: Any, what: str, gradient: str) -> None:
    def plain(x: Any) -> Any:
        return f(2 * x)

    (row,) = held_against(plain, jaxmem.low_memory(plain), numbers((3, 16)))
    assert (row.what, row.gradient, row.shape, row.count) == (what, gradient, (3, 16), 1)


@pytest.mark.parametrize("f", [jnp.tanh, jax.nn.sigmoid, jax.nn.softplus, jax.nn.elu, jax.nn.relu6])
def test_what_is_no_such_layer_is_left_alone(f: Any) -> None:
    with pytest.warns(NoEffectWarning, match="low_memory found nothing to replace in"):
        assert not jaxmem.replacements(
            jaxmem.low_memory(lambda x: f(2 * x)), Spec((3, 8), "float32")
        )


def test_what_is_called_relu_and_does_nothing_is_left() -> None:
    @jax.custom_jvp
    def model(x: Any) -> Any:
        @jax.jit
        def relu(x: Any) -> Any:
            return x

        return relu(x)

    model.defjvps(lambda tangent, out, x: tangent)
    with pytest.warns(NoEffectWarning):
        assert not jaxmem.replacements(jaxmem.low_memory(model), numbers((4, 8)))


def norm_in_float32(x: Any) -> Any:
    wide = x.astype("float32")
    mean = wide.mean(-1, keepdims=True)
    variance = ((wide - mean) ** 2).mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype)


def norm_by_var(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def rms_of_llama(x: Any) -> Any:
    variance = jnp.power(x.astype("float32"), 2).mean(-1, keepdims=True)
    return (x / jnp.sqrt(variance + 1e-6)).astype(x.dtype)


def norm_of_images(x: Any) -> Any:
    mean = x.mean((0, 1))
    variance = (x**2).mean((0, 1)) - mean**2
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


@pytest.mark.parametrize(
    ("f", "what"),
    [
        (norm_in_float32, "layer norm"),
        (norm_by_var, "layer norm"),
        (rms_of_llama, "rms norm"),
        (norm_of_images, "layer norm"),
    ],
)
def test_norms_that_are_written_out(f: Any, what: str) -> None:
    def plain(x: Any) -> Any:
        return f(2 * x)

    (row,) = held_against(plain, jaxmem.low_memory(plain), numbers((4, 6, 16)))
    assert (row.what, row.gradient) == (what, "exact")


def l2(x: Any) -> Any:
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def of_another(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(0, keepdims=True) + 1e-6)


def not_centered(x: Any) -> Any:
    return x * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def by_a_half(x: Any) -> Any:
    wide = x - x.mean(-1, keepdims=True)
    return wide * jax.lax.rsqrt((wide**2).sum(-1, keepdims=True) / 8 + 1e-6)


def gated(x: Any) -> Any:
    root = jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * (root * jnp.tanh(x))


@pytest.mark.parametrize("f", [l2, of_another, not_centered, by_a_half, gated])
def test_what_is_nearly_a_norm_is_left_alone(f: Any) -> None:
    with pytest.warns(NoEffectWarning):
        assert not jaxmem.replacements(jaxmem.low_memory(f), Spec((4, 4, 16), "float32"))


# ---------------------------------------------------------------- Flax


class Block(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, _: Any = None, train: bool = True) -> Any:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.relu(nn.Dense(32, dtype=self.dtype)(h))
        h = nn.Dropout(0.25, deterministic=not train)(h)
        h = nn.BatchNorm(not train, dtype=self.dtype)(nn.Dense(16, dtype=self.dtype)(h))
        return x + nn.RMSNorm(dtype=self.dtype)(h), None


class Stack(nn.Module):
    block: Any = Block

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = nn.scan(
            self.block,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return layers()(x, None)[0]


def applied(module: Any, variables: Any, x: Any) -> Any:
    keys = {"dropout": jax.random.key(1)}
    return module.apply(variables, x, rngs=keys, mutable=["batch_stats"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: jaxmem.low_memory(Stack)(),
        lambda: jaxmem.low_memory(Stack()),
        lambda: Stack(jaxmem.low_memory(exact=True)(Block)),
        lambda: jaxmem.remat(jaxmem.low_memory(Stack), "dots")(),
        lambda: jaxmem.low_memory(jaxmem.remat(Stack, "dots"))(),
    ],
    ids=["class", "instance", "inner class", "under a policy", "over a policy"],
)
def test_linen(make: Any) -> None:
    x, module = numbers((4, 6, 16)), make()
    variables = module.init(jax.random.key(0), x)
    plain = Stack()
    chex.assert_trees_all_equal(variables, plain.init(jax.random.key(0), x))
    found = held_against(
        functools.partial(applied, plain), functools.partial(applied, module), variables, x
    )
    assert {row.what for row in found} == {"layer norm", "rms norm", "relu", "dropout"}
    if module.block is Block:
        assert [row.what for row in found].count("layer norm") == 2
        assert all(row.count == 3 for row in found)
    assert "test_replaced.py" in found.rows[0].source


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(nnx.relu(self.batch_norm(self.up(self.norm(x)))))


@pytest.mark.parametrize(
    "make",
    [jaxmem.low_memory(Net), lambda rngs: jaxmem.low_memory(Net(rngs))],
    ids=["class", "instance"],
)
def test_nnx(make: Any) -> None:
    x = numbers((4, 6, 16))

    def ran(module: Any) -> Any:
        def loss(module: Any) -> Any:
            return (module(x) ** 2 * jnp.cos(jnp.arange(32))).sum()

        value, gradient = nnx.jit(nnx.value_and_grad(loss))(module)
        return value, gradient, nnx.state(module)

    module = make(rngs=nnx.Rngs(0))
    assert isinstance(module, Net)
    (value, gradient, state), expected = ran(module), ran(Net(nnx.Rngs(0)))
    assert value == expected[0]
    chex.assert_trees_all_close(
        jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), rtol=1e-4, atol=1e-4
    )
    plain = [v for v in jax.tree.leaves(state) if v.dtype == "float32"]
    others = [v for v in jax.tree.leaves(expected[2]) if v.dtype == "float32"]
    chex.assert_trees_all_equal(plain, others)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_strangers_model(kind: str) -> None:
    """Flax models of the `transformers` package, with small sizes and random weights."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "gpt2":
            config = transformers.GPT2Config(
                n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16,
                attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
            )  # fmt: skip
            model = transformers.FlaxGPT2LMHeadModel(config, seed=0)
        else:
            config = transformers.LlamaConfig(
                num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=64,
                num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
            )  # fmt: skip
            model = transformers.FlaxLlamaForCausalLM(config, seed=0, input_shape=(1, 16))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)))

    def plain(params: Any, tokens: Any) -> Any:
        return model(tokens, params=params).logits

    found = held_against(plain, jaxmem.low_memory(plain), model.params, tokens)
    expected = {"gpt2": ("gelu", "layer norm", 5), "llama": ("silu", "rms norm", 5)}[kind]
    what = [row.what for row in found]
    assert (what.count(expected[0]), what.count(expected[1])) == (2, expected[2])
    exact = jaxmem.low_memory(plain, exact=True)
    assert held_against(plain, exact, model.params, tokens).is_exact


# ---------------------------------------------------------------- inside of what


@pytest.mark.parametrize(
    "around",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: jax.lax.scan(lambda h, _: (f(h), None), x, None, 2)[0],
        lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda x: x, x),
        jax.vmap,
        lambda f: jaxmem.remat(
            lambda x: jax.lax.scan(lambda h, _: (f(h), None), x, None, 2)[0], "sqrt"
        ),
    ],
    ids=["plain", "jit", "checkpoint", "scan", "cond", "vmap", "policy"],
)
def test_inside_of_calls_and_loops(around: Any) -> None:
    def f(x: Any) -> Any:
        return jax.nn.relu(norm_in_float32(2 * x) * 1.5)

    plain = around(f)
    mine = jaxmem.low_memory(plain)
    x = numbers((4, 16))
    chex.assert_trees_all_equal(jax.jit(mine)(x), jax.jit(plain)(x))
    found, expected = (jax.grad(lambda x, f=f: (f(x) ** 3).sum())(x) for f in (mine, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert {row.what for row in jaxmem.replacements(mine, x)} == {"relu", "layer norm"}


def test_what_is_returned_as_well_stays() -> None:
    def plain(x: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        variance = x.var(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-6), mean, variance

    x = numbers((4, 16))
    mine = jaxmem.low_memory(plain)
    assert len(jaxmem.replacements(mine, x)) == 1
    found, expected = (
        jax.grad(lambda x, f=f: sum((y**3).sum() for y in f(x)))(x) for f in (mine, plain)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


BITS = "regelu2", "keep"


@pytest.mark.slow
def test_fit_keeps_two_bits_where_it_pays() -> None:
    @jaxmem.remat_auto
    @jaxmem.low_memory
    def model(w: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + jax.nn.gelu(norm_in_float32(h) @ w[0]) @ w[1].T, None

        return (jax.lax.scan(layer, x, w)[0] ** 2).sum()

    w, x = Spec((8, 2, 64, 256), "float32"), Spec((512, 64), "float32")
    step = jax.grad(model)
    free = jaxmem.fit(step, w, x, budget="1GiB", progress=False)
    assert free.report.required_bytes < 2**30
    budget = free.report.required_bytes * 9 // 20
    tight = jaxmem.fit(step, w, x, budget=budget, cost="flops", progress=False)
    assert tight.report.required_bytes <= budget
    # It is a value like any other, and kept in place of what it was made of.
    (kept,) = {row.bytes for row in tight.explain().rows if (row.name, row.decision) == BITS}
    assert kept == 512 * 256 // 4


# ---------------------------------------------------------------- what is said


def test_the_table() -> None:
    def model(x: Any) -> Any:
        return jax.nn.gelu(jax.nn.relu(2 * x))

    text = str(jaxmem.replacements(jaxmem.low_memory(model), Spec((2, 8), "bfloat16")))
    assert text.startswith("2 layers replaced by one that keeps less; 1 with an approximate grad")
    assert "gelu by regelu2" in text
    assert "bfloat16[2,8]" in text
    assert "test_replaced.py" in text


def test_a_gradient_is_too_late() -> None:
    step = jaxmem.low_memory(jax.grad(lambda x: jax.nn.relu(2 * x).sum()))
    with pytest.warns(NoEffectWarning, match="takes gradients itself"):
        step(jnp.ones(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda jaxmem: jaxmem.low_memory(3), "takes a function, a Flax module class"),
        (lambda jaxmem: jaxmem.low_memory(dict), "dict is a class of another kind"),
        (lambda jaxmem: jaxmem.low_memory(len, methods="f"), "methods= goes with a Flax module"),
        (lambda jaxmem: jaxmem.low_memory(Block, methods="nothing"), "no method 'nothing'"),
        (lambda jaxmem: jaxmem.low_memory(len, exact=1), "exact must be True or False"),
        (lambda jaxmem: jaxmem.replacements(3), "pass replacements\\(fn, \\*args\\)"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(jaxmem)
