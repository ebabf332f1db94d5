"""Accumulation for functions of Flax NNX modules.

A module among the arguments is taken apart into its graph, what is differentiated (its
parameters) and all other state, which goes from microbatch to microbatch as it would in a loop;
in the end it is written back.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmem._util.imported import nnx_is_used

# ---------------------------------------------------------------- API


def present(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether NNX modules are among the arguments.

    Raises:
      TypeError: one is, where it could not be taken apart.
    """
    if not nnx_is_used():
        return False
    from flax import nnx

    for name, value in kwargs.items():
        if isinstance(value, nnx.Module):
            raise TypeError(
                f"{name}= is an NNX module, {type(value).__name__}; pass modules by position"
            )
    for position, arg in enumerate(args):
        found = _inside(arg)
        if found is not None and not isinstance(arg, nnx.Module):
            raise TypeError(
                f"argument {position} has an NNX {type(found).__name__} in it, whose changes "
                "would be lost; pass a module that holds it, as an argument of its own"
            )
    return any(isinstance(arg, nnx.Module) for arg in args)


def wanted(argnums: Any) -> tuple[Any, dict[int, Any]]:
    """Positions, and for each `nnx.DiffState` among them which variables it means."""
    several = argnums if isinstance(argnums, Sequence) else (argnums,)
    if not nnx_is_used():
        return (tuple(several) if isinstance(argnums, Sequence) else argnums), {}
    from flax import nnx

    filters = {item.argnum: item.filter for item in several if isinstance(item, nnx.DiffState)}
    plain = [item.argnum if isinstance(item, nnx.DiffState) else item for item in several]
    return (tuple(plain) if isinstance(argnums, Sequence) else plain[0]), filters


def pure(
    fun: Callable[..., Any],
    args: Sequence[Any],
    argnums: Sequence[int],
    filters: Mapping[int, Any],
    has_aux: bool,
) -> tuple[Callable[..., Any], list[Any], list[int]]:
    """`fun` as a function of arrays.

    Returns:
      A function that returns the loss and (states, aux); its arguments: those of
      `fun`, with parameters in place of modules, followed by the modules' other state; and
      the positions of the modules.

    Raises:
      ValueError: two modules share a variable.
    """
    from flax import nnx

    positions = [k for k, arg in enumerate(args) if isinstance(arg, nnx.Module)]
    _check_apart([args[k] for k in positions], positions)
    graphs: dict[int, Any] = {}
    own, states = list(args), []
    for k in positions:
        if k in argnums:
            graphs[k], own[k], state = nnx.split(args[k], filters.get(k, nnx.Param), ...)
        else:
            (graphs[k], state), own[k] = nnx.split(args[k]), nnx.State({})
        states.append(state)

    @functools.wraps(fun)
    def call(*given: Any, **kwargs: Any) -> Any:
        arguments, rest = list(given[: len(args)]), given[len(args) :]
        merged = {}
        for k, state in zip(positions, rest, strict=True):
            merged[k] = arguments[k] = nnx.merge(graphs[k], arguments[k], state)
        out = fun(*arguments, **kwargs)
        after = []
        for k in positions:
            apart = (filters.get(k, nnx.Param), ...) if k in argnums else ()
            after.append(nnx.split(merged[k], *apart)[-1])
        loss, aux = out if has_aux else (out, None)
        return loss, (after, aux)

    return call, [*own, *states], positions


def write_back(args: Sequence[Any], positions: Sequence[int], states: Sequence[Any]) -> None:
    """Give each module the state that the last microbatch left."""
    from flax import nnx

    for k, state in zip(positions, states, strict=True):
        nnx.update(args[k], state)


# ---------------------------------------------------------------- implementation


def _inside(tree: Any) -> Any:
    """The first NNX module in a tree, or `nnx.Rngs`; None if there is none."""
    if not nnx_is_used():
        return None
    from flax import nnx

    kinds = (nnx.Module, nnx.Rngs)
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return next((node for node in leaves if isinstance(node, kinds)), None)


def _check_apart(modules: Sequence[Any], positions: Sequence[int]) -> None:
    from flax import nnx

    owner: dict[int, int] = {}
    for position, module in zip(positions, modules, strict=True):
        for path, node in nnx.iter_graph(module, graph=True):
            if isinstance(node, nnx.Variable) and owner.setdefault(id(node), position) != position:
                raise ValueError(
                    f"arguments {owner[id(node)]} and {position} share the variable "
                    f"{'/'.join(map(str, path))}; pass one module that holds both"
                )
