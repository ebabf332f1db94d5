"""The names given by `checkpoint_name`, matched to the buffers of a compiled program.

Names are not in the compiled program.  What it records of a value is the operation
that computed it, the line of code and the shape; where these identify one name, the
buffer is called by it.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.trace.source import source_line

# The name, in jax's reports, of the carries that a plan keeps.
CARRY_NAME = "jaxmem_carry"

Key = tuple[str, str, tuple[int, ...]]

# ---------------------------------------------------------------- API


class GivenNames:
    """The names in a traced program.

    >>> import jax, jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> def model(x):
    ...     h = checkpoint_name(jnp.sin(x), "hidden")
    ...     return h + jnp.cos(x)
    >>> names = GivenNames(jax.make_jaxpr(model)(jnp.ones(3)))
    >>> line = next(iter(names.of))[1]
    >>> names.find("sin", line, (24, 3)), names.find("cos", line, (24, 3))
    ('hidden', '')
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        found = list(_makers(closed))
        # Looking up lines is slow: only for equations that could be mistaken for a named one.
        named = {_form(eqn) for eqn, name in found if name}
        self.of: dict[Key, set[str]] = {}
        for eqn, name in found:
            if (form := _form(eqn)) in named:
                operation, shape = form
                self.of.setdefault((operation, source_line(eqn), shape), set()).add(name)

    def find(self, operation: str, source: str, shape: tuple[int, ...]) -> str:
        """The name of the result of this operation in this line; "" for none, or if ambiguous.

        Args:
          operation: as "tanh" or "tanh (backward)".
          shape: of the value; with leading axes where a loop stacks values.
        """
        plain, _, direction = operation.partition(" ")
        for cut in range(len(shape) + 1):
            if names := self.of.get((plain, source, shape[cut:])):
                (name, *others) = names
                return f"{name} {direction}".strip() if name and not others else ""
        return ""


# ---------------------------------------------------------------- implementation

_MOVES = frozenset({"convert_element_type", "reshape", "transpose", "squeeze", "expand_dims"})


def _makers(closed: ClosedJaxpr) -> Iterator[tuple[Any, str]]:
    """Every equation with one result, and the result's name; "" for none."""
    eqns = closed.jaxpr.eqns
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    named: dict[int, str] = {}
    for eqn in eqns:
        name = _jax.name_given_by(eqn)
        maker = makers.get(eqn.invars[0]) if name and eqn.invars else None
        while name and maker is not None:
            named[id(maker)] = name
            # Operations that only move or reshape a value do not change it for a reader.
            moves = maker.primitive.name in _MOVES and not _jax.is_literal(maker.invars[0])
            maker = makers.get(maker.invars[0]) if moves else None
    for eqn in eqns:
        if len(eqn.outvars) == 1 and _jax.name_given_by(eqn) is None:
            yield eqn, named.get(id(eqn), "")
        for sub in _jax.all_subjaxprs(eqn):
            yield from _makers(sub)


def _form(eqn: Any) -> tuple[str, tuple[int, ...]]:
    return eqn.primitive.name, tuple(getattr(eqn.outvars[0].aval, "shape", ()))
