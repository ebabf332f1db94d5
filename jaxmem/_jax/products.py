"""The tangent of a product in 16 bits, whose transpose adds up in 32.

jax gives the gradient of an operand in the operand's own type: of a parameter that was cast to
bfloat16 it would be rounded to that, and then cast, and devices would add up what is rounded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters import ad, batching, mlir

from jaxmem._jax.evaluation import bound, bound_with, evaluate
from jaxmem._jax.tracing import trace

# Operands: what the product reads besides, and the tangent in the wide type.
product_p = Primitive("jaxmem_product")


def with_wide_gradient(
    fn: Callable[..., Any], cast: Callable[[Any], Any], wide: Any, others: Sequence[Any]
) -> Any:
    """``fn(cast(wide), *others)``, where the gradient of `wide` is not rounded to what it reads.

    Args:
      fn: linear in its first operand.
    """

    @jax.custom_jvp
    def product(wide: Any, *others: Any) -> Any:
        return fn(cast(wide), *others)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        wide, *others = primals
        narrow = cast(wide)
        given = [None if _is_zero(t) else t for t in tangents[1:]]
        found = None if _is_zero(tangents[0]) else _tangent(fn, cast, tangents[0], others)

        def active(*diff: Any) -> Any:
            own = iter(diff)
            return fn(
                narrow, *(o if t is None else next(own) for o, t in zip(others, given, strict=True))
            )

        diff = [o for o, t in zip(others, given, strict=True) if t is not None]
        if not diff:
            out = active()
        else:
            out, rest = jax.jvp(active, diff, [t for t in given if t is not None])
            found = rest if found is None else found + rest
        if found is None:
            found = jax.custom_derivatives.zero_from_primal(out, symbolic_zeros=True)
        return out, found

    product.defjvp(rule, symbolic_zeros=True)
    return product(wide, *others)


# ---------------------------------------------------------------- implementation


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _tangent(
    fn: Callable[..., Any], cast: Callable[[Any], Any], tangent: Any, others: Sequence[Any]
) -> Any:
    return product_p.bind(*others, tangent, fn=fn, cast=cast)


def _run(*args: Any, fn: Callable[..., Any], cast: Callable[[Any], Any]) -> Any:
    *others, tangent = args
    return fn(cast(tangent), *others)


product_p.def_impl(_run)
mlir.register_lowering(product_p, mlir.lower_fun(_run, multiple_results=False))


@product_p.def_abstract_eval
def _(*avals: Any, **params: Any) -> Any:
    return trace(lambda *args: _run(*args, **params), avals).out_avals[0]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Second derivatives: of the plain product, in all operands but the linear one."""
    *others, wide = primals
    *given, last = tangents
    out = product_p.bind(*primals, **params)
    active = [k for k, t in enumerate(given) if type(t) is not ad.Zero]
    found = None if type(last) is ad.Zero else product_p.bind(*others, last, **params)
    if active:

        def run(*diff: Any) -> Any:
            full = list(others)
            for k, value in zip(active, diff, strict=True):
                full[k] = value
            return _run(*full, wide, **params)

        rest = jax.jvp(run, [others[k] for k in active], [given[k] for k in active])[1]
        found = rest if found is None else found + rest
    if found is None:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, found


ad.primitive_jvps[product_p] = _jvp


def _transpose(
    ct: Any, *args: Any, fn: Callable[..., Any], cast: Callable[[Any], Any]
) -> list[Any]:
    *others, linear = args
    none = [None] * len(others)
    if type(ct) is ad.Zero:
        return [*none, ad.Zero(linear.aval)]
    wide = linear.aval
    narrow = jax.eval_shape(cast, wide)
    narrow = wide.update(dtype=narrow.dtype)

    def transposed(ct: Any, *others: Any) -> Any:
        return jax.linear_transpose(lambda narrow: fn(narrow, *others), narrow)(ct)[0]

    closed = trace(transposed, [jax.typeof(ct), *map(jax.typeof, others)])

    def special(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if "preferred_element_type" in eqn.params and eqn.outvars[0].aval.dtype == narrow.dtype:
            return bound_with(eqn, {"preferred_element_type": wide.dtype}, *operands)
        is_cast = eqn.primitive is convert_element_type_p
        if is_cast and eqn.params["new_dtype"] == narrow.dtype and operands[0].dtype == wide.dtype:
            return operands
        return bound(eqn, *operands)

    (found,) = evaluate(closed, [ct, *others], special)
    return [*none, jax.lax.convert_element_type(found, wide.dtype)]


ad.primitive_transposes[product_p] = _transpose


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
    # The gradient of each example by itself is rounded.
    return jax.vmap(lambda *args: _run(*args, **params), in_axes=list(dims))(*args), 0


batching.primitive_batchers[product_p] = _batch
