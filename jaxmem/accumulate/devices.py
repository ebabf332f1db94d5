"""Batches whose rows lie over devices: sums that are taken once, at the end.

Where the compiler shards a program by itself, the gradient of a parameter is
summed over the devices as soon as it is computed, which is once for each microbatch (and
for each layer of a scanned stack).  Inside `jax.shard_map` nothing is summed unless
it is said so, and it can be said after the last microbatch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxmem import _jax


def zeros(like: Any, dtype: Any = None) -> jax.Array:
    """Zeros with the shape and the place of an array, of which the shape and place may be all."""
    sharding = getattr(like, "sharding", None)
    explicit = isinstance(sharding, NamedSharding) and _jax.types_tell(sharding.mesh)
    found = jnp.zeros(
        like.shape,
        dtype or like.dtype,
        **({"out_sharding": sharding} if explicit else {}),
    )
    kind = getattr(like, "manual_axis_type", None)
    return _jax.as_varying(found, frozenset(getattr(kind, "varying", ())))


def summed(tree: Any, axes: Sequence[str]) -> Any:
    """The sum over devices; the tree as it is without axes."""
    return jax.lax.psum(tree, tuple(axes)) if axes else tree


def averaged(tree: Any, axes: Sequence[str]) -> Any:
    """State that each device carried for itself, as one: means, counters, keys of the first.

    Batch statistics are averaged, as is usual where they are not synchronised; whole numbers
    are the same everywhere or counted, and the largest is taken.
    """

    def one(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(leaf)
            first = jax.lax.axis_index(tuple(axes)) == 0
            data = jax.lax.psum(jnp.where(first, data, jnp.zeros_like(data)), tuple(axes))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.pmean(leaf, tuple(axes))
        if leaf.dtype == jnp.bool_:
            return jax.lax.pmax(leaf.astype(jnp.int32), tuple(axes)) > 0
        return jax.lax.pmax(leaf, tuple(axes))

    return jax.tree.map(one, tree) if axes else tree


def own_keys(tree: Any, axes: Sequence[str]) -> Any:
    """The tree with a random key of its own on every device but the first, which keeps it."""
    if not axes:
        return tree
    index = jax.lax.axis_index(tuple(axes))

    def one(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return leaf
        own = jax.random.key_data(fold_in(leaf, index))
        data = jnp.where(index == 0, jax.random.key_data(leaf), own)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))

    return jax.tree.map(one, tree)


def own_key(key: jax.Array, axes: Sequence[str]) -> jax.Array:
    """`own_keys` for what is known to be a key, or an array of keys, of the old kind too."""
    if not axes or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return own_keys(key, axes)
    index = jax.lax.axis_index(tuple(axes))
    return jnp.where(index == 0, key, fold_in(key, index))


def fold_in(key: jax.Array, index: Any) -> jax.Array:
    """`jax.random.fold_in` for a key or an array of keys, of either kind."""
    is_new = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    fold = functools.partial(jax.random.fold_in, data=index)
    for _ in range(key.ndim if is_new else key.ndim - 1):
        fold = jax.vmap(fold)
    return fold(key)
