"""A net trained in PyTorch, in a separate process."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch._functorch.config  # pyright: ignore[reportMissingImports]
from torch.utils.checkpoint import (  # pyright: ignore[reportMissingImports]
    checkpoint,
    checkpoint_sequential,
)

from side import torch_nets
from side.methods import COMPILED
from side.shapes import ADAMW, Net, weights

# ---------------------------------------------------------------- API


def run(net: Net, family: str, how: str, device: str, warmup: int, steps: int) -> dict[str, Any]:
    """Train for so many steps on one batch.

    Args:
      device: "cpu" or "cuda".

    Returns:
      As `run_jax.run`; the peak is that of the timed steps, without the compiler's trials.
    """
    gpu = device == "cuda"
    torch.backends.cudnn.benchmark = True
    model: Any = torch_nets.made(net, weights(net.shapes)).to(device)
    batch = [tensor.to(device) for tensor in torch_nets.data(net.data())]
    adamw = torch.optim.AdamW(
        model.parameters(), ADAMW.rate, (ADAMW.b1, ADAMW.b2), ADAMW.eps, ADAMW.decay, fused=gpu
    )
    loss = _loss(model, family, how)
    wait = torch.cuda.synchronize if gpu else _nothing
    seconds, losses = [], []
    for number in range(warmup + steps):
        if gpu and number == warmup:
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        adamw.zero_grad(set_to_none=True)
        value = loss(*batch)
        value.backward()
        adamw.step()
        wait()
        seconds.append(time.perf_counter() - start)
        losses.append(value.item())
    return {
        "seconds": seconds[warmup:],
        "losses": losses[:2],
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "device": torch.cuda.get_device_name() if gpu else device,
        "compiled": False,
    }


# ---------------------------------------------------------------- implementation


def _loss(model: Any, family: str, how: str) -> Callable[..., Any]:
    kind, _, number = how.partition("=")

    def loss(*batch: Any) -> Any:
        return model(_through(kind, number), *batch)

    if family != COMPILED:
        return loss
    if kind == "budget":
        torch._functorch.config.activation_memory_budget = float(number)
    return torch.compile(loss)


def _through(kind: str, number: str) -> torch_nets.Through:
    def plain(layers: Sequence[Any], x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    def each(layers: Sequence[Any], x: Any) -> Any:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def segments(layers: Sequence[Any], x: Any) -> Any:
        return checkpoint_sequential(list(layers), int(number), x, use_reentrant=False)

    return {"plain": plain, "budget": plain, "each": each, "segments": segments}[kind]


def _nothing() -> None:
    """A CPU does what it is told at once."""
