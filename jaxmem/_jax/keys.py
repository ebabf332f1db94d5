"""Random keys, for jax's own checker of keys that are used twice (`jax.debug_key_reuse`)."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, batching, mlir

from jaxmem._jax.primitives import Differentiable, keys_p, stack_p, tangent_p
from jaxmem._jax.private import (
    KeyForward,
    KeyReuseSignature,
    KeySink,
    KeySource,
    dynamic_key_reuse_signature,
    jaxpr_key_reuse_signature,
    key_reuse_signatures,
)
from jaxmem._jax.tracing import keys_are_checked, trace
from jaxmem._jax.types import Aval, is_key


def same_keys(values: Sequence[Any]) -> list[Any]:
    """The values; random keys in them may be used again, as it is known for what."""
    if not keys_are_checked():
        return list(values)
    return [jax.random.clone(value) if is_key(value) else value for value in values]


def named(value: Any, name: str) -> Any:
    """`checkpoint_name`; of random keys other ones are named, as jax takes that for a use."""
    [value] = same_keys([value])
    [value] = same_keys([checkpoint_name(value, name)])
    return value


def used_by(run: Differentiable | ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Operands; random keys in them are used as a stack's plain scan, or a jaxpr, uses them.

    Raises:
      jax.errors.KeyReuseError: that uses one twice.
    """
    if not keys_are_checked() or not any(map(is_key, args)):
        return list(args)
    places = [place for place, arg in enumerate(args) if is_key(arg)]
    found = _signature(run, list(map(jax.typeof, args)))
    signature = KeyReuseSignature(
        *(KeySink(places.index(s.idx), s.mask) for s in found.sinks if s.idx < len(args)),
        *map(KeySource, range(len(places))),
    )
    keys = iter(keys_p.bind(*(args[p] for p in places), passed=0, signature=signature))
    return [next(keys) if is_key(arg) else arg for arg in args]


def made_by(
    run: Differentiable | ClosedJaxpr, args: Sequence[Any], outs: Sequence[Any]
) -> list[Any]:
    """Results; random keys in them are new ones if those of the plain scan, or the jaxpr, are."""
    if not keys_are_checked() or not any(map(is_key, outs)):
        return list(outs)
    ins = [place for place, arg in enumerate(args) if is_key(arg)]
    places = [place for place, out in enumerate(outs) if is_key(out)]
    found = _signature(run, list(map(jax.typeof, args)))
    signature = KeyReuseSignature(
        *(KeySource(places.index(s.idx), s.mask) for s in found.sources if s.idx in places),
        *(
            KeyForward(ins.index(f.in_idx), places.index(f.out_idx))
            for f in found.forwards
            if f.in_idx < len(args)
        ),
    )
    operands = [*(args[p] for p in ins), *(outs[p] for p in places)]
    keys = iter(keys_p.bind(*operands, passed=len(ins), signature=signature))
    return [next(keys) if is_key(out) else out for out in outs]


def _signature(run: Differentiable | ClosedJaxpr, avals: Sequence[Aval]) -> Any:
    """What a jaxpr, or the plain scan of a stack, does with random keys."""
    if isinstance(run, ClosedJaxpr):
        return jaxpr_key_reuse_signature(run.jaxpr)
    if run.is_part:
        return KeyReuseSignature(*map(KeySource, range(len(run.out_avals()))))
    plain = trace(lambda *args: run.run(args), avals)
    return jaxpr_key_reuse_signature(plain.jaxpr)


def _keys_run(*keys: Any, passed: int, signature: Any) -> list[Any]:
    return list(keys[passed:])


@keys_p.def_impl
def _(*keys: Any, **params: Any) -> list[Any]:
    return same_keys(_keys_run(*keys, **params))  # other arrays, of which jax keeps other books


mlir.register_lowering(keys_p, mlir.lower_fun(_keys_run, multiple_results=True))


@keys_p.def_abstract_eval
def _(*avals: Aval, passed: int, signature: Any) -> Sequence[Aval]:
    return avals[passed:]


def _keys_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    outs = keys_p.bind(*primals, **params)
    return outs, [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]


ad.primitive_jvps[keys_p] = _keys_jvp


def _keys_batch(
    keys: Sequence[Any], dims: Sequence[Any], *, passed: int, signature: Any
) -> tuple[list[Any], Sequence[Any]]:
    # Which of several keys are used is said for those that are not mapped; all of them, then.
    whole = [type(part)(part.idx) for part in (*signature.sinks, *signature.sources)]
    signature = KeyReuseSignature(*whole, *signature.forwards)
    return keys_p.bind(*keys, passed=passed, signature=signature), dims[passed:]


batching.primitive_batchers[keys_p] = _keys_batch

key_reuse_signatures[keys_p] = dynamic_key_reuse_signature(lambda eqn: eqn.params["signature"])

key_reuse_signatures[stack_p] = dynamic_key_reuse_signature(
    lambda eqn: _signature(eqn.params["stack"], [atom.aval for atom in eqn.invars])
)

# What the backward pass runs again has been looked at, as jax says of `jax.checkpoint`.
key_reuse_signatures[tangent_p] = KeyReuseSignature()
