"""Leaves of parameters and of an optimizer's state, by their paths."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

# The path of parameters that are one array and no tree.
ITSELF = "the value itself"

# ---------------------------------------------------------------- API


def flat(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Paths, leaves and structure."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
    return [name or ITSELF for name in names], [leaf for _, leaf in found], structure


def types_of(init: Callable[[Any], Any], params: Any) -> tuple[Any, list[Any]]:
    """What an optimizer's `init` returns: a tree of shapes, and types, which tell the memory."""
    leaves, tree = jax.tree.flatten(params)
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    closed, shapes = jax.make_jaxpr(lambda *flat: init(tree.unflatten(flat)), return_shape=True)(
        *specs
    )
    return shapes, list(closed.out_avals)


def parameter_in(path: str, names: Iterable[str]) -> str | None:
    """The longest path of a parameter that stands in a path of the state."""
    padded = f"/{path}/"
    found = [name for name in names if f"/{name}/" in padded or name == ITSELF]
    return max(found, key=len, default=None)
