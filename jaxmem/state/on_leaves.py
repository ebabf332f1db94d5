"""An optimizer on trees as a program on their leaves, of which an update of rows is made."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import _jax
from jaxmem._util.imported import nnx_is_used
from jaxmem.accumulate.trees import difference
from jaxmem.state import stored
from jaxmem.state.places import Places
from jaxmem.state.update import traced


@dataclasses.dataclass(frozen=True)
class OnLeaves:
    """The optimizer on trees, as a program on leaves."""

    optimizer: Any
    tree: Any
    params: Sequence[Any]
    state: Any

    def __post_init__(self) -> None:
        params = self.tree.unflatten(self.params)
        wanted = jax.eval_shape(self.optimizer.init, params)
        state, wanted = map(stored.types, (self.state, wanted))
        found = difference(state, wanted, ("the state", "what optimizer.init(params) returns"))
        if found:
            raise ValueError(
                f"the state is not of this optimizer and these parameters: {found}; pass what "
                "optimizer.init(params) returned, or what a step before did"
            )

    @property
    def state_leaves(self) -> list[Any]:
        leaves, _ = stored.flatten(self.state)
        return [leaf if stored.is_on_disk(leaf) else jnp.asarray(leaf) for leaf in leaves]

    @property
    def state_tree(self) -> Any:
        return stored.flatten(self.state)[1]

    def update(self, value: Any, places: Places) -> Callable[[Sequence[Any]], Any]:
        """From types of gradients to the program of the update; `value` is the loss's type."""
        types = places.types([device_type(leaf, leaf.dtype) for leaf in self.params])
        params = self.tree.unflatten(types)
        state = self.state_tree.unflatten(list(map(stored.typed, self.state_leaves)))

        def update(gradients: Any, state: Any, params: Any, value: Any) -> tuple[Any, Any]:
            extra = {}
            if isinstance(self.optimizer, optax.GradientTransformationExtraArgs):
                extra = {"value": value}
            updates, after = self._call(gradients, state, params, extra)
            self._check(updates, params, "the tree of updates", "that of the parameters")
            new = optax.apply_updates(params, updates)
            self._check(after, state, "the state after a step", "that before it")
            return new, after

        def program(types: Sequence[Any]) -> Any:
            gradients = self.tree.unflatten(list(types))
            return traced(update, gradients, state, params, value)

        return program

    def _call(self, gradients: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
        try:
            found = self.optimizer.update(gradients, state, params, **extra)
        except (TypeError, ValueError) as error:
            if type(error) not in (TypeError, ValueError):  # jax's own explain themselves
                raise
            raise TypeError(
                "the optimizer's update fails when called as value_and_update does, with "
                f"gradients, state, parameters{' and value=' if extra else ''}: "
                f"{str(error).rstrip('.')}.  One that "
                "evaluates the loss itself, such as optax.lbfgs with its line search, needs the "
                "ordinary step; others have to be transformations as optax defines them"
            ) from error
        if not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(
                "the optimizer's update has to return a pair of updates and state, got an object "
                f"of type {type(found).__name__}; value_and_update takes transformations as optax "
                "defines them"
            )
        return found

    def _check(self, new: Any, old: Any, *what: str) -> None:
        found = difference(new, old, (what[0], what[1]))
        if found:
            raise ValueError(
                f"the optimizer changes the form of what it is given: {found}; value_and_update "
                "updates arrays in their places, and needs a transformation that keeps their form"
            )


def pure(tree: Any, leaves: Sequence[Any]) -> Any:
    """The structure of parameters as an optimizer gets them: of NNX modules, without variables."""
    if not nnx_is_used():
        return tree
    from flax import nnx

    return jax.tree.structure(nnx.as_pure(tree.unflatten(leaves)))


def device_type(leaf: Any, dtype: Any) -> Any:
    """The type of an array on the device (or one), with another dtype."""
    if not isinstance(leaf, jax.Array):
        return leaf.update(dtype=dtype, weak_type=False)
    return jax.typeof(leaf).update(dtype=dtype, weak_type=False, memory_space=_jax.DEVICE)
