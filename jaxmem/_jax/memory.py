"""Memory spaces: where an array is, by its type; and what jax gets wrong of transfers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core.primitives import device_put_p
from jax.interpreters import ad

from jaxmem._jax.private import empty_like_aval

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(leaf: Any) -> bool:
    """Whether an array, or what has such a type, is in host memory."""
    # Asked of a traced array, some releases raise what hasattr does not catch.
    is_type = not isinstance(leaf, jax.Array) and hasattr(leaf, "memory_space")
    aval = leaf if is_type else jax.typeof(leaf)
    return getattr(aval, "memory_space", DEVICE) == HOST


def type_on_device(leaf: Any) -> Any:
    """The type of an array, as it is on the device."""
    return jax.typeof(leaf).update(memory_space=DEVICE)


def unfilled_like(leaf: Any) -> Any:
    """Room for an array of the same type in the same memory, to be written before it is read."""
    return empty_like_aval(jax.typeof(leaf))


def on_device(leaf: Any) -> Any:
    """The array on the device."""
    return jax.device_put(leaf, DEVICE) if is_on_host(leaf) else leaf


def refuse_mapped(flags: Iterable[bool]) -> None:
    """Raise where one of some stacked arrays on the host is mapped by `jax.vmap`.

    XLA's compilers fail where rows of an array on the host are not contiguous in it.

    Raises:
      ValueError: one is.
    """
    if any(flags):
        raise ValueError(
            "jax.vmap maps over arrays of a layer stack that are in host memory, or over their "
            "gradients; map over the other arguments and differentiate the mapped function, as in "
            "jax.grad(lambda params: jax.vmap(loss, (None, 0))(params, batch).mean()), or move the "
            "parameters first: jax.device_put(params, jax.memory.Space.Device)"
        )


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
            is_on_host = getattr(jax.typeof(ct), "memory_space", None) == jax.memory.Space.Host
            if is_on_host and arg.aval.memory_space == jax.memory.Space.Device:
                found[place] = jax.device_put(ct, jax.memory.Space.Device)
        return found

    ad.primitive_transposes[device_put_p] = rule


# Where jax keeps its rules elsewhere, they are left as they are.
if device_put_p in ad.primitive_transposes:
    _move_cotangents_to_device()
