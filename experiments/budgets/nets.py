"""ResNet-50, a U-Net and VGG as plain Python lists of layers, and what `jax.grad` makes of them.

A net is a list of layers, written out one after the other with no scan: `forward` is a loop over
that list.  Each layer belongs to a block, what a person would put `jax.checkpoint` around.  All is
float32, images lie as NHWC and kernels as OHWI, which is what cuDNN wants: otherwise XLA copies the
gradients of all kernels at the end.

Batch norm uses the statistics of the batch; running averages, a few kilobytes compared with
gigabytes of feature maps, are omitted, and so are the biases of convolutions before it, which it
would cancel, and the dropout between VGG's last three layers.

Shapes: B images, H height, W width, C channels; kernels (C made, h, w, C given).
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxmem

Spec = jax.ShapeDtypeStruct
Tree = Any
# What goes from layer to layer: the feature map, and below it those that pass by.
Maps = tuple[jax.Array, ...]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_EPSILON = 1e-5

# Convolutions before each pooling.
VGG_16, VGG_19 = (2, 2, 3, 3, 3), (2, 2, 4, 4, 4)

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Layer:
    """One step of a net.

    Attributes:
      block: which block it is part of.
      params: shapes of its parameters.
      apply: from its parameters and the maps to the maps behind it, of which the first is new
        and the others are of those before it.
    """

    block: str
    params: Tree
    apply: Callable[[Tree, Maps], Maps]


@dataclasses.dataclass(frozen=True)
class Net:
    """A net for a batch of a certain size.

    Attributes:
      name: for a reader.
      layers: from first to last.
      images, labels: the batch, described.
      loss: of what the last layer makes and the labels, a number.
    """

    name: str
    layers: tuple[Layer, ...]
    images: jax.ShapeDtypeStruct
    labels: jax.ShapeDtypeStruct
    loss: Callable[[jax.Array, jax.Array], jax.Array]

    @property
    def program(self) -> str:
        """The sizes as a text, for the table."""
        batch, height, width, _ = self.images.shape
        return f"{self.name} batch={batch} image={height}×{width}"

    @property
    def params(self) -> list[Tree]:
        """Shapes, a tree for each layer."""
        return [layer.params for layer in self.layers]

    @property
    def blocks(self) -> list[int]:
        """How many layers each block has."""
        return [len(list(own)) for _, own in itertools.groupby(self.layers, lambda la: la.block)]

    def made(self) -> list[int]:
        """Bytes of the map that each layer makes."""
        maps: Any = (self.images,)
        found = []
        for layer in self.layers:
            maps = jax.eval_shape(layer.apply, layer.params, maps)
            found.append(maps[0].size * maps[0].dtype.itemsize)
        return found


# ---------------------------------------------------------------- API


def job(
    net: Net,
    segments: Sequence[int] = (),
    decorate: Decorator | None = None,
    microbatches: int = 1,
) -> jaxmem.Job:
    """Loss and gradient of a net.  The gradient is a result; an optimizer stands outside.

    Args:
      segments: how many layers stand under one `jax.checkpoint` each, one after the other; what
        is left over at the end stands under none.
      decorate: put on the forward pass as a whole.
      microbatches: into how many the batch is cut, if not 1; only where images do not see each
        other, which batch norm makes them do.
    """

    def forward(params: Sequence[Tree], images: jax.Array) -> jax.Array:
        maps: Maps = (images,)
        first = 0
        for number in segments:
            own = slice(first, first + number)
            maps = jax.checkpoint(_through(net.layers[own]))(params[own], maps)
            first += number
        return _through(net.layers[first:])(params[first:], maps)[0]

    run = decorate(forward) if decorate else forward

    def loss(params: Sequence[Tree], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        images, labels = batch
        return net.loss(run(params, images), labels)

    step = jax.value_and_grad(loss)
    if microbatches > 1:
        step = jaxmem.value_and_grad(loss, microbatches=microbatches)
    return jaxmem.Job(step, (net.params, (net.images, net.labels)), name=net.name)


def resnet(
    batch: int = 184, image: int = 224, width: int = 64, stages: Sequence[int] = (3, 4, 6, 3)
) -> Net:
    """ResNet-50 (He et al. 2015), its stride in the 3×3 convolution as in torchvision's."""
    layers = [Layer("stem", _normed(7, 3, width), _stem)]
    given = width
    for number, blocks in enumerate(stages):
        narrow = width * 2**number
        for k in range(blocks):
            stride = 2 if number and not k else 1
            params = {
                "1": _normed(1, given, narrow),
                "2": _normed(3, narrow, narrow),
                "3": _normed(1, narrow, 4 * narrow),
            }
            if not k:
                params["short"] = _normed(1, given, 4 * narrow)
            layers.append(Layer(f"{number}_{k}", params, _bottleneck(stride)))
            given = 4 * narrow
    layers.append(Layer("head", _dense(given, 1000), _head))
    return _classifier("ResNet-50", layers, batch, image)


def unet(
    batch: int = 11, height: int = 416, width: int = 608, channels: int = 64, levels: int = 4
) -> Net:
    """The U-Net of MONeT's code: two convolutions a level, four levels down and up again.

    Maps are halved by the largest of 2×2 and doubled by repetition.
    """
    # The lowest level has as many channels as the one above it, which is what goes up.
    wide = [channels * 2 ** min(level, levels - 1) for level in range(levels + 1)]
    layers = []
    for level, made in enumerate(wide):
        given = wide[level - 1] if level else 3
        layers.append(Layer(f"down {level}", _two(given, made, made), _down if level else _first))
    for level in reversed(range(levels)):
        given = 2 * wide[level]
        # The levels above have half the channels, the first as many as the second.
        made = wide[max(level - 1, 0)]
        layers.append(Layer(f"up {level}", _two(given, given // 2, made), _up))
    layers.append(Layer("out", _conv_shapes(1, wide[0], 1), _out))
    images = Spec((batch, height, width, 3), "float32")
    labels = Spec((batch, height, width, 1), "float32")
    return Net("U-Net", tuple(layers), images, labels, _per_pixel)


def vgg(
    convs: Sequence[int] = VGG_16,
    batch: int = 176,
    image: int = 224,
    width: int = 64,
    hidden: int = 4096,
) -> Net:
    """VGG (Simonyan & Zisserman 2014): so many convolutions before each pooling, no norm."""
    layers = []
    given = 3
    for number, many in enumerate(convs):
        made = width * min(2**number, 8)
        for _ in range(many):
            layers.append(Layer(f"{number}", _conv_shapes(3, given, made), _conv_relu))
            given = made
        layers.append(Layer(f"{number}", {}, _pool))
    given *= (image // 2 ** len(convs)) ** 2
    for k, made in enumerate((hidden, hidden, 1000)):
        layers.append(Layer("dense", _dense(given, made), _dense_relu if k < 2 else _head))
        given = made
    return _classifier(f"VGG-{sum(convs) + 3}", layers, batch, image)


# ---------------------------------------------------------------- layers


def _through(layers: Sequence[Layer]) -> Callable[[Sequence[Tree], Maps], Maps]:
    """Layers, one after the other."""

    def run(params: Sequence[Tree], maps: Maps) -> Maps:
        for layer, own in zip(layers, params, strict=True):
            maps = layer.apply(own, maps)
        return maps

    return run


def _stem(p: Tree, maps: Maps) -> Maps:
    x = jax.nn.relu(_convolved_normed(maps[0], p, 2))
    return (lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),)


def _bottleneck(stride: int) -> Callable[[Tree, Maps], Maps]:
    def apply(p: Tree, maps: Maps) -> Maps:
        (x,) = maps
        y = jax.nn.relu(_convolved_normed(x, p["1"], 1))
        y = jax.nn.relu(_convolved_normed(y, p["2"], stride))
        y = _convolved_normed(y, p["3"], 1)
        short = _convolved_normed(x, p["short"], stride) if "short" in p else x
        return (_relu(y + short),)

    return apply


def _first(p: Tree, maps: Maps) -> Maps:
    return (_twice(maps[0], p),)


def _down(p: Tree, maps: Maps) -> Maps:
    return (_twice(_halved(maps[0]), p), *maps)


def _up(p: Tree, maps: Maps) -> Maps:
    x, skip, *rest = maps
    x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
    return (_twice(jnp.concatenate([skip, x], -1), p), *rest)


def _out(p: Tree, maps: Maps) -> Maps:
    return (_convolved(maps[0], p["kernel"], 1) + p["bias"],)


def _conv_relu(p: Tree, maps: Maps) -> Maps:
    return (_relu(_convolved(maps[0], p["kernel"], 1) + p["bias"]),)


def _pool(p: Tree, maps: Maps) -> Maps:
    return (_halved(maps[0]),)


def _dense_relu(p: Tree, maps: Maps) -> Maps:
    x = maps[0].reshape(len(maps[0]), -1)
    return (_relu(x @ p["kernel"] + p["bias"]),)


def _head(p: Tree, maps: Maps) -> Maps:
    (x,) = maps
    x = x.mean((1, 2)) if x.ndim == 4 else x
    return (x @ p["kernel"] + p["bias"],)


# ---------------------------------------------------------------- what layers are made of


def _twice(x: jax.Array, p: Tree) -> jax.Array:
    for key in "12":
        x = jax.nn.relu(_convolved_normed(x, p[key], 1))
    return x


def _convolved_normed(x: jax.Array, p: Tree, stride: int) -> jax.Array:
    """Convolution, and batch norm by the batch's own mean and variance."""
    x = _convolved(x, p["kernel"], stride)
    mean = x.mean((0, 1, 2))
    variance = jnp.square(x).mean((0, 1, 2)) - jnp.square(mean)
    return (x - mean) * (lax.rsqrt(variance + _EPSILON) * p["scale"]) + p["bias"]


def _convolved(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    x, kernel = _together(x, kernel)
    axes = ("NHWC", "OHWI", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=axes)


@jax.custom_jvp
def _relu(x: jax.Array) -> jax.Array:
    """As `jax.nn.relu`, but its derivative goes by its result, as that of PyTorch's does.

    What follows it keeps the result anyway, and the derivative of `jax.nn.relu` goes by the
    argument: XLA then holds both.  Behind a norm it would be the other way around, as the result
    can be had from the convolution's and is held by nobody else.
    """
    return jnp.maximum(x, 0)


@_relu.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    y = _relu(*primals)
    # XLA knows that max(x, 0) > 0 is x > 0, and without a barrier goes back to the argument.
    return y, jnp.where(lax.optimization_barrier(y) > 0, tangents[0], 0)


@jax.custom_vjp
def _together(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both as they are; but their gradients are made in one go.

    Else XLA's scheduler for GPUs puts off those of kernels, which free little, and holds what
    they are made from till then.
    """
    return x, kernel


def _together_forward(x: jax.Array, kernel: jax.Array) -> Any:
    return (x, kernel), None


def _together_backward(_: None, gradients: Any) -> Any:
    return lax.optimization_barrier(gradients)


_together.defvjp(_together_forward, _together_backward)


def _halved(x: jax.Array) -> jax.Array:
    """The largest of each 2×2, as a maximum of axes: XLA needs less for it than for a window's."""
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4))


def _two(given: int, between: int, made: int) -> Tree:
    return {"1": _normed(3, given, between), "2": _normed(3, between, made)}


def _normed(size: int, given: int, made: int) -> Tree:
    return _conv_shapes(size, given, made) | {"scale": Spec((made,), "float32")}


def _conv_shapes(size: int, given: int, made: int) -> Tree:
    kernel, bias = Spec((made, size, size, given), "float32"), Spec((made,), "float32")
    return {"kernel": kernel, "bias": bias}


def _dense(given: int, made: int) -> Tree:
    return {"kernel": Spec((given, made), "float32"), "bias": Spec((made,), "float32")}


# ---------------------------------------------------------------- losses


def _classifier(name: str, layers: Sequence[Layer], batch: int, image: int) -> Net:
    images, labels = Spec((batch, image, image, 3), "float32"), Spec((batch,), "int32")
    return Net(name, tuple(layers), images, labels, _cross_entropy)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def _per_pixel(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy of a yes or no for each pixel."""
    return (jax.nn.softplus(logits) - labels * logits).mean()
