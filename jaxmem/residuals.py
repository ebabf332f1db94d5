"""What the forward pass of a function keeps for its backward pass, value by value.

The residuals are read off the traced forward pass: the function that `jax.vjp`
returns is a pytree, and its leaves are what is kept.  Each is followed back
through jit, scan and custom rules to the operation that made it.

What jax keeps is not always what the compiler allocates: a value that is cheap
may be fused away, and one that jax lists once may be copied.  For the
compiler's word use `jaxmem.memory_report`.
"""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmem._jax import is_scan, scan_parts
from jaxmem.arguments import is_array, named_leaves
from jaxmem.execute.forms import CARRY_NAME
from jaxmem.text import columns, size

Kind = Literal["computed", "argument", "constant"]

_SHOWN = 50

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that is kept.

    Attributes:
      bytes: of all of it, every layer of a scan counted.
      shape: of one layer's value, where a scan stacks it; else of the value.
      dtype: the name of its dtype.
      name: its `checkpoint_name` ("jaxmem_carry" for those that a plan keeps), or
        the operation that made it, or "argument 'path'".
      source: "file.py:12 (function)" of the user's code, "" where unknown.
      module: the Flax module or `jax.named_scope` it was made in, "" where none.
      count: of how many scan iterations it is kept, 1 outside of scans.
      kind: "computed" by the forward pass; an "argument" or a "constant" is kept
        alive anyway and costs nothing more.
      place: "device" or "host".
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    name: str
    source: str
    module: str = ""
    count: int = 1
    kind: Kind = "computed"
    place: Literal["device", "host"] = "device"


@dataclasses.dataclass(frozen=True)
class Residuals:
    """All values that are kept, largest first; `print` it for a table.

    Attributes:
      rows: one for each value.
    """

    rows: tuple[Residual, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes that the forward pass computes and leaves on the device."""
        return self._sum(lambda row: row.kind == "computed" and row.place == "device")

    @property
    def host_bytes(self) -> int:
        """Bytes that the forward pass computes and sends to the host."""
        return self._sum(lambda row: row.kind == "computed" and row.place == "host")

    @property
    def argument_bytes(self) -> int:
        """Bytes of arguments and constants that the backward pass reads; alive anyway."""
        return self._sum(lambda row: row.kind != "computed")

    def _sum(self, counts: Callable[[Residual], bool]) -> int:
        return sum(row.bytes for row in self.rows if counts(row))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __str__(self) -> str:
        computed = sum(row.kind == "computed" for row in self.rows)
        total = size(self.total_bytes + self.host_bytes)
        head = f"{total} kept for the backward pass in {_values(computed)}"
        if self.host_bytes:
            head += f", {size(self.host_bytes)} of them on the host"
        if others := len(self.rows) - computed:
            head += f"; beside it {size(self.argument_bytes)} of arguments in {_values(others)}"
        cells = []
        for row in self.rows[:_SHOWN]:
            times = f"{row.count} x " if row.count > 1 else ""
            shape = f"{times}{row.dtype}[{','.join(map(str, row.shape))}]"
            place = " (on the host)" if row.place == "host" else ""
            cells.append([size(row.bytes), shape, row.name + place, row.module, row.source])
        if not cells:
            return head
        text = f"{head}\n{columns(cells, right=[0])}"
        if rest := self.rows[_SHOWN:]:
            text += f"\n  … and {len(rest)} more, {size(sum(row.bytes for row in rest))}"
        return text


# ---------------------------------------------------------------- API


def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """What the forward pass of `fn` keeps to differentiate by all its float arguments.

    Nothing is computed: the function is traced.

    Args:
      fn: a function of arrays; it may be jitted, decorated, or a bound method.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees.  Whatever else there
        is (`train=True`, a string, None) goes to `fn` as it is.
      **kwargs: likewise.

    Returns:
      One row for each value, in bytes; print it for a table.

    Raises:
      TypeError: `fn` is not callable.
      ValueError: no argument is a float array, so that there is no gradient.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.ShapeDtypeStruct((256, 4), "float32")
    >>> kept = jaxmem.saved_residuals(lambda x: jnp.sin(x).sum(), x)
    >>> kept.total_bytes, kept.rows[0].shape
    (4096, (256, 4))
    """
    if not callable(fn):
        raise TypeError(
            f"saved_residuals takes a function and its arguments, got {fn!r} of type "
            f"{type(fn).__name__} as the function; pass saved_residuals(fn, *args), not fn(*args)"
        )
    leaves, tree = jax.tree.flatten((args, kwargs))
    names = [name for name, _ in named_leaves(fn, args, kwargs)]
    traced = [k for k, leaf in enumerate(leaves) if is_array(leaf)]
    floats = [k for k in traced if _is_float(leaves[k])]
    if not floats:
        raise ValueError(
            "saved_residuals: no argument is an array of floats, so there is no gradient to keep "
            "anything for; Python numbers count as settings, so wrap one to differentiate by in "
            "jnp.asarray"
        )

    def kept(*values: Any) -> list[Any]:
        now = list(leaves)
        for k, value in zip(traced, values, strict=True):
            now[k] = value

        def forward(differentiated: list[Any]) -> list[Any]:
            for k, value in zip(floats, differentiated, strict=True):
                now[k] = value
            call_args, call_kwargs = jax.tree.unflatten(tree, now)
            # Whole numbers and settings that come out have no gradient.
            return [out for out in jax.tree.leaves(fn(*call_args, **call_kwargs)) if _is_float(out)]

        return jax.tree.leaves(jax.vjp(forward, [now[k] for k in floats])[1])

    jaxpr = jax.make_jaxpr(kept)(*(leaves[k] for k in traced)).jaxpr
    top = _Scope(jaxpr, arguments=[names[k] for k in traced])
    rows: dict[Any, Residual] = {}
    for var in jaxpr.outvars:
        if not isinstance(var, core.Literal):
            key, row = _residual(top, var)
            rows.setdefault(key, row)
    # Stable for equal sizes: as the program runs.
    return Residuals(tuple(sorted(rows.values(), key=lambda row: -row.bytes)))


# ---------------------------------------------------------------- implementation


class _Scope:
    """One jaxpr and, if it is the body of an equation, where that equation stands."""

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        outer: "tuple[_Scope, core.JaxprEqn] | None" = None,
        arguments: list[str] | None = None,
    ):
        self.jaxpr = jaxpr
        self.outer = outer
        self.arguments = arguments
        self.makers = {var: (eqn, k) for eqn in jaxpr.eqns for k, var in enumerate(eqn.outvars)}
        self.inputs = {var: k for k, var in enumerate(jaxpr.invars)}
        # A value that is named is the same buffer before and after it gets its name.
        self.names = {
            eqn.invars[0]: name
            for eqn in jaxpr.eqns
            if (name := _given_name(eqn)) and not isinstance(eqn.invars[0], core.Literal)
        }
        self._inside: dict[int, _Scope] = {}

    def inside(self, eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> "_Scope":
        """The body of `eqn`; the same object each time, so that values can be told apart."""
        if id(jaxpr) + id(eqn) not in self._inside:
            self._inside[id(jaxpr) + id(eqn)] = _Scope(jaxpr, (self, eqn))
        return self._inside[id(jaxpr) + id(eqn)]


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where a value comes from: output `index` of `eqn`, or input `index` of `scope`'s jaxpr.

    `names` are those it was given on its way, the last first; `calls` are the
    equations (jit and the like) inside which it was made.
    """

    scope: _Scope
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
        """The user's line; inside of jitted library code, the line of the call."""
        eqns = [*self.calls, self.eqn] if self.eqn is not None else self.calls
        return next((line for eqn in reversed(eqns) if (line := _user_line(eqn))), "")

    @property
    def module(self) -> str:
        eqns = [*self.calls, self.eqn] if self.eqn is not None else self.calls
        return "/".join(part for eqn in eqns if (part := _module(eqn)))


@dataclasses.dataclass(frozen=True)
class _Label:
    name: str
    source: str = ""
    module: str = ""
    count: int = 1
    kind: Kind = "computed"


def _residual(top: _Scope, var: core.Var) -> tuple[Any, Residual]:
    origin = _origin(top, var)
    label = _describe(origin)
    aval: Any = var.aval
    shape = tuple(aval.shape)
    row = Residual(
        bytes=math.prod(shape) * aval.dtype.itemsize,
        shape=shape[_stacked(origin) :],
        dtype=str(aval.dtype),
        name=label.name,
        source=label.source,
        module=label.module,
        count=label.count,
        kind=label.kind,
        place="host" if _on_host(aval) else "device",
    )
    return origin.key, row


def _origin(scope: _Scope, atom: Any) -> _Origin:
    """Follow a value back, through everything that hands it on unchanged, to what made it."""
    names: list[str] = []
    calls: list[core.JaxprEqn] = []

    def found(eqn: core.JaxprEqn | None, index: int, literal: bool = False) -> _Origin:
        return _Origin(scope, eqn, index, tuple(names), tuple(calls), literal)

    while True:
        if isinstance(atom, core.Literal):
            return found(None, -1, literal=True)
        if atom in scope.names:
            names.append(scope.names[atom])
        if atom in scope.makers:
            eqn, k = scope.makers[atom]
            if (given := _given_name(eqn)) is not None:
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
            calls = calls[:-1]  # the call only handed it through
            scope, atom = outer, eqn.invars[k]
        else:
            return found(None, scope.inputs.get(atom, -1))


def _describe(origin: _Origin) -> _Label:
    """What a reader should be told of a value."""
    eqn = origin.eqn
    given = origin.names[0] if origin.names else None
    if origin.literal:
        return _Label(given or "literal", kind="constant")
    if eqn is None:
        return _describe_input(origin, given)
    made = _Label(given or eqn.primitive.name, origin.source, origin.module)
    if is_scan(eqn):
        inner = _describe(_in_layer(origin, eqn))
        return _Label(
            name=given or inner.name,
            source=inner.source or made.source,
            module="/".join(part for part in (made.module, inner.module) if part),
            count=inner.count * _rows(origin, eqn),
        )
    if eqn.primitive.name in _MOVES:
        moved = _origin(origin.scope, eqn.invars[0])
        if moved.names:  # a named value keeps its name wherever it goes
            return dataclasses.replace(
                made, name=given or moved.names[0], source=moved.source or made.source
            )
        if moved.eqn is None and not moved.literal:
            what = _describe(moved).name
            return dataclasses.replace(made, name=given or f"{eqn.primitive.name} of {what}")
    if all(isinstance(atom, core.Literal) for atom in eqn.invars) and not eqn.effects:
        # Filled in by the compiler wherever it is read.
        return dataclasses.replace(made, kind="constant")
    return made


def _describe_input(origin: _Origin, given: str | None) -> _Label:
    scope, k = origin.scope, origin.index
    if scope.outer is None:
        if k < 0:
            return _Label(given or "constant", kind="constant")
        return _Label(f"argument '{(scope.arguments or [])[k]}'", kind="argument")
    outer, eqn = scope.outer
    if not is_scan(eqn) or k < 0:
        return _Label(given or f"input of {eqn.primitive.name}", _user_line(eqn))
    parts = scan_parts(eqn)
    if k < parts.num_consts + parts.num_carry:
        made = _origin(scope, scope.jaxpr.outvars[k - parts.num_consts])
        return _Label(given or "carry", made.source or _user_line(eqn), made.module)
    whole = _describe(_origin(outer, eqn.invars[k]))
    return _Label(given or f"slice of {whole.name}", whole.source or _user_line(eqn))


def _stacked(origin: _Origin) -> int:
    """How many leading axes of a value are scan iterations."""
    eqn = origin.eqn
    if eqn is None or not is_scan(eqn):
        return 0
    axes = 1 if origin.index >= scan_parts(eqn).num_carry or _is_store(origin) else 0
    return _stacked(_in_layer(origin, eqn)) + axes


def _rows(origin: _Origin, eqn: core.JaxprEqn) -> int:
    """How many iterations' values a result of a scan holds."""
    parts = scan_parts(eqn)
    if origin.index >= parts.num_carry:
        return parts.length
    if _is_store(origin):
        return eqn.outvars[origin.index].aval.shape[0]  # pyright: ignore[reportAttributeAccessIssue]
    return 1


def _is_store(origin: _Origin) -> bool:
    """Whether it is a plan's store of carries, which a loop fills slot by slot."""
    return CARRY_NAME in origin.names


def _in_layer(origin: _Origin, eqn: core.JaxprEqn) -> _Origin:
    """Where a result of a scan comes from inside its body."""
    body = _body(eqn, "jaxpr")
    return _origin(origin.scope.inside(eqn, body), body.outvars[origin.index])


# Hand a value on, in another place or form: the name of what they moved is the better name.
_MOVES = frozenset(
    {"device_put", "copy", "copy_p", "convert_element_type", "sharding_constraint", "transpose"}
    | {"reshape", "squeeze", "expand_dims", "broadcast_in_dim"}
)
_CONTROL_FLOW = frozenset({"scan", "while", "cond", "pallas_call"})


def _given_name(eqn: core.JaxprEqn) -> str | None:
    """What `checkpoint_name` named the output of this equation, if it did."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    # Newer versions of jax say it with an object instead.
    inner = eqn.params.get("_prim")
    if type(inner).__name__ == "CheckpointName":
        return getattr(inner, "name", None)
    return None


def _same_value(eqn: core.JaxprEqn, k: int) -> Any:
    """The input that output `k` is, bit for bit and with no new buffer; else None."""
    if _given_name(eqn) is not None or eqn.primitive.name == "pvary":
        return eqn.invars[k]
    if eqn.primitive.name == "optimization_barrier":
        return eqn.invars[k]
    if eqn.primitive.name in ("reduce_precision", "convert_element_type"):
        # Only where it changes nothing: jax marks what it saves with the first,
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
    inner = eqn.params[key]
    return inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner


def _call_body(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """The body of an equation that calls a function once, outputs for outputs: jit, remat, …"""
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


def _on_host(aval: Any) -> bool:
    space = getattr(aval, "memory_space", None)
    return "host" in str(getattr(space, "name", space)).lower()


def _user_line(eqn: core.JaxprEqn) -> str:
    """The innermost line of code that belongs to no library which writes layers for others."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ""
    libraries = _libraries()
    for frame in traceback.frames:
        if not frame.file_name.startswith(libraries):
            function = frame.function_name.rsplit("<locals>.", 1)[-1]
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({function})"
    return ""


def _module(eqn: core.JaxprEqn) -> str:
    """The name stack of an equation without what transformations wrote around its parts."""
    text = str(eqn.source_info.name_stack)
    while (plain := re.sub(r"\w+\(([^()]*)\)", r"\1", text)) != text:
        text = plain
    return "/".join(part for part in text.split("/") if part)


def _is_float(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _libraries() -> tuple[str, ...]:
    modules = [sys.modules.get(name) for name in ("jax", "jaxlib", "flax", "optax", "equinox")]
    files = [module.__file__ for module in modules if module is not None and module.__file__]
    return ("<", *(os.path.dirname(file) + os.sep for file in [*files, __file__]))


def _values(count: int) -> str:
    return f"{count} value" + ("" if count == 1 else "s")
