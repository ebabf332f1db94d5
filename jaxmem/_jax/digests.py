"""What tells one jaxpr from another, in every process alike."""

import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import core
from jax.extend.core import ClosedJaxpr

from jaxmem._jax.jaxprs import all_subjaxprs, as_closed, is_literal, name_given_by
from jaxmem._jax.types import Eqn


def digest(closed: ClosedJaxpr, *more: str) -> str:
    """What tells a jaxpr from others, in every process alike: types, operations, parameters.

    Lines of code, and names that say where in the code an operation stands, are not in it.
    """
    lines = [*more, *_described(closed)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def operation_digest(eqn: Eqn) -> str:
    """What tells an operation from others, whatever it works on: kind, types, parameters."""
    ins, outs = ([str(atom.aval) for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    return f"{eqn.primitive.name} {ins} {outs} {_canonical(eqn.params)}"


def held_by(eqn: Eqn) -> tuple[int, ...]:
    """What an operation holds that no digest shows: constants, functions that may hold values.

    By identity: equal only where it is the same.  jax's own functions hold nothing.
    """
    subs = all_subjaxprs(eqn)
    jaxs_own = all(_JAX in str(sub.jaxpr.debug_info.func_src_info) for sub in subs)
    has_rules = any(hasattr(value, "call_wrapped") for value in eqn.params.values())
    found = [id(eqn)] if has_rules and not jaxs_own else []
    for value in eqn.params.values():
        code = getattr(value, "__code__", None)
        if isinstance(value, functools.partial) or (code and _JAX not in code.co_filename):
            found.append(id(value))
    for sub in subs:
        found += map(id, sub.consts)
        for inner in sub.jaxpr.eqns:
            found += held_by(inner)
    return tuple(found)


_JAX = str(Path(jax.__file__).parent)

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
    if isinstance(value, core.Jaxpr | ClosedJaxpr):
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
