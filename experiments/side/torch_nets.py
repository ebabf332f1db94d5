"""The nets of `shapes.py` in PyTorch, as one would write them there; `jax_nets.py` has the same.

Normalisations and attention are PyTorch's own kernels, which keep less for the backward pass than
their parts would.  Parameters are float32 and cast where they are used, as under autocast.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

from side.shapes import STAGES, Cnn, Gpt, Net

Through = Callable[[Sequence[nn.Module], Tensor], Tensor]

# ---------------------------------------------------------------- API


def made(net: Net, weights: Mapping[str, Any]) -> "Transformer | ConvNet":
    """The model with these weights, which are laid out as those of the twin in JAX."""
    return Transformer(net, weights) if isinstance(net, Gpt) else ConvNet(net, weights)


def data(arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """What `net.data` gives; images become [batch, channels, height, width], channels last."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return [tensor.permute(0, 3, 1, 2) if tensor.ndim == 4 else tensor.long() for tensor in tensors]


class Transformer(nn.Module):
    """From tokens [B, T + 1] to the mean loss, its layers run by `through`."""

    def __init__(self, net: Gpt, weights: Mapping[str, Any]) -> None:
        super().__init__()
        self.dtype = _dtype(net)
        self.tokens, self.positions, self.scale = (
            _parameter(weights[name]) for name in ("tokens", "positions", "scale")
        )
        self.layers = nn.ModuleList(
            TransformerLayer(net, _row(weights["layers"], k)) for k in range(net.layers)
        )

    def forward(self, through: Through, tokens: Tensor) -> Tensor:
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = (self.tokens[given] + self.positions).to(self.dtype)
        x = through(list(self.layers), x)
        y = F.layer_norm(x, x.shape[-1:], self.scale.to(self.dtype), None, 1e-5)
        logits = F.linear(y, self.tokens.to(self.dtype)).float()
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class ConvNet(nn.Module):
    """From images and labels to the mean loss, its blocks and strided convolutions by `through`."""

    def __init__(self, net: Cnn, weights: Mapping[str, Any]) -> None:
        super().__init__()
        self.dtype = _dtype(net)
        self.head = _parameter(weights["head"])
        self.layers = nn.ModuleList()
        for stage in range(STAGES):
            self.layers.append(Down(net, weights[f"down_{stage}"]))
            blocks = weights[f"stage_{stage}"]
            self.layers.extend(ConvBlock(net, _row(blocks, k)) for k in range(net.blocks))

    def forward(self, through: Through, images: Tensor, labels: Tensor) -> Tensor:
        x = through(list(self.layers), images.to(self.dtype))
        logits = x.mean((2, 3)) @ self.head.to(self.dtype)
        return F.cross_entropy(logits.float(), labels)


# ---------------------------------------------------------------- layers


class TransformerLayer(nn.Module):
    """Attention, and a hidden layer four times as wide."""

    def __init__(self, net: Gpt, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.heads, self.fused, self.dtype = net.heads, net.attention == "fused", _dtype(net)
        self.p = nn.ParameterDict({name: _parameter(value) for name, value in weights.items()})

    def forward(self, x: Tensor) -> Tensor:
        p = {name: value.to(self.dtype) for name, value in self.p.items()}
        width = x.shape[-1:]
        y = F.layer_norm(x, width, p["scale_1"], p["bias_1"], 1e-5)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (y @ p["qkv"]).chunk(3, dim=-1)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = _attention(q, k, v)
        x = x + y.transpose(1, 2).flatten(2) @ p["out"]
        y = F.layer_norm(x, width, p["scale_2"], p["bias_2"], 1e-5)
        return x + F.gelu(y @ p["up"], approximate="tanh") @ p["down"]


class ConvBlock(nn.Module):
    """Two convolutions behind normalisation by the batch's own statistics, added to the input."""

    def __init__(self, net: Cnn, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.dtype = _dtype(net)
        self.p = nn.ParameterDict({name: _parameter(value) for name, value in weights.items()})

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for k in "12":
            scale, bias = self.p[f"scale_{k}"], self.p[f"bias_{k}"]
            y = F.relu(F.batch_norm(y, None, None, scale, bias, training=True, eps=1e-5))
            y = F.conv2d(y, self.p[f"conv_{k}"].to(self.dtype), padding=1)
        return x + y


class Down(nn.Module):
    """A convolution to half the size."""

    def __init__(self, net: Cnn, kernel: np.ndarray) -> None:
        super().__init__()
        self.dtype, self.kernel = _dtype(net), _parameter(kernel)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel.to(self.dtype), stride=2, padding=1)


# ---------------------------------------------------------------- implementation


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of [B, H, T, D / H], with the scores in float32."""
    scores = (q @ k.transpose(-1, -2)).float() / q.shape[-1] ** 0.5
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).to(q.dtype) @ v


def _parameter(value: np.ndarray) -> nn.Parameter:
    tensor = torch.from_numpy(np.ascontiguousarray(value))
    if value.ndim == 4:  # height, width, in, out
        tensor = tensor.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    return nn.Parameter(tensor)


def _row(stacked: Mapping[str, np.ndarray], k: int) -> dict[str, np.ndarray]:
    return {name: value[k] for name, value in stacked.items()}


def _dtype(net: Net) -> torch.dtype:
    return getattr(torch, net.dtype)
