"""Some equations of a jaxpr as a function, and where they stand."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jaxmem import _jax

# How `jax.shard_map` says that a value, from here on, may differ between devices.
SPREADING = frozenset({"pvary", "pcast"})

# ---------------------------------------------------------------- types


class Piece:
    """What computes some values from others, as it stands in a jaxpr; compared by identity."""

    def __init__(self, jaxpr: Any, only: Collection[int], ins: Sequence[Any], outs: Sequence[Any]):
        eqns = [eqn for at, eqn in enumerate(jaxpr.eqns) if at in only]
        self._closed = _jax.piece_of(jaxpr, eqns, ins, ())
        self._outs = list(outs)

    def __call__(self, *args: Any) -> list[Any]:
        return _jax.evaluate(self._closed, args, outs=self._outs)


class Makers:
    """The equations of a jaxpr by what they make."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self.place = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}

    def of(self, atom: Any) -> Any:
        """The equation that makes a value; None for what is given, and for literals."""
        at = self.place.get(atom) if _jax.is_var(atom) else None
        return None if at is None else self.jaxpr.eqns[at]

    def literal(self, atom: Any) -> Any:
        """The literal that a value is, if it is one: as it stands, or spread over devices.

        From jax 0.12 on a number is spread as Python has it, and converted then.
        """
        eqn = self.of(atom)
        if eqn is None or atom.aval.shape:
            return atom
        name = eqn.primitive.name
        if name not in SPREADING and name != "convert_element_type":
            return atom
        known = self.literal(eqn.invars[0])
        if not _jax.is_literal(known):
            return atom
        return Literal(np.asarray(known.val).astype(atom.aval.dtype), atom.aval)

    def piece(self, ins: Sequence[Any], outs: Sequence[Any]) -> Piece | None:
        """What makes `outs` of `ins`; None if that needs anything else."""
        found: set[int] = set()
        wanted = [var for var in outs if var not in ins]
        while wanted:
            atom = wanted.pop()
            at = self.place.get(atom)
            if at is None:
                return None
            if at not in found:
                found.add(at)
                wanted += [a for a in self.jaxpr.eqns[at].invars if _jax.is_var(a) and a not in ins]
        return Piece(self.jaxpr, found, ins, outs)

    def depend_on(self, atom: Any) -> set[Any]:
        """All that is computed from a value, and that itself."""
        found = {atom}
        for eqn in self.jaxpr.eqns:
            if any(_jax.is_var(a) and a in found for a in eqn.invars):
                found.update(eqn.outvars)
        return found

    def used_by(self) -> Mapping[Any, list[Any]]:
        """Of each value, the equations that read it; None among them if it is returned."""
        found: dict[Any, list[Any]] = {}
        for eqn in self.jaxpr.eqns:
            for atom in eqn.invars:
                if _jax.is_var(atom):
                    found.setdefault(atom, []).append(eqn)
        for atom in self.jaxpr.outvars:
            if _jax.is_var(atom):
                found.setdefault(atom, []).append(None)
        return found
