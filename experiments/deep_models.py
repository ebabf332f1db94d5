"""Models of any depth, each a train step for `jaxmem.fit` to bring within a budget.

    jaxmem fit experiments/deep_models.py:feedforward --budget 10GiB --target h100-80g

Equal layers are scanned over, so that compilation takes as long for ten of them as for ten
thousand.  An iteration of the scan may be a *group* of layers, written out one after the other:
within an iteration a plan can drop the carry between two layers and keep something smaller,
which it cannot between iterations.  Grouping changes nothing else.

`remat` is "hand" for `jax.checkpoint` around each iteration, as one would write it without jaxmem;
anything else is the policy of a jaxmem decorator, which applies until `fit` finds a plan.
Nothing is allocated: arguments are described by shape.  A step is one of gradient descent with
momentum, with everything donated, unless stated otherwise.

Shapes: B batch, S positions, D width, H heads, K width of a head, C channels.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxmem

Spec = jax.ShapeDtypeStruct
Tree = Any

# Momentum and epsilon of batch norm.
_MEMORY, _EPSILON = 0.9, 1e-5

# ---------------------------------------------------------------- the models


def feedforward(
    depth: int = 24, group: int = 1, remat: str = "none", batch: int = 262144, width: int = 256
) -> jaxmem.Job:
    """Layers of layer norm, gelu and one matrix product, no residual: bfloat16, float32 norms."""

    def layer(x: jax.Array, p: Tree) -> jax.Array:
        p = _cast(p, x.dtype)
        return jax.nn.gelu(_layer_norm(x) * p["scale"] + p["bias"]) @ p["weight"]

    shapes = {"scale": (width,), "bias": (width,), "weight": (width, width)}
    return _chain("feedforward", layer, shapes, (batch, width), depth, group, remat)


def transformer(
    depth: int = 24,
    group: int = 1,
    remat: str = "none",
    batch: int = 1024,
    sequence: int = 256,
    width: int = 256,
    heads: int = 4,
) -> jaxmem.Job:
    """Causal pre-norm layers with plain attention: bfloat16, norms and scores in float32."""
    shapes = {
        **dict.fromkeys(["scale_1", "bias_1", "scale_2", "bias_2"], (width,)),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }

    def layer(x: jax.Array, p: Tree) -> jax.Array:
        p = _cast(p, x.dtype)
        y = _layer_norm(x) * p["scale_1"] + p["bias_1"]
        x = x + _attention(*jnp.split(y @ p["qkv"], 3, axis=-1), heads=heads) @ p["out"]
        y = _layer_norm(x) * p["scale_2"] + p["bias_2"]
        return x + jax.nn.gelu(y @ p["up"]) @ p["down"]

    shape = (batch, sequence, width)
    return _chain("transformer", layer, shapes, shape, depth, group, remat)


def cifar_resnet(
    depth: int = 18, group: int = 1, remat: str = "none", batch: int = 1280, width: int = 16
) -> jaxmem.Job:
    """The bottleneck ResNet for CIFAR shapes (He et al. 2016) with `depth` + 1 blocks a stage.

    Float32, and batch norm over the batch.
    """
    stages, groups = (depth + 1,) * 3, (group,) * 3
    net = functools.partial(_resnet, groups=groups, large=False, remat=remat)
    params, state = _resnet_shapes(stages, groups, width, classes=10, large=False)
    images, labels = Spec((batch, 32, 32, 3), "float32"), Spec((batch,), "int32")

    def step(params: Tree, velocity: Tree, state: Tree, images: Any, labels: Any) -> Tree:
        (value, state), gradient = jax.value_and_grad(_cross_entropy(net), has_aux=True)(
            params, state, images, labels
        )
        return *_descend(params, velocity, gradient), state, value

    args = (params, params, state, images, labels)
    return jaxmem.Job(step, args, donate_argnums=(0, 1, 2), name="cifar_resnet")


def imagenet_resnet(
    stages: Sequence[int] = (16, 121, 181, 16),
    groups: Sequence[int] = (1, 1, 1, 1),
    remat: str = "none",
    batch: int = 32,
    size: int = 224,
    width: int = 64,
) -> jaxmem.Job:
    """Loss and gradient of a bottleneck ResNet of four stages (He et al. 2016), in float32.

    The gradient is a result, so that temporaries are feature maps and what is like them.

    Args:
      stages: number of residual blocks; the first of each is apart, as it halves the size.
      groups: how many blocks make a round of each stage's scan.
    """
    net = functools.partial(_resnet, groups=groups, large=True, remat=remat)
    params, state = _resnet_shapes(stages, groups, width, classes=1000, large=True)
    images, labels = Spec((batch, size, size, 3), "float32"), Spec((batch,), "int32")

    def value_and_grad(params: Tree, state: Tree, images: Any, labels: Any) -> Tree:
        loss = _cross_entropy(net)
        return jax.value_and_grad(loss, has_aux=True)(params, state, images, labels)

    args = (params, state, images, labels)
    return jaxmem.Job(value_and_grad, args, donate_argnums=1, name="imagenet_resnet")


def bottleneck_layers(stages: Sequence[int]) -> int:
    """How many layers a ResNet of so many bottleneck blocks has, as they are usually counted."""
    return 3 * sum(stages) + 2


@dataclasses.dataclass(frozen=True)
class Deep:
    """A model of any depth.

    Attributes:
      job: a step, of `depth`, `group`, `remat` and sizes.
      layers: how many layers such a depth is.
    """

    job: Callable[..., jaxmem.Job]
    layers: Callable[[int], int] = lambda depth: depth


MODELS = {
    "feed-forward": Deep(feedforward),
    "ResNet": Deep(cifar_resnet, lambda depth: bottleneck_layers((depth + 1,) * 3)),
    "transformer": Deep(transformer),
}

# ---------------------------------------------------------------- stacks


def _stacked(layer: Callable[[Any, Tree], tuple[Any, Tree]], remat: str) -> Callable[..., Any]:
    """A scan over layers, or over groups of them if parameters have one more axis for that."""
    body = jax.checkpoint(layer, prevent_cse=False) if remat == "hand" else layer

    def run(x: Any, params: Tree) -> tuple[Any, Tree]:
        return lax.scan(body, x, params)

    return run if remat == "hand" else jaxmem.remat(run, remat)


def _single(block: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """A layer that is in no stack: policies leave nothing to do but `jax.checkpoint`."""
    if remat == "none":
        return jaxmem.remat(block, "none")
    saved = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
    return jax.checkpoint(block, policy=saved)


def _grouped(
    layer: Callable[[Any, Tree], tuple[Any, Tree]], group: int
) -> Callable[[Any, Tree], tuple[Any, Tree]]:
    """So many layers, one after the other, as one."""
    if group == 1:
        return layer

    def several(x: Any, params: Tree) -> tuple[Any, Tree]:
        outs = []
        for k in range(group):
            x, out = layer(x, jax.tree.map(lambda p, k=k: p[k], params))
            outs.append(out)
        return x, jax.tree.map(lambda *outs: jnp.stack(outs), *outs)

    return several


def _lead(length: int, group: int) -> tuple[int, ...]:
    """The leading axes of parameters of so many layers.

    Raises:
      ValueError: they do not make whole groups.
    """
    if length % group:
        raise ValueError(f"{length} layers cannot be scanned over in groups of {group}")
    return (length,) if group == 1 else (length // group, group)


def _chain(
    name: str,
    layer: Callable[[jax.Array, Tree], jax.Array],
    shapes: dict[str, tuple[int, ...]],
    x: tuple[int, ...],
    depth: int,
    group: int,
    remat: str,
) -> jaxmem.Job:
    """A step through a stack of equal layers, parameters in float32."""
    lead = _lead(depth, group)
    params = {key: Spec((*lead, *shape), "float32") for key, shape in shapes.items()}
    stack = _stacked(_grouped(lambda x, p: (layer(x, p), None), group), remat)

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        return jnp.square(stack(x, params)[0].astype(jnp.float32)).mean()

    def step(params: Tree, velocity: Tree, x: jax.Array) -> Tree:
        value, gradient = jax.value_and_grad(loss)(params, x)
        return *_descend(params, velocity, gradient), value

    args = (params, params, Spec(x, "bfloat16"))
    return jaxmem.Job(step, args, donate_argnums=(0, 1), name=name)


def _descend(params: Tree, velocity: Tree, gradient: Tree) -> tuple[Tree, Tree]:
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity


# ---------------------------------------------------------------- ResNets


def _resnet(
    params: Tree,
    state: Tree,
    x_BHWC: jax.Array,
    *,
    groups: Sequence[int],
    large: bool,
    remat: str,
) -> tuple[jax.Array, Tree]:
    """Logits, and what batch norm remembers."""
    new: Tree = {"stages": []}
    x = _convolved(x_BHWC, params["stem"], 2 if large else 1)
    if large:
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for number, group in enumerate(groups):
        own, known = params["stages"][number], state["stages"][number]
        stride = 1 if number == 0 else 2
        first = _single(functools.partial(_bottleneck, stride=stride), remat)
        x, one = first(x, (own["first"], known["first"]))
        stack = _stacked(_grouped(_bottleneck, group), remat)
        x, rest = stack(x, (own["rest"], known["rest"]))
        new["stages"].append({"first": one, "rest": rest})
    x, new["norm"] = _batch_norm(x, params["norm"], state["norm"])
    return jax.nn.relu(x).mean((1, 2)) @ params["head"], new


def _bottleneck(x: jax.Array, known: tuple[Tree, Tree], stride: int = 1) -> tuple[jax.Array, Tree]:
    """Norm, relu and convolution three times (1×1, 3×3, 1×1), added to what comes in."""
    p, state = known
    new: dict[str, Tree] = {}
    y, short = x, x
    for k in (1, 2, 3):
        y, new[f"norm_{k}"] = _batch_norm(y, p[f"norm_{k}"], state[f"norm_{k}"])
        y = jax.nn.relu(y)
        if k == 1 and "short" in p:
            short = _convolved(y, p["short"], stride)
        y = _convolved(y, p[f"conv_{k}"], stride if k == 2 else 1)
    return short + y, new


def _resnet_shapes(
    stages: Sequence[int], groups: Sequence[int], width: int, classes: int, large: bool
) -> tuple[Tree, Tree]:
    """Parameters, and the means and variances that batch norm remembers."""
    params: list[Tree] = []
    state: list[Tree] = []
    given = width
    for number, (blocks, group) in enumerate(zip(stages, groups, strict=True)):
        narrow = width * 2**number
        first = _block_shapes((), given, narrow)
        given = 4 * narrow
        rest = _block_shapes(_lead(blocks - 1, group), given, narrow, equal=True)
        params.append({"first": first[0], "rest": rest[0]})
        state.append({"first": first[1], "rest": rest[1]})
    each = Spec((given,), "float32")
    ends = {
        "stem": Spec((width, 7, 7, 3) if large else (width, 3, 3, 3), "float32"),
        "norm": {"scale": each, "bias": each},
        "head": Spec((given, classes), "float32"),
    }
    return {**ends, "stages": params}, {
        "stages": state,
        "norm": {"mean": each, "variance": each},
    }


def _block_shapes(
    lead: tuple[int, ...], given: int, narrow: int, equal: bool = False
) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Of a bottleneck block; one whose result is unlike its input has a convolution for that."""

    def spec(*shape: int) -> jax.ShapeDtypeStruct:
        return Spec((*lead, *shape), "float32")

    channels = {"norm_1": given, "norm_2": narrow, "norm_3": narrow}
    params: dict[str, Tree] = {
        key: {"scale": spec(number), "bias": spec(number)} for key, number in channels.items()
    }
    params |= {
        "conv_1": spec(narrow, 1, 1, given),
        "conv_2": spec(narrow, 3, 3, narrow),
        "conv_3": spec(4 * narrow, 1, 1, narrow),
    }
    if not equal:
        params["short"] = spec(4 * narrow, 1, 1, given)
    state = {key: {"mean": spec(n), "variance": spec(n)} for key, n in channels.items()}
    return params, state


def _cross_entropy(net: Callable[..., tuple[jax.Array, Tree]]) -> Callable[..., Any]:
    def loss(params: Tree, state: Tree, images: Any, labels: Any) -> tuple[jax.Array, Tree]:
        logits, state = net(params, state, images)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -chosen.mean(), state

    return loss


# ---------------------------------------------------------------- what layers are made of


def _convolved(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    # Kernels lie as cuDNN wants them; otherwise all of their gradients are copied at the end.
    axes = ("NHWC", "OHWI", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=axes)


def _batch_norm(x: jax.Array, p: Tree, state: Tree) -> tuple[jax.Array, Tree]:
    mean = x.mean((0, 1, 2))
    variance = jnp.square(x).mean((0, 1, 2)) - jnp.square(mean)
    y = (x - mean) * (lax.rsqrt(variance + _EPSILON) * p["scale"]) + p["bias"]
    batch = {"mean": mean, "variance": variance}
    return y, jax.tree.map(lambda old, new: _MEMORY * old + (1 - _MEMORY) * new, state, batch)


def _layer_norm(x: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 along the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    variance = jnp.square(y - mean).mean(-1, keepdims=True)
    return ((y - mean) * lax.rsqrt(variance + 1e-6)).astype(x.dtype)


def _attention(q_BSD: jax.Array, k_BSD: jax.Array, v_BSD: jax.Array, *, heads: int) -> jax.Array:
    batch, sequence, width = q_BSD.shape
    q, k, v = (a.reshape(batch, sequence, heads, -1) for a in (q_BSD, k_BSD, v_BSD))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((sequence, sequence), bool))
    scores = jnp.where(causal, scores / math.sqrt(width // heads), jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum("bhqs,bshk->bqhk", weights, v).reshape(q_BSD.shape)


def _cast(p: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda a: a.astype(dtype), p)
