"""The optimizers of a run, with their state in 32 bits or 8, in memory or on disk."""

import warnings
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import jaxmem
from jaxmem.errors import OffloadWarning

OptimizerName = Literal[
    "adamw", "adam", "sgd", "momentum", "lion", "lamb", "adafactor", "adalomo",
    "one-bit-adam", "one-bit-lamb",
]  # fmt: skip
StateName = Literal["float32", "8bit", "8bit-companding", "host", "8bit-host", "disk", "8bit-disk"]
WeightsName = Literal["float32", "bfloat16", "bfloat16+8"]


def make(
    name: OptimizerName,
    rate: Any,
    state: StateName,
    weights: WeightsName,
    clip: float | None,
    folder: Path,
    every: int,
    **options: Any,
) -> Any:
    """An optax transformation.

    Args:
      rate: of learning, a schedule.
      state: where the state is, and in how many bits.
      weights: what the parameters are stored in.
      clip: the largest global norm of a gradient; None for any.
      folder: for a state on disk; what a run that has no checkpoint left there is removed.
      every: steps between checkpoints.
      options: of the optimizers that send signs.
    """
    found = _MAKERS[name](rate, **options)
    if weights == "bfloat16+8":
        found = jaxmem.master_weights(found)
    if state.startswith("8bit"):
        codec = "companding" if state == "8bit-companding" else "dynamic"
        found = jaxmem.quantize_state(found, codec)
    if state.endswith("host"):
        found = _quiet(jaxmem.offload_state(found, min_size=4096))
    if state.endswith("disk"):
        found = jaxmem.disk_state(found, folder, every=every, min_size=4096, overwrite=True)
    return found if clip is None else optax.chain(optax.clip_by_global_norm(clip), found)


def stored(params: Any, weights: WeightsName) -> Any:
    """Parameters in what they are stored in."""
    dtype = jnp.float32 if weights == "float32" else jnp.bfloat16
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def in_float32(params: Any) -> Any:
    """Parameters as the model computes with them."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


def hold(state: Any) -> None:
    """For a checkpoint: until what is on disk of a state is all there, and to stay."""
    for leaf in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, jaxmem.OnDisk)):
        if isinstance(leaf, jaxmem.OnDisk):
            leaf.hold()
            return


# ---------------------------------------------------------------- implementation

_MAKERS: dict[str, Any] = {
    "adamw": lambda rate: optax.adamw(rate, b2=0.98, weight_decay=0.01),
    "adam": lambda rate: optax.adam(rate, b2=0.98),
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "lion": lambda rate: optax.lion(rate, weight_decay=0.01),
    "lamb": lambda rate: optax.lamb(rate, b2=0.98, weight_decay=0.01),
    "adafactor": optax.adafactor,
    "adalomo": lambda rate: jaxmem.adalomo(rate),  # imported when it is asked for
    "one-bit-adam": lambda rate, **options: jaxmem.one_bit_adam(
        rate, b2=0.98, weight_decay=0.01, **options
    ),
    "one-bit-lamb": lambda rate, **options: jaxmem.one_bit_lamb(
        rate, b2=0.98, weight_decay=0.01, **options
    ),
}


def _quiet(optimizer: Any) -> Any:
    """The same; that a CPU has one memory is known from the table's note."""

    def init(params: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OffloadWarning)
            return optimizer.init(params)

    return optax.GradientTransformationExtraArgs(init, optimizer.update)
