"""The decorators: one line above a function, a Flax module class or a method.

Also known as gradient or activation checkpointing.  A decorator finds the layer
stacks in what it decorates, and applies a policy to them.  Nothing else about
the model changes: parameters, random numbers, state, values and gradients are
those of the undecorated code.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as flax_linen
from flax import nnx as flax_nnx

from jaxmem import linen, nnx, policies
from jaxmem._scope import inside_layer_scope, method_names
from jaxmem.errors import JaxmemWarning, warn
from jaxmem.find import Where
from jaxmem.plan import Plan
from jaxmem.policies import Policy
from jaxmem.rewrite import Choice, rewritten

# ---------------------------------------------------------------- API


def remat(
    target: Any,
    policy: str | Policy | Plan,
    *,
    where: Where | None = None,
    min_length: int = 1,
    methods: str | Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """`target` with its layer stacks under a policy.

    A layer stack is an outermost scan (`jax.lax.scan`, `nn.scan`, `nnx.scan`,
    `jaxmem.scan`, whatever wrote it).  Where there is none, ``sqrt`` cuts the code
    where little is alive; else the whole call is checkpointed once, with a
    `NoStackWarning`.

    Args:
      target: a function; a Flax linen module class, instance or method; a Flax
        NNX module class, instance or method.
      policy: name of a policy, a policy from `jaxmem.policies`, or a `Plan`.
      where: which of several stacks: a predicate on `jaxmem.LayerStack`, or its
        index.
      min_length: scans shorter than this are not taken for stacks.
      methods: for module classes and instances, the methods to decorate;
        ``__call__`` by default.
      **options: options of a policy given by name (``slots=8``).

    Returns:
      The same kind of thing, to be used in the same way.

    Raises:
      ValueError: unknown policy, a plan for another length, a name that nothing
        in the function has.
      TypeError: `target` is none of the above, or an option is not the policy's.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def model(weights, h):
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()
    >>> weights = jnp.stack([jnp.eye(4)] * 64)
    >>> small = jaxmem.remat(model, "sqrt")
    >>> before, after = (jax.grad(f)(weights, jnp.ones(4)) for f in (model, small))
    >>> bool((before == after).all())
    True
    """
    if isinstance(policy, Plan):
        if options:
            raise TypeError(
                f"options {', '.join(options)} go with the name of a policy, not a plan"
            )
        parsed = policy
    else:
        parsed = policies.parse(policy, **options)
    choice = Choice(parsed, where, min_length)
    if methods is not None and not _is_module(target):
        raise TypeError(
            f"methods= goes with a Flax module class or instance, and {target!r} is none; "
            "decorate the method itself"
        )
    if isinstance(target, type):
        names = method_names(methods)
        if issubclass(target, flax_linen.Module):
            return linen.remat_class(target, choice, names)
        if issubclass(target, flax_nnx.Module):
            return nnx.remat_class(target, choice, names)
        raise TypeError(
            f"jaxmem.remat decorates Flax module classes, and {target.__name__} is a class of "
            "another kind; decorate its method (the function that scans over the layers) instead"
        )
    if isinstance(target, flax_linen.Module):
        return linen.remat_instance(target, choice, method_names(methods))
    if isinstance(target, flax_nnx.Module):
        return nnx.remat_instance(target, choice, method_names(methods))
    if inspect.ismethod(target) and _is_module(target.__self__):
        return functools.partial(_function(target.__func__, choice), target.__self__)
    if not callable(target):
        raise TypeError(
            "jaxmem.remat takes a function, a Flax module class, a module instance or a method, "
            f"got an object of type {type(target).__name__}; policies apply to code, not to "
            "arrays.  Options go by name, as in remat_revolve(slots=4)"
        )
    if hasattr(target, "lower") and hasattr(target, "__wrapped__"):
        warn(
            f"{getattr(target, '__name__', target)!r} is jitted, and a decorator around it traces "
            "it anew at each call that is not itself under a jit; put jax.jit outside: "
            "jax.jit(jaxmem.remat(function, policy))",
            JaxmemWarning,
        )
    return _function(target, choice)


def remat_full(target: Any = None, **options: Any) -> Any:
    """Keep each layer's carry and nothing else; compute every layer once more.

    Like all these decorators it is used bare or with arguments, those of `remat`.

    >>> import jaxmem
    >>> @jaxmem.remat_full
    ... def model(weights, h): ...
    >>> @jaxmem.remat_full(min_length=4)
    ... def model(weights, h): ...
    """
    return _decorate(target, "full", options)


def remat_sqrt(target: Any = None, **options: Any) -> Any:
    """Keep every c-th carry, for the c that needs the fewest bytes; one extra forward.

    Takes ``segments=`` to fix the cut by hand and ``levels=`` to nest it; see
    `jaxmem.policies.sqrt`.

    >>> import jaxmem
    >>> @jaxmem.remat_sqrt(levels=2)
    ... def model(weights, h): ...
    """
    return _decorate(target, "sqrt", options)


def remat_dots(target: Any = None, **options: Any) -> Any:
    """Keep carries and the results of matrix products.

    >>> import jaxmem
    >>> @jaxmem.remat_dots
    ... def model(weights, h): ...
    """
    return _decorate(target, "dots", options)


def remat_revolve(target: Any = None, **options: Any) -> Any:
    """Keep a fixed number of carries (``slots=8``), scheduled optimally.

    >>> import jaxmem
    >>> @jaxmem.remat_revolve(slots=4)
    ... def model(weights, h): ...
    """
    return _decorate(target, "revolve", options)


def remat_offload(target: Any = None, **options: Any) -> Any:
    """Keep carries (and values of the given ``names=``) in host memory.

    >>> import jaxmem
    >>> @jaxmem.remat_offload(names=["mlp_out"])
    ... def model(weights, h): ...
    """
    return _decorate(target, "offload", options)


def remat_auto(target: Any = None, **options: Any) -> Any:
    """Mark what `jaxmem.fit` is to plan; the plan says then what is kept.

    Until there is one everything is kept, with a warning.  The other decorators mark their
    stacks as well: their policy is what holds without a plan.  What is marked is planned as a
    whole, so mark the model and not its block: the calls of a block all have one plan.

    >>> import jaxmem
    >>> @jaxmem.remat_auto
    ... def model(weights, h): ...
    """
    return _decorate(target, "auto", options)


# ---------------------------------------------------------------- implementation


def _decorate(target: Any, policy: str, options: dict[str, Any]) -> Any:
    if target is None:
        return lambda target: remat(target, policy, **options)
    return remat(target, policy, **options)


def _function(fn: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
    """The decorated function; what its arguments are is seen at the call."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if args and inside_layer_scope(args[0]):  # the stack around this layer has the policy
            return fn(*args, **kwargs)
        if args and isinstance(args[0], flax_linen.Module):
            return linen.call_method(fn, choice, args[0], args[1:], kwargs)
        if nnx.is_bound_method(fn) or nnx.has_modules(args, kwargs):
            return nnx.call(fn, choice, args, kwargs)
        return rewritten(fn, choice)(*args, **kwargs)

    # functools.wraps around this copies both marks; only here is the owner the bearer.
    vars(run).update(__jaxmem_choice__=choice, __jaxmem_owner__=run)
    return run


def _is_module(target: Any) -> bool:
    kind = target if isinstance(target, type) else type(target)
    return issubclass(kind, flax_linen.Module | flax_nnx.Module)
