"""Flax linen modules under a policy, with names, state and random keys as they were.

A method of a module is made a pure function of its variables and keys the way
flax lifts its own transformations (`flax.core.lift.pack`); the policy is
applied to the stacks in that function.  Unlike flax's `nn.remat` this renames
nothing, takes keyword arguments and has no ``static_argnums``: what is no array
is static.  `init` runs the undecorated module.

Decorate a class that holds an `nn.scan`, or decorate a layer and stack it with
`scan` of this file.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen import module as linen_module
from flax.linen import transforms

from jaxmem import _jax
from jaxmem._util.imported import is_module
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
from jaxmem.trace.cache import Traces, Undecided, key_of

# linen marks the functions that it has wrapped with its own bookkeeping
# (setup, compact scopes, captured outputs), and wraps no function twice.
_HANDLED = "method_handler_wrapped"

# What makes of a pure function another with the same results.
Rewrite = Callable[[Callable[..., Any]], Callable[..., Any]]

# ---------------------------------------------------------------- API


def scan(
    target: Any,
    variable_axes: Mapping[Any, Any] | None = None,
    variable_broadcast: Any = False,
    variable_carry: Any = False,
    split_rngs: Mapping[Any, bool] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    data_transform: Callable[..., Any] | None = None,
    metadata_params: Mapping[Any, Any] | None = None,
    methods: Any = None,
    *,
    remat: Any = None,
    **options: Any,
) -> Any:
    """`flax.linen.scan` of a layer, the stack being under a policy.

    Everything but `remat` is `nn.scan`'s own, and names, variables and results
    are those that `nn.scan` gives: weights are stacked along the axis in
    `variable_axes`, whatever the policy.

    Args:
      target: a linen class, or a function ``(module, carry, *xs)``.
      remat: name of a policy, policy or `Plan`.  None takes it from the
        decorator of the layer; without one this is `nn.scan`.
      options: further arguments of `nn.scan`.

    Raises:
      ValueError: the layer's decorator and `remat` disagree.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> from flax import linen as nn
    >>> @jaxmem.remat_sqrt
    ... class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, _):
    ...         return x + nn.Dense(x.shape[-1])(nn.relu(x)), None
    >>> stack = jaxmem.linen.scan(
    ...     Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=16
    ... )()
    >>> variables = stack.init(jax.random.key(0), jnp.ones((2, 4)), None)
    >>> variables["params"]["Dense_0"]["kernel"].shape
    (16, 4, 4)
    """
    arguments = dict(
        variable_axes=variable_axes or {},
        variable_broadcast=variable_broadcast,
        variable_carry=variable_carry,
        split_rngs=split_rngs or {},
        in_axes=in_axes,
        out_axes=out_axes,
        length=length,
        reverse=reverse,
        unroll=unroll,
        data_transform=data_transform,
        metadata_params=metadata_params or {},
        **options,
    )
    if isinstance(target, functools.partial) and _is_module_class(_innermost(target)):
        stack = scan(target.func, methods=methods, remat=remat, **arguments)
        return functools.partial(stack, *target.args, **target.keywords)
    if _is_module_class(target):
        return _scan_class(target, methods, remat, arguments)
    if not callable(target) or isinstance(target, nn.Module):
        raise TypeError(
            "jaxmem.linen.scan takes a linen class or a function (module, carry, *xs), got "
            f"{_short(target)}; for a module instance pass its class here and the fields to what "
            "comes back"
        )
    return _scan_function(target, remat, arguments)


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
    return subclass(cls, {"__jaxmem_choice__": choice, **lifted})


def remat_instance(module: nn.Module, choice: Choice, methods: Any = ("__call__",)) -> nn.Module:
    """The module with these methods under a policy: same fields, name, parent and variables.

    Raises: as `remat_class`.
    """
    return _twin(module, remat_class(type(module), choice, methods))


def lifted_class(cls: Any, rewrite: Rewrite, methods: Any = ("__call__",)) -> Any:
    """A class that passes for `cls`, with these methods rewritten as pure functions.

    Raises:
      TypeError: a name in `methods` is no plain method of `cls`.
    """
    lifted = {
        name: lifted_method(plain_method(cls, name, None), rewrite)
        for name in method_names(methods)
    }
    return subclass(cls, lifted)


def lifted_instance(module: nn.Module, rewrite: Rewrite, methods: Any = ("__call__",)) -> nn.Module:
    """The module with these methods rewritten: same fields, name, parent and variables.

    Raises: as `lifted_class`.
    """
    return _twin(module, lifted_class(type(module), rewrite, methods))


def lifted_method(method: Callable[..., Any], rewrite: Rewrite) -> Callable[..., Any]:
    """A method that runs as a rewritten pure function of its module's variables and keys.

    In `init`, which differentiates nothing, it runs as it stands.
    """
    body = method if hasattr(method, _HANDLED) else _entered(method)
    lifted = _lifted(body, lambda pure, module, scopes: rewrite(pure))

    @functools.wraps(method)
    def rewritten_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = method if _initializing(self) else lifted
        return run(self, *args, **kwargs)

    return rewritten_method


def is_method(target: Any) -> TypeGuard[types.MethodType]:
    """Whether something is a method of a Flax module that runs inside of it."""
    return inspect.ismethod(target) and is_module(target.__self__) and not _binds(target.__func__)


def is_called_on_module(fn: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is that of a linen module's method, as written in its class."""
    return bool(args) and isinstance(args[0], nn.Module) and not _binds(fn)


def _binds(fn: Any) -> bool:
    """Whether a function binds its module to variables by itself: `apply`, `init` and the like.

    They are linen's own, of every module, and plain functions of what they are given.
    """
    inner = getattr(fn, "__func__", fn)
    return inner is getattr(nn.Module, getattr(inner, "__name__", ""), None)


def call_method(
    fn: Callable[..., Any],
    choice: Choice,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    traces: Traces,
) -> Any:
    """``fn(module, *args, **kwargs)`` under a policy; `fn` is a method as written in its class."""
    if _left_alone(module):
        return fn(module, *args, **kwargs)
    body = fn if hasattr(fn, _HANDLED) else _entered(fn)
    return _lift(body, choice, traces)(module, *args, **kwargs)


# ---------------------------------------------------------------- implementation


def _lift(method: Callable[..., Any], choice: Choice, traces: Traces) -> Callable[..., Any]:
    """`method` of a bound module, run as a pure function of its variables and keys by a policy."""

    def under_policy(
        pure: Callable[..., Any], module: nn.Module, scopes: Callable[[], list[Any]]
    ) -> Callable[..., Any]:
        outside = _Outside(module, scopes)
        eager = eager_call(traces, outside.decides, outside.look, outside.again)
        return rewritten(pure, choice, eager)

    return _lifted(method, under_policy)


def _lifted(
    method: Callable[..., Any], rewrite: Callable[[Any, Any, Any], Callable[..., Any]]
) -> Callable[..., Any]:
    """`method` of a bound module, run as a rewritten pure function of its variables and keys.

    Args:
      rewrite: from the pure function, the module and what gives its scopes.
    """

    def transform(scope_function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        def inner(
            scope_of: Any, variables_of: Any, variables: Any, keys: Any, *args: Any, **kwargs: Any
        ) -> Any:
            def pure(variables: Any, keys: Any, args: Any, kwargs: Any) -> Any:
                scopes = scope_of(variables, keys)
                result = scope_function(scopes, *args, **kwargs)
                return result, variables_of(scopes)

            pure.__name__ = getattr(method, "__name__", "method")
            pure.__qualname__ = getattr(method, "__qualname__", "method")
            vars(pure)["__wrapped__"] = method  # for messages: where it was written
            run = rewrite(pure, module, lambda: jax.tree.leaves(scope_of(variables, keys)))
            return run(variables, keys, args, kwargs)

        everything = (True,)
        return lift.pack(inner, everything, everything, everything, enable_kwargs=True)

    def lifted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with_module = functools.partial(transform, module=module)
        return transforms.decorator_lift_transform(with_module, method)(module, *args, **kwargs)

    return lifted


def _twin(module: nn.Module, cls: Any) -> nn.Module:
    """A module as an object of a subclass of its class."""
    if module.parent is None:
        fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
        return cls(**fields)
    # The name is taken and the scope is open already: the new object takes both over.
    twin = object.__new__(cls)
    twin.__dict__.update(module.__dict__)
    if isinstance(module.parent, nn.Module) and module.name is not None:
        children = module.parent._state.children
        if children.get(module.name) is module:
            children[module.name] = twin
    return twin


class _Outside:
    """What of a bound module is neither a variable nor an argument, and its scopes'.

    A call reads and changes it: names that were given, keys that were made.
    """

    def __init__(self, module: nn.Module, scopes: Callable[[], list[Any]]) -> None:
        self.module, self._scopes = module, scopes

    @functools.cached_property
    def scopes(self) -> list[Any]:
        # New ones, but with the counters of the scopes outside.
        return self._scopes()

    def decides(self) -> Any:
        """What of it decides a trace.

        Raises:
          TypeError: nothing does.
        """
        context = linen_module._context
        watched = any(context.capture_stack) or any(context.call_info_stack)
        if watched or any(True for _ in linen_module._global_interceptor_stack):
            raise Undecided("somebody looks on")
        scopes = [(s.path, s.debug_path, s.mutable, s.flags) for s in self.scopes]
        counts = tuple(_counts(scope.rng_counters) for scope in self.scopes)
        config = key_of(_jax.flax_config())
        return _fingerprint(self.module, []), key_of(scopes), counts, config

    def look(self) -> Any:
        """What of it a call has changed."""
        counts = [_counts(scope.rng_counters) for scope in self.scopes]
        return self.module._state.export(), counts

    def again(self, after: Any) -> None:
        """The same change."""
        state, counted = after
        self.module._state.reimport(state)
        for scope, counts in zip(self.scopes, counted, strict=True):
            _count_on(scope.rng_counters, counts)


def _counts(counters: Mapping[Any, Any]) -> tuple[Any, ...]:
    """How many keys a scope, and those in it, have made; scopes share these counters."""
    return tuple(
        (key, _counts(count) if isinstance(count, Mapping) else count)
        for key, count in counters.items()
    )


def _count_on(counters: dict[Any, Any], counts: tuple[Any, ...]) -> None:
    """Sets counters to what `_counts` saw, in place."""
    for key, count in counts:
        if isinstance(count, tuple):
            _count_on(counters.setdefault(key, {}), count)
        else:
            counters[key] = count


def _fingerprint(module: nn.Module, seen: list[Any]) -> Any:
    """A module's class, fields and state, those of modules in its fields, and how it shares them.

    Raises:
      TypeError: a field is an array, or may change.
    """
    for number, known in enumerate(seen):
        if known is module:
            return number
    seen.append(module)

    def of(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return _fingerprint(value, seen)
        if isinstance(value, tuple | list):
            return type(value), *map(of, value)
        if isinstance(value, Mapping):
            return type(value), *((key_of(key), of(item)) for key, item in value.items())
        return key_of(value)

    names = [f.name for f in dataclasses.fields(module) if f.name != "parent"]
    fields = [(name, of(getattr(module, name, None))) for name in names]
    state = module._state
    return (
        key_of(type(module)),
        tuple(fields),
        (state.in_compact_method, state.in_setup, state.setup_called, state.is_initialized),
        key_of(state.autoname_cursor),
        module.scope is None,
    )


def _under_policy(method: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
    lifted = _lift(_as_layer(method), choice, Traces())

    @functools.wraps(method)
    def with_policy(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _left_alone(self):
            return method(self, *args, **kwargs)
        return lifted(self, *args, **kwargs)

    vars(with_policy)["__jaxmem_choice__"] = choice
    return with_policy


def _left_alone(module: nn.Module) -> bool:
    """Whether a call has nothing to gain from a policy."""
    return _initializing(module) or inside_layer_scope(module)


def _initializing(module: nn.Module) -> bool:
    """In `init`, which differentiates nothing and has to work on shapes alone; or unbound."""
    if module.scope is None:  # linen says what is wrong, if anything is
        return True
    # Not Module.is_initializing, which would run `setup` on this side of the lifting.
    return bool(module.scope.get_flag("initializing", False))


def _as_layer(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, its module's own policy being spent (a super() call meets it again)."""

    @functools.wraps(method)
    def layer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with layer_scope(module):
            return method(module, *args, **kwargs)

    return layer


def _entered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for the clone of a module whose method linen has entered already.

    linen keeps its books (captured outputs, tabulated calls, compact flags) on
    the outer module; of these steps the clone needs only two: its `setup`, and
    to be the parent of the modules that `fn` makes.
    """

    @functools.wraps(fn)
    def entered(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module._try_setup()
        stack = linen_module._context.module_stack
        stack.append(module)
        try:
            return fn(module, *args, **kwargs)
        finally:
            stack.pop()

    setattr(entered, _HANDLED, True)
    return entered


def _scan_class(target: Any, methods: Any, remat: Any, arguments: dict[str, Any]) -> Any:
    names = method_names(methods)
    layers = {name: plain_method(target, name, None) for name in names}
    choice = stack_choice(
        remat, [declared_choice(target), *(declared_choice(layers[name]) for name in names)]
    )
    if choice is None:
        return nn.scan(target, methods=methods, **arguments)
    layer = subclass(target, {name: _as_layer(method) for name, method in layers.items()})
    return remat_class(nn.scan(layer, methods=methods, **arguments), choice, names)


def _scan_function(target: Any, remat: Any, arguments: dict[str, Any]) -> Any:
    scanned = nn.scan(_as_layer(target), **arguments)
    if remat is not None:
        stack_choice(remat, [declared_choice(target)])  # say what is wrong with it at once
    traces = Traces()

    @functools.wraps(scanned)
    def stack(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        declared = [declared_choice(target)]
        if not inside_layer_scope(module):
            declared.append(declared_choice(type(module)))
        choice = stack_choice(remat, declared)
        if choice is None or _initializing(module):
            return scanned(module, *args, **kwargs)
        return _lift(scanned, choice, traces)(module, *args, **kwargs)

    return stack


def _is_module_class(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, nn.Module)


def _innermost(target: Any) -> Any:
    return _innermost(target.func) if isinstance(target, functools.partial) else target


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
