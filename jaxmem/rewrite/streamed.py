"""Arrays on the host in a rewritten function: which of them go to the device row by row.

An array that one stack alone reads, as it is, stays where it is: the stack moves one row of it to
the device at a time, forwards, in recomputation and backwards, and writes rows of its gradient to
the host.  All others are moved as a whole, once, in front of everything; so are their gradients.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.trace import find
from jaxmem.trace.context import platform


def placed(closed: ClosedJaxpr, args: Sequence[Any], stacks: Collection[int]) -> list[Any]:
    """The arguments, on the device but for those that a stack reads row by row.

    Args:
      closed: a function of arrays on the device.
      args: its arguments.
      stacks: ids of the equations that are stacks.
    """
    return [
        arg
        if not _jax.is_on_host(arg) or (has_rows(arg) and [*_uses(closed, var, stacks)] == [True])
        else _jax.on_device(arg)
        for var, arg in zip(closed.jaxpr.invars, args, strict=True)
    ]


def has_rows(array: Any) -> bool:
    """Whether a compiler can read and write rows of an array on the host.

    That for TPUs has its rows in tiles of 128 numbers, and fails where they have fewer.
    """
    return platform() != "tpu" or (array.ndim > 1 and array.shape[-1] >= 128)


def _uses(closed: ClosedJaxpr, var: Any, stacks: Collection[int]) -> Iterator[bool]:
    """For each time that a variable is read, whether a stack reads rows of it."""
    for eqn in closed.jaxpr.eqns:
        for place, atom in enumerate(eqn.invars):
            if atom is not var:
                continue
            inner = find.subjaxprs(eqn)
            if id(eqn) in stacks:
                yield place >= _first_x(eqn)
            elif _jax.is_jit(eqn) and not _jax.constrains(eqn):
                yield from _uses(inner[0], inner[0].jaxpr.invars[place], stacks)
            else:
                yield False


def _first_x(eqn: Any) -> int:
    if _jax.is_stack(eqn):
        body = eqn.params["stack"].form.body
        return body.num_consts + body.num_carry
    scan = _jax.scan_parts(eqn)
    return scan.num_consts + scan.num_carry
