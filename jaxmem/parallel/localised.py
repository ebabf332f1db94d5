"""A program as one device runs it, for looking at: each value with the shape of its part.

What is said of bytes, FLOPs and seconds of such a program is then of one device, by the same code
that says it of a program for one.
"""

from collections.abc import Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.parallel.messages import PER_DEVICE, Spec, of_operation


class Localiser:
    """Programs as one device runs them; values that several of them share stay the same.

    Args:
      specs: how values are split; what is not there is whole on every device.
      sizes: of the mesh axes.
    """

    def __init__(self, specs: Mapping[Any, Spec], sizes: Mapping[str, int]) -> None:
        self._specs, self._sizes = dict(specs), dict(sizes)
        self._vars: dict[Any, Any] = {}
        self._jaxprs: dict[int, Any] = {}

    def __call__(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(self._jaxpr(closed.jaxpr), closed.consts)

    def var(self, atom: Any) -> Any:
        """A value as one device holds it; a literal as it is."""
        if _jax.is_literal(atom):
            return atom
        if atom not in self._vars:
            shape = getattr(atom.aval, "shape", ())  # a token has none
            local = _jax.local_shape(shape, self._specs.get(atom), self._sizes)
            self._vars[atom] = atom if local == shape else _jax.with_shape(atom, local)
        return self._vars[atom]

    # ------------------------------------------------------------ implementation

    def _jaxpr(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._jaxprs:
            self._like_readers(jaxpr)
            eqns = [self._eqn(eqn) for eqn in jaxpr.eqns]
            parts = {
                name: list(map(self.var, getattr(jaxpr, name)))
                for name in ("constvars", "invars", "outvars")
            }
            new = jaxpr.replace(eqns=eqns, **parts)
            self._jaxprs[id(jaxpr)] = jaxpr, new  # the first keeps its id
        return self._jaxprs[id(jaxpr)][1]

    def _like_readers(self, jaxpr: Any) -> None:
        """Of what is made of constants alone nothing is said: it is made as it is read."""
        made_of_constants = {
            var
            for eqn in jaxpr.eqns
            if eqn.primitive.name in ("broadcast_in_dim", "iota", "full")
            and not any(map(_jax.is_var, eqn.invars))
            for var in eqn.outvars
        }
        for eqn in reversed(jaxpr.eqns):
            for out in eqn.outvars:
                spec = self._specs.get(out)
                for atom in filter(_jax.is_var, eqn.invars):
                    alike = getattr(atom.aval, "shape", 0) == getattr(out.aval, "shape", 1)
                    if spec and alike and atom in made_of_constants:
                        self._specs.setdefault(atom, spec)

    def _eqn(self, eqn: Any) -> Any:
        ins, outs = (
            [None if _jax.is_literal(atom) else self._specs.get(atom) for atom in atoms]
            for atoms in (eqn.invars, eqn.outvars)
        )
        noted = of_operation(eqn, ins, outs, self._sizes)
        params = dict(eqn.params)
        if _jax.is_looked_into(eqn):
            params.update(_jax.changed_inside(eqn, self._held))
        elif noted.messages or noted.matmul_flops is not None:
            params[PER_DEVICE] = noted
        ins, outs = (list(map(self.var, atoms)) for atoms in (eqn.invars, eqn.outvars))
        return eqn.replace(invars=ins, outvars=outs, params=params)

    def _held(self, jaxpr: Any) -> Any:
        return self(jaxpr) if hasattr(jaxpr, "consts") else self._jaxpr(jaxpr)
