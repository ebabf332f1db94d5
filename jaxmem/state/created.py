"""The state that an optimizer's `init` makes: one array after the other, and in what form."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import _jax
from jaxmem._util.imported import nnx_is_used
from jaxmem.accumulate.trees import leaf_names


def one_by_one(init: Any, params: Any) -> Iterator[Any]:
    """The leaves of ``init(params)``, each made when it is asked for: no two need be there at once.

    What `init` computes of the parameters' values and not of their shapes alone is made anew for
    each leaf that needs it.
    """
    arrays = jax.tree.map(jnp.asarray, params)
    leaves = jax.tree.leaves(arrays)
    spread = any(len(leaf.sharding.device_set) > 1 for leaf in leaves)
    types = [jax.typeof(leaf).update(memory_space=_jax.DEVICE) for leaf in leaves]
    tree = jax.tree.structure(arrays)
    closed = None
    if not spread:  # else an array's place follows from that of its parameter, not from its type
        with contextlib.suppress(jax.errors.ConcretizationTypeError):  # it looks at values
            closed = _jax.trace(lambda *flat: jax.tree.leaves(init(tree.unflatten(flat))), types)
    if closed is None:
        yield from jax.tree.leaves(init(tree.unflatten(list(map(_jax.on_device, leaves)))))
        return
    for out, aval in zip(closed.jaxpr.outvars, closed.out_avals, strict=True):
        needed = _jax.needed(closed, [out], keep_effects=False)
        atoms = [out, *(atom for index in needed for atom in closed.jaxpr.eqns[index].invars)]
        read = {atom for atom in atoms if not _jax.is_literal(atom)}
        given = [
            _jax.on_device(leaf) if var in read else None
            for var, leaf in zip(closed.jaxpr.invars, leaves, strict=True)
        ]
        (value,) = _jax.evaluate(closed, given, only=needed, outs=[out])
        yield _jax.as_array(value, aval)


def shapes(init: Any, params: Any) -> Any:
    """Types of ``init(params)``, of parameters wherever they are."""
    return jax.eval_shape(init, jax.tree.map(_on_device_type, params))


def without_variables(tree: Any) -> Any:
    """The tree with arrays in the place of NNX variables, as an optimizer's update gets it."""
    if not nnx_is_used():
        return tree
    from flax import nnx

    return nnx.as_pure(tree)


def in_its_form(state: Any, init: Any, params: Any) -> Any:
    """A state in the form that `init` gives it.

    An `nnx.Optimizer` knows of arrays alone: what holds several, such as codes and their scales, it
    takes apart at the first update, and has an `nnx.State` in its place.
    """
    if not nnx_is_used():
        return state
    wanted = shapes(init, params)
    leaves, tree = jax.tree.flatten(state)
    if tree == jax.tree.structure(wanted) or leaf_names(state) != leaf_names(wanted):
        return state
    return jax.tree.structure(wanted).unflatten(leaves)


# ---------------------------------------------------------------- implementation


def _on_device_type(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
