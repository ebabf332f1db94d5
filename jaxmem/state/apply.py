"""`apply_gradients`: an optimizer's step of parameters and gradients that may be on the host."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import _jax
from jaxmem.accumulate import shards
from jaxmem.accumulate.trees import difference, leaf_names
from jaxmem.parallel.zero import Zero
from jaxmem.state import rows, stored
from jaxmem.state.places import Places
from jaxmem.state.update import Known, taken_apart, traced


def apply_gradients(
    optimizer: Any,
    gradients: Any,
    state: Any,
    params: Any,
    *,
    zero: Zero | None = None,
    **extra: Any,
) -> tuple[Any, Any]:
    """Parameters and state after a step, large arrays on the host computed some rows at a time.

        value, gradients = jax.value_and_grad(loss)(params, batch)
        params, state = jaxmem.apply_gradients(optimizer, gradients, state, params)

    It computes what optax does:

        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)

    But there an update of parameters on the host is a sum of arrays on the host, which no compiler
    for an accelerator takes; and on the device, the updates are as large as the parameters.  Here
    rows of parameter, gradient and state (`jaxmem.offload_state`) go to the device, and the new
    ones into their places, so that the device holds some rows whatever the depth.  Arrays of which
    a row does not follow from rows (after `optax.clip_by_global_norm`, a norm of the gradient is
    taken of whole arrays) are moved as a whole.  `jaxmem.value_and_update` has no gradient at all,
    and such norms in a pass of their own.

    Put it under `jax.jit`, parameters and state donated.

    Args:
      optimizer: an optax transformation.
      gradients: of the parameters, on the host or on the device.
      state: of the optimizer.
      params: a tree of arrays.
      zero: the `jaxmem.Zero` by which parameters and state are split over devices: the update is
        computed in shards, and parameters are gathered from them in stages 1 and 2.
      extra: as the optimizer's `update` takes them, such as ``value=``.

    Returns:
      (parameters, state), in the memories where they were.

    Raises:
      ValueError: the gradients have another form than the parameters.

    >>> import jax, jax.numpy as jnp, jaxmem, optax
    >>> params = jax.device_put({"w": jnp.ones((6, 4))}, jax.memory.Space.Host)
    >>> optimizer = optax.adam(0.1)
    >>> step = jax.jit(lambda *args: jaxmem.apply_gradients(optimizer, *args))
    >>> params, state = step(params, optimizer.init({"w": jnp.ones((6, 4))}), params)
    >>> params["w"].sharding.memory_kind, round(float(params["w"][0, 0]), 2)
    ('pinned_host', 0.9)
    """
    found = difference(gradients, params, ("the tree of gradients", "that of the parameters"))
    if found:
        raise ValueError(f"{found}; pass gradients of these parameters")
    own, tree = jax.tree.flatten(params)
    own, given = (list(map(jnp.asarray, leaves)) for leaves in (own, jax.tree.leaves(gradients)))
    held, state_tree = stored.flatten(state)
    names = leaf_names(params, "params")
    places = Places.of(shards.checked("apply_gradients", zero), names, own, state)
    before, own = own, [places.shards(leaf, param) for leaf, param in enumerate(own)]
    given = [places.gradient(leaf, gradient) for leaf, gradient in enumerate(given)]
    rest, filled = rows.arrays_in(extra)

    def flat(gradients: Any, state: Any, params: Any, rest: Any) -> tuple[Any, Any]:
        params = tree.unflatten(params)
        updates, after = optimizer.update(
            tree.unflatten(gradients), state_tree.unflatten(state), params, **filled(rest)
        )
        return optax.apply_updates(params, updates), after

    types = [list(map(_jax.type_on_device, leaves)) for leaves in (given, own)]
    closed = traced(flat, types[0], list(map(stored.typed, held)), types[1], rest)
    update = taken_apart(closed, len(own), len(held), (), passes=1)
    # What is moved as a whole here, and read by rows, a compiler leaves out.
    known = Known(update, held, list(map(_jax.on_device, own)))
    known.learn(dict(zip(closed.jaxpr.invars, map(_jax.on_device, given), strict=False)))
    known.learn(dict(zip(closed.jaxpr.invars[2 * len(own) + len(held) :], rest, strict=True)))
    done = rows.finished(known, given, held, own)
    after, new = rows.collected(known, done, held)
    new = list(map(_jax.beside, new, own))
    new = [places.whole(leaf, *pair) for leaf, pair in enumerate(zip(before, new, strict=True))]
    return tree.unflatten(new), state_tree.unflatten(places.state_in_shards(after))
