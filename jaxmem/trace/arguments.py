"""Names for the leaves of a call's arguments: "params/Dense_0/kernel"."""

import difflib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np


def is_array(leaf: Any) -> bool:
    """Whether jax can trace it as an array: an array, or the shape and dtype of one."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        return False
    # Random keys and bfloat16 have extended dtypes; only numpy's need checking.
    return not (isinstance(dtype, np.dtype) and dtype.kind in "OUSmM")


# The options of `memory_report`, `fit` and `frontier`, passed along with a function's arguments.
OPTIONS = [
    "allow_offload",
    "budget",
    "cache",
    "compiler_options",
    "cost",
    "donate_argnums",
    "generate_code",
    "max_compiles",
    "max_seconds",
    "optimizer_state",
    "parameters",
    "points",
    "progress",
    "static_argnums",
    "suggest",
    "target",
    "timeout",
    "workers",
]


def check_keywords(fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise on keywords that resemble an option's name and that the function does not take.

    Raises:
      TypeError: the message names the option.
    """
    for key in kwargs:
        near = difflib.get_close_matches(key, OPTIONS, 1)
        if near and not _takes(fn, key):
            name = getattr(fn, "__qualname__", type(fn).__name__)
            raise TypeError(
                f"{name} takes no argument {key!r}, and there is no such option; did you "
                f"mean {near[0]}=?"
            )


def _takes(fn: Any, key: str) -> bool:
    """Whether a function may take a keyword; wrappers of jax and jaxmem are unwrapped."""
    while fn is not None:
        try:
            parameters = inspect.signature(fn, follow_wrapped=False).parameters
        except (TypeError, ValueError):
            return True
        if key in parameters:
            return True
        wrapped = getattr(fn, "__wrapped__", None)
        passes_on = wrapped is not None and (hasattr(fn, "lower") or _is_own(fn))
        if not passes_on and any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
            return True
        fn = wrapped if passes_on else None
    return False


def _is_own(fn: Any) -> bool:
    code = getattr(fn, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(Path(__file__).parents[1])


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
      positions: the position in the call of each of `args`, if some were left out.

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
