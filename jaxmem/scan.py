"""`jaxmem.scan`: `jax.lax.scan` with a policy for what its layers keep."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxmem import policies
from jaxmem.errors import check_positive
from jaxmem.plans.choose import choose
from jaxmem.plans.plan import Plan
from jaxmem.policies import NoRemat, Policy
from jaxmem.rewrite.apply import Choice, rewritten
from jaxmem.rewrite.scope import declared_choice, stack_choice
from jaxmem.solve.problem import Problem


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    remat: str | Policy | Plan = "none",
) -> tuple[Any, Any]:
    """A drop-in for `jax.lax.scan` that trades memory for recomputation.

    Arguments and results are those of `jax.lax.scan`; values and gradients do
    not depend on `remat`.

    Args:
      f: the layer, ``(carry, x) -> (carry, y)``.  If it carries a decorator of
        jaxmem, the policy is taken from there.
      init: the first carry, any pytree of arrays.
      xs: layer inputs such as parameters, stacked along the leading axis.
      length: number of layers, needed where `xs` has no arrays.
      reverse: go over the layers from the last to the first.
      unroll: how many layers a step of the compiled loop holds.
      remat: name of a policy ("none", "full", "dots", "dots_no_batch", "sqrt",
        "revolve", "offload"), a policy from `jaxmem.policies`, or a `Plan`.

    Returns:
      (final carry, ys stacked along the leading axis).

    Raises:
      ValueError: unknown policy, a plan for another length, `remat` contradicts
        the decorator of `f`.
      TypeError: the carry that `f` returns differs from the one it was given;
        the message names the leaf.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> layer = lambda h, w: (jnp.tanh(h @ w), None)
    >>> weights = jnp.stack([jnp.eye(4)] * 64)
    >>> loss = lambda weights: jaxmem.scan(layer, jnp.ones(4), weights, remat="sqrt")[0].sum()
    >>> jax.grad(loss)(weights).shape
    (64, 4, 4)
    """
    policy = policies.parse(remat) if not isinstance(remat, Plan) else remat
    declared = declared_choice(f)
    if declared is not None and getattr(f, "__jaxmem_owner__", None) is f:
        given = None if isinstance(policy, NoRemat) else policy
        policy = stack_choice(given, [declared]).policy  # pyright: ignore[reportOptionalMemberAccess]
        f = f.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    count = _length(xs, length)
    check_positive("unroll", int(unroll) or 1)

    def layer(carry: Any, x: Any) -> tuple[Any, Any]:
        out = f(carry, x)
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                "the layer given to jaxmem.scan must return a pair (carry, y); it returned "
                f"{type(out).__name__}.  Return (carry, None) where there is no y"
            )
        _check_carry(carry, out[0])
        return out

    if isinstance(policy, Plan):
        choose(policy, Problem(count))  # raises if it is for another length

    def plain(init: Any, xs: Any) -> tuple[Any, Any]:
        return lax.scan(layer, init, xs, length=length, reverse=reverse, unroll=unroll)

    if isinstance(policy, NoRemat) or count == 0:
        return plain(init, xs)
    return rewritten(plain, Choice(policy))(init, xs)


def _length(xs: Any, length: int | None) -> int:
    """The number of layers, or an error that says which leaf disagrees."""
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(xs):
        shape = getattr(leaf, "shape", None)
        where = f"xs{jax.tree_util.keystr(path)}"
        if not shape:
            raise ValueError(
                f"{where} has no leading axis to scan over: it is {leaf!r} of type "
                f"{type(leaf).__name__}"
            )
        sizes[where] = shape[0]
    if length is not None:
        sizes["length="] = length
    if not sizes:
        raise ValueError("jaxmem.scan needs xs with at least one array, or length=")
    first, count = next(iter(sizes.items()))
    for where, size in sizes.items():
        if size != count:
            raise ValueError(
                f"the leading axes of xs must agree: {first} has {count} layers, {where} has {size}"
            )
    return int(count)


def _check_carry(given: Any, returned: Any) -> None:
    """jax's rule (same structure, shapes and types), with the leaf that breaks it named."""
    before, after = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (given, returned))
    keystr = jax.tree_util.keystr
    if missing := [path for path in before if path not in after]:
        raise TypeError(
            f"the layer lost a part of its carry: carry{keystr(missing[0])} was given and not "
            "returned"
        )
    if added := [path for path in after if path not in before]:
        raise TypeError(
            "the layer returned a carry with a part that it was not given: "
            f"carry{keystr(added[0])}; put it into init, or return it as y"
        )
    for path, old in before.items():
        new = after[path]
        old_type, new_type = (jax.typeof(jax.numpy.asarray(leaf)) for leaf in (old, new))
        same_dtype = old_type.dtype == new_type.dtype or old_type.weak_type
        if old_type.shape == new_type.shape and same_dtype:
            continue
        raise TypeError(
            f"the layer changed the type of its carry: carry{keystr(path)} came in as "
            f"{old_type.str_short()} and went out as {new_type.str_short()}; every layer must "
            "return what it was given, so cast or reshape it in the layer, or start from an init "
            "of that type"
        )
