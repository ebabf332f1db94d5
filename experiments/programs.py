"""Programs whose memory is predicted and measured, as functions that return a `jaxmem.Job`.

    jaxmem report experiments/programs.py:transformer --target h100-80g --policy full
    python experiments/verify_predictions.py

Nothing is allocated: parameters, optimizer state and batch are described by
shape.  Each model is a stack of layers in a scan, under a decorator that changes nothing by
itself, so that `jaxmem.use_policy` (and `--policy`) can put any policy in its place.

`transformer()` as it stands is the reference program: 24 pre-norm layers of bfloat16, causal
attention with scores kept in float32, and the gradient of a loss on the last layer's output.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import jaxmem

Dtype = Literal["float32", "bfloat16"]
Spec = jax.ShapeDtypeStruct

# ---------------------------------------------------------------- the programs


def mlp(
    batch: int = 4096,
    width: int = 1024,
    layers: int = 16,
    dtype: Dtype = "float32",
    donate: bool = True,
    accum: int = 1,
) -> jaxmem.Job:
    """A train step of residual layers of two matrix products, `width` → 4 `width` → `width`."""
    w_up, w_down = (layers, width, 4 * width), (layers, 4 * width, width)
    params = {"up": Spec(w_up, dtype), "down": Spec(w_down, dtype)}

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(_normal(x) @ p["up"]) @ p["down"], None

    def loss(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        return _mean_square(_stacked(layer)(x, params)), state

    return _train("mlp", loss, params, {}, Spec((batch, width), dtype), donate, accum)


def convnet(
    batch: int = 64,
    size: int = 64,
    width: int = 64,
    blocks: int = 6,
    dtype: Dtype = "float32",
    donate: bool = True,
    accum: int = 1,
) -> jaxmem.Job:
    """A train step of a residual convolutional net: two stages of `blocks`, batch norm."""
    net: nn.Module = jaxmem.remat(ConvNet, "none")(width, blocks, dtype)
    images = Spec((batch // accum, size, size, 3), dtype)
    variables = jax.eval_shape(net.init, jax.random.key(0), images)

    def loss(params: Any, stats: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": stats}
        out, updated = net.apply(variables, images, mutable=["batch_stats"])
        return _mean_square(out), updated["batch_stats"]

    whole = Spec((batch, *images.shape[1:]), dtype)
    params, stats = variables["params"], variables["batch_stats"]
    return _train("convnet", loss, params, stats, whole, donate, accum)


def transformer(
    batch: int = 8,
    sequence: int = 1024,
    width: int = 1024,
    layers: int = 24,
    heads: int = 16,
    dtype: Dtype = "bfloat16",
    donate: bool = True,
    accum: int = 1,
    attention: Literal["plain", "fused"] = "plain",
    form: Literal["gradient", "step"] = "gradient",
    checkpoint: str | None = None,
) -> jaxmem.Job:
    """Causal pre-norm layers: attention, and a hidden layer four times as wide.

    Args:
      attention: "plain" matrix products, or one "fused" kernel of cuDNN (needs it, and bfloat16).
      form: the "gradient" of the loss, or a train "step".
      checkpoint: None for layers under jaxmem's decorator; else without it, under
        `jax.checkpoint` with this member of `jax.checkpoint_policies`, or "names:qkv,out" to
        save what has one of these names (qkv, attention, out, up, down); "none" for bare ones.
    """
    shapes = {
        **dict.fromkeys(["scale_1", "bias_1", "scale_2", "bias_2"], (width,)),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    params = {name: Spec((layers, *shape), dtype) for name, shape in shapes.items()}
    layer = functools.partial(transformer_layer, heads=heads, fused=attention == "fused")

    def loss(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        return _mean_square(_stacked(layer, checkpoint)(x, params)), state

    x = Spec((batch, sequence, width), dtype)
    if form == "step":
        return _train("transformer", loss, params, {}, x, donate, accum)

    def value_and_grad(params: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda params: loss(params, {}, x)[0])(params)

    return jaxmem.Job(value_and_grad, (params, x), name="transformer")


def rnn(
    batch: int = 128,
    steps: int = 1024,
    width: int = 1024,
    dtype: Dtype = "float32",
    donate: bool = True,
    accum: int = 1,
) -> jaxmem.Job:
    """A train step of an LSTM; the stack is its scan over time, and all layers are one."""
    params = {
        "in": Spec((width, 4 * width), dtype),
        "recurrent": Spec((width, 4 * width), dtype),
        "bias": Spec((4 * width,), dtype),
    }

    def run(params: Any, inputs: jax.Array) -> jax.Array:
        def cell(carry: Any, x: jax.Array) -> tuple[Any, None]:
            h, c = carry
            gates = x @ params["in"] + h @ params["recurrent"] + params["bias"]
            take, forget, new, show = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(take) * jnp.tanh(new)
            return (jax.nn.sigmoid(show) * jnp.tanh(c), c), None

        # Time first: it is what the scan goes along.
        inputs = jnp.moveaxis(inputs, 1, 0)
        start = jnp.zeros_like(inputs[0])
        return jax.lax.scan(cell, (start, start), inputs)[0][0]

    decorated = jaxmem.remat(run, "none")

    def loss(params: Any, state: Any, inputs: jax.Array) -> tuple[jax.Array, Any]:
        return _mean_square(decorated(params, inputs)), state

    return _train("rnn", loss, params, {}, Spec((batch, steps, width), dtype), donate, accum)


def states(
    optimizer: str = "Adam", way: str = "ordinary", layers: int = 16, width: int = 2048
) -> jaxmem.Job:
    """A step of the feed-forward model of `state_memory.py`, by one of the optimizers it lists.

    Args:
      way: one of `common.ways`: what is updated in the backward pass, and what is on the host.
    """
    import state_memory  # needs what only experiments need

    from common.ways import OPTIMIZERS, WAYS

    for given, known in ((optimizer, OPTIMIZERS), (way, WAYS)):
        if given not in known:
            raise ValueError(f"states: {given!r} is none of {', '.join(map(repr, known))}")
    return state_memory.training(layers, width).job(optimizer, cast(Any, way))


def keeping_less(
    form: Literal["plain", "norms", "gelu", "both"] = "both", layers: int = 24
) -> jaxmem.Job:
    """The gradient of the transformer of `low_memory.py`, as it is or with layers replaced."""
    import low_memory

    return jaxmem.Job(*low_memory.gradient(layers, form), name=f"keeping_less, {form}")


# ---------------------------------------------------------------- what they are made of


def transformer_layer(x: jax.Array, p: Any, *, heads: int, fused: bool) -> tuple[jax.Array, None]:
    batch, sequence, width = x.shape
    y = _normal(x) * p["scale_1"] + p["bias_1"]
    q, k, v = (
        part.reshape(batch, sequence, heads, width // heads)
        for part in jnp.split(checkpoint_name(y @ p["qkv"], "qkv"), 3, axis=-1)
    )
    if fused:
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    else:
        y = _attention(q, k, v)
    y = checkpoint_name(y, "attention")
    x = x + checkpoint_name(y.reshape(x.shape) @ p["out"], "out")
    y = _normal(x) * p["scale_2"] + p["bias_2"]
    y = jax.nn.gelu(checkpoint_name(y @ p["up"], "up"))
    return x + checkpoint_name(y @ p["down"], "down"), None


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    sequence = q.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((sequence, sequence), bool))
    scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def _normal(x: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 along the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    variance = ((y - mean) ** 2).mean(-1, keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype)


def _stacked(
    layer: Callable[..., Any], checkpoint: str | None = None
) -> Callable[[jax.Array, Any], jax.Array]:
    if checkpoint is not None and checkpoint != "none":
        layer = jax.checkpoint(layer, policy=_checkpoint_policy(checkpoint), prevent_cse=False)

    def stack(x: jax.Array, params: Any) -> jax.Array:
        return jax.lax.scan(layer, x, params)[0]

    return jaxmem.remat(stack, "none") if checkpoint is None else stack


def _checkpoint_policy(text: str) -> Callable[..., Any]:
    kind, colon, names = text.partition(":")
    if colon:
        if kind != "names":
            raise ValueError(f"transformer: checkpoint={text!r}; write names:qkv,out")
        return jax.checkpoint_policies.save_only_these_names(*names.split(","))
    return getattr(jax.checkpoint_policies, text)


class ConvNet(nn.Module):
    """Stages of scanned residual blocks, each stage half the size and twice the width."""

    width: int
    blocks: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for stage in range(2):
            width = self.width * 2**stage
            x = nn.Conv(width, (3, 3), strides=(2, 2), dtype=self.dtype, param_dtype=self.dtype)(x)
            blocks = nn.scan(
                Residual,
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True},
                length=self.blocks,
            )
            x, _ = blocks(self.dtype, name=f"stage_{stage}")(x, None)
        return x.mean((1, 2))


class Residual(nn.Module):
    """Two convolutions with batch norm, added to what comes in."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = x
        kinds = {"dtype": self.dtype, "param_dtype": self.dtype}
        for k in range(2):
            y = nn.relu(nn.BatchNorm(False, name=f"norm_{k}", **kinds)(y))
            y = nn.Conv(x.shape[-1], (3, 3), name=f"conv_{k}", **kinds)(y)
        return x + y, None


def _mean_square(x: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) ** 2).mean()


def _train(
    name: str,
    loss: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]],
    params: Any,
    state: Any,
    batch: jax.ShapeDtypeStruct,
    donate: bool,
    accum: int,
) -> jaxmem.Job:
    """A step of adamw on the mean gradient of `accum` microbatches.

    Args:
      loss: of params, state and a microbatch; returns the new state too.
      batch: all microbatches together.

    Raises:
      ValueError: the batch cannot be cut into so many equal parts.
    """
    if accum < 1 or batch.shape[0] % accum:
        raise ValueError(
            f"{name}: a batch of {batch.shape[0]} cannot be cut into accum={accum} equal parts"
        )
    optimizer = optax.adamw(1e-3)

    def gradient(params: Any, state: Any, x: jax.Array) -> Any:
        (_, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x)
        return grads, state

    def accumulated(params: Any, state: Any, xs: jax.Array) -> Any:
        def add(carry: Any, x: jax.Array) -> tuple[Any, None]:
            total, state = carry
            grads, state = gradient(params, state, x)
            return (jax.tree.map(jnp.add, total, grads), state), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        (total, state), _ = jax.lax.scan(add, (zeros, state), xs)
        return jax.tree.map(lambda g: g / accum, total), state

    def step(params: Any, opt_state: Any, state: Any, x: jax.Array) -> Any:
        grads, state = (gradient if accum == 1 else accumulated)(params, state, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state

    if accum > 1:
        batch = Spec((accum, batch.shape[0] // accum, *batch.shape[1:]), batch.dtype)
    opt_state = jax.eval_shape(optimizer.init, params)
    donated = (0, 1, 2) if donate else ()
    return jaxmem.Job(step, (params, opt_state, state, batch), donate_argnums=donated, name=name)
