"""Parameters that are cast where products read them, transposed or not, as in most Flax modules.

The gradient of such a matrix is made by itself, for GPUs, in the dtype that it is cast to.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives

from jaxmem import _jax


class Casts:
    """Of code, the casts of its inputs that are matrices, or of more dimensions.

    Args:
      eqns, outvars: the operations, and what they are done for.
      inputs: what they begin with.
    """

    def __init__(
        self, eqns: Sequence[Any], outvars: Sequence[Any], inputs: Collection[Any]
    ) -> None:
        self._eqns, self._outvars, self._inputs = eqns, outvars, inputs
        # Transposed and reshaped inputs, and what these are of.
        self._views: dict[Any, Any] = {}
        for eqn in eqns:
            if eqn.primitive in (primitives.transpose_p, primitives.reshape_p):
                given = self._behind_view(eqn.invars[0])
                if _jax.is_var(given) and given in inputs:
                    self._views[eqn.outvars[0]] = given

    def __contains__(self, eqn: Any) -> bool:
        """Whether an operation is such a cast, and has a gradient."""
        if eqn.primitive is not primitives.convert_element_type_p:
            return False
        (given,), (made,) = eqn.invars, eqn.outvars
        if not _jax.is_var(given) or self._behind_view(given) not in self._inputs:
            return False
        has_gradient = _jax.has_tangent(given.aval) and _jax.has_tangent(made.aval)
        return len(made.aval.shape) > 1 and has_gradient

    @functools.cached_property
    def only(self) -> dict[Any, int]:
        """The inputs that nothing but such casts read, with the bytes of an element they cast to.

        Of several casts the widest counts.
        """
        found: dict[Any, int] = {}
        others = set(filter(_jax.is_var, self._outvars))
        for eqn in self._eqns:
            if eqn in self:
                (given,), (made,) = eqn.invars, eqn.outvars
                source = self._behind_view(given)
                found[source] = max(found.get(source, 0), made.aval.dtype.itemsize)
            elif self._views.keys().isdisjoint(eqn.outvars):
                others.update(filter(_jax.is_var, eqn.invars))
        read = set(map(self._behind_view, others))
        return {var: width for var, width in found.items() if var not in read}

    def _behind_view(self, var: Any) -> Any:
        return self._views.get(var, var) if _jax.is_var(var) else var


@jax.custom_jvp
def read_behind(first: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    """All of these; the values are not read before the first one is there.

    Their gradients wait for nothing.
    """
    first, *later = lax.optimization_barrier([first, *values]) if values else [first]
    return first, later


def _with_own_tangents(primals: Any, tangents: Any) -> Any:
    first, values = tangents
    return read_behind(*primals), (first, list(values))


read_behind.defjvp(_with_own_tangents, symbolic_zeros=True)
