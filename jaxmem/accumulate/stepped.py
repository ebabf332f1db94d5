"""The step of a wrapped optimizer where a window ends, and the reset of its accumulator."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.accumulate.once import run_if
from jaxmem.accumulate.trees import difference, own_zero, promoted

# ---------------------------------------------------------------- API


def stepped(
    opt: optax.GradientTransformationExtraArgs,
    steps: jax.Array,
    gradients: Any,
    mean: Any,
    inner: Any,
    params: Any,
    passed: dict[str, Any],
) -> tuple[Any, Any, Any]:
    """Updates, accumulator and inner state, after a step if there is to be one.

    After a step the accumulator is zeros, and without one the updates are: one
    buffer holds whichever is not.
    """
    leaves, tree = jax.tree.flatten(passed)
    arrays = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)}

    def inner_update(mean: Any, inner: Any, operands: Any) -> tuple[Any, Any]:
        params, arrays = operands
        extra = jax.tree.unflatten(tree, [arrays.get(k, leaf) for k, leaf in enumerate(leaves)])
        updates, new = opt.update(mean, inner, params, **extra)
        return updates, jax.tree.map(_like, new, inner)

    operands = (params, arrays)
    found = jax.eval_shape(inner_update, mean, inner, operands)[0]
    wanted = found
    if any(map(_differ, jax.tree.leaves(gradients), jax.tree.leaves(mean))):
        wanted = jax.eval_shape(inner_update, gradients, inner, operands)[0]
    inner = jax.tree.map(_like, inner, inner)

    if _can_share(found, mean):
        treedef = jax.tree.structure(mean)

        def body(carry: Any, operands: Any) -> Any:
            shared, inner = treedef.unflatten(carry[0][::-1]), carry[1]
            updates, inner = inner_update(jax.tree.map(_like, shared, mean), inner, operands)
            updates = jax.tree.map(_like, updates, shared)
            return jax.tree.leaves(updates)[::-1], inner

        shared = jax.tree.map(
            lambda acc, new: acc.astype(promoted(acc.dtype, new.dtype)), mean, found
        )
        # The last leaf goes first.  XLA finds a place for what is in a loop in the loop's order,
        # and takes any donated accumulator that is free meanwhile; those are overwritten after
        # the loop, in the order of the tree.  In that order a leaf would take the place of a
        # later one, which then finds none (seen on TPU: a temporary for each such leaf).  The
        # other way around no place but its own stays free until it is read.
        last_first, inner = run_if(body, steps, (jax.tree.leaves(shared)[::-1], inner), operands)
        shared = treedef.unflatten(last_first[::-1])
        updates = jax.tree.map(lambda x: jnp.where(steps, x, own_zero(x.dtype)), shared)
        mean = jax.tree.map(
            lambda x, acc: jnp.where(steps, own_zero(x.dtype), x).astype(acc.dtype),
            shared,
            mean,
        )
    else:

        def body(carry: Any, operands: Any) -> Any:
            _, mean, inner = carry
            updates, inner = inner_update(mean, inner, operands)
            return updates, jax.tree.map(jnp.zeros_like, mean), inner

        none = jax.tree.map(lambda new: jnp.zeros(new.shape, new.dtype), found)
        updates, mean, inner = run_if(body, steps, (none, mean, inner), operands)
    return jax.tree.map(_like, updates, wanted), mean, inner


# ---------------------------------------------------------------- implementation

_ARRAYS = (jax.Array, np.ndarray)


def _like(leaf: Any, other: Any) -> jax.Array:
    """The leaf in the other's dtype, of which it is not just a guess (jax's weak types)."""
    return jax.lax.convert_element_type(
        leaf, other.dtype if hasattr(other, "dtype") else jnp.result_type(other)
    )


def _differ(leaf: Any, other: Any) -> bool:
    return jnp.result_type(leaf) != jnp.result_type(other)


def _can_share(updates: Any, mean: Any) -> bool:
    return difference(updates, mean, ("", "")) is None and all(
        jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(updates)
    )
