"""The decorators: one line above a function, a Flax module class or a method.

Also known as gradient or activation checkpointing.  A decorator finds the layer
stacks in what it decorates, and applies a policy to them.  Nothing else about
the model changes: parameters, random numbers, state, values and gradients are
those of the undecorated code.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import linen as flax_linen

from jaxmem import linen, policies
from jaxmem._util.imported import is_module, is_nnx_class, nnx_is_used
from jaxmem.plans.plan import Plan
from jaxmem.policies import Policy
from jaxmem.rewrite.apply import Choice, rewritten
from jaxmem.rewrite.scope import eager_call, inside_layer_scope, method_names
from jaxmem.trace.cache import Traces, key_of
from jaxmem.trace.find import Where

# ---------------------------------------------------------------- API


def remat(
    target: Any,
    policy: str | Policy | Plan,
    *,
    where: Where | None = None,
    min_length: int = 1,
    methods: str | Sequence[str] | None = None,
    partition: str | tuple[str, ...] | None = None,
    **options: Any,
) -> Any:
    """`target` with its layer stacks under a policy.

    A layer stack is an outermost scan (`jax.lax.scan`, `nn.scan`, `nnx.scan`,
    `jaxmem.scan`, whatever wrote it).  Where there is none, ``sqrt`` cuts the code
    where little is live; else the whole call is checkpointed once, with a
    `NoStackWarning`.

    Args:
      target: a function; a Flax linen module class, instance or method, its `apply`
        among these; a Flax NNX module class, instance or method.
      policy: name of a policy, a policy from `jaxmem.policies`, or a `Plan`.
      where: which of several stacks: a predicate on `jaxmem.LayerStack`, or its
        index.
      min_length: scans shorter than this are not taken for stacks.  Layers that are called one
        after another, each with a scan of its own (over chunks of a sequence), have only these
        scans for stacks, and all around them is kept, of which a `NoStackWarning` tells; with a
        `min_length` above theirs it is the code of all layers that the policy is applied to.
        `jaxmem.fit` tries both.
      methods: for module classes and instances, the methods to decorate;
        ``__call__`` by default.
      partition: mesh axes over which the carries of stacks are split from layer to layer, and so
        are stored split for the backward pass (ZeRO-R; sequence parallelism), where tensor-parallel
        devices would each hold them whole.  What reads a carry gathers it.  The first dimension
        behind the batch that the devices divide is split; other axes stay as they are.
      **options: options of a policy given by name (``slots=8``).

    Returns:
      The same kind of thing, to be used in the same way.

    Raises:
      ValueError: unknown policy, a plan for another length, a name that nothing
        in the function has; the mesh lacks an axis of `partition`, or no carry can be split
        over it.
      TypeError: `target` is none of the above, or an option is not the policy's.

    What is decorated is traced, so that ``if float(x) > 0`` works undecorated only.  An NNX
    module that a function closes over can be read but not updated.  Layers with ordered
    effects or writes to a Ref are refused.  As under `jax.checkpoint`, an eager call is traced once
    for the types of its arrays; what it reads of changing Python state is that of its first call.

    Parameters may be in host memory (``jax.device_put(params, jax.memory.Space.Host)``), under
    every policy; what is decorated is written as if they were on the device.  An array that one
    stack alone reads, as it is, goes there layer by layer, in both passes, and its gradient to the
    host (`jaxmem.apply_gradients` makes a step of it); the device then holds some layers whatever
    the depth.  All other arrays on the host
    (embeddings, what is cast or cut before the scan, what two stacks read; on a TPU also arrays
    whose last axis has fewer than 128) are moved as a whole.  Forward mode and second derivatives
    move stacks as a whole, too, and `jax.vmap` over such parameters is refused.

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
    choice = Choice(parsed, where, min_length, partition)
    if methods is not None and not is_module(target):
        raise TypeError(
            f"methods= goes with a Flax module class or instance, and {target!r} is none; "
            "decorate the method itself"
        )
    if isinstance(target, type):
        names = method_names(methods)
        if issubclass(target, flax_linen.Module):
            return linen.remat_class(target, choice, names)
        if is_nnx_class(target):
            from jaxmem import nnx

            return nnx.remat_class(target, choice, names)
        raise TypeError(
            f"jaxmem.remat decorates Flax module classes, and {target.__name__} is a class of "
            "another kind; decorate its method (the function that scans over the layers) instead"
        )
    if isinstance(target, flax_linen.Module):
        return linen.remat_instance(target, choice, method_names(methods))
    if is_nnx_class(type(target)):
        from jaxmem import nnx

        return nnx.remat_instance(target, choice, method_names(methods))
    if linen.is_method(target):
        return functools.partial(_function(target.__func__, choice), target.__self__)
    if not callable(target):
        raise TypeError(
            "jaxmem.remat takes a function, a Flax module class, a module instance or a method, "
            f"got an object of type {type(target).__name__}; policies apply to code, not to "
            "arrays.  Options go by name, as in remat_revolve(slots=4)"
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
    traces = Traces()

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if args and inside_layer_scope(args[0]):  # the stack around this layer has the policy
            return fn(*args, **kwargs)
        if linen.is_called_on_module(fn, args):
            return linen.call_method(fn, choice, args[0], args[1:], kwargs, traces)
        if nnx_is_used():
            from jaxmem import nnx

            if nnx.is_bound_method(fn) or nnx.has_modules(args, kwargs):
                return nnx.call(fn, choice, args, kwargs, traces)
        return rewritten(fn, choice, eager_call(traces, lambda: key_of(fn)))(*args, **kwargs)

    # functools.wraps around this copies both marks; only here is the owner the bearer.
    vars(run).update(__jaxmem_choice__=choice, __jaxmem_owner__=run)
    return run
