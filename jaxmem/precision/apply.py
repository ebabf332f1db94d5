"""A function with its parameters cast late: traced, and evaluated on the parameters as they are."""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.errors import JaxmemWarning, NoEffectWarning, warn
from jaxmem.precision import late
from jaxmem.precision.late import Late
from jaxmem.precision.policy import Precision
from jaxmem.precision.reductions import Wide
from jaxmem.trace import find

# From a tree of arguments to what each leaf is: a parameter, another input, or neither; with its
# path.
Roles = Callable[[Any], list[tuple[str, str]]]
PARAM, INPUT, STATE = "param", "input", "state"

# ---------------------------------------------------------------- API


def applied(
    fn: Callable[..., Any],
    precision: Precision,
    label: str,
    roles: Roles,
    result: Callable[[Any], Sequence[bool]],
    keep: Callable[[str], bool] | None = None,
    is_module: bool = False,
) -> Callable[..., Any]:
    """`fn`, computing in another type than its parameters have.

    Args:
      label: what it is called in messages.
      roles: of the leaves of ``(args, kwargs)``.
      result: from what `fn` returns to flags of its leaves: which are results, cast to the output
        type.
      keep: from the path of an argument to whether it stays as it is.
      is_module: whether what counts as a parameter surely is one.
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        casts = _casts(leaves, roles((args, kwargs)), precision, keep, label)
        if is_module and not _inside.get():
            _check_params(leaves, roles((args, kwargs)), precision, label)
        is_array = [isinstance(leaf, jax.Array) or c for leaf, c in zip(leaves, casts, strict=True)]
        arrays = [jnp.asarray(leaf) for leaf, a in zip(leaves, is_array, strict=True) if a]
        kinds = [cast for cast, a in zip(casts, is_array, strict=True) if a]
        static: Any = None

        def flat(*given: Any) -> list[Any]:
            nonlocal static
            own = iter(given)
            full = [next(own) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, full)
            token = _inside.set(True)
            try:
                out = fn(*args, **kwargs)
            finally:
                _inside.reset(token)
            outs, out_tree = jax.tree.flatten(out)
            made = [isinstance(out, jax.Array | np.ndarray) for out in outs]
            statics = [None if a else out for out, a in zip(outs, made, strict=True)]
            flags = [flag for flag, a in zip(result(out), made, strict=True) if a]
            static = out_tree, statics, made, flags
            return [out for out, a in zip(outs, made, strict=True) if a]

        compute = precision.compute_dtype
        types = [
            _jax.with_dtype(array, compute) if kind else _jax.type_on_device(array)
            for array, kind in zip(arrays, kinds, strict=True)
        ]
        closed = jax.make_jaxpr(flat)(*types)
        out_tree, statics, made, flags = static
        _check(closed, precision, label)
        given = [
            Late((_jax.on_device(array),), compute)
            if kind == PARAM
            else lax.convert_element_type(array, compute)
            if kind == INPUT
            else _jax.on_device(array)
            for array, kind in zip(arrays, kinds, strict=True)
        ]
        found = late.evaluate(closed, given, precision.reductions)
        outs = iter(
            _out(value, aval, precision.output_dtype if flag else None)
            for value, aval, flag in zip(found, closed.out_avals, flags, strict=True)
        )
        return out_tree.unflatten(
            [next(outs) if a else other for a, other in zip(made, statics, strict=True)]
        )

    return run


# ---------------------------------------------------------------- implementation

# Whether what is traced is under mixed precision further out, which has cast its parameters.
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxmem_mixed", default=False)


def _casts(
    leaves: Sequence[Any],
    roles: Sequence[tuple[str, str]],
    precision: Precision,
    keep: Callable[[str], bool] | None,
    label: str,
) -> list[str]:
    """For each leaf how it is cast: as a parameter, as another input; "" if it is not."""
    compute = precision.compute_dtype
    found, kept, floating, as_it_is = [], [], [], []
    for leaf, (role, path) in zip(leaves, roles, strict=True):
        numbers = isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(
            leaf.dtype, jnp.inexact
        )
        if not numbers or role == STATE:
            found.append("")
            continue
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            as_it_is.append(f"{path} ({leaf.dtype})")
            found.append("")
            continue
        floating.append(path)
        if keep is not None and _flag(keep, path):
            kept.append(path)
            found.append("")
            continue
        found.append("" if leaf.dtype == compute else role)
    if as_it_is:
        warn(
            f"mixed precision: {', '.join(as_it_is)} of {label} stays as it is, for there are no "
            "complex numbers of fewer bits; what is computed with it is complex64 or wider",
            JaxmemWarning,
        )
    if not floating:
        warn(
            f"mixed precision does nothing in {label}: no floating-point array is among its "
            "arguments.  Pass parameters and inputs as arguments; what a function closes over "
            "stays in its own type",
            NoEffectWarning,
        )
    elif keep is not None and not kept:
        warn(
            f"mixed precision: keep= chooses no argument of {label}; their paths are "
            f"{', '.join(floating[:8])}{', …' if len(floating) > 8 else ''}",
            NoEffectWarning,
        )
    return found


def _check_params(
    leaves: Sequence[Any], roles: Sequence[tuple[str, str]], precision: Precision, label: str
) -> None:
    """Warns of the first parameter that is narrower than parameters are to be."""
    for leaf, (role, path) in zip(leaves, roles, strict=True):
        dtype = getattr(leaf, "dtype", None)
        if role != PARAM or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            continue
        if dtype.itemsize < precision.param_dtype.itemsize:
            warn(
                f"mixed precision: parameter {path} of {label} is {dtype}, and parameters are to "
                f"be {precision.param_dtype}: small updates of it are rounded away.  Make it "
                f"{precision.param_dtype} (param_dtype= of its module), or say "
                f"param_dtype='{dtype}'",
                JaxmemWarning,
            )
            return


def _flag(keep: Callable[[str], bool], path: str) -> bool:
    found = keep(path)
    if not isinstance(found, bool | np.bool_):
        raise TypeError(
            f"keep must return True or False for each path of an argument, got {found!r} for "
            f"{path!r}"
        )
    return bool(found)


def _check(closed: ClosedJaxpr, precision: Precision, label: str) -> None:
    """Warns of what mixed precision comes too late for."""
    if find.find(closed).takes_gradients:
        warn(
            f"mixed precision: {label} takes gradients itself, which so arrive in "
            f"{precision.compute_dtype}; decorate the model or the loss function in it instead, "
            "and gradients are as wide as the parameters",
            JaxmemWarning,
        )
    for const in closed.consts:
        if not (_jax.is_tracer(const) and jnp.issubdtype(const.dtype, jnp.floating)):
            continue
        if const.ndim and const.dtype.itemsize > precision.compute_dtype.itemsize:
            warn(
                f"mixed precision: {label} closes over an array {const.dtype}"
                f"{list(const.shape)}, which stays so, and with it what is computed from it; pass "
                "it as an argument",
                JaxmemWarning,
            )
            return


def _out(value: Any, aval: Any, dtype: Any) -> Any:
    """A result: cast to a type, if there is one; a parameter that is returned as it was given."""
    if isinstance(value, Late):
        value = value.param if not value.steps else value.cast()
    if isinstance(value, Wide):
        is_wider = dtype is not None and dtype.itemsize > value.dtype.itemsize
        value = value.value if is_wider else value.cast()
    value = _jax.as_array(value, aval)
    if dtype is None or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return lax.convert_element_type(value, dtype)
