"""What tells one jaxpr from another, in every process alike."""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmem._jax.jaxprs import all_subjaxprs, as_closed, is_literal, name_given_by
from jaxmem._jax.types import Eqn


def digest(closed: ClosedJaxpr, *more: str) -> str:
    """What tells a jaxpr from others, in every process alike: types, operations, parameters.

    Lines of code, and names that say where in the code an operation stands, are not in it.
    """
    lines = [*more, *_described(closed)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def operation_digest(eqn: Eqn) -> str:
    """What tells an operation from others, whatever it works on: kind, types, parameters.

    Where a slice begins is not in it: a layer may take what is of its number.
    """
    ins, outs = ([str(atom.aval) for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    name, params = eqn.primitive.name, eqn.params
    if name == "slice":
        params = {key: value for key, value in params.items() if not key.endswith("_indices")}
    return f"{name} {ins} {outs} {_canonical(params)}"


def exactly(eqn: Eqn) -> Any:
    """What is equal for operations of which one can be done in the place of the other.

    What `operation_digest` has and, on top, constants of inner functions by identity, numbers to
    the last bit, and what users' rules and callbacks are, which may hold values.
    """
    subs = all_subjaxprs(eqn)
    sources = [str(getattr(sub.jaxpr.debug_info, "func_src_info", "")) for sub in subs]
    jaxs_own = bool(subs) and all(_JAX in source for source in sources)
    held = "a rule of jax" if jaxs_own else _Same(eqn)
    literals = tuple(_bits(atom.val) for atom in eqn.invars if is_literal(atom))
    return literals, tuple((key, _exact(value, held)) for key, value in sorted(eqn.params.items()))


def _exact(value: Any, held: Any) -> Any:
    if isinstance(value, Jaxpr | ClosedJaxpr):
        closed = as_closed(value)
        outs = tuple(_bits(atom.val) for atom in closed.jaxpr.outvars if is_literal(atom))
        consts = tuple(map(_Same, closed.consts))
        inner = tuple(map(exactly, closed.jaxpr.eqns))
        return tuple(_described(closed)), consts, inner, outs
    if isinstance(value, tuple | list):
        return tuple(_exact(item, held) for item in value)
    if hasattr(value, "call_wrapped") or hasattr(value, "__code__"):
        return held
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value


def _bits(value: Any) -> Any:
    found = np.asarray(value)
    return type(value), str(found.dtype), found.shape, found.tobytes()


class _Same:
    """Equal only to one of the same object, which it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_JAX = f"{Path(jax.__file__).parent}{os.sep}"

# Names of this kind tell places in the code.
_PLACE_NAME = "jaxmem_operation_"


def place_name(place: int) -> str:
    """The name under which the results of an operation of unrolled code are kept."""
    return f"{_PLACE_NAME}{place}"


def place_named_by(eqn: Eqn) -> int | None:
    """The place that was made such a name, if this is the equation that gives it."""
    name = name_given_by(eqn) or ""
    return int(name.removeprefix(_PLACE_NAME)) if name.startswith(_PLACE_NAME) else None


def _described(closed: ClosedJaxpr) -> Iterator[str]:
    jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    numbers: dict[Any, int] = {var: number for number, var in enumerate(inputs)}
    yield " ".join(str(var.aval) for var in inputs)

    def written(atom: Any) -> str:
        return str(atom) if is_literal(atom) else str(numbers[atom])

    for eqn in jaxpr.eqns:
        ins = [written(atom) for atom in eqn.invars]
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        outs = [str(var.aval) for var in eqn.outvars]
        params = _canonical(eqn.params) if place_named_by(eqn) is None else ""
        yield f"{eqn.primitive.name} {ins} {outs} {params}"
    yield str([written(atom) for atom in jaxpr.outvars])


def _canonical(value: Any) -> str:
    """A parameter as text that no address and no order of a set gets into."""
    if isinstance(value, Jaxpr | ClosedJaxpr):
        return "; ".join(_described(as_closed(value)))
    if isinstance(value, dict):
        return str(sorted((str(key), _canonical(item)) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return str(sorted(map(_canonical, value)))
    if isinstance(value, tuple | list):
        return str([_canonical(item) for item in value])
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__name__)
    return re.sub(r"0x[0-9a-fA-F]+", "", str(value))
