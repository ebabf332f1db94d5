"""`offload_state`: an optimizer whose state is in the host's memory.

ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) for one device: rows of the state go to the device
one after the other, are updated there, and go back into the rows that they came from.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import core

from jaxmem import _jax
from jaxmem.accumulate.trees import leaf_names
from jaxmem.errors import OffloadWarning, check_positive, warn
from jaxmem.state import created, rows, stored
from jaxmem.state.update import is_as_a_whole
from jaxmem.state.wrapping import check_keep, check_optimizer
from jaxmem.trace.context import platform

# ---------------------------------------------------------------- API


def offload_state(
    optimizer: Any,
    *,
    min_size: int = 2**20,
    keep: Callable[[str], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The same optimizer with its state in host memory: of AdamW's 8 bytes none on the device.

        optimizer = jaxmem.offload_state(optax.adamw(3e-4))

    Large arrays of the state are created in the host's pinned memory and stay there.  An update
    takes them to the device some rows at a time, where each row of the new state follows from the
    same row of the old, and puts new rows in their places.  In `jaxmem.value_and_update` this
    happens in the backward pass, layer by layer, while other layers are computed.  With
    `jaxmem.quantize_state` inside of it, a quarter of the bytes go to and fro.

    Restore a checkpoint into a live state as the template (``optimizer.init(params)``): what
    `jax.eval_shape` returns does not say where arrays are.

    Donate the state together with the parameters, as ever, or the host holds it twice.  A jitted
    `init` makes the state on the device first, where it must fit for that moment; without
    `jax.jit` it makes one array after the other.

    Args:
      optimizer: an optax transformation.
      min_size: arrays with fewer numbers stay on the device; so do, on a TPU, those whose last axis
        has fewer than 128, such as scales of 8-bit codes, of which its compiler cannot write rows
        on the host.
      keep: from the path of an array in the optimizer's state, such as "0/nu/embedding", to whether
        it stays on the device.

    Returns:
      An optax transformation, whose state has the form of the optimizer's.

    Raises:
      TypeError, ValueError: an option cannot be.

    Warns:
      jaxmem.OffloadWarning: device and host memory are one here, as on a CPU: nothing is saved.

    >>> import jax, jax.numpy as jnp, jaxmem, optax, warnings
    >>> warnings.simplefilter("ignore", jaxmem.OffloadWarning)  # of a CPU
    >>> params = {"w": jnp.ones((64, 512)), "b": jnp.ones(512)}
    >>> adam = jaxmem.offload_state(optax.adam(1e-3), min_size=4096)
    >>> state = adam.init(params)
    >>> updates, state = jax.jit(adam.update)(params, state, params)
    >>> state[0].nu["w"].sharding.memory_kind, state[0].nu["b"].sharding.memory_kind
    ('pinned_host', 'device')
    """
    check_optimizer("offload_state", optimizer)
    check_keep(keep, "stays on the device")
    offloaded = _Offloaded(
        optax.with_extra_args_support(optimizer),
        check_positive("min_size", min_size),
        keep or (lambda path: False),
    )
    return optax.GradientTransformationExtraArgs(offloaded.init, offloaded.update)


# ---------------------------------------------------------------- implementation


@dataclasses.dataclass(frozen=True)
class _Offloaded:
    optimizer: Any
    min_size: int
    keep: Callable[[str], bool]

    def init(self, params: Any) -> Any:
        if platform() == "cpu":
            warn(
                "offload_state: on the cpu backend, the default here, device and host memory are "
                "one, so nothing is saved; the numbers are the same",
                OffloadWarning,
            )
        types = created.shapes(self.optimizer.init, params)
        if any(map(stored.is_on_disk, stored.flatten(types)[0])):
            raise ValueError(
                "the state is on disk already (jaxmem.disk_state); offload_state has nothing to do"
            )
        if any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(params)):
            leaves = jax.tree.leaves(self.optimizer.init(jax.tree.map(_jax.on_device, params)))
        else:
            leaves = created.one_by_one(self.optimizer.init, params)
        return jax.tree.structure(types).unflatten(
            [
                jax.device_put(leaf, _jax.HOST) if self._goes(leaf, name) else leaf
                for leaf, name in zip(leaves, leaf_names(types), strict=True)
            ]
        )

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        leaves, tree = jax.tree.flatten(state)
        on_host = list(map(_jax.is_on_host, leaves))

        def run(updates: Any, state: Sequence[Any], params: Any, extra: Any) -> tuple[Any, Any]:
            own = tree.unflatten(list(map(_jax.on_device, state)))
            found, after = self.optimizer.update(updates, own, params, **extra)
            new = [
                jax.device_put(leaf, _jax.HOST) if host else leaf
                for leaf, host in zip(jax.tree.leaves(after), on_host, strict=True)
            ]
            return found, new

        if is_as_a_whole():
            found, new = run(updates, leaves, params, extra)
        else:
            found, new = rows.by_rows(run, updates, leaves, params, extra)
        return found, tree.unflatten(new)

    def _goes(self, leaf: Any, name: str) -> bool:
        return (
            isinstance(leaf, jax.Array)
            and not (platform() == "tpu" and leaf.shape[-1:] < (128,))
            and math.prod(jnp.shape(leaf)) >= self.min_size
            and not self.keep(name)
        )
