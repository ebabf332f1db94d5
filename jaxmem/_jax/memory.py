"""Memory spaces: where an array is, by its type; and what jax gets wrong of transfers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core
from jax.extend.core.primitives import device_put_p
from jax.interpreters import ad

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(leaf: Any) -> bool:
    """Whether an array, or what has such a type, is in host memory."""
    aval = leaf if hasattr(leaf, "memory_space") else jax.typeof(leaf)
    return getattr(aval, "memory_space", DEVICE) == HOST


def on_device(leaf: Any) -> Any:
    """The array on the device."""
    return jax.device_put(leaf, DEVICE) if is_on_host(leaf) else leaf


def beside(leaf: Any, other: Any) -> Any:
    """The array in the memory where the other one is."""
    if is_on_host(leaf) == is_on_host(other):
        return leaf
    return jax.device_put(leaf, HOST if is_on_host(other) else DEVICE)


def _move_cotangents_to_device() -> None:
    """Mend jax's transpose of a transfer to the host, on which second derivatives depend.

    The gradient through a checkpoint that offloads holds transfers of its values to the host.
    Their cotangents are to come back, but jax (0.10.2) leaves them on the host, as these transfers
    do not say where they come from, and then refuses them: "Expected cotangent type float32[2,4]
    but got float32<host>[2,4]".  Nothing changes where jax puts them right.
    """
    transpose: Callable[..., Any] = ad.primitive_transposes[device_put_p]

    def rule(cts: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
        found = list(transpose(cts, *args, **params))
        for place, (ct, arg) in enumerate(zip(found, args, strict=True)):
            if ct is None or type(ct) is ad.Zero or not ad.is_undefined_primal(arg):
                continue
            is_on_host = getattr(core.typeof(ct), "memory_space", None) == jax.memory.Space.Host
            if is_on_host and arg.aval.memory_space == jax.memory.Space.Device:
                found[place] = jax.device_put(ct, jax.memory.Space.Device)
        return found

    ad.primitive_transposes[device_put_p] = rule


# Where jax keeps its rules elsewhere, they are left as they are.
if device_put_p in ad.primitive_transposes:
    _move_cotangents_to_device()
