"""The nets of `shapes.py` in JAX; `torch_nets.py` has the same in PyTorch.

The layers are scans, under a decorator of jaxmem that changes nothing by itself:
`jaxmem.use_policy`, `jaxmem.fit` and `jaxmem.use_plan` decide.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmem
from side.shapes import ADAMW, STAGES, Cnn, Gpt, Net

Layer = Callable[[jax.Array, Any], tuple[jax.Array, None]]
Around = Callable[[Layer], Layer]
Loss = Callable[..., jax.Array]
Spec = jax.ShapeDtypeStruct

# ---------------------------------------------------------------- API


def specs(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, described by shape."""
    return {
        name: specs(shape) if isinstance(shape, Mapping) else Spec(shape, "float32")
        for name, shape in shapes.items()
    }


def optimizer() -> optax.GradientTransformation:
    """What trains them."""
    return optax.adamw(ADAMW.rate, ADAMW.b1, ADAMW.b2, ADAMW.eps, weight_decay=ADAMW.decay)


def loss(net: Net, around: Around | None = None) -> Loss:
    """Mean nats of guessing, as a function of parameters and what `net.data` gives.

    Args:
      around: put around each layer, in the place of jaxmem's decorator around the whole.
    """

    def bare(layer: Layer) -> Layer:
        return layer

    made = _gpt(net, around or bare) if isinstance(net, Gpt) else _cnn(net, around or bare)
    return jaxmem.remat(made, "none") if around is None else made


def training(net: Net, value_and_grad: Callable[..., Any]) -> jaxmem.Job:
    """A train step, and its arguments described by shape.

    Args:
      value_and_grad: of a loss of `net`, as a function of parameters and the batch.
    """
    adamw = optimizer()

    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = value_and_grad(params, *batch)
        updates, state = adamw.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    params = specs(net.shapes)
    # A batch of one tells the shapes without making the whole.
    single = dataclasses.replace(net, batch=1).data()
    batch = [Spec((net.batch, *array.shape[1:]), array.dtype) for array in single]
    arguments = (params, jax.eval_shape(adamw.init, params), *batch)
    return jaxmem.Job(step, arguments, donate_argnums=(0, 1), name=type(net).__name__)


# ---------------------------------------------------------------- the transformer


def _gpt(net: Gpt, around: Around) -> Loss:
    layer = around(functools.partial(_transformer_layer, net))

    def mean(params: Any, tokens: jax.Array) -> jax.Array:
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = (params["tokens"][given] + params["positions"][None]).astype(net.dtype)
        x, _ = jax.lax.scan(layer, x, params["layers"])
        y = _normal(x, -1) * params["scale"].astype(net.dtype)
        return _nats(y @ params["tokens"].astype(net.dtype).T, wanted)

    return mean


def _transformer_layer(net: Gpt, x: jax.Array, p: Any) -> tuple[jax.Array, None]:
    # Cast here, so that no more than one layer's parameters are there twice.
    p = _cast(p, net.dtype)
    y = _normal(x, -1) * p["scale_1"] + p["bias_1"]
    q, k, v = (
        part.reshape(*x.shape[:2], net.heads, -1) for part in jnp.split(y @ p["qkv"], 3, axis=-1)
    )
    if net.attention == "fused":
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    else:
        y = _attention(q, k, v)
    x = x + y.reshape(x.shape) @ p["out"]
    y = _normal(x, -1) * p["scale_2"] + p["bias_2"]
    return x + jax.nn.gelu(y @ p["up"]) @ p["down"], None


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    length = q.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


# ---------------------------------------------------------------- the CNN


def _cnn(net: Cnn, around: Around) -> Loss:
    block = around(functools.partial(_block, net))

    def mean(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = images.astype(net.dtype)
        for stage in range(STAGES):
            x = _conv(x, params[f"down_{stage}"].astype(net.dtype), 2)
            x, _ = jax.lax.scan(block, x, params[f"stage_{stage}"])
        return _nats(x.mean((1, 2)) @ params["head"].astype(net.dtype), labels)

    return mean


def _block(net: Cnn, x: jax.Array, p: Any) -> tuple[jax.Array, None]:
    p = _cast(p, net.dtype)
    y = x
    for k in "12":
        y = jax.nn.relu(_normal(y, (0, 1, 2)) * p[f"scale_{k}"] + p[f"bias_{k}"])
        y = _conv(y, p[f"conv_{k}"])
    return x + y, None


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    # Padded alike on all sides, as PyTorch does, also where the stride is 2.
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), [(1, 1), (1, 1)], dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# ---------------------------------------------------------------- of both


def _normal(x: jax.Array, axes: Any) -> jax.Array:
    """Mean 0 and variance 1 along the axes, computed in float32."""
    y = x.astype(jnp.float32)
    mean = y.mean(axes, keepdims=True)
    variance = ((y - mean) ** 2).mean(axes, keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)


def _nats(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), wanted
    ).mean()


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
