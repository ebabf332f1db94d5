"""What the leaves of a call's arguments are called: "params/Dense_0/kernel"."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def is_array(leaf: Any) -> bool:
    """Whether jax can trace it as an array: an array, or the shape and dtype of one."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        return False
    # Random keys and bfloat16 have dtypes of their own; only numpy's are in doubt.
    return not (isinstance(dtype, np.dtype) and dtype.kind in "OUSmM")


def named_leaves(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    positions: Sequence[int] | None = None,
) -> list[tuple[str, Any]]:
    """The leaves of a call in jax's order, each with the path a reader knows it by.

    Args:
      fn: the function called; its signature gives the first part of each path.
      args: positional arguments, pytrees.
      kwargs: keyword arguments, pytrees.
      positions: where in the call each of `args` stood, if some were left out.

    >>> def step(params, *batch): ...
    >>> [name for name, _ in named_leaves(step, ({"w": 1.0, "b": 2.0}, 3, 4), {})]
    ['params/b', 'params/w', 'batch[0]', 'batch[1]']
    """
    names = _positional_names(fn)
    found = []
    for k, arg in enumerate(args):
        position = positions[k] if positions is not None else k
        found += _paths(names(position), arg)
    for key in sorted(kwargs):  # the order in which jax flattens a dict
        found += _paths(key, kwargs[key])
    return found


def _positional_names(fn: Callable[..., Any]) -> Callable[[int], str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # builtins and some callables of C have none
        parameters = []
    kinds = inspect.Parameter
    single = [
        p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    several = next((p.name for p in parameters if p.kind == kinds.VAR_POSITIONAL), "args")

    def name(position: int) -> str:
        if position < len(single):
            return single[position]
        return f"{several}[{position - len(single)}]"

    return name


def _paths(root: str, tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = []
    for path, leaf in leaves:
        rest = jax.tree_util.keystr(path, simple=True, separator="/")
        named.append((f"{root}/{rest}" if rest else root, leaf))
    return named
