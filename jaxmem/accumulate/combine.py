"""What is made of the auxiliary outputs of microbatches.

A spec is a prefix of the tree of outputs, with one of these words at its leaves:

* "stack": [microbatches, …], in the order in which they ran;
* "concat": one entry per example, back in the order of the batch;
* "sum", and "mean", which is weighted as the loss is (by its first term);
* "last": that of the last microbatch;
* "carry": what the next microbatch gets as an argument; in the end, the last.

A `Weighted` among the outputs becomes its mean over the batch, whatever the word.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.accumulate import devices
from jaxmem.accumulate.split import Split
from jaxmem.accumulate.trees import at_least_float32, described, leaf_names, promoted
from jaxmem.accumulate.weighted import Weighted, counted, ratio

MODES = ("stack", "concat", "sum", "mean", "last", "carry")


@dataclasses.dataclass(frozen=True)
class Spec:
    """How each part of the auxiliary outputs is combined."""

    modes: tuple[str, ...]
    tree: Any

    @classmethod
    def of(cls, spec: Any) -> "Spec":
        """Checked.

        Raises:
          ValueError: a leaf is none of the words.
        """
        modes, tree = jax.tree.flatten(spec)
        for mode in modes:
            if mode not in MODES:
                raise ValueError(
                    f"aux must be made of {', '.join(map(repr, MODES))}, in a tree that begins as "
                    f"fun's auxiliary outputs do; got {mode!r}"
                )
        return cls(tuple(modes), tree)

    def parts(self, aux: Any) -> list[tuple[str, Any]]:
        """The parts of the outputs, each with its word.

        Raises:
          ValueError: the outputs are another tree.
        """
        try:
            found = self.tree.flatten_up_to(aux)
        except ValueError as error:
            raise ValueError(
                f"aux={self.tree.unflatten(self.modes)!r} does not fit what fun returns next to "
                f"the loss, {jax.tree.structure(aux)}: {error}"
            ) from None
        return list(zip(self.modes, found, strict=True))

    def carried(self, aux: Any) -> list[Any]:
        """The parts that the next microbatch gets."""
        return [part for mode, part in self.parts(aux) if mode == "carry"]

    def zeros(self, aux: Any) -> list[Any]:
        """What is summed up, before the first microbatch, from the outputs' shapes."""
        return [
            _map(lambda leaf, mode=mode: _zero(mode, leaf), part) for mode, part in self.parts(aux)
        ]

    def add(self, sums: list[Any], aux: Any, weight: Any) -> tuple[list[Any], list[Any]]:
        """The sums with one more microbatch, and what is collected of it as it is."""
        added, collected = [], []
        for (mode, part), before in zip(self.parts(aux), sums, strict=True):
            leaves, tree = jax.tree.flatten(part, is_leaf=_is_weighted)
            kept = tree.flatten_up_to(before)
            pairs = [_add(mode, old, leaf, weight) for old, leaf in zip(kept, leaves, strict=True)]
            added.append(tree.unflatten([new for new, _ in pairs]))
            collected.append(tree.unflatten([out for _, out in pairs]))
        return added, collected

    def result(
        self,
        sums: list[Any],
        collected: list[list[Any]],
        carried: list[Any],
        aux: Any,
        split: Split,
        axes: tuple[str, ...],
    ) -> tuple[Any, list[bool]]:
        """The auxiliary outputs of the batch, and of each leaf whether devices hold parts of it.

        Args:
          sums: after the last microbatch.
          collected: of each group, [count, …].
          carried: after the last microbatch.
          aux: shapes of one microbatch's outputs.
          split: of the batch.
          axes: mesh axes that other parts of the batch lie on.
        """
        results, carries = [], iter(carried)
        split_leaves: list[bool] = []
        for number, (mode, part) in enumerate(self.parts(aux)):
            if mode == "carry":
                results.append(next(carries))
                split_leaves += [False] * len(jax.tree.leaves(results[-1]))
                continue
            leaves, tree = jax.tree.flatten(part, is_leaf=_is_weighted)
            ended = tree.flatten_up_to(sums[number])
            groups = [tree.flatten_up_to(group[number]) for group in collected]
            split_leaves += [
                mode in ("stack", "concat") and not _is_weighted(leaf) for leaf in leaves
            ]
            columns = list(zip(*groups, strict=True)) or [()] * len(leaves)
            results.append(
                tree.unflatten(
                    [
                        _result(mode, leaf, total, column, split, axes)
                        for leaf, total, column in zip(leaves, ended, columns, strict=True)
                    ]
                )
            )
        return self.tree.unflatten(results), split_leaves

    def check(self, aux: Any, rows: int) -> None:
        """Raises `TypeError` or `ValueError` if an output cannot be combined as asked."""
        for mode, part in self.parts(aux):
            leaves, _ = jax.tree.flatten(part, is_leaf=_is_weighted)
            names = leaf_names(jax.tree.map(lambda _: 0, part, is_leaf=_is_weighted), "aux")
            for name, leaf in zip(names, leaves, strict=True):
                if mode == "concat" and not _is_weighted(leaf) and leaf.shape[:1] != (rows,):
                    raise ValueError(
                        f'"concat" wants one entry per example, and {name} is {described(leaf)} '
                        f"for a microbatch of {rows}; pass another word for it in aux="
                    )
                if mode in ("sum", "mean") and not _is_weighted(leaf) and not _numeric(leaf):
                    raise TypeError(f'"{mode}" wants numbers, and {name} is {described(leaf)}')


# ---------------------------------------------------------------- implementation


def _is_weighted(leaf: Any) -> bool:
    return isinstance(leaf, Weighted)


def _map(fn: Any, tree: Any) -> Any:
    return jax.tree.map(fn, tree, is_leaf=_is_weighted)


def _numeric(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_


def _sum_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return at_least_float32(dtype)
    return promoted(dtype, jnp.int32)


def _zero(mode: str, leaf: Any) -> Any:
    """The sum of an output before the first microbatch; () where nothing is summed."""
    if _is_weighted(leaf):
        return tuple(
            (devices.zeros(total, at_least_float32(total.dtype)), devices.zeros(weight))
            for total, weight in leaf.terms
        )
    if mode == "sum":
        return devices.zeros(leaf, _sum_dtype(leaf.dtype))
    if mode == "mean":
        dtype = at_least_float32(leaf.dtype)
        return devices.zeros(leaf, dtype), jnp.zeros((), jnp.finfo(dtype).dtype)
    return devices.zeros(leaf) if mode == "last" else ()


def _add(mode: str, old: Any, leaf: Any, weight: Any) -> tuple[Any, Any]:
    """The sum with one more output in it, and what is collected of the output."""
    if _is_weighted(leaf):
        return tuple(
            (
                old_total + counted(jnp.asarray(total, old_total.dtype), weight),
                old_weight + weight,
            )
            for (old_total, old_weight), (total, weight) in zip(old, leaf.terms, strict=True)
        ), ()
    if mode == "carry":
        return (), ()
    if mode == "sum":
        return old + leaf.astype(old.dtype), ()
    if mode == "mean":
        total, weights = old
        factor = jnp.asarray(weight, total.dtype)
        new = jnp.where(factor == 0, 0, leaf.astype(total.dtype) * factor)
        return (total + new, weights + jnp.asarray(weight, weights.dtype)), ()
    return (leaf, ()) if mode == "last" else ((), leaf)


def _result(
    mode: str, leaf: Any, total: Any, parts: Any, split: Split, axes: tuple[str, ...]
) -> Any:
    if _is_weighted(leaf):
        return Weighted.of(devices.summed(total, axes)).mean
    if mode == "sum":
        return devices.summed(total, axes)
    if mode == "mean":
        total, weights = devices.summed(total, axes)
        return ratio(total, weights)
    if mode == "last":
        return total
    if mode == "concat":
        return split.collected(parts)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
