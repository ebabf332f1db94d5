"""Which leaves of a call's arguments are an optimizer's state, and of which of its fields.

optax's states are named tuples, one inside of the other; parameters, batches and train states of
other kinds (dicts, dataclasses) are not.  So a leaf is told by the innermost named tuple
around it: "mu" of ScaleByAdamState, whatever chain that is a link of.  For a state of another
form the caller names the argument (see `jaxmem.trace.training_state`).
"""

import dataclasses
from typing import Any

import jax

# A stored array is a named tuple, too, and no state: codes and scales of one field.
_STORED = ("codes", "scales")


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """A leaf of an argument.

    Attributes:
      field: the name of its field of an optimizer's state; None for what is no state.
      disk_bytes: of the array on disk that it stands for; 0 for an array in memory.
    """

    field: str | None
    disk_bytes: int = 0


# ---------------------------------------------------------------- API


def state_fields(tree: Any) -> list[str | None]:
    """For each leaf in jax's order the name of its field; None for what is no state.

    >>> import jax.numpy as jnp, optax
    >>> state = optax.chain(optax.clip(1.0), optax.adam(0.1)).init({"w": jnp.ones(3)})
    >>> state_fields({"w": jnp.ones(3), "opt_state": state})
    ['count', 'mu', 'nu', None]
    """
    return [leaf.field for leaf in state_leaves(tree)]


def state_leaves(tree: Any) -> list[StateLeaf]:
    """What each leaf is, in jax's order.

    An array on disk is a node with `bytes_on_disk`, whose one leaf is a scalar.
    """
    found: list[StateLeaf] = []

    def walk(node: Any, field: str | None) -> None:
        if _is_named(node):
            for name, value in zip(node._fields, node, strict=True):
                walk(value, name)
            return
        for leaf in jax.tree.leaves(node, is_leaf=_is_special):
            if _is_named(leaf):
                walk(leaf, field)
            elif (disk := _bytes_on_disk(leaf)) is not None:
                sizes = [disk, *[0] * len(jax.tree.leaves(leaf))]
                found.extend(StateLeaf(field, size) for size in sizes[:-1])
            else:
                found.append(StateLeaf(field))

    walk(tree, None)
    return found


# ---------------------------------------------------------------- implementation


def _is_special(node: Any) -> bool:
    return _is_named(node) or _bytes_on_disk(node) is not None


def _is_named(node: Any) -> bool:
    fields = getattr(node, "_fields", None)
    return isinstance(node, tuple) and fields is not None and tuple(fields) != _STORED


def _bytes_on_disk(node: Any) -> int | None:
    found = getattr(node, "bytes_on_disk", None)
    return found if isinstance(found, int) else None
