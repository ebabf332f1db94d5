"""The origin of a value in a traced program: the operation that computed it.

A value is passed on unchanged by names, barriers and calls (jit, remat, custom
rules); a scan returns the values of its layers, stacked.  A `Label` describes a value
to a reader: its name or the operation that computed it, the line of the user's code,
the module, and over how many iterations it is stacked.
"""

import dataclasses
import re
from typing import Any, Literal

import jax.numpy as jnp
from jax.extend import core

from jaxmem._jax import is_scan, name_given_by, scan_parts
from jaxmem.trace.names import CARRY_NAME
from jaxmem.trace.source import source_line

Kind = Literal["computed", "argument", "constant"]

# ---------------------------------------------------------------- types


class Scope:
    """One jaxpr and, if it is the body of an equation, that equation and its scope."""

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        outer: "tuple[Scope, core.JaxprEqn] | None" = None,
        arguments: list[str] | None = None,
    ):
        self.jaxpr = jaxpr
        self.outer = outer
        self.arguments = arguments
        self.makers = {var: (eqn, k) for eqn in jaxpr.eqns for k, var in enumerate(eqn.outvars)}
        self.inputs = {var: k for k, var in enumerate(jaxpr.invars)}
        # A named value is the same buffer before and after it is named.
        self.names = {
            eqn.invars[0]: name
            for eqn in jaxpr.eqns
            if (name := name_given_by(eqn)) and not isinstance(eqn.invars[0], core.Literal)
        }
        self._inside: dict[tuple[int, int], Scope] = {}

    def inside(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> "Scope":
        """The scope of the body of `eqn`; the same object each time, so that values compare."""
        key = id(eqn), id(jaxpr)
        if key not in self._inside:
            self._inside[key] = Scope(jaxpr, (self, eqn))
        return self._inside[key]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value comes from: output `index` of `eqn`, or input `index` of `scope`'s jaxpr.

    `names` are those given to it on the way, the last first; `calls` are the
    equations (jit and the like) inside which it was computed.
    """

    scope: Scope
    eqn: core.JaxprEqn | None
    index: int
    names: tuple[str, ...] = ()
    calls: tuple[core.JaxprEqn, ...] = ()
    literal: bool = False

    @property
    def key(self) -> Any:
        return id(self.scope), id(self.eqn) if self.eqn else None, self.index

    @property
    def source(self) -> str:
        """The user's line; for jitted library code the line of the call."""
        eqns = [*self.calls, self.eqn] if self.eqn is not None else self.calls
        return next((line for eqn in reversed(eqns) if (line := source_line(eqn))), "")

    @property
    def module(self) -> str:
        eqns = [*self.calls, self.eqn] if self.eqn is not None else self.calls
        return "/".join(part for eqn in eqns if (part := module_of(eqn)))


@dataclasses.dataclass(frozen=True)
class Label:
    """The description of a value; the fields are those of `jaxmem.Residual`."""

    name: str
    source: str = ""
    module: str = ""
    count: int = 1
    kind: Kind = "computed"


# ---------------------------------------------------------------- API


def origin_of(scope: Scope, atom: Any) -> Origin:
    """Follow a value back, through everything that passes it on unchanged, to its origin."""
    names: list[str] = []
    calls: list[core.JaxprEqn] = []

    def found(eqn: core.JaxprEqn | None, index: int, literal: bool = False) -> Origin:
        return Origin(scope, eqn, index, tuple(names), tuple(calls), literal)

    while True:
        if isinstance(atom, core.Literal):
            return found(None, -1, literal=True)
        if atom in scope.names:
            names.append(scope.names[atom])
        if atom in scope.makers:
            eqn, k = scope.makers[atom]
            if (given := name_given_by(eqn)) is not None:
                names.append(given)
            if (before := _same_value(eqn, k)) is not None:
                atom = before
            elif (body := _call_body(eqn)) is not None:
                calls.append(eqn)
                scope, atom = scope.inside(eqn, body), body.outvars[k]
            else:
                return found(eqn, k)
        elif atom in scope.inputs and scope.outer is not None:
            outer, eqn = scope.outer
            k = scope.inputs[atom]
            if _call_body(eqn) is None and not (is_scan(eqn) and k < scan_parts(eqn).num_consts):
                return found(None, k)
            calls = calls[:-1]  # the call only passed it through
            scope, atom = outer, eqn.invars[k]
        else:
            return found(None, scope.inputs.get(atom, -1))


def describe(origin: Origin) -> Label:
    """The description of a value for a reader."""
    eqn = origin.eqn
    given = origin.names[0] if origin.names else None
    if origin.literal:
        return Label(given or "literal", kind="constant")
    if eqn is None:
        return _describe_input(origin, given)
    made = Label(given or eqn.primitive.name, origin.source, origin.module)
    if is_scan(eqn):
        inner = describe(_in_layer(origin, eqn))
        return Label(
            name=given or inner.name,
            source=inner.source or made.source,
            module="/".join(part for part in (made.module, inner.module) if part),
            count=inner.count * _rows(origin, eqn),
        )
    if eqn.primitive.name == "cond":
        branches = [origin.scope.inside(eqn, _jaxpr(b)) for b in eqn.params["branches"]]
        inner = [origin_of(branch, branch.jaxpr.outvars[origin.index]) for branch in branches]
        # A branch without this value returns zeros; the other branches identify it.
        label = next((describe(o) for o in inner if not _is_filled_in(o)), made)
        return dataclasses.replace(label, name=given or label.name)
    if eqn.primitive.name in _MOVES:
        moved = origin_of(origin.scope, eqn.invars[0])
        if moved.names:  # a named value keeps its name wherever it goes
            return dataclasses.replace(
                made, name=given or moved.names[0], source=moved.source or made.source
            )
        if moved.eqn is None and not moved.literal:
            what = describe(moved).name
            return dataclasses.replace(made, name=given or f"{eqn.primitive.name} of {what}")
    return dataclasses.replace(made, kind="constant") if _is_filled_in(origin) else made


def stacked_axes(origin: Origin) -> int:
    """How many leading axes of a value are scan iterations."""
    eqn = origin.eqn
    if eqn is None or not is_scan(eqn):
        return 0
    axes = 1 if origin.index >= scan_parts(eqn).num_carry or _is_store(origin) else 0
    return stacked_axes(_in_layer(origin, eqn)) + axes


# ---------------------------------------------------------------- implementation


def _describe_input(origin: Origin, given: str | None) -> Label:
    scope, k = origin.scope, origin.index
    if scope.outer is None:
        if k < 0:
            return Label(given or "constant", kind="constant")
        return Label(f"argument '{(scope.arguments or [])[k]}'", kind="argument")
    outer, eqn = scope.outer
    if eqn.primitive.name == "cond" and k >= 0:  # the first operand chooses the branch
        whole = describe(origin_of(outer, eqn.invars[k + 1]))
        return Label(given or f"copy of {whole.name}", whole.source or source_line(eqn))
    if not is_scan(eqn) or k < 0:
        return Label(given or f"input of {eqn.primitive.name}", source_line(eqn))
    parts = scan_parts(eqn)
    if k < parts.num_consts + parts.num_carry:
        made = origin_of(scope, scope.jaxpr.outvars[k - parts.num_consts])
        return Label(given or "carry", made.source or source_line(eqn), made.module)
    whole = describe(origin_of(outer, eqn.invars[k]))
    return Label(given or f"slice of {whole.name}", whole.source or source_line(eqn))


def _is_filled_in(origin: Origin) -> bool:
    """Whether it depends on literals alone, so that the compiler computes it where it is read."""
    eqn = origin.eqn
    if eqn is None or eqn.effects or not (eqn.primitive.name in _MOVES or not eqn.invars):
        return origin.literal
    return all(_is_filled_in(origin_of(origin.scope, atom)) for atom in eqn.invars)


def _rows(origin: Origin, eqn: core.JaxprEqn) -> int:
    """Over how many iterations a result of a scan is stacked."""
    parts = scan_parts(eqn)
    if origin.index >= parts.num_carry:
        return parts.length
    if _is_store(origin):
        return eqn.outvars[origin.index].aval.shape[0]  # pyright: ignore[reportAttributeAccessIssue]
    return 1


def _is_store(origin: Origin) -> bool:
    """Whether it is a plan's buffer of carries, which a loop fills slot by slot."""
    return CARRY_NAME in origin.names


def _in_layer(origin: Origin, eqn: core.JaxprEqn) -> Origin:
    """Where a result of a scan comes from inside its body."""
    body = _body(eqn, "jaxpr")
    return origin_of(origin.scope.inside(eqn, body), body.outvars[origin.index])


# These only move or reshape a value: the name of their operand is more informative.
_MOVES = frozenset(
    {"device_put", "copy", "copy_p", "convert_element_type", "sharding_constraint", "transpose"}
    | {"reshape", "squeeze", "expand_dims", "broadcast_in_dim"}
)
_CONTROL_FLOW = frozenset({"scan", "while", "cond", "pallas_call"})


def _same_value(eqn: core.JaxprEqn, k: int) -> Any:
    """The input that output `k` equals, bit for bit and without a new buffer; else None."""
    if name_given_by(eqn) is not None or eqn.primitive.name == "pvary":
        return eqn.invars[k]
    if eqn.primitive.name == "optimization_barrier":
        return eqn.invars[k]
    if eqn.primitive.name in ("reduce_precision", "convert_element_type"):
        # Only where it has no effect: jax marks what it saves with the first,
        # and drops weak types with the second.
        before, after = eqn.invars[0].aval, eqn.outvars[0].aval
        exact = eqn.primitive.name == "convert_element_type" or _full_precision(eqn)
        if before.dtype == after.dtype and exact:  # pyright: ignore[reportAttributeAccessIssue]
            return eqn.invars[0]
    return None


def _full_precision(eqn: core.JaxprEqn) -> bool:
    info = jnp.finfo(eqn.outvars[0].aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    wanted = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
    return wanted == (info.nexp, info.nmant)


def _body(eqn: core.JaxprEqn, key: str) -> core.Jaxpr:
    return _jaxpr(eqn.params[key])


def _jaxpr(inner: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    return inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner


def _call_body(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """The body of an equation that calls a function once, with equal outputs: jit, remat, …"""
    if eqn.primitive.name in _CONTROL_FLOW:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if isinstance(eqn.params.get(key), core.Jaxpr | core.ClosedJaxpr):
            body = _body(eqn, key)
            per_shard = eqn.primitive.name == "shard_map"
            if _alike(body.invars, eqn.invars, per_shard) and _alike(
                body.outvars, eqn.outvars, per_shard
            ):
                return body
    return None


def _alike(inner: Any, outer: Any, per_shard: bool) -> bool:
    if len(inner) != len(outer):
        return False
    # The body of a reduction has scalars where the equation has arrays.
    return per_shard or all(
        getattr(a.aval, "shape", None) == getattr(b.aval, "shape", None)
        for a, b in zip(inner, outer, strict=True)
    )


def module_of(eqn: core.JaxprEqn) -> str:
    """The name stack of an equation without the wrappers added by transformations."""
    text = str(eqn.source_info.name_stack)
    while (plain := re.sub(r"\w+\(([^()]*)\)", r"\1", text)) != text:
        text = plain
    return "/".join(part for part in text.split("/") if part)
