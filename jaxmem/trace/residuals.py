"""What the forward pass of a function keeps for its backward pass, value by value.

The residuals are read from the traced forward pass: the function that `jax.vjp`
returns is a pytree, and its leaves are the residuals.  Each is followed back
through jit, scan and custom rules to the operation that computed it.

What jax keeps is not always what the compiler allocates: a cheap value may be
fused away, and one that jax lists once may be copied.  For what is allocated use
`jaxmem.memory_report`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxmem import _jax
from jaxmem._util.text import columns, size
from jaxmem.errors import JaxmemWarning, warn
from jaxmem.trace.arguments import is_array, named_leaves
from jaxmem.trace.origin import Kind, Scope, describe, origin_of, stacked_axes

_SHOWN = 50

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that is kept for the backward pass.

    Attributes:
      bytes: in total, over all layers of a scan; where arguments are spread over a mesh, those of
        one of its devices.
      shape: of one layer's value, where a scan stacks it; else of the value.  Over a mesh, of what
        one device has of it.
      dtype: the name of its dtype.
      name: its `checkpoint_name` ("jaxmem_carry" for carries that a plan keeps), or
        the operation that computed it, or "argument 'path'".
      source: "file.py:12 (function)" of the user's code, "" where unknown.
      module: the Flax module or `jax.named_scope` it was computed in, "" where none.
      count: over how many scan iterations it is stacked, 1 outside of scans.
      kind: "computed" by the forward pass; an "argument" or a "constant" is live
      anyway and needs no extra memory.
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
    """All residuals of a function, largest first; `print` it for a table.

    Attributes:
      rows: one for each value.
    """

    rows: tuple[Residual, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes that the forward pass computes and keeps on the device."""
        return self._sum(lambda row: row.kind == "computed" and row.place == "device")

    @property
    def host_bytes(self) -> int:
        """Bytes that the forward pass computes and keeps in host memory."""
        return self._sum(lambda row: row.kind == "computed" and row.place == "host")

    @property
    def argument_bytes(self) -> int:
        """Bytes of arguments and constants that the backward pass reads; they are live anyway."""
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
            head += f"; also {size(self.argument_bytes)} of arguments in {_values(others)}"
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


def saved_residuals(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Residuals:
    """What the forward pass of `fn` keeps to differentiate with respect to its float arguments.

    The function is traced, not executed.

    Args:
      fn: a function of arrays; it may be jitted, decorated, or a bound method.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees.  Anything else
        (`train=True`, a string, None) is passed to `fn` as it is.
      argnums: positions of the arguments to differentiate with respect to, as for `jax.grad`; by
        default all, also those in `kwargs`.  With weights that are not trained left out, what only
        their gradients need is not kept.
      **kwargs: likewise.

    Returns:
      One row per residual; print it for a table.

    Raises:
      TypeError: `fn` is not callable, or `argnums` are no positions of arguments.
      ValueError: none of these arguments is a float array, so that there is no gradient.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.ShapeDtypeStruct((256, 4), "float32")
    >>> kept = jaxmem.saved_residuals(lambda x: jnp.sin(x).sum(), x)
    >>> kept.total_bytes, kept.rows[0].shape
    (4096, (256, 4))
    >>> product = lambda w, x: (x @ w).sum()
    >>> w = jax.ShapeDtypeStruct((4, 4), "float32")
    >>> [len(jaxmem.saved_residuals(product, w, x, argnums=k)) for k in (0, (0, 1))]
    [1, 2]
    """
    if not callable(fn):
        raise TypeError(
            f"saved_residuals takes a function and its arguments, got {fn!r} of type "
            f"{type(fn).__name__} as the function; pass saved_residuals(fn, *args), not fn(*args)"
        )
    leaves, tree = jax.tree.flatten((args, kwargs))
    names = [name for name, _ in named_leaves(fn, args, kwargs)]
    traced = [k for k, leaf in enumerate(leaves) if is_array(leaf)]
    wanted = _positions(argnums, len(args))
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    owners = [k for k, count in enumerate(counts) for _ in range(count)]
    owners += [-1] * (len(leaves) - len(owners))  # by name
    own = [wanted is None or owner in wanted for owner in owners]
    floats = [k for k in traced if _is_float(leaves[k]) and own[k]]
    if not floats:
        which = "no argument" if wanted is None else f"none of the arguments {wanted}"
        raise ValueError(
            f"saved_residuals: {which} is an array of floats, so there is no gradient and no "
            "residual; Python numbers count as settings, so wrap one to differentiate by in "
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
            # Results that are integers or settings have no gradient.
            return [out for out in jax.tree.leaves(fn(*call_args, **call_kwargs)) if _is_float(out)]

        return jax.tree.leaves(jax.vjp(forward, [now[k] for k in floats])[1])

    closed = jax.make_jaxpr(kept)(*(leaves[k] for k in traced))
    jaxpr, shapes = closed.jaxpr, _Shapes(closed, [_sharding(leaves[k]) for k in traced])
    top = Scope(jaxpr, arguments=[names[k] for k in traced])
    rows: dict[Any, Residual] = {}
    for var in jaxpr.outvars:
        if not isinstance(var, core.Literal):
            key, row = _residual(top, var, shapes(var))
            rows.setdefault(key, row)
    # Stable for equal sizes: in program order.
    return Residuals(tuple(sorted(rows.values(), key=lambda row: -row.bytes)))


# ---------------------------------------------------------------- implementation


def _positions(argnums: Any, count: int) -> tuple[int, ...] | None:
    if argnums is None:
        return None
    several = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    for number in several:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(
                "saved_residuals takes argnums as a position or several, got "
                f"{number!r} of type {type(number).__name__}"
            )
        if not -count <= number < count:
            raise TypeError(
                f"argnums names argument {number}, and saved_residuals got {count} positional "
                "arguments for the function; pass it by position"
            )
    return tuple(number % count for number in several)


class _Shapes:
    """The shapes of values on one device, as the partitioner splits them over a mesh."""

    def __init__(self, closed: Any, shardings: Sequence[Any]) -> None:
        mesh = _jax.mesh_of(shardings)
        self._specs: Any = {}
        self._sizes: Any = {}
        if mesh is None:
            return
        try:
            self._specs, self._sizes = _jax.splits(closed, shardings), mesh.shape
        except (NotImplementedError, RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0]
            warn(
                "saved_residuals: how values are split over the mesh is not known, since jax "
                f"cannot lower the function here ({why}); shapes and bytes are of whole values",
                JaxmemWarning,
            )

    def __call__(self, var: Any) -> tuple[int, ...]:
        return _jax.local_shape(var.aval.shape, self._specs.get(var), self._sizes)


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None)


def _residual(top: Scope, var: core.Var, shape: tuple[int, ...]) -> tuple[Any, Residual]:
    origin = origin_of(top, var)
    label = describe(origin)
    aval: Any = var.aval
    row = Residual(
        bytes=math.prod(shape) * aval.dtype.itemsize,
        shape=shape[stacked_axes(origin) :],
        dtype=str(aval.dtype),
        name=label.name,
        source=label.source,
        module=label.module,
        count=label.count,
        kind=label.kind,
        place="host" if _on_host(aval) else "device",
    )
    return origin.key, row


def _on_host(aval: Any) -> bool:
    space = getattr(aval, "memory_space", None)
    return "host" in str(getattr(space, "name", space)).lower()


def _is_float(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _values(count: int) -> str:
    return f"{count} value" + ("" if count == 1 else "s")
