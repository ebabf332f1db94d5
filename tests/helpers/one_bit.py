"""What the tests of 1-bit optimizers share: their steps over devices, and the paper in numpy."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from helpers.menagerie import exact_jit
from helpers.updating import normal

Arrays = list[np.ndarray]  # [devices, …] each

DEVICES = 4
PARAMS = {"b": 0.1 * normal(0, 5), "layers": {"w": normal(1, 3, 7, 11)}}


def gradients(step: int, devices: int = DEVICES, params: Any = PARAMS) -> Any:
    """Those of all devices, along a leading axis: noise around one direction."""
    random = np.random.default_rng(step)
    return jax.tree.map(
        lambda p: (0.1 * np.asarray(p) + random.standard_normal((devices, *p.shape))).astype(
            np.float32
        ),
        params,
    )


class Run:
    """An optimizer over devices: `init`, and steps with the gradients of all of them."""

    def __init__(self, optimizer: Any, devices: int = DEVICES, params: Any = PARAMS) -> None:
        self.params, mesh = params, mesh_of(devices)
        mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        specs: Any = None

        def types(params: Any) -> Any:
            nonlocal specs
            specs = jaxmem.one_bit_specs(jax.eval_shape(optimizer.init, params))
            return ()

        jax.eval_shape(mapped(types, in_specs=P(), out_specs=()), params)
        self.state = exact_jit(mapped(optimizer.init, in_specs=P(), out_specs=specs))(params)

        def update(gradients: Any, state: Any, params: Any) -> Any:
            own = jax.tree.map(lambda leaf: leaf[0], gradients)
            updates, state = optimizer.update(own, state, params)
            return optax.apply_updates(params, updates), state

        self._update = exact_jit(
            mapped(update, in_specs=(P("data"), specs, P()), out_specs=(P(), specs))
        )

    def step(self, gradients: Any) -> None:
        self.params, self.state = self._update(gradients, self.state, self.params)


def run(optimizer: Any, steps: int, **options: Any) -> Run:
    found = Run(optimizer, **options)
    for step in range(steps):
        found.step(gradients(step))
    return found


def mesh_of(devices: int) -> Any:
    return jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])


def compressed(numbers: np.ndarray, counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers as their signs tell them, and what is wrong with that."""
    numbers = np.where(counted, numbers, 0)
    scale = np.abs(numbers).sum() / max(counted.sum(), 1)
    told = np.where(counted, np.where(numbers >= 0, scale, -scale), 0)
    return told, numbers - told


def reference(
    arrays: Sequence[np.ndarray],
    sent: Sequence[np.ndarray],
    owned: Sequence[np.ndarray],
    counted: Sequence[np.ndarray],
) -> tuple[Arrays, Arrays, Arrays]:
    """The algorithm of the paper, array by array, in float64."""
    averages, new_sent, new_owned = [], [], []
    for x, error, server, mask in zip(arrays, sent, owned, counted, strict=True):
        devices, numbers = len(x), mask.size
        pairs = [compressed(np.float64(x[k]) + error[k], mask) for k in range(devices)]
        told, wrong = (np.stack(part) for part in zip(*pairs, strict=True))
        part = 8 * -(-numbers // (8 * devices))
        rest = devices * part - numbers
        mean = np.pad(told.reshape(devices, -1).mean(0), (0, rest)).reshape(devices, part)
        is_real = np.pad(mask.ravel(), (0, rest)).reshape(devices, part)
        pairs = [compressed(mean[k] + server[k], is_real[k]) for k in range(devices)]
        told, kept = (np.stack(part) for part in zip(*pairs, strict=True))
        averages.append(told.ravel()[:numbers].reshape(mask.shape))
        new_sent.append(wrong)
        new_owned.append(kept)
    return averages, new_sent, new_owned
