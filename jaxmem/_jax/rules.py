"""How the primitives are lowered, differentiated, transposed, mapped and checked."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, batching, mlir

from jaxmem._jax.keys import same_keys
from jaxmem._jax.memory import is_on_host, refuse_mapped
from jaxmem._jax.primitives import Differentiable, Linear, bind_stack, stack_p, tangent_p
from jaxmem._jax.private import BatchTracer, batch_jaxpr, checkify_jaxpr, error_checks
from jaxmem._jax.tracing import keys_unchecked, trace
from jaxmem._jax.types import Aval


@stack_p.def_impl
def _(*args: Any, stack: Differentiable) -> list[Any]:
    with keys_unchecked():  # as that was done for all of it
        return stack.run(args)


@stack_p.def_effectful_abstract_eval
def _(*avals: Aval, stack: Differentiable) -> tuple[Sequence[Aval], Any]:
    return stack.out_avals(), stack.effects


mlir.register_lowering(
    stack_p, mlir.lower_fun(lambda *args, stack: stack.run(args), multiple_results=True)
)


def _stack_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, stack: Differentiable
) -> tuple[Sequence[Any], Sequence[Any]]:
    given = [None if type(t) is ad.Zero else t for t in tangents]
    outs, out_tangents = stack.jvp(primals, given)
    return outs, [
        ad.Zero(jax.typeof(out).to_tangent_aval()) if t is None else t
        for out, t in zip(outs, out_tangents, strict=True)
    ]


ad.primitive_jvps[stack_p] = _stack_jvp


def _stack_transpose(cts: Sequence[Any], *args: Any, stack: Differentiable) -> list[Any]:
    # Only `jax.linear_transpose` of a stack that is itself linear comes here.
    linear = [ad.is_undefined_primal(arg) for arg in args]

    def run(*lin: Any) -> list[Any]:
        rest = iter(lin)
        return stack.run(
            [next(rest) if is_lin else a for is_lin, a in zip(linear, args, strict=True)]
        )

    specs = [arg.aval for arg in args if ad.is_undefined_primal(arg)]
    given = [ad.instantiate_zeros(ct) if type(ct) is ad.Zero else ct for ct in cts]
    found = iter(jax.linear_transpose(run, *specs)(given))
    return [next(found) if is_lin else None for is_lin in linear]


ad.primitive_transposes[stack_p] = _stack_transpose


def _stack_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, stack: Differentiable
) -> tuple[list[Any], list[Any]]:
    def batch(body: ClosedJaxpr, flags: Sequence[bool], instantiate: Sequence[bool]) -> Any:
        return batch_jaxpr(body, axis_data, list(flags), list(instantiate))

    is_batched = [dim is not None for dim in dims]
    refuse_mapped(is_on_host(arg) and flag for arg, flag in zip(args, is_batched, strict=True))
    new, in_flags, in_axes, out_flags, out_axes = stack.batched(batch, is_batched)
    moved = []
    for arg, dim, flag, axis in zip(args, dims, in_flags, in_axes, strict=True):
        if flag and dim is None:
            arg = batching.broadcast(arg, axis_data.size, axis, axis_data.explicit_mesh_axis)
        elif flag:
            arg = jax.numpy.moveaxis(arg, dim, axis)
        moved.append(arg)
    outs = bind_stack(new, moved)
    return outs, [axis if flag else None for flag, axis in zip(out_flags, out_axes, strict=True)]


batching.fancy_primitive_batchers[stack_p] = _stack_batch


def _stack_checkify(*given: Any, stack: Differentiable) -> tuple[Any, list[Any]]:
    # From jax 0.11 on a context goes before the error.
    has_context = "ctx" in inspect.signature(checkify_jaxpr).parameters
    context, (error, enabled, *args) = given[:has_context], given[has_context:]
    closed = trace(lambda *args: stack.run(args), list(map(jax.typeof, args)))
    error, outs = checkify_jaxpr(*context, closed, enabled, error, *args)
    return error, stack.unplanned(outs)


# Where jax keeps its rules elsewhere, the stack is evaluated without checks.
error_checks[stack_p] = _stack_checkify


def _tangent_run(*args: Any, linear: Linear) -> list[Any]:
    split = linear.num_residuals
    residuals = same_keys(args[:split])
    with keys_unchecked():
        return linear.push(residuals, args[split:])


tangent_p.def_impl(_tangent_run)

mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent_run, multiple_results=True))


@tangent_p.def_abstract_eval
def _(*avals: Aval, linear: Linear) -> Sequence[Aval]:
    return linear.tangent_avals


def _tangent_transpose(cts: Sequence[Any], *args: Any, linear: Linear) -> list[Any]:
    split = linear.num_residuals
    given = [None if type(ct) is ad.Zero else ct for ct in cts]
    is_mapped = any(isinstance(ct, BatchTracer) for ct in given)
    refuse_mapped(is_mapped and is_on_host(arg) for arg in args[:split])
    residuals = same_keys(args[:split])
    with keys_unchecked():
        return [None] * split + linear.pull(residuals, given)


ad.primitive_transposes[tangent_p] = _tangent_transpose


def _tangent_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear: Linear
) -> tuple[Sequence[Any], Sequence[Any]]:
    # A second derivative: differentiate the plain form.
    given = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(lambda *args: _tangent_run(*args, linear=linear), list(primals), given)


ad.primitive_jvps[tangent_p] = _tangent_jvp


def _tangent_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, linear: Linear
) -> tuple[list[Any], list[int]]:
    # Forward mode under vmap: batch the plain form.  (A stack that is mapped and
    # then differentiated is batched as a whole, by `_stack_batch`.)
    mapped = jax.vmap(
        lambda *args: _tangent_run(*args, linear=linear),
        in_axes=list(dims),
        axis_name=axis_data.name,
        axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name,
    )
    outs = mapped(*args)
    return outs, [0] * len(outs)


batching.fancy_primitive_batchers[tangent_p] = _tangent_batch
