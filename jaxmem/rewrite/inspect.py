"""`stacks`: which layer stacks a function has, and the plan that each one got."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxmem import _jax
from jaxmem.plans.plan import Plan
from jaxmem.policies import NoRemat, Policy
from jaxmem.rewrite.apply import as_stack, through
from jaxmem.solve.problem import Problem
from jaxmem.stacked import applied
from jaxmem.stacked.stack import Stack
from jaxmem.trace import find
from jaxmem.trace.find import LayerStack


@dataclasses.dataclass(frozen=True)
class PlannedStack:
    """A layer stack with its sizes and its plan.

    Attributes:
      stack: where it is and how long.
      policy: what it was given; `policies.none()` where nothing was.
      problem: its bytes, for a derivative with respect to all of its inputs.
      plan: what the policy makes of these.
    """

    stack: LayerStack
    policy: Policy | Plan
    problem: Problem
    plan: Plan

    def __str__(self) -> str:
        return f"{self.stack}\n{self.plan}"


def stacks(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[PlannedStack]:
    """The layer stacks that a call of `fn` runs, decorated or not, in order.

    Nothing is computed; arguments may be `jax.ShapeDtypeStruct`s.

    Raises:
      TypeError: `fn` is not callable.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.remat_sqrt
    ... def model(weights, h):
    ...     return jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), h, weights)[0].sum()
    >>> found = jaxmem.stacks(model, jnp.ones((64, 4, 4)), jnp.ones(4))
    >>> print(found[0].plan)
    Plan of 64 layers: 12 segments of 5 and one of 4, 64 extra forward evaluations
      |....|....|....|....|....|....|....|....|....|....|....|....|...
      | carry kept   . recomputed
    """
    if not callable(fn):
        raise TypeError(
            f"stacks takes a function and its arguments, got an object of type {type(fn).__name__} "
            "as the function; pass stacks(fn, *args), not stacks(fn(*args))"
        )
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in leaves]

    def flat(*arrays: Any) -> Any:
        given = iter(arrays)
        full = [next(given) if t else leaf for t, leaf in zip(traced, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, full)
        out = fn(*args, **kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]

    closed = jax.make_jaxpr(flat)(*(leaf for t, leaf in zip(traced, leaves, strict=True) if t))
    infos = {id(eqn): info for info, eqn in find.find(closed).stacks}
    planned = []

    # Layers are looked at from within, where the axes of a shard_map around them are known.
    def look(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if id(eqn) in infos:
            planned.append(_planned(infos[id(eqn)], eqn))
            return None
        return through(eqn, operands, infos.keys(), look)

    _jax.trace(lambda *arrays: _jax.evaluate(closed, arrays, look), closed.in_avals)
    return planned


def _planned(info: LayerStack, eqn: Any) -> PlannedStack:
    stack = eqn.params["stack"] if _jax.is_stack(eqn) else _as_written(as_stack(eqn, NoRemat()))
    operands = [_jax.has_tangent(atom.aval) for atom in eqn.invars]
    layer = stack.layer(operands)
    return PlannedStack(info, stack.policy, layer.problem(info.length), stack.plan(layer))


def _as_written(stack: Stack) -> Stack:
    """A scan whose whole layer is under `jax.checkpoint`, as the plan that this is."""
    body = stack.form.body
    found = [_jax.checkpointed_by(eqn) for eqn in body.jaxpr.jaxpr.eqns]
    others = [
        eqn
        for eqn, policy in zip(body.jaxpr.jaxpr.eqns, found, strict=True)
        if policy is None and _jax.name_given_by(eqn) is None
    ]
    policies = [policy for policy in found if policy is not None]
    if len(policies) != 1 or others:
        return stack
    layer, host = applied(*policies[0])
    plan = Plan.full(stack.form.length, layer, "host" if host else "device")

    def inlined(*flat: Any) -> list[Any]:
        return _jax.evaluate(body.jaxpr, flat, _jax.without_checkpoint)

    bare = dataclasses.replace(body, jaxpr=_jax.trace(inlined, body.jaxpr.in_avals))
    return Stack(dataclasses.replace(stack.form, body=bare), plan)
