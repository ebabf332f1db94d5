"""Small problems, one for each thing that a layer stack may hold.

Every problem is a plain function whose stack is a `lax.scan`, as a reader of
jax's documentation would write it; the tests hold a decorated copy of it
against itself.  Sizes are tiny, and differ from axis to axis so that a
transposed axis cannot go unseen.  Each layer names one value "kept", so that
policies of names apply to all of them.

Shapes: B batch, T positions, D width, F inner width, K classes, N layers.
"""

import dataclasses
import functools
import platform
from collections.abc import Callable
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

# ---------------------------------------------------------------- types

Loss = Callable[[Any, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loss and where to evaluate it.

    Attributes:
      loss: ``(params, inputs) -> (scalar, outputs)``; both arguments are pytrees.
      params: pytree of floating point arrays.
      inputs: pytree of arrays, among them integers and random keys.
    """

    loss: Loss
    params: Any
    inputs: Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A problem of any depth: ``model.make(n, key)`` has n layers."""

    name: str
    make: Callable[[int, jax.Array], Problem]


MODELS: dict[str, Model] = {}


def _model(make: Callable[[int, jax.Array], Problem]) -> Callable[[int, jax.Array], Problem]:
    MODELS[make.__name__] = Model(make.__name__, make)
    return make


# ---------------------------------------------------------------- API

B, T, D, F = 3, 4, 6, 5


def differentiate(loss: Loss) -> Callable[[Any, Any], tuple[Any, Any]]:
    """``(params, inputs) -> ((scalar, outputs), gradients)``, of all that is floating point."""

    def run(params: Any, inputs: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten((params, inputs))
        floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

        def of_floats(floats: list[Any]) -> tuple[Any, Any]:
            given = iter(floats)
            full = [next(given) if f else leaf for f, leaf in zip(floating, leaves, strict=True)]
            return loss(*jax.tree.unflatten(tree, full))

        floats = [leaf for f, leaf in zip(floating, leaves, strict=True) if f]
        return jax.value_and_grad(of_floats, has_aux=True)(floats)

    return run


# On the CPU the same operations give the same bits wherever they stand in a
# program, if XLA is kept from choosing between several ways to do one of them
# by what stands around it:
#  * a product and a sum that end up in one fused loop become one multiply-add
#    with a single rounding, where the processor has such an instruction: AVX,
#    the newest instruction set of x86 without it, rules that out;
#  * a matrix product outside of loops may go to a threaded library, which has
#    multiply-adds of its own, and inside of loops does not;
#  * the chain bfloat16 -> float32 -> bfloat16 loses its middle, and with it a
#    rounding, where both conversions are fused;
#  * a convolution goes to the library or is spelled out in loops, depending on
#    the layouts around it.
# Level 0 changes no number here; it compiles in half the time.
EXACT: dict[str, Any] = {
    "xla_cpu_max_isa": "AVX",
    "xla_cpu_multi_thread_eigen": False,
    "xla_allow_excess_precision": False,
    "xla_disable_hlo_passes": "convolution-canonicalization",
    "xla_backend_optimization_level": 0,
}
# Other processors have a multiply-add in their first instruction set.
CAN_BE_EXACT = platform.machine().lower() in ("x86_64", "amd64")

exact_jit = functools.partial(jax.jit, compiler_options=EXACT)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structures, types and bits (where the processor allows, see `EXACT`)."""
    if not CAN_BE_EXACT:
        return assert_close(actual, expected)
    actual, expected = _plain(actual), _plain(expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(actual, expected)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Equal structures and types, and each array within a relative distance, in norm."""
    actual, expected = _plain(actual), _plain(expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, b), a in zip(leaves, jax.tree.leaves(actual), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        distance, size = np.linalg.norm(a - b), np.linalg.norm(b)
        assert distance <= tolerance * size, (
            f"{jax.tree_util.keystr(path)}: {distance / size if size else distance:.1e} apart"
        )


def _plain(tree: Any) -> Any:
    """numpy arrays; random keys as their words."""

    def words(leaf: Any) -> Any:
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(words, tree)


# ---------------------------------------------------------------- parts


def _named(x: Any) -> Any:
    return checkpoint_name(x, "kept")


def _normal(key: jax.Array, *shape: int, scale: float = 0.5) -> jax.Array:
    return scale * jax.random.normal(key, shape)


def _affine(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return x @ w + jnp.broadcast_to(b, (*x.shape[:-1], b.shape[-1]))


def _layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
    return x * jnp.broadcast_to(scale, x.shape)


def _dense_layers(n: int, key: jax.Array, width: int = D) -> dict[str, jax.Array]:
    w, b = jax.random.split(key)
    return {"w": _normal(w, n, width, width), "b": _normal(b, n, width)}


def _residual(h: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    return h + jnp.tanh(_named(_affine(h, p["w"], p["b"])))


def _energy(*outs: jax.Array) -> jax.Array:
    """A scalar in which every element of every output has another weight."""
    total = jnp.float32(0)
    for out in outs:
        weight = jnp.linspace(0.5, 1.5, out.size).reshape(out.shape)
        total = total + jnp.mean(weight * jnp.square(out.astype(jnp.float32)))
    return total


# ---------------------------------------------------------------- models


@_model
def mlp(n: int, key: jax.Array) -> Problem:
    """Residual layers between an embedding and a head."""
    k = jax.random.split(key, 4)
    params = {
        "embed": _normal(k[0], F, D),
        "layers": _dense_layers(n, k[1]),
        "head": _normal(k[2], D, 2),
    }

    def loss(params: Any, x: Any) -> Any:
        h, _ = lax.scan(lambda h, p: (_residual(h, p), None), x @ params["embed"], params["layers"])
        out = h @ params["head"]
        return _energy(out), out

    return Problem(loss, params, _normal(k[3], B, F))


@_model
def transformer(n: int, key: jax.Array) -> Problem:
    """Pre-norm attention and MLP, with dropout from keys that are scanned over."""
    k = jax.random.split(key, 7)
    heads, inner = 2, 8
    params = {
        "norm1": 1 + _normal(k[0], n, D),
        "qkv": _normal(k[1], n, D, 3, heads, D // heads),
        "out": _normal(k[2], n, heads, D // heads, D),
        "norm2": 1 + _normal(k[3], n, D),
        "up": _normal(k[4], n, D, inner),
        "down": _normal(k[5], n, inner, D),
    }
    inputs = {"x": _normal(k[6], 2, T, D), "keys": jax.random.split(k[6], (n, 2))}

    def dropout(key: Any, x: Any) -> Any:
        keep = jax.random.bernoulli(key, 0.8, x.shape)
        return jnp.where(keep, x / 0.8, jnp.zeros_like(x))

    def layer(x: Any, scanned: Any) -> Any:
        p, keys = scanned
        q, k, v = jnp.moveaxis(
            jnp.einsum("btd,dchk->btchk", _layer_norm(x, p["norm1"]), p["qkv"]), 2, 0
        )
        scores = jnp.einsum("bthk,bshk->bhts", q, k)
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), scores.shape)
        weights = jax.nn.softmax(jnp.where(causal, scores, jnp.full_like(scores, -1e9)))
        mixed = jnp.einsum("bhts,bshk->bthk", dropout(keys[0], weights), v)
        x = x + _named(jnp.einsum("bthk,hkd->btd", mixed, p["out"]))
        hidden = jax.nn.gelu(_layer_norm(x, p["norm2"]) @ p["up"])
        return x + dropout(keys[1], hidden @ p["down"]), None

    def loss(params: Any, inputs: Any) -> Any:
        out, _ = lax.scan(layer, inputs["x"], (params, inputs["keys"]))
        return _energy(out), out

    return Problem(loss, params, inputs)


@_model
def conv_batch_norm(n: int, key: jax.Array) -> Problem:
    """Convolution and batch norm; running statistics come in as xs and go out as ys."""
    k = jax.random.split(key, 3)
    channels = 3
    params = {
        "kernel": _normal(k[0], n, 2, 2, channels, channels),
        "scale": 1 + _normal(k[1], n, channels),
    }
    stats = {"mean": jnp.zeros((n, channels)), "var": jnp.ones((n, channels))}
    inputs = {"x": _normal(k[2], 2, 4, 5, channels), "stats": stats, "batches": jnp.int32(3)}

    def layer(carry: Any, scanned: Any) -> Any:
        x, batches = carry
        p, stats = scanned
        h = _named(
            lax.conv_general_dilated(
                x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
        mean, var = h.mean((0, 1, 2)), h.var((0, 1, 2))
        new = jax.tree.map(
            lambda old, now: 0.9 * old + 0.1 * lax.stop_gradient(now),
            stats,
            {"mean": mean, "var": var},
        )
        h = (h - jnp.broadcast_to(mean, h.shape)) * jnp.broadcast_to(
            p["scale"] * lax.rsqrt(var + 1e-5), h.shape
        )
        return (x + jax.nn.relu(h), batches + 1), new

    def loss(params: Any, inputs: Any) -> Any:
        init = inputs["x"], inputs["batches"]
        (out, batches), stats = lax.scan(layer, init, (params, lax.stop_gradient(inputs["stats"])))
        return _energy(out), (out, batches, stats)

    return Problem(loss, params, inputs)


@_model
def rnn(n: int, key: jax.Array) -> Problem:
    """A recurrent cell: the weights are constants of the scan, its xs are time."""
    k = jax.random.split(key, 4)
    params = {"in": _normal(k[0], F, D), "rec": _normal(k[1], D, D), "b": _normal(k[2], D)}

    def loss(params: Any, xs: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(_named(x @ params["in"] + _affine(h, params["rec"], params["b"])))
            return h, h

        last, hs = lax.scan(cell, jnp.zeros((B, D)), xs)
        return _energy(last, hs), (last, hs)

    return Problem(loss, params, _normal(k[3], n, B, F))


@_model
def tuple_carry(n: int, key: jax.Array) -> Problem:
    """A carry of tuples and dicts; one part of it is read by others and has no gradient."""
    k = jax.random.split(key, 4)
    params = {"gate": _normal(k[0], n, D, 2, D), "cell": _normal(k[1], n, D)}
    inputs = {"h": _normal(k[2], B, D), "c": _normal(k[3], B, D)}

    def layer(carry: Any, p: Any) -> Any:
        (h, rest) = carry
        forget, update = jnp.moveaxis(_named(jnp.einsum("bd,dgf->bgf", h, p["gate"])), 1, 0)
        c = jax.nn.sigmoid(forget) * rest["c"] + jnp.tanh(update)
        seen = lax.stop_gradient(jnp.maximum(rest["seen"], jnp.abs(c).max(0)))
        h = jnp.tanh(c) + jnp.broadcast_to(p["cell"] * seen, h.shape)
        return (h, {"c": c, "seen": seen}), None

    def loss(params: Any, inputs: Any) -> Any:
        init = inputs["h"], {"c": inputs["c"], "seen": jnp.zeros(D)}
        (h, rest), _ = lax.scan(layer, init, params)
        return _energy(h, rest["c"]), (h, rest)

    return Problem(loss, params, inputs)


@_model
def int_carry(n: int, key: jax.Array) -> Problem:
    """A counter in the carry, whole numbers among xs and ys."""
    k = jax.random.split(key, 3)
    inputs = {
        "x": _normal(k[0], B, D),
        "shift": jax.random.randint(k[1], (n,), 0, D),
        "count": jnp.int32(0),
    }

    def layer(carry: Any, scanned: Any) -> Any:
        h, count = carry
        p, shift = scanned
        h = jnp.roll(_residual(h, p), shift, axis=-1)
        h = h * (1 + 0.1 * (count % 3).astype(h.dtype))
        return (h, count + shift), (count * 2, h.mean())

    def loss(params: Any, inputs: Any) -> Any:
        init = inputs["x"], inputs["count"]
        (h, count), (doubled, means) = lax.scan(layer, init, (params, inputs["shift"]))
        return _energy(h, means), (h, count, doubled, means)

    return Problem(loss, _dense_layers(n, k[2]), inputs)


@_model
def sown(n: int, key: jax.Array) -> Problem:
    """Each layer hands out its activations, which are penalised, and a statistic, which is not."""
    k = jax.random.split(key)

    def layer(h: Any, p: Any) -> Any:
        h = _residual(h, p)
        return h, {"act": jnp.tanh(h), "norm": jnp.square(h).sum()}

    def loss(params: Any, x: Any) -> Any:
        h, ys = lax.scan(layer, x, params)
        return _energy(h) + 0.1 * _energy(ys["act"]), ys

    return Problem(loss, _dense_layers(n, k[0]), _normal(k[1], B, D))


@jax.custom_vjp
def _clipped(x: jax.Array, bound: jax.Array) -> jax.Array:
    """The identity, with its gradient clipped: not the derivative of anything."""
    return x * 1.0


def _clipped_fwd(x: jax.Array, bound: jax.Array) -> Any:
    return _clipped(x, bound), bound


def _clipped_bwd(bound: jax.Array, ct: jax.Array) -> Any:
    bound = jnp.broadcast_to(bound, ct.shape)
    return jnp.clip(ct, -bound, bound), jnp.zeros(())


_clipped.defvjp(_clipped_fwd, _clipped_bwd)


@_model
def custom_vjp(n: int, key: jax.Array) -> Problem:
    """A layer with a derivative rule of its own, which recomputation must not replace."""
    k = jax.random.split(key)

    def layer(h: Any, p: Any) -> Any:
        return _clipped(_residual(h, p), jnp.float32(0.01)), None

    def loss(params: Any, x: Any) -> Any:
        h, _ = lax.scan(layer, x, params)
        return _energy(h), h

    return Problem(loss, _dense_layers(n, k[0]), _normal(k[1], B, D))


@_model
def two_stacks(n: int, key: jax.Array) -> Problem:
    """An encoder and a decoder of another width and depth, which reads the encoder's ys."""
    k = jax.random.split(key, 4)
    params = {
        "encoder": _dense_layers(n, k[0]),
        "bridge": _normal(k[1], D, F),
        "decoder": _dense_layers(n + 1, k[2], F),
    }

    def encode(h: Any, p: Any) -> Any:
        h = _residual(h, p)
        return h, h.mean()

    def loss(params: Any, x: Any) -> Any:
        h, means = lax.scan(encode, x, params["encoder"])
        memory = h @ params["bridge"] * means.sum()

        def decode(h: Any, p: Any) -> Any:
            return jnp.cos(_residual(h, p)) + memory, None

        out, _ = lax.scan(decode, memory, params["decoder"])
        return _energy(out), (out, means)

    return Problem(loss, params, _normal(k[3], B, D))


@_model
def stack_in_stack(n: int, key: jax.Array) -> Problem:
    """Each layer is a stack of two smaller ones, with ys inside."""
    k = jax.random.split(key)

    def small(h: Any, p: Any) -> Any:
        h = _residual(h, p)
        return h, h.mean(-1)

    def layer(h: Any, p: Any) -> Any:
        h, means = lax.scan(small, h, p)
        return h + jnp.broadcast_to(means.mean(0)[:, None], h.shape), means

    def loss(params: Any, x: Any) -> Any:
        h, means = lax.scan(layer, x, params)
        return _energy(h, means), (h, means)

    params = jax.tree.map(
        lambda leaf: leaf.reshape(n, 2, *leaf.shape[1:]), _dense_layers(2 * n, k[0])
    )
    return Problem(loss, params, _normal(k[1], B, D))


class _Block(eqx.Module):
    linear: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(D, D, key=key)
        self.activation = jnp.tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.activation(_named(self.linear(x)))


@_model
def equinox(n: int, key: jax.Array) -> Problem:
    """Layers stacked by filter_vmap, partitioned and scanned, as Equinox documents it."""
    k = jax.random.split(key)
    blocks = eqx.filter_vmap(_Block)(jax.random.split(k[0], n))
    params, static = eqx.partition(blocks, eqx.is_array)

    def layer(h: Any, p: Any) -> Any:
        return jax.vmap(eqx.combine(p, static))(h), None

    def loss(params: Any, x: Any) -> Any:
        h, _ = lax.scan(layer, x, params)
        return _energy(h), h

    return Problem(loss, params, _normal(k[1], B, D))


@_model
def bfloat16(n: int, key: jax.Array) -> Problem:
    """bfloat16 weights beside float32 ones that are cast; the carry is float32."""
    k = jax.random.split(key, 3)
    params = {"low": _normal(k[0], n, D, F).astype(jnp.bfloat16), "high": _normal(k[1], n, F, D)}

    def layer(h: Any, p: Any) -> Any:
        inner = jax.nn.silu(_named(h.astype(jnp.bfloat16) @ p["low"]))
        return h + (inner @ p["high"].astype(jnp.bfloat16)).astype(jnp.float32), inner.sum()

    def loss(params: Any, x: Any) -> Any:
        h, sums = lax.scan(layer, x, params)
        return _energy(h, sums), (h, sums)

    return Problem(loss, params, _normal(k[2], B, D))


@_model
def key_carry(n: int, key: jax.Array) -> Problem:
    """A random key in the carry, split by each layer for its noise."""
    k = jax.random.split(key, 3)

    def layer(carry: Any, p: Any) -> Any:
        h, key = carry
        key, mine = jax.random.split(key)
        return (_residual(h, p) * (1 + 0.1 * jax.random.normal(mine, h.shape)), key), mine

    def loss(params: Any, inputs: Any) -> Any:
        (h, key), used = lax.scan(layer, (inputs["x"], inputs["key"]), params)
        return _energy(h), (h, key, used)

    return Problem(loss, _dense_layers(n, k[0]), {"x": _normal(k[1], B, D), "key": k[2]})


@_model
def backwards(n: int, key: jax.Array) -> Problem:
    """A stack run from the last layer to the first (reverse=True), with ys."""
    k = jax.random.split(key)

    def layer(h: Any, p: Any) -> Any:
        h = _residual(h, p)
        return h, h.sum(-1)

    def loss(params: Any, x: Any) -> Any:
        h, sums = lax.scan(layer, x, params, reverse=True)
        return _energy(h, sums), (h, sums)

    return Problem(loss, _dense_layers(n, k[0]), _normal(k[1], B, D))


@_model
def tied(n: int, key: jax.Array) -> Problem:
    """One layer repeated: a length and no xs."""
    k = jax.random.split(key, 3)
    params = {"w": _normal(k[0], D, D), "b": _normal(k[1], D)}

    def loss(params: Any, x: Any) -> Any:
        h, _ = lax.scan(lambda h, _: (_residual(h, params), None), x, length=n)
        return _energy(h), h

    return Problem(loss, params, _normal(k[2], B, D))


@_model
def closed_over(n: int, key: jax.Array) -> Problem:
    """Layers that all read an array made outside, which is differentiated, and a mask, which is not."""
    k = jax.random.split(key, 4)
    inputs = {"x": _normal(k[0], B, D), "mask": jax.random.bernoulli(k[1], 0.7, (B, D))}
    params = {"context": _normal(k[2], F, D), "layers": _dense_layers(n, k[3])}

    def loss(params: Any, inputs: Any) -> Any:
        context = jnp.sin(params["context"])

        def layer(h: Any, p: Any) -> Any:
            h = _residual(h, p)
            read = jax.nn.softmax(h @ context.T) @ context
            return jnp.where(inputs["mask"], h + read, h), None

        h, _ = lax.scan(layer, inputs["x"], params["layers"])
        return _energy(h), h

    return Problem(loss, params, inputs)


@_model
def large_y(n: int, key: jax.Array) -> Problem:
    """A y much larger than the carry."""
    k = jax.random.split(key)

    def layer(h: Any, p: Any) -> Any:
        h = _residual(h, p)
        return h, jnp.einsum("bd,ce->bcde", h, jnp.tanh(h))

    def loss(params: Any, x: Any) -> Any:
        h, ys = lax.scan(layer, x, params)
        return _energy(h, ys), ys

    return Problem(loss, _dense_layers(n, k[0]), _normal(k[1], B, D))


@_model
def jit_inside(n: int, key: jax.Array) -> Problem:
    """jit in the layer, and around the scan."""
    k = jax.random.split(key)
    inner = jax.jit(_residual)

    @jax.jit
    def stack(params: Any, x: Any) -> Any:
        return lax.scan(lambda h, p: (inner(h, p), None), x, params)[0]

    def loss(params: Any, x: Any) -> Any:
        h = stack(params, x)
        return _energy(h), h

    return Problem(loss, _dense_layers(n, k[0]), _normal(k[1], B, D))


@_model
def cond_inside(n: int, key: jax.Array) -> Problem:
    """Every other layer is of another kind."""
    k = jax.random.split(key)

    def layer(carry: Any, p: Any) -> Any:
        h, i = carry
        h = lax.cond(i % 2 == 0, _residual, lambda h, p: jnp.sin(h @ p["w"]), h, p)
        return (_named(h), i + 1), None

    def loss(params: Any, x: Any) -> Any:
        (h, count), _ = lax.scan(layer, (x, jnp.int32(0)), params)
        return _energy(h), (h, count)

    return Problem(loss, _dense_layers(n, k[0]), _normal(k[1], B, D))


@_model
def checkpoint_inside(n: int, key: jax.Array) -> Problem:
    """jax.checkpoint in the layer and unroll=3: what a user may have tried before."""
    k = jax.random.split(key)
    layer = jax.checkpoint(_residual)

    def loss(params: Any, x: Any) -> Any:
        h, _ = lax.scan(lambda h, p: (layer(h, p), None), x, params, unroll=3)
        return _energy(h), h

    return Problem(loss, _dense_layers(n, k[0]), _normal(k[1], B, D))


@_model
def no_carry(n: int, key: jax.Array) -> Problem:
    """Nothing is handed on: a map."""
    k = jax.random.split(key)

    def loss(params: Any, x: Any) -> Any:
        _, ys = lax.scan(lambda _, p: (None, _residual(x, p)), None, params)
        return _energy(ys), ys

    return Problem(loss, _dense_layers(n, k[0]), _normal(k[1], B, D))


@_model
def handed_through(n: int, key: jax.Array) -> Problem:
    """Carries that no layer changes, a y that is an x, a y that is a carry, an x nobody reads."""
    k = jax.random.split(key, 3)
    params = _dense_layers(n, k[0]) | {"unread": _normal(k[0], n, 2)}
    inputs = {"x": _normal(k[1], B, D), "fixed": _normal(k[2], D), "other": _normal(k[2], 2)}

    def layer(carry: Any, p: Any) -> Any:
        h, fixed, other = carry
        new = _residual(h, p) * jnp.broadcast_to(fixed, h.shape)
        return (new, fixed, other), (p["b"], h, jnp.float32(1))

    def loss(params: Any, inputs: Any) -> Any:
        init = inputs["x"], inputs["fixed"], inputs["other"]
        carry, ys = lax.scan(layer, init, params)
        return _energy(*carry, *ys), (carry, ys)

    return Problem(loss, params, inputs)
