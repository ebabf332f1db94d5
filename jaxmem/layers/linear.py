"""Tangents that are computed from what is kept, in the form in which it is kept.

Written in operations of jax, the factor of a derivative is unpacked in the forward pass, and kept
unpacked: partial evaluation computes whatever does not depend on the tangent.  An operation that
takes the tangent and the packed factor at once cannot be taken apart.  Only the backward pass looks
into it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmem import _jax

# ---------------------------------------------------------------- types


# A function of a tangent, in which it is linear, and of what was kept.  It is compared by value, so
# that programs that use it are found again.
Rule = Callable[..., Any]

# ---------------------------------------------------------------- API


def linear(rule: Rule, tangent: Any, *kept: Any) -> jax.Array:
    """``rule(tangent, *kept)``, of which a backward pass keeps just `kept`.

    Arrays of floats in `kept` may depend on what is differentiated, for derivatives of higher
    order.
    """
    return linear_p.bind(tangent, *kept, rule=rule)


# ---------------------------------------------------------------- implementation

linear_p = Primitive("jaxmem_linear")


def _run(tangent: Any, *kept: Any, rule: Rule) -> Any:
    return rule(tangent, *kept)


@linear_p.def_abstract_eval
def _(*avals: Any, rule: Rule) -> Any:
    return _jax.trace(rule, avals).out_avals[0]


linear_p.def_impl(_run)
mlir.register_lowering(linear_p, mlir.lower_fun(_run, multiple_results=False))


def _transposed(ct: Any, tangent: Any, *kept: Any, rule: Rule) -> list[Any]:
    nothing = [None] * len(kept)
    if type(ct) is ad.Zero:
        return [ad.Zero(tangent.aval), *nothing]
    back = jax.linear_transpose(lambda tangent: rule(tangent, *kept), tangent.aval)
    return [*back(ct), *nothing]


ad.primitive_transposes[linear_p] = _transposed


def _pushed(primals: Sequence[Any], tangents: Sequence[Any], *, rule: Rule) -> tuple[Any, Any]:
    out = linear_p.bind(*primals, rule=rule)
    (tangent, *kept), (pushed, *others) = primals, tangents
    parts = []
    if type(pushed) is not ad.Zero:
        parts.append(linear_p.bind(pushed, *kept, rule=rule))
    moved = [k for k, other in enumerate(others) if type(other) is not ad.Zero]
    if moved:

        def of_kept(*values: Any) -> Any:
            now = list(kept)
            for k, value in zip(moved, values, strict=True):
                now[k] = value
            return rule(tangent, *now)

        values, moves = ([some[k] for k in moved] for some in (kept, others))
        parts.append(jax.jvp(of_kept, values, moves)[1])
    if not parts:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, parts[0] if len(parts) == 1 else parts[0] + parts[1]


ad.primitive_jvps[linear_p] = _pushed


@dataclass(frozen=True)
class _Mapped:
    """A rule under `jax.vmap`; along axis 0 of what is True."""

    rule: Rule
    mapped: tuple[bool, ...]

    def __call__(self, *args: Any) -> Any:
        axes = tuple(0 if one else None for one in self.mapped)
        mapped: Callable[..., Any] = jax.vmap(self.rule, in_axes=axes)
        return mapped(*args)


def _batched(args: Sequence[Any], dims: Sequence[int | None], *, rule: Rule) -> tuple[Any, int]:
    moved = [
        arg if dim is None else jnp.moveaxis(arg, dim, 0)
        for arg, dim in zip(args, dims, strict=True)
    ]
    mapped = _Mapped(rule, tuple(dim is not None for dim in dims))
    return linear_p.bind(*moved, rule=mapped), 0


batching.primitive_batchers[linear_p] = _batched
