"""What the twins in JAX and in PyTorch share: sizes, initial weights, a batch; numpy alone.

The layers of a stack have their parameters stacked, [layers, …], as a scan takes them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

Shape = tuple[int, ...]

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Adamw:
    """What trains both, as both understand it."""

    rate: float = 1e-4
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    decay: float = 1e-2


@dataclasses.dataclass(frozen=True)
class Gpt:
    """A transformer over bytes, in the proportions of GPT-2.

    Attributes:
      dtype: of the layers; parameters are float32.
      attention: "plain" matrix products, or one "fused" kernel.
    """

    layers: int = 24
    width: int = 1024
    heads: int = 16
    sequence: int = 1024
    batch: int = 8
    vocabulary: int = 256
    dtype: str = "bfloat16"
    attention: Literal["plain", "fused"] = "plain"

    @property
    def shapes(self) -> dict[str, Any]:
        """Of the parameters."""
        d = self.width
        layer = {
            **dict.fromkeys(["scale_1", "bias_1", "scale_2", "bias_2"], (d,)),
            "qkv": (d, 3 * d),
            "out": (d, d),
            "up": (d, 4 * d),
            "down": (4 * d, d),
        }
        return {
            "tokens": (self.vocabulary, d),
            "positions": (self.sequence, d),
            "layers": stacked(self.layers, layer),
            "scale": (d,),
        }

    @property
    def count(self) -> int:
        """How many numbers the parameters are."""
        return count(self.shapes)

    def data(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Tokens, each sequence with the one that comes after it."""
        rng = np.random.default_rng(seed)
        return (rng.integers(0, self.vocabulary, (self.batch, self.sequence + 1), np.int32),)


@dataclasses.dataclass(frozen=True)
class Cnn:
    """A residual net of four stages, each half the size and twice the width of the one before.

    Attributes:
      width: of the first stage.
      blocks: of a stage, each two convolutions.
      image: pixels along a side.
    """

    blocks: int = 8
    width: int = 64
    image: int = 224
    batch: int = 128
    classes: int = 1000
    dtype: str = "bfloat16"

    @property
    def shapes(self) -> dict[str, Any]:
        """Of the parameters; kernels are [height, width, in, out]."""
        found: dict[str, Any] = {}
        given = 3
        for stage in range(STAGES):
            width = self.width * 2**stage
            block = {
                **dict.fromkeys(["scale_1", "bias_1", "scale_2", "bias_2"], (width,)),
                **dict.fromkeys(["conv_1", "conv_2"], (3, 3, width, width)),
            }
            found[f"down_{stage}"] = (3, 3, given, width)
            found[f"stage_{stage}"] = stacked(self.blocks, block)
            given = width
        return {**found, "head": (given, self.classes)}

    @property
    def count(self) -> int:
        """How many numbers the parameters are."""
        return count(self.shapes)

    def data(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Images [batch, image, image, 3] and their labels."""
        rng = np.random.default_rng(seed)
        images = rng.standard_normal((self.batch, self.image, self.image, 3), np.float32)
        return images, rng.integers(0, self.classes, self.batch, np.int32)


Net = Gpt | Cnn
Name = Literal["transformer", "fused transformer", "CNN"]
STAGES = 4
ADAMW = Adamw()
NETS: Mapping[Name, Net] = {
    "transformer": Gpt(),
    "fused transformer": Gpt(attention="fused"),
    "CNN": Cnn(),
}
SMALL: Mapping[Name, Net] = {
    "transformer": Gpt(4, 16, 2, 16, 2, 32, dtype="float32"),
    "CNN": Cnn(2, 4, 32, 4, 10, dtype="float32"),
}

# ---------------------------------------------------------------- API


def weights(shapes: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """Initial parameters: ones for scales, zeros for biases, else normal over √fan-in."""
    rng = np.random.default_rng(seed)

    def made(name: str, shape: Any) -> Any:
        if isinstance(shape, Mapping):
            return {key: made(key, value) for key, value in shape.items()}
        if name.startswith("scale"):
            return np.ones(shape, np.float32)
        if name.startswith("bias"):
            return np.zeros(shape, np.float32)
        values = rng.standard_normal(shape, np.float32)
        values *= 0.02 if name in ("tokens", "positions") else _fan_in(name, shape) ** -0.5
        return values

    return made("", shapes)


def stacked(layers: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes with the number of layers in front."""
    return {name: (layers, *shape) for name, shape in shapes.items()}


def count(shapes: Mapping[str, Any]) -> int:
    """How many numbers there are."""
    return sum(
        count(shape) if isinstance(shape, Mapping) else math.prod(shape)
        for shape in shapes.values()
    )


# ---------------------------------------------------------------- implementation


def _fan_in(name: str, shape: Shape) -> int:
    # Of a convolution all but the last; of stacks one of the layers.
    return math.prod(shape[-4:-1]) if name.startswith(("conv", "down_")) else shape[-2]
