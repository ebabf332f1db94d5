"""The loss on one microbatch as a jaxpr: what it reads, what it returns, and what it changes."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem._util.imported import nnx_is_used
from jaxmem.accumulate.call import Call, Path, positional, take_apart
from jaxmem.accumulate.combine import Spec
from jaxmem.accumulate.micro import Micro
from jaxmem.accumulate.split import Group
from jaxmem.accumulate.trees import described
from jaxmem.accumulate.weighted import Weighted
from jaxmem.pipeline.options import Options

# ---------------------------------------------------------------- types


class Operands:
    """The arrays of a call, in the order in which a microbatch gets them."""

    def __init__(self, call: Call) -> None:
        self.call = call
        own = {*call.rows, *call.keys}
        self.paths = [
            path
            for path, leaf in call.leaves.items()
            if path not in own and isinstance(leaf, jax.Array | np.ndarray)
        ]
        self.shared = [jnp.asarray(call.leaves[path]) for path in self.paths]
        self.keys = [jnp.asarray(call.leaves[path]) for path in call.keys]

    @property
    def all_paths(self) -> list[Path]:
        return [*self.paths, *self.call.rows, *self.call.keys]

    def rows(self, group: Group) -> list[jax.Array]:
        """Of these microbatches, [size, microbatches, …]."""
        return [dict(self.call.split.dealt(self.call.leaves[path]))[group]
                for path in self.call.rows]  # fmt: skip

    @property
    def nothing_of_microbatch(self) -> list[None]:
        """In the place of a microbatch's own, where nothing reads them."""
        return [None] * (len(self.call.rows) + len(self.keys))


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """A leaf of the auxiliary outputs that is combined over the microbatches.

    Attributes:
      mode: by which word of `aux=`.
      outs: its flat results; several of a `jaxmem.Weighted`.
      tree: that they are put together by.
    """

    mode: str
    outs: tuple[int, ...]
    tree: Any

    def of(self, outs: Sequence[Any]) -> Any:
        """The leaf, from its flat results."""
        return self.tree.unflatten(list(outs))


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """What the flat results are.

    Attributes:
      is_mean: whether the loss is a mean; else it is totals and then their weights.
      losses: how many results these are; they are the first.
      outputs: auxiliary outputs, in their order.
      changed: (path of a leaf among the arguments, result that the next microbatch gets for it).
      parts: of the auxiliary outputs, each with its word and the tree of its leaves.
      carried: paths of the leaves of carried arguments.
    """

    is_mean: bool
    losses: int
    outputs: tuple[Output, ...]
    changed: tuple[tuple[Path, int], ...]
    parts: tuple[tuple[str, Any], ...]
    carried: tuple[Path, ...]

    @property
    def weight(self) -> int | None:
        """The result that auxiliary outputs are weighted by; None for the number of rows."""
        return None if self.is_mean else self.losses // 2

    def assembled(self, spec: Spec, outputs: Sequence[Any], after: Mapping[Path, Any]) -> Any:
        """The auxiliary outputs of the batch.

        Args:
          outputs: combined.
          after: what the last microbatch left of carried arguments.
        """
        found, own, carried = [], iter(outputs), iter(self.carried)
        for mode, tree in self.parts:
            one = (lambda: after[next(carried)]) if mode == "carry" else (lambda: next(own))
            found.append(tree.unflatten([one() for _ in range(tree.num_leaves)]))
        return spec.tree.unflatten(found)


# ---------------------------------------------------------------- API


def called(options: Options, fun: Any, args: Any, kwargs: Any) -> Call:
    """The arguments of a call, taken apart."""
    args, kwargs = positional(fun, args, kwargs)
    for name, value in kwargs.items():
        if any(map(_is_node, _nodes(value))):
            raise TypeError(
                f"{name}= has an NNX module in it, whose changes would be lost; pass modules by "
                "position"
            )
    modules = [k for k, arg in enumerate(args) if any(_in_modules(arg))]
    call = take_apart(
        fun,
        args,
        kwargs,
        argnums=(),
        batch_argnums=options.batch_argnums,
        rng_argnums=options.rng_argnums,
        # Keys in modules, next to a counter, are not the same for all microbatches.
        carry_argnums=(*options.carry_argnums, *modules),
        microbatches=options.microbatches or 1,
    )
    carried = call.carried[: len(options.carry_argnums)]
    if len(set(carried)) < len(carried):
        raise ValueError(
            f"carry_argnums={options.carry_argnums} names an argument twice, of {len(args)}; name "
            "each once"
        )
    call.check_carried(carried)
    leaves = {
        path: jnp.asarray(leaf) if path[0] in carried else leaf
        for path, leaf in call.leaves.items()
    }
    trees: list[Any] = list(call.trees)
    for position in modules:
        if places := _shared_places(args[position]):
            trees[position] = _Shared(trees[position], places)
    return dataclasses.replace(call, carried=carried, leaves=leaves, trees=tuple(trees))


def traced(
    call: Call, spec: Spec, has_aux: bool, size: int, label: str
) -> tuple[ClosedJaxpr, list[Any], Results]:
    """The function on a microbatch of so many rows: its constants are its first operands.

    Returns:
      The jaxpr; the constants; what its results are.

    Raises:
      TypeError, ValueError: the function returns something else, or changes what it must not.
    """
    paths = Operands(call).all_paths
    results: Results | None = None

    def flat(*arrays: Any) -> list[Any]:
        nonlocal results
        known = {**call.leaves, **dict(zip(paths, arrays, strict=True))}
        seen: list[Any] = []

        @functools.wraps(call.fun)
        def fun(*args: Any, **kwargs: Any) -> Any:
            seen.append(args)
            return call.fun(*args, **kwargs)

        carry = [call.argument(position, known) for position in call.carried]
        micro = Micro(dataclasses.replace(call, fun=fun), spec, has_aux)
        loss, aux = micro(known, carry, size)
        outs = [loss]
        if isinstance(loss, Weighted):
            totals, weights = zip(*loss.terms, strict=True)
            outs = [*totals, *weights]
        losses = len(outs)
        parts, outputs, changed = [], [], []
        carried = [path for path in call.leaves if path[0] in call.carried]
        carried.sort(key=lambda path: (call.carried.index(path[0]), path[1]))
        places = iter(carried)
        for mode, part in spec.parts(aux) if has_aux else ():
            leaves, tree = jax.tree.flatten(part, is_leaf=_is_weighted)
            parts.append((mode, tree))
            for leaf in leaves:
                own, inner = jax.tree.flatten(leaf)
                numbers = range(len(outs), len(outs) + len(own))
                if mode == "carry":
                    changed.append((next(places), numbers[0]))
                else:
                    outputs.append(Output(mode, tuple(numbers), inner))
                outs += own
        for position, arg in enumerate(seen[0]):
            if position in call.carried:
                continue  # what counts is what was returned for it
            for path, leaf in _changed(call, label, position, arg, known):
                changed.append((path, len(outs)))
                outs.append(leaf)
        is_mean = not isinstance(loss, Weighted)
        results = Results(
            is_mean, losses, tuple(outputs), tuple(changed), tuple(parts), tuple(carried)
        )
        return list(map(jnp.asarray, outs))

    own = set(call.rows)

    def type_of(path: Any) -> Any:
        leaf = jnp.asarray(call.leaves[path])
        shape = (size, *leaf.shape[1:]) if path in own else leaf.shape
        is_weak = getattr(leaf, "weak_type", False)  # keys have none
        return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=is_weak)

    closed = _jax.inlined(jax.make_jaxpr(flat)(*map(type_of, paths)))
    closed, consts = _jax.without_consts(closed)
    assert results is not None
    return closed, consts, results


def write_back(fun: Any, args: Any, kwargs: Any, after: Mapping[Path, Any]) -> None:
    """Give NNX modules among the arguments of a call the state that the last microbatch left."""
    if not after:
        return
    from flax import nnx

    args, _ = positional(fun, args, kwargs)
    for position in {path[0] for path in after}:
        leaves, tree = jax.tree.flatten(args[position])
        new = tree.unflatten([after.get((position, k), leaf) for k, leaf in enumerate(leaves)])
        for old, node in zip(_nodes(args[position]), _nodes(new), strict=True):
            if _is_node(old):
                nnx.update(old, nnx.state(node))


# ---------------------------------------------------------------- implementation


def _is_weighted(leaf: Any) -> bool:
    return isinstance(leaf, Weighted)


def _is_node(node: Any) -> bool:
    """Whether it is part of an NNX graph."""
    if not nnx_is_used():
        return False
    from flax import nnx

    return isinstance(node, nnx.Module | nnx.Rngs)


def _nodes(arg: Any) -> list[Any]:
    return jax.tree.leaves(arg, is_leaf=_is_node)


def _in_modules(arg: Any) -> list[bool]:
    """Of each leaf, whether it is in an NNX module."""
    return [_is_node(node) for node in _nodes(arg) for _ in jax.tree.leaves(node)]


def _is_variable(node: Any) -> bool:
    from flax import nnx

    return isinstance(node, nnx.Variable)


def _shared_places(arg: Any) -> list[int]:
    """Of each variable in modules, where it was first found; empty if each is there once."""
    first: dict[int, int] = {}
    found = jax.tree.leaves(arg, is_leaf=_is_variable)
    places = [first.setdefault(id(one), k) for k, one in enumerate(found) if _is_variable(one)]
    is_shared = len(set(places)) < len(places)
    return [first.get(id(one), k) for k, one in enumerate(found)] if is_shared else []


@dataclasses.dataclass(frozen=True, eq=False)
class _Shared:
    """The structure of an argument with variables that are in several places, once put together.

    Attributes:
      tree: the structure as jax knows it, in which each place is a variable of its own.
      places: of each variable, the place where it is first.
    """

    tree: Any
    places: Sequence[int]

    @property
    def num_leaves(self) -> int:
        return self.tree.num_leaves

    @functools.cached_property
    def first(self) -> list[int]:
        """Of each leaf, the one that is read in its place."""
        numbers = self.tree.unflatten(range(self.num_leaves))
        found = [jax.tree.leaves(one) for one in jax.tree.leaves(numbers, is_leaf=_is_variable)]
        return [leaf for place in self.places for leaf in found[place]]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        found, tree = jax.tree.flatten(self.tree.unflatten(leaves), is_leaf=_is_variable)
        return tree.unflatten([found[place] for place in self.places])


def _changed(
    call: Call, label: str, position: int, arg: Any, known: Mapping[Path, Any]
) -> list[tuple[Path, Any]]:
    """What a function changed in an argument, such as an NNX module."""
    after, tree = jax.tree.leaves(arg), call.trees[position]
    count, first = tree.num_leaves, getattr(tree, "first", None)
    inside = _in_modules(arg)
    name = call.names.get((position, 0), f"argument {position}").split("/")[0]
    if any(inside) and len(after) != count:
        raise ValueError(
            f"{label} changes which arrays {name} holds: {count} before and {len(after)} after, "
            "and what a microbatch leaves the next one has to take; make the variables when the "
            "module is made, or return the values with has_aux=True"
        )
    found = []
    for number, (leaf, is_inside) in enumerate(zip(after, inside, strict=True)):
        path = (position, number)
        if number >= count or leaf is known[position, first[number] if first else number]:
            continue
        what = f"{label} changes {call.names[path]}"
        if not is_inside:
            raise ValueError(
                f"{what} in place, which is lost where it is in no NNX module; return the new "
                'value with has_aux=True, for the next microbatch by carry_argnums= and "carry" '
                "in aux="
            )
        old = known[path]
        is_array = hasattr(old, "shape") and hasattr(old, "dtype")
        if not is_array or jnp.shape(leaf) != old.shape or jnp.result_type(leaf) != old.dtype:
            raise ValueError(
                f"{what} from {described(old)} to {described(leaf)}; what the next microbatch "
                "gets must be an array of the same shape and dtype"
            )
        found.append((path, leaf))
    return found
