"""An optimizer's update of whole arrays, run some rows at a time.

What an update makes on the way, such as a moment in float32 that is stored in 8 bits, then exists
for these rows alone.  Of whole arrays, compilers for GPUs as for TPUs keep it.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.state import stored
from jaxmem.state.update import Known, Update, row_program, taken_apart, traced
from jaxmem.trace.arguments import is_array

# Of the numbers of a parameter that are updated at once, about.  Fewer make more turns of a loop.
CHUNK = 2**22

# ---------------------------------------------------------------- API


def by_rows(
    update: Callable[..., tuple[Any, Any]],
    updates: Any,
    state: Sequence[Any],
    params: Any,
    extra: Mapping[str, Any],
) -> tuple[Any, Any]:
    """What a function of trees returns, large arrays computed some rows at a time.

    Args:
      update: from gradients, a list of trees that the state is made of, parameters and other
        arguments to what replaces the gradients and the state.
    """
    given, tree = jax.tree.flatten(updates)
    if params is not None and jax.tree.structure(params) != tree:
        return update(updates, state, params, extra)  # which will say so
    given = list(map(jnp.asarray, given))
    without = params is None
    own = given if without else list(map(jnp.asarray, jax.tree.leaves(params)))
    leaves, state_tree = stored.flatten(list(state))
    rest, filled = arrays_in(extra)

    def flat(gradients: Any, state: Any, params: Any, rest: Any) -> tuple[Any, Any]:
        found, new = update(
            tree.unflatten(gradients),
            state_tree.unflatten(state),
            None if without else tree.unflatten(params),
            filled(rest),
        )
        return jax.tree.leaves(found), new

    closed = traced(flat, given, list(map(stored.typed, leaves)), own, rest)
    after, found = run(closed, given, leaves, own, rest)
    return tree.unflatten(found), state_tree.unflatten(after)


def arrays_in(extra: Mapping[str, Any]) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays among other arguments, and a function that puts others in their places."""
    leaves, tree = jax.tree.flatten(extra)

    def filled(arrays: Sequence[Any]) -> Any:
        own = iter(arrays)
        return tree.unflatten([next(own) if is_array(leaf) else leaf for leaf in leaves])

    return [leaf for leaf in leaves if is_array(leaf)], filled


def run(
    closed: ClosedJaxpr,
    gradients: Sequence[Any],
    state: Sequence[Any],
    params: Sequence[Any],
    rest: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """New leaves of the state, and one result for each gradient, of its type.

    Args:
      closed: (gradients, state, parameters, rest) -> (state, results).
      rest: other operands, not made of rows.
    """
    count = len(gradients)
    update = taken_apart(closed, count, len(state), (), passes=1)
    known = Known(update, state, params)
    known.learn(dict(zip(closed.jaxpr.invars, gradients, strict=False)))
    known.learn(dict(zip(closed.jaxpr.invars[2 * count + len(state) :], rest, strict=True)))
    found = finished(known, gradients, state, params, over_gradients=True)
    return collected(known, found, state)


def finished(
    known: Known,
    gradients: Sequence[Any],
    state: Sequence[Any],
    params: Sequence[Any],
    over_gradients: bool = False,
) -> dict[tuple[str, int], Any]:
    """Of parameters with a whole gradient, those that are worth it updated some rows at a time.

    Args:
      known: all that is known when the gradients are.
      gradients: of each parameter; None where it is updated already.
      over_gradients: whether results replace the gradients, and not the parameters.

    Returns:
      By "param" and its number, what becomes of it; by "state" and its number, a leaf of the state.
    """
    first = known.update
    large = [
        leaf
        for leaf, gradient in enumerate(gradients)
        if gradient is not None and rows_at_once(gradient.shape) is not None
    ]
    if not large:
        return {}
    update = taken_apart(
        first.closed,
        first.num_params,
        first.num_state,
        [*first.by_row, *large],
        passes=sys.maxsize,
        over_gradients=over_gradients,
    )
    found: dict[tuple[str, int], Any] = {}
    if not set(first.by_row) <= set(update.by_row):
        return found
    for leaf in large:
        held = update.held.get(leaf, ())
        stored = [params[leaf], *(state[number] for number in held)]
        if leaf not in update.by_row or not any(map(_is_stored, stored)):
            continue
        own = [state[number] for number in held]
        names = [update.gradient(leaf), update.param(leaf)]
        arrays = [gradients[leaf], params[leaf]]
        if not over_gradients:
            names, arrays = names[::-1], arrays[::-1]
        new = _loop(
            known,
            update,
            [update.new_param(leaf), *map(update.new_state, held)],
            dict(zip([names[0], *map(update.state, held)], [arrays[0], *own], strict=True)),
            {names[1]: arrays[1]},
        )
        found["param", leaf], *after = new
        found |= {("state", n): array for n, array in zip(held, after, strict=True)}
    return found


def collected(
    known: Known, found: Mapping[tuple[str, int], Any], state: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The state's leaves and the parameters: those found, and the others computed as a whole."""
    update = known.update
    keys = [("state", number) for number in range(update.num_state)]
    keys += [("param", leaf) for leaf in range(update.num_params)]
    outs = dict(zip(keys, update.closed.jaxpr.outvars, strict=True))
    left = [key for key in keys if key not in found]
    values = dict(zip(left, known.whole([outs[key] for key in left]), strict=True))
    avals = update.closed.out_avals
    whole = [
        found[key] if key in found else _jax.as_array(values[key], aval)
        for key, aval in zip(keys, avals, strict=True)
    ]
    after = list(map(stored.after_step, state, whole))
    return after, whole[update.num_state :]


def rows_at_once(shape: tuple[int, ...]) -> int | None:
    """How many rows of an array are updated at once; None for all of them, without a loop."""
    if len(shape) < 2 or math.prod(shape) <= CHUNK:
        return None
    most = max(1, CHUNK // math.prod(shape[1:]))
    if shape[0] <= most:
        return None
    # A divisor, if there is one that is not much less: the rest is a program of its own.
    divisors = [d for d in range(1, most + 1) if shape[0] % d == 0]
    return divisors[-1] if 2 * divisors[-1] >= most else most


# ---------------------------------------------------------------- implementation


def _is_stored(leaf: Any) -> bool:
    """Whether a leaf of the state is stored in another form than it is computed in."""
    is_coded = leaf.dtype in (jnp.int8, jnp.uint8, jnp.int16)
    return is_coded or stored.is_on_disk(leaf) or stored.is_on_host(leaf)


def _loop(
    known: Known,
    update: Update,
    wanted: Sequence[Any],
    carried: Mapping[Any, Any],
    read: Mapping[Any, Any],
) -> list[Any]:
    """The carried arrays with their rows replaced by what is wanted.

    Args:
      known: values without rows are taken from it.
      update: says which have rows.
      wanted: variables of what the rows of each carried array become.
      carried, read: arrays by variable.
    """
    shape = next(iter(carried.values())).shape
    chunk = rows_at_once(shape) or shape[0]

    def some(count: int) -> Callable[[list[Any], Any], list[Any]]:
        program = row_program(update, wanted, [*carried, *read], count)
        whole = dict(zip(program.whole, known.whole(program.whole), strict=True))

        def step(arrays: list[Any], index: Any) -> list[Any]:
            given = {**dict(zip(carried, arrays, strict=True)), **read}
            own = {
                var: _jax.beside(stored.rows_of(array, index, count), var.aval)
                for var, array in given.items()
            }
            return [
                stored.with_rows(array, row, index)
                for array, row in zip(arrays, program(whole, own, index), strict=True)
            ]

        return step

    turns, rest = divmod(shape[0], chunk)
    step = some(chunk)
    arrays, _ = lax.scan(
        lambda arrays, turn: (step(arrays, turn * chunk), None),
        list(carried.values()),
        jnp.arange(turns, dtype=jnp.int32),
    )
    return some(rest)(arrays, jnp.int32(turns * chunk)) if rest else arrays
