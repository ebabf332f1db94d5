"""A computation that runs or does not run, in the place of what it replaces.

`lax.cond` says this, but XLA keeps operands and results of a conditional apart
where a branch passes an operand through: around the state of an optimizer that is
a copy of the whole state (seen on GPU: 3 copies for Adam and its accumulator; none
on TPU).  A loop of no or one round is updated in place by every backend.  Its
derivative is that of the conditional, which can be had in reverse as well.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer


def run_if(body: Callable[[Any, Any], Any], flag: Any, carry: Any, operands: Any) -> Any:
    """`body(carry, operands)` where `flag` is true, `carry` where it is not.

    Args:
      body: returns a tree like `carry`, of the same shapes and dtypes.
      flag: a bool array without axes.
    """
    if not isinstance(flag, Tracer):  # outside of `jit` there is nothing to compile
        return body(carry, operands) if flag else carry
    # What the body closes over, such as a learning rate, may be differentiated, too.
    closed, consts = jax.closure_convert(body, carry, operands)
    return _run_if(
        lambda carry, operands: closed(carry, operands[0], *operands[1]),
        flag,
        carry,
        (operands, consts),
    )


# ---------------------------------------------------------------- implementation


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_if(body: Callable[[Any, Any], Any], flag: Any, carry: Any, operands: Any) -> Any:
    def again(state: Any) -> Any:
        flag, carry = state
        return flag & False, body(carry, operands)

    return jax.lax.while_loop(lambda state: state[0], again, (flag, carry))[1]


@_run_if.defjvp
def _(body: Callable[[Any, Any], Any], primals: Any, tangents: Any) -> Any:
    def branch(flag: Any, carry: Any, operands: Any) -> Any:
        return jax.lax.cond(flag, body, lambda carry, _: carry, carry, operands)

    return jax.jvp(branch, primals, tangents)
