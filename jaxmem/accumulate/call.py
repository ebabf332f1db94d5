"""One call of a function whose batch is to be split: which argument is what, and whether it can be.

Leaves of an argument that are no arrays (strings, functions, None) and batch leaves
without axes are passed through as they are.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.accumulate.split import Split
from jaxmem.accumulate.trees import described, leaf_names
from jaxmem.errors import JaxmemWarning, warn

Path = tuple[int, int]  # position of an argument, number of a leaf in it

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments taken apart into leaves.

    Attributes:
      fun: what is called.
      kwargs: keyword arguments that have no position.
      trees: structure of each positional argument.
      leaves: of each positional argument.
      names: paths of the leaves, as errors say them.
      argnums: positions of the arguments that a gradient is wanted of, in the order asked for.
      diff: where the leaves of these are.
      rows: where the leaves are that are split.
      keys: where random keys are.
      carried: positions of arguments that go from microbatch to microbatch.
      split: of the rows.
    """

    fun: Callable[..., Any]
    kwargs: Mapping[str, Any]
    trees: tuple[Any, ...]
    leaves: Mapping[Path, Any]
    names: Mapping[Path, str]
    argnums: tuple[int, ...]
    diff: tuple[Path, ...]
    rows: tuple[Path, ...]
    keys: tuple[Path, ...]
    carried: tuple[int, ...]
    split: Split

    def carry(self) -> list[Any]:
        """The carried arguments as they begin."""
        return [self.argument(position, self.leaves) for position in self.carried]

    def check_carried(self, positions: Collection[int]) -> None:
        """Raises `TypeError` if something in these carried arguments is no array."""
        for path, leaf in self.leaves.items():
            is_number = hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)
            if path[0] in positions and not is_number:
                raise TypeError(
                    f"{self.names[path]} is {described(leaf)}, and a carried argument is made of "
                    "arrays; pass it in another argument, or let the function close over it"
                )

    def argument(self, position: int, leaves: Mapping[Path, Any]) -> Any:
        """One positional argument, put together again."""
        tree = self.trees[position]
        return tree.unflatten([leaves[position, k] for k in range(tree.num_leaves)])

    def __call__(self, leaves: Mapping[Path, Any], carry: Sequence[Any]) -> Any:
        """Call the function with these leaves and carried arguments, the others as given."""
        known = {**self.leaves, **leaves}
        args = [self.argument(position, known) for position in range(len(self.trees))]
        for position, value in zip(self.carried, carry, strict=True):
            args[position] = value
        return self.fun(*args, **self.kwargs)

    def with_leaves(self, leaves: Mapping[Path, Any], split: Split) -> "Call":
        """The same call of other arrays, with rows of another number."""
        return dataclasses.replace(self, leaves={**self.leaves, **leaves}, split=split)


# ---------------------------------------------------------------- API


def take_apart(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    argnums: Sequence[int],
    batch_argnums: Sequence[int],
    rng_argnums: Sequence[int],
    carry_argnums: Sequence[int],
    microbatches: int,
    devices: int = 1,
) -> Call:
    """See `Call`.

    Args:
      devices: over how many devices the rows lie; each splits its own.

    Raises:
      TypeError: an argument is not there, or of the wrong kind for its part.
      ValueError: the rows of the batch differ, or are fewer than the microbatches.
    """
    args, kwargs = positional(fun, args, kwargs)
    parts = {
        "argnums": argnums,
        "batch_argnums": batch_argnums,
        "rng_argnums": rng_argnums,
        "carry_argnums": carry_argnums,
    }
    argnums, batch, rng, carried = (there(fun, args, *part) for part in parts.items())
    _check_apart(dict(zip(parts, (argnums, batch, rng, carried), strict=True)))
    names, leaves, trees = {}, {}, []
    for position, (arg, root) in enumerate(zip(args, _roots(fun, args), strict=True)):
        flat, tree = jax.tree.flatten(arg)
        trees.append(tree)
        for k, (leaf, name) in enumerate(zip(flat, leaf_names(arg, root), strict=True)):
            leaves[position, k] = leaf
            names[position, k] = name
    diff = tuple(path for path in leaves if path[0] in argnums)
    for path in diff:
        leaves[path] = _differentiable(names[path], leaves[path])
    rows = tuple(path for path in leaves if path[0] in batch and _has_rows(leaves[path]))
    for path in rows:
        leaves[path] = jnp.asarray(leaves[path])
    keys = tuple(path for path in leaves if path[0] in rng)
    for path in keys:
        _check_key(names[path], leaves[path])
    if microbatches * devices > 1:
        alone = {path for path in leaves if path[0] in carried}.union(rows, keys)
        same = {names[path]: leaf for path, leaf in leaves.items() if path not in alone}
        _warn_of_keys({**same, **kwargs})
    count = _rows({names[path]: leaves[path] for path in rows}, batch, microbatches, devices)
    ordered = tuple(sorted(diff, key=lambda path: argnums.index(path[0])))
    return Call(
        fun, kwargs, tuple(trees), leaves, names, argnums, ordered, rows, keys, carried,
        Split.of(count, microbatches),
    )  # fmt: skip


# ---------------------------------------------------------------- implementation


def positional(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Keyword arguments in their positions, as far as they have one."""
    if kwargs:
        try:
            bound = inspect.signature(fun).bind(*args, **kwargs)
        except (TypeError, ValueError):  # `fun` itself will say so, or has no signature
            return tuple(args), kwargs
        return bound.args, bound.kwargs
    return tuple(args), kwargs


def there(
    fun: Callable[..., Any], args: Sequence[Any], what: str, numbers: Sequence[int]
) -> tuple[int, ...]:
    """The positions that these numbers mean, those from the end counted from the start.

    Raises:
      TypeError: there is no such argument.
    """
    for number in numbers:
        if not -len(args) <= number < len(args):
            name = getattr(fun, "__name__", "fun")
            raise TypeError(
                f"{what} names argument {number}, and {name} was called with {len(args)} "
                f"positional arguments; pass it by position, or name the right one in {what}="
            )
    return tuple(number % len(args) for number in numbers)


def _check_apart(parts: Mapping[str, Sequence[int]]) -> None:
    taken: dict[int, str] = {}
    for what, numbers in parts.items():
        for number in numbers:
            before = taken.setdefault(number, what)
            if before != what and {before, what} != {"argnums", "batch_argnums"}:
                raise ValueError(
                    f"argument {number} is in {before} and in {what}; it can be only one of them"
                )


def _roots(fun: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    single = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [single[k] if k < len(single) else f"argument {k}" for k in range(len(args))]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _has_rows(leaf: Any) -> bool:
    return _is_array(leaf) and leaf.ndim > 0


def _differentiable(name: str, leaf: Any) -> jax.Array:
    known = _is_array(leaf) or isinstance(leaf, float | complex)
    if not known or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        raise TypeError(
            f"{name} is {described(leaf)}, which has no gradient; pass argnums= of floating-point "
            "arguments only. Where an argument holds others as well, partition it (as "
            "equinox.partition does), pass the rest as an argument of its own, and combine both "
            "in the function"
        )
    return jnp.asarray(leaf)


def _check_key(name: str, leaf: Any) -> None:
    old = _is_array(leaf) and leaf.dtype == np.uint32 and leaf.shape[-1:] in ((2,), (4,))
    if not _is_new_key(leaf) and not old:
        raise TypeError(
            f"{name} is {described(leaf)}, and rng_argnums names random keys; pass one of "
            "jax.random.key"
        )


def _is_new_key(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _warn_of_keys(shared: Mapping[str, Any]) -> None:
    """Warn of random keys that all microbatches get as they are.

    Raw keys of the old kind look like any other array, and are not found.
    """
    found = []
    for root, arg in shared.items():
        for leaf, name in zip(jax.tree.leaves(arg), leaf_names(arg, root), strict=True):
            if _is_new_key(leaf):
                found.append(name)
    if found:
        one = len(found) == 1
        warn(
            f"{', '.join(found)} {'is a random key' if one else 'are random keys'}, and not in "
            "rng_argnums: every microbatch draws the same numbers; name the argument in "
            "rng_argnums=, or let the function close over the key if that is what is meant",
            JaxmemWarning,
        )


def _rows(
    batch: Mapping[str, Any], positions: Iterable[int], microbatches: int, devices: int
) -> int:
    if not batch:
        raise ValueError(
            f"no array with axes is in the arguments {tuple(positions)} that batch_argnums names, "
            "so there is nothing to split; pass batch_argnums= of the batch"
        )
    first, *others = batch.items()
    for name, leaf in others:
        if leaf.shape[0] != first[1].shape[0]:
            raise ValueError(
                f"the batch has {first[1].shape[0]} rows in {first[0]}, {described(first[1])}, and "
                f"{leaf.shape[0]} in {name}, {described(leaf)}; its leading axes must be equal (a "
                "value that all rows share can have no axes, or be another argument)"
            )
    rows = first[1].shape[0]
    if rows % devices:
        raise ValueError(
            f"the {rows} rows of the batch cannot lie evenly over the {devices} devices of "
            "batch_sharding; pass a batch that they divide"
        )
    if not rows:
        raise ValueError(
            f"the batch has no rows ({first[0]} is {described(first[1])}), so that there is "
            "nothing to take a mean over; leave an empty batch out"
        )
    if rows // devices < microbatches:
        where = "" if devices == 1 else f" on each of {devices} devices"
        raise ValueError(
            f"microbatches={microbatches} is more than the {rows // devices} rows of the "
            f"batch{where} ({first[0]} is {described(first[1])}); pass at most "
            f"{rows // devices}, or a larger batch"
        )
    return rows // devices
