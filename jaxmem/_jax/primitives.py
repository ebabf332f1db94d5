"""The primitives of jaxmem, and what they carry.

`stack_p` is a layer stack that has not been differentiated yet; `tangent_p` is its linear part,
whose transpose is the schedule of the plan.  `jax.custom_vjp` would do for plain reverse mode, but
forbids forward mode, and under `vmap` it makes a copy of the parameters' gradient for each example.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax.extend.core import Primitive

from jaxmem._jax.types import Aval, Eqn


class Differentiable(Protocol):
    """What `stack_p` carries: a stack with its policy.  Hashed by identity."""

    def run(self, args: Sequence[Any]) -> list[Any]: ...

    def batched(
        self, batch: Callable[..., Any], flags: Sequence[bool]
    ) -> tuple["Differentiable", list[bool], list[int], list[bool], list[int]]: ...

    def jvp(
        self, args: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]: ...

    def out_avals(self) -> Sequence[Aval]: ...

    @property
    def effects(self) -> Any: ...

    @property
    def is_part(self) -> bool:
        """Whether it is a part of code that was looked at as a whole, for what uses its keys."""
        ...

    def unplanned(self, outs: Sequence[Any]) -> list[Any]:
        """The results of its plain scan, if that is what will be differentiated."""
        ...


class Linear(Protocol):
    """What `tangent_p` carries: a linear map given its residuals.  Hashed by identity."""

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Apply the map; in plain jax, differentiable in both arguments."""
        ...

    def pull(self, residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        """Apply its transpose; a cotangent may be None for zero."""
        ...

    @property
    def num_residuals(self) -> int: ...

    @property
    def tangent_avals(self) -> Sequence[Aval]: ...


# What jax's checker of random keys (jax.debug_key_reuse) takes for another use of keys than what
# stands in the jaxpr: each key that goes in or out of a stack, once.
keys_p = Primitive("jaxmem_keys")

keys_p.multiple_results = True

stack_p = Primitive("jaxmem_stack")

stack_p.multiple_results = True

tangent_p = Primitive("jaxmem_stack_tangent")

tangent_p.multiple_results = True


def bind_stack(stack: Differentiable, args: Sequence[Any]) -> list[Any]:
    """The results of a stack on its flat operands."""
    return stack_p.bind(*args, stack=stack)


def bind_tangent(linear: Linear, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The linear part of a stack, applied; to be transposed by its schedule."""
    return tangent_p.bind(*residuals, *tangents, linear=linear)


def is_stack(eqn: Eqn) -> bool:
    """Whether an equation is a layer stack bound to its policy."""
    return eqn.primitive is stack_p
