"""The net whose memory was published, as a list of modules, and a step of its training.

One convolution from 1 channel to `width`, then `depth` times a convolution, relu and
max-pooling by 2, then two linear maps.  All kernels are 3×3 with a padding of 2: each
convolution makes the image larger by 2 and each pooling halves it, so that 28×28 becomes 2×2
after the fifth pooling and stays so (2 + 2 = 4, halved 2).

Shapes: B images, D width; kernels (D, 3, 3, C) for C channels, as cuDNN has them: in another
layout XLA keeps a transposed copy of each in addition.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Spec = jax.ShapeDtypeStruct
Module = tuple[str, int]
Update = Literal["inside", "after"]
Decorator = Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]

SIDE, CLASSES = 28, 10
_SETTLED = 5  # poolings until the image is 2×2

# ---------------------------------------------------------------- API


def modules(depth: int) -> list[Module]:
    """The kind of each, "conv", "relu" or "pool", and which convolution it is or follows."""
    return [("conv", 0)] + [(kind, k + 1) for k in range(depth) for kind in _KINDS]


def cut(modules: Sequence[Module], segments: int) -> list[Sequence[Module]]:
    """Equal numbers of modules, the rest in the last segment.

    Raises:
      ValueError: there are fewer modules than segments.
    """
    if not 1 <= segments <= len(modules):
        raise ValueError(f"{len(modules)} modules cannot be cut into {segments} segments")
    size = len(modules) // segments
    begins = [k * size for k in range(segments)]
    return [modules[a:b] for a, b in zip(begins, [*begins[1:], len(modules)], strict=True)]


def parameters(depth: int, width: int) -> Any:
    """Their shapes: "convs" first to last, then "hidden" and "out".

    Raises:
      ValueError: the net is too shallow for the image to become 2×2.
    """
    if depth < _SETTLED:
        raise ValueError(f"depth must be at least {_SETTLED}, for 2×2 in the end; got {depth}")

    def affine(out: int, *kernel: int) -> dict[str, Spec]:
        return {"kernel": Spec(kernel, "float32"), "bias": Spec((out,), "float32")}

    convs = [affine(width, width, 3, 3, 1 if k == 0 else width) for k in range(depth + 1)]
    hidden = affine(CLASSES, 4 * width, CLASSES)
    return {"convs": convs, "hidden": hidden, "out": affine(CLASSES, CLASSES, CLASSES)}


def batch(size: int) -> tuple[Spec, Spec]:
    """Images and labels, described."""
    return Spec((size, SIDE, SIDE, 1), "float32"), Spec((size,), "int32")


def start(depth: int, width: int, images: jax.Array, seed: int) -> Any:
    """Parameters at random, kernels scaled so that what they make of these images is of size 1.

    Size is the root mean square behind the pooling (Mishkin & Matas 2016).  The number of inputs
    alone does not tell a scale: most of what is under a kernel is padding, and pooling takes the
    largest of four.
    """
    rng = np.random.default_rng(seed)

    def drawn(spec: Spec) -> jax.Array:
        normal = rng.standard_normal(spec.shape, np.float32)
        return jnp.asarray(normal if len(spec.shape) > 1 else np.zeros_like(normal))

    params = jax.tree.map(drawn, parameters(depth, width))
    x = images
    for k, conv in enumerate(params["convs"]):
        conv["kernel"], x = _sized(conv, x, _KINDS[: 1 if k == 0 else None])
    for name in ("hidden", "out"):
        kernel = params[name]["kernel"]
        params[name]["kernel"] = kernel / kernel.shape[0] ** 0.5
    return params


def logits(
    params: Any,
    images: jax.Array,
    segments: int | None = None,
    decorate: Decorator = lambda function: function,
    rate: float | None = None,
) -> jax.Array:
    """What the net says of images, (B, 10).

    Args:
      segments: into how many the modules are cut by hand, each under `jax.checkpoint` but the
        last, as `torch.utils.checkpoint.checkpoint_sequential` does it.
      decorate: put on the modules as a whole.
      rate: None for parameters whose cotangents are gradients; else see `_moved`.
    """
    parts = modules(len(params["convs"]) - 1)
    one = functools.partial(_through, rate=rate)
    if segments is None:
        x = decorate(functools.partial(one, parts))(params["convs"], images)
    else:
        x = images
        for part in cut(parts, segments):
            piece = functools.partial(one, part)
            own = {k: params["convs"][k] for kind, k in part if kind == "conv"}
            x = (piece if part[-1] == parts[-1] else jax.checkpoint(piece))(own, x)
    x = x.reshape(len(x), -1)
    for name in ("hidden", "out"):
        x = x @ params[name]["kernel"] + params[name]["bias"]
    return x


def step(
    rate: float = 0.1, update: Update = "inside", **options: Any
) -> Callable[..., tuple[Any, jax.Array]]:
    """A step of plain gradient descent: (params, images, labels) -> (new params, loss).

    Args:
      update: "after" the whole gradient is there, or "inside" of the backward pass, each
        convolution as soon as its own is.  Both are the same arithmetic.
      **options: of `logits`.
    """
    inside = rate if update == "inside" else None

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(logits(params, images, rate=inside, **options))
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    def run(params: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        value, found = jax.value_and_grad(loss)(params, images, labels)
        moved = {name: _descent(params[name], found[name], rate) for name in params}
        return (moved | {"convs": found["convs"]} if inside else moved), value

    return run


# ---------------------------------------------------------------- implementation

_KINDS = ("conv", "relu", "pool")


def _through(
    modules: Sequence[Module], convs: Any, x: jax.Array, rate: float | None = None
) -> jax.Array:
    for kind, k in modules:
        if kind == "conv":
            p = convs[k]
            if rate is not None:
                x, p = _moved(rate, x, p)
            x = _conv(x, p)
        else:
            x = jax.nn.relu(x) if kind == "relu" else _pool(x)
    return x


@functools.partial(jax.jit, static_argnames="kinds")
def _sized(conv: Any, x: jax.Array, kinds: Sequence[str]) -> tuple[jax.Array, jax.Array]:
    """A kernel so that what comes out is of size 1, and that."""
    x = _through([(kind, 0) for kind in kinds], [conv], x)
    scale = jnp.sqrt(jnp.square(x).mean())
    # As long as the bias is zero what comes out goes as the kernel does.
    return conv["kernel"] / scale, x / scale


def _conv(x: jax.Array, p: Any) -> jax.Array:
    padding = ((2, 2), (2, 2))
    layout = ("NHWC", "OHWI", "NHWC")
    y = jax.lax.conv_general_dilated(x, p["kernel"], (1, 1), padding, dimension_numbers=layout)
    return y + p["bias"]


def _pool(x: jax.Array) -> jax.Array:
    """The largest of each 2×2; of an odd last row or column nothing.

    As a maximum of an axis, for which XLA needs less than for `reduce_window`, whose
    derivative looks for the place of the maximum first.
    """
    b, h, w, d = x.shape
    x = x[:, : h // 2 * 2, : w // 2 * 2]
    return x.reshape(b, h // 2, 2, w // 2, 2, d).max((2, 4))


def _unmoved(rate: float, x: jax.Array, p: Any) -> tuple[jax.Array, Any]:
    """Both as they are; but the cotangent of `p` is not its gradient but what descent makes of `p`.

    The barrier has it made before the backward pass goes on.  Without, XLA's scheduler for
    GPUs puts the gradients of all kernels last, where they free the least, and till then holds
    all that they are made from: the memory that recomputation was to save.
    """
    return x, p


def _moved_forward(rate: float, x: jax.Array, p: Any) -> Any:
    return (x, p), p


def _moved_backward(rate: float, p: Any, cotangents: Any) -> Any:
    ct, gradient = cotangents
    return jax.lax.optimization_barrier((ct, _descent(p, gradient, rate)))


_moved: Any = jax.custom_vjp(_unmoved, nondiff_argnums=(0,))
_moved.defvjp(_moved_forward, _moved_backward)


def _descent(params: Any, gradient: Any, rate: float) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, gradient)
