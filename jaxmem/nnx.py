"""Flax NNX modules under a policy, with graph, state and random keys as they were.

A call is made a pure function of the state of all modules among its arguments,
as NNX does for its own transformations; the policy is applied to the stacks in
that function, and what the call changed is written back.  Where only values
changed (batch statistics, counters of random keys), only those variables are
written: a module of an outer trace can be read in here, as it can without a
policy.  Where the graph changed (sown values, new attributes), NNX's own update
context propagates it whole.

Known gap: modules that a function closes over, rather than takes as arguments,
can be read under a policy but not updated, as under `jax.jit`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.nnx import extract, graphlib

from jaxmem.rewrite.apply import Choice, rewritten
from jaxmem.rewrite.scope import (
    declared_choice,
    eager_call,
    inside_layer_scope,
    layer_scope,
    method_names,
    plain_method,
    stack_choice,
    subclass,
)
from jaxmem.trace.cache import Traces, key_of

_TAG = "jaxmem"

# What makes of a pure function another with the same results.
Rewrite = Callable[[Callable[..., Any]], Callable[..., Any]]

# ---------------------------------------------------------------- API


def scan(
    f: Callable[..., Any] | None = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Any = (nnx.Carry, 0),
    out_axes: Any = (nnx.Carry, 0),
    remat: Any = None,
    **options: Any,
) -> Any:
    """`flax.nnx.scan`, the stack being under a policy.

    Everything but `remat` is `nnx.scan`'s own, as are the results and every
    state.

    Args:
      f: the layer, a function with modules among its arguments.  None makes a
        decorator.
      remat: name of a policy, policy or `Plan`.  None takes it from the class
        of a decorated layer among the arguments; without one this is `nnx.scan`.
      options: further arguments of `nnx.scan`.

    Raises:
      ValueError: a layer's decorator and `remat` disagree (at the call).

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> from flax import nnx
    >>> @nnx.vmap(in_axes=0, out_axes=0)
    ... def make(key):
    ...     return nnx.Linear(4, 4, rngs=nnx.Rngs(key))
    >>> layers = make(jax.random.split(jax.random.key(0), 16))
    >>> @jaxmem.nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, remat="sqrt")
    ... def forward(x, layer):
    ...     return x + layer(nnx.relu(x))
    >>> forward(jnp.ones((2, 4)), layers).shape
    (2, 4)
    """
    if f is None:
        return functools.partial(
            scan,
            length=length,
            reverse=reverse,
            unroll=unroll,
            in_axes=in_axes,
            out_axes=out_axes,
            remat=remat,
            **options,
        )
    stack_choice(remat, [declared_choice(f)])  # say what is wrong with remat= at once

    @functools.wraps(f)
    def layer(*args: Any) -> Any:
        # A decorated function knows itself by its first argument.
        spent = _decorated(args) if declared_choice(f) is None else [*_decorated(args), *args[:1]]
        with layer_scope(*spent):
            return f(*args)

    scanned = nnx.scan(
        layer,
        length=length,
        reverse=reverse,
        unroll=unroll,
        in_axes=in_axes,
        out_axes=out_axes,
        **options,
    )
    traces = Traces()

    @functools.wraps(f)
    def stack(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = _positional(f, args, kwargs)
        layers = _decorated(_scanned(args, in_axes))
        classes = {type(layer): None for layer in layers if not inside_layer_scope(layer)}
        choice = stack_choice(remat, [declared_choice(f), *map(declared_choice, classes)])
        if choice is None:
            return scanned(*args)
        return call(scanned, choice, args, {}, traces)

    return stack


def remat_class(cls: Any, choice: Choice, methods: Any = ("__call__",)) -> Any:
    """A class that passes for `cls`, with these methods under a policy.

    It is a subclass: `cls` itself stays as it is.

    Raises:
      TypeError: a name in `methods` is no plain method of `cls`.
      ValueError: a method is under another policy already.
    """
    lifted = {
        name: _under_policy(plain_method(cls, name, choice), choice)
        for name in method_names(methods)
    }
    return subclass(cls, {"__jaxmem_choice__": choice, **_own_methods(cls), **lifted})


def remat_instance(module: Any, choice: Choice, methods: Any = ("__call__",)) -> Any:
    """A module that shares all variables and submodules with this one, its methods under a policy.

    Raises: as `remat_class`.
    """
    twin = object.__new__(remat_class(type(module), choice, methods))
    vars(twin).update(vars(module))
    return twin


def lifted_class(cls: Any, rewrite: Rewrite, methods: Any = ("__call__",)) -> Any:
    """A class that passes for `cls`, with these methods rewritten as pure functions.

    Raises:
      TypeError: a name in `methods` is no plain method of `cls`.
    """
    lifted = {
        name: lifted_method(plain_method(cls, name, None), rewrite)
        for name in method_names(methods)
    }
    return subclass(cls, {**_own_methods(cls), **lifted})


def lifted_instance(module: Any, rewrite: Rewrite, methods: Any = ("__call__",)) -> Any:
    """A module that shares all variables and submodules with this one, its methods rewritten.

    Raises: as `lifted_class`.
    """
    twin = object.__new__(lifted_class(type(module), rewrite, methods))
    vars(twin).update(vars(module))
    return twin


def lifted_method(method: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    """A method that runs as a rewritten pure function of its module's state."""

    @functools.wraps(method)
    def rewritten_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return lifted_call(method, rewrite, (self, *args), kwargs)

    return rewritten_method


def call(
    fn: Callable[..., Any],
    choice: Choice,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    traces: Traces | None = None,
) -> Any:
    """``fn(*args, **kwargs)`` under a policy, with NNX modules among the arguments.

    A bound method of a module counts its module among the arguments.

    Args:
      traces: of `fn`, for eager calls; None to trace each.  As for `nnx.jit`, what decides them is
        the structure of the modules, the types of their arrays and all other arguments by value.
    """

    def under_policy(pure: Callable[..., Any]) -> Callable[..., Any]:
        eager = None if traces is None else eager_call(traces, lambda: key_of(_unbound(fn, ())[0]))
        return rewritten(pure, choice, eager)

    return lifted_call(fn, under_policy, args, kwargs)


def lifted_call(
    fn: Callable[..., Any], rewrite: Rewrite, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """``fn(*args, **kwargs)`` as a rewritten pure function, with NNX modules among the arguments.

    A bound method of a module counts its module among the arguments.
    """
    fn, args = _unbound(fn, args)

    def pure(tree: Any) -> Any:
        args, kwargs = extract.from_tree(tree, ctxtag=_TAG, is_inner=True)
        modules = _modules((args, kwargs))
        before = _snapshot(modules)
        result = fn(*args, **kwargs)
        if not _modules(result):
            changed = _changes(before, _snapshot(modules))
            if changed is not None:
                return changed, None, result
        kept = extract.clear_non_graph_nodes((args, kwargs))
        return None, *extract.to_tree((kept, result), ctxtag=_TAG)

    pure.__name__ = getattr(fn, "__name__", "function")
    pure.__qualname__ = getattr(fn, "__qualname__", "function")
    vars(pure)["__wrapped__"] = fn  # whose line is shown
    with nnx.update_context(_TAG):
        tree = extract.to_tree((args, dict(kwargs)), ctxtag=_TAG)
        changed, kept, result = rewrite(pure)(tree)
        if changed is None:
            _, result = extract.from_tree((kept, result), ctxtag=_TAG, is_inner=False)
            return result
    variables = _variables(_modules((args, kwargs)))
    for index, value in changed.items():
        variables[int(index)].set_raw_value(value)
    return result


def has_modules(args: Any, kwargs: Any = ()) -> bool:
    """Whether NNX modules, variables or other graph nodes are among the arguments."""
    return bool(_modules((args, kwargs)))


def is_bound_method(fn: Any) -> bool:
    """Whether `fn` is a bound method of an NNX module, through `functools.partial` too."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.ismethod(fn) and graphlib.is_graph_node(fn.__self__)


# ---------------------------------------------------------------- implementation


def _own_methods(cls: Any) -> dict[str, Any]:
    # nnx.capture looks for methods in the class's own namespace only.
    return {
        name: member
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


def _under_policy(method: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
    traces = Traces()

    @functools.wraps(method)
    def layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        with layer_scope(self):  # a super() call meets the policy again
            return method(self, *args, **kwargs)

    @functools.wraps(method)
    def with_policy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if inside_layer_scope(self):
            return method(self, *args, **kwargs)
        return call(layer, choice, (self, *args), kwargs, traces)

    vars(with_policy)["__jaxmem_choice__"] = choice
    return with_policy


def _unbound(fn: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`fn` as a function that takes all its modules as arguments."""
    if isinstance(fn, functools.partial):
        inner, given = _unbound(fn.func, fn.args)
        return functools.partial(inner, **fn.keywords) if fn.keywords else inner, (*given, *args)
    if is_bound_method(fn):
        return fn.__func__, (fn.__self__, *args)
    if not inspect.isroutine(fn) and graphlib.is_graph_node(fn):
        return type(fn).__call__, (fn, *args)
    return fn, args


def _is_node(value: Any) -> bool:
    return graphlib.is_graph_node(value) or isinstance(value, nnx.Variable)


def _modules(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_node) if _is_node(leaf)]


def _variables(modules: list[Any]) -> list[Any]:
    """All variables, each once, in an order that the graph's structure fixes."""
    nodes = nnx.iter_graph(modules, graph=True)
    return [node for _, node in nodes if isinstance(node, nnx.Variable)]


def _snapshot(modules: list[Any]) -> tuple[Any, list[Any], list[Any]]:
    """The graph's structure, the variables with their values, and the arrays outside variables."""
    structure = graphlib.flatten(modules, graph=True)[0]
    values, arrays = [], []
    for _, node in nnx.iter_graph(modules, graph=True):
        if isinstance(node, nnx.Variable):
            # Flattened now: captures are dicts that grow in place.
            values.append((node, jax.tree.flatten(node.get_raw_value())))
        elif isinstance(node, jax.Array):
            arrays.append(node)
    return structure, values, arrays


def _changes(before: Any, after: Any) -> dict[str, Any] | None:
    """New values by the variable's number; None where more than values changed."""
    if before[0] != after[0] or not _identical(before[2], after[2]):
        return None
    changed = {}
    for number, ((old, was), (new, now)) in enumerate(zip(before[1], after[1], strict=True)):
        if old is not new:
            return None
        if was[1] != now[1] or not _identical(was[0], now[0]):
            changed[str(number)] = new.get_raw_value()
    return changed


def _identical(was: list[Any], now: list[Any]) -> bool:
    return len(was) == len(now) and all(a is b for a, b in zip(was, now, strict=True))


def _decorated(args: Iterable[Any]) -> list[Any]:
    return [node for node in _modules(tuple(args)) if declared_choice(type(node)) is not None]


def _scanned(args: tuple[Any, ...], in_axes: Any) -> list[Any]:
    """The arguments that a layer gets a slice of."""
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    return [arg for arg, axis in zip(args, axes, strict=False) if axis not in (None, nnx.Carry)]


def _positional(f: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
    bound = inspect.signature(f).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"a scan matches in_axes with positional arguments, and {', '.join(bound.kwargs)} of "
            f"{getattr(f, '__name__', 'the layer')} can only be given by keyword; make it "
            "positional, or bind it with functools.partial"
        )
    return bound.args
