"""Which leaves of a call's arguments are an optimizer's state, and of which of its fields.

optax's states are named tuples, one inside of the other; parameters, batches and train states of
other kinds (dicts, dataclasses) are not.  So a leaf is told by the innermost named tuple
around it: "mu" of ScaleByAdamState, whatever chain that is a link of.
"""

from typing import Any

import jax

# A stored array is a named tuple, too, and no state: codes and scales of one field.
_STORED = ("codes", "scales")


def state_fields(tree: Any) -> list[str | None]:
    """For each leaf in jax's order the name of its field; None for what is no state.

    >>> import jax.numpy as jnp, optax
    >>> state = optax.chain(optax.clip(1.0), optax.adam(0.1)).init({"w": jnp.ones(3)})
    >>> state_fields({"w": jnp.ones(3), "opt_state": state})
    ['count', 'mu', 'nu', None]
    """
    found: list[str | None] = []

    def walk(node: Any, field: str | None) -> None:
        if _is_named(node):
            for name, value in zip(node._fields, node, strict=True):
                walk(value, name)
            return
        for leaf in jax.tree.leaves(node, is_leaf=_is_named):
            if _is_named(leaf):
                walk(leaf, field)
            else:
                found.append(field)

    walk(tree, None)
    return found


def _is_named(node: Any) -> bool:
    fields = getattr(node, "_fields", None)
    return isinstance(node, tuple) and fields is not None and tuple(fields) != _STORED
