"""A traced function with layers that keep less in the place of those that it has.

Jits are looked into (their insides then stand where the call stood), as are scans, branches,
checkpoints and shard_maps; functions with a derivative of their own are not.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxmem import _jax
from jaxmem.errors import NoEffectWarning, warn
from jaxmem.layers.norm_patterns import norm_matches
from jaxmem.layers.patterns import (
    KEPT_CALLS,
    Gradient,
    Match,
    activation_matches,
    dropout_matches,
    relu_matches,
)
from jaxmem.layers.pieces import Makers
from jaxmem.trace.find import find
from jaxmem.trace.origin import module_of
from jaxmem.trace.source import source_line

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class LowMemory:
    """What a decorator was told.

    Attributes:
      exact: whether only what leaves gradients as they are is replaced.
    """

    exact: bool = False


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A layer that was put in the place of another.

    Attributes:
      what: what was found: "gelu", "silu", "relu", "layer norm", "rms norm" or "dropout".
      by: the function of `jaxmem.layers` that is there now.
      gradient: "exact", or "approximate" where it is another than before.
      shape, dtype: of the result.
      source: "file.py:12 (function)" of the user's code, "" where unknown.
      module: the Flax module or `jax.named_scope` that it is in, "" where none.
      count: how often it runs, in the scans around it.
    """

    what: str
    by: str
    gradient: Gradient
    shape: tuple[int, ...]
    dtype: str
    source: str = ""
    module: str = ""
    count: int = 1


# ---------------------------------------------------------------- API


def with_low_memory(fn: Callable[..., Any], choice: LowMemory) -> Callable[..., Any]:
    """`fn` with layers replaced that it runs.

    Arguments that are jax arrays are traced; all others are static, as are outputs that are no
    arrays.
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(jax.config, "jax_disable_jit", False):
            return fn(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [isinstance(leaf, jax.Array) for leaf in leaves]
        statics: Any = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal statics
            given = iter(arrays)
            full = [next(given) if t else leaf for t, leaf in zip(traced, leaves, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, full)
            outs, out_tree = jax.tree.flatten(fn(*args, **kwargs))
            is_array = [isinstance(out, jax.Array | np.ndarray) for out in outs]
            others = [None if a else o for a, o in zip(is_array, outs, strict=True)]
            statics = out_tree, others, is_array
            return [out for a, out in zip(is_array, outs, strict=True) if a]

        arrays = [leaf for t, leaf in zip(traced, leaves, strict=True) if t]
        closed = jax.make_jaxpr(flat)(*arrays)
        with noting_replacements() as notes:
            found = iter(evaluated(closed, arrays, choice))
        _warn_of_no_effect(fn, closed, notes)
        out_tree, others, is_array = statics
        outs = [next(found) if a else o for a, o in zip(is_array, others, strict=True)]
        return jax.tree.unflatten(out_tree, outs)

    return run


def evaluated(closed: ClosedJaxpr, args: Sequence[Any], choice: LowMemory) -> list[Any]:
    """The results of a jaxpr in which layers are replaced."""
    outs = _evaluate(_flat(closed), args, choice, 1)
    return list(map(_jax.as_array, outs, closed.out_avals))


_notes: contextvars.ContextVar[tuple[list[Replacement], ...]] = contextvars.ContextVar(
    "jaxmem_replacements", default=()
)


@contextlib.contextmanager
def noting_replacements() -> Iterator[list[Replacement]]:
    """While open, what is replaced is written down."""
    notes: list[Replacement] = []
    token = _notes.set((*_notes.get(), notes))
    try:
        yield notes
    finally:
        _notes.reset(token)


# ---------------------------------------------------------------- implementation


def _warn_of_no_effect(fn: Any, closed: ClosedJaxpr, notes: Sequence[Replacement]) -> None:
    name = getattr(fn, "__qualname__", type(fn).__name__)
    if find(closed).takes_gradients:
        warn(
            f"{name} takes gradients itself (a backward pass is part of it), and low_memory around "
            "it comes too late to change what they read; unless it is differentiated once more "
            "outside, decorate the model or the loss function in it instead",
            NoEffectWarning,
        )
    elif not notes:
        warn(
            f"low_memory found nothing to replace in {name}: no GELU, SiLU, ReLU, dropout or norm. "
            "Functions with a derivative of their own (jax.custom_vjp) are not looked into, nor "
            "are layers in a Python loop under a policy of jaxmem: put the policy on top",
            NoEffectWarning,
        )


def _flat(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr with the insides of jits in their places, but for those that are known by name."""

    def inside(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if not _jax.is_jit(eqn) or _jax.constrains(eqn) or eqn.params["name"] in KEPT_CALLS:
            return None
        return _jax.evaluate(eqn.params["jaxpr"], operands, inside)

    return _jax.trace(lambda *flat: _jax.evaluate(closed, flat, inside), closed.in_avals)


def _matches(closed: ClosedJaxpr, choice: LowMemory) -> dict[int, Match]:
    """By the place of the equation that makes what is replaced."""
    makers = Makers(closed.jaxpr)
    found = [*relu_matches(makers), *dropout_matches(makers), *norm_matches(makers)]
    if not choice.exact:
        found += activation_matches(makers)
    return {match.place: match for match in found}


def _evaluate(closed: ClosedJaxpr, args: Sequence[Any], choice: LowMemory, count: int) -> list[Any]:
    """Evaluates a flat jaxpr.

    Args:
      count: how often it runs.
    """
    eqns: list[Any] = list(closed.jaxpr.eqns)
    runs: dict[int, Match] = {}
    for place, match in _matches(closed, choice).items():
        # It reads what its replacement takes, and no more what it was made of.
        eqns[place] = _jax.renamed(eqns[place], match.ins, eqns[place].outvars)
        runs[id(eqns[place])] = match
    edited = _jax.with_equations(closed, eqns)

    def special(eqn: Any, operands: list[Any]) -> list[Any] | None:
        if (match := runs.get(id(eqn))) is not None:
            _note(match, eqn, count)
            return [match.run(*operands)]
        return _inside(eqn, operands, choice, count)

    only = _jax.needed(edited, edited.jaxpr.outvars, keep_effects=True)
    return _jax.evaluate(edited, args, special, only=only)


def _inside(eqn: Any, operands: list[Any], choice: LowMemory, count: int) -> list[Any] | None:
    """The results of an equation with other equations in it; None if it is none of those."""
    params = eqn.params

    def run(closed: ClosedJaxpr, times: int = 1) -> Callable[..., list[Any]]:
        # Made flat where it is run: inside of a shard_map, the axes of which it may speak of.
        return lambda *args: _evaluate(_flat(closed), args, choice, count * times)

    def traced(closed: ClosedJaxpr, times: int = 1) -> ClosedJaxpr:
        return _jax.trace(run(closed, times), closed.in_avals)

    if (checkpointed := _jax.checkpointed_by(eqn)) is not None:
        inner = _jax.in_checkpoint(eqn)
        assert inner is not None
        barrier = params.get("prevent_cse", True)
        fn = jax.checkpoint(run(inner), prevent_cse=barrier, policy=checkpointed[0])
        return fn(*operands)
    if _jax.is_scan(eqn):
        body = traced(params["jaxpr"], params["length"])
        return _jax.bound_with(eqn, {"jaxpr": body}, *operands)
    if _jax.is_jit(eqn) and eqn.params["name"] not in KEPT_CALLS:
        return _jax.bound_with(eqn, {"jaxpr": traced(params["jaxpr"])}, *operands)
    if _jax.is_stack(eqn):
        stack = params["stack"]
        body = dataclasses.replace(
            stack.form.body, jaxpr=traced(stack.form.body.jaxpr, stack.form.length)
        )
        form = dataclasses.replace(stack.form, body=body)
        return _jax.bind_stack(dataclasses.replace(stack, form=form), operands)
    if eqn.primitive.name == "cond":
        branches = tuple(traced(branch) for branch in params["branches"])
        return _jax.bound_with(eqn, {"branches": branches}, *operands)
    if eqn.primitive.name == "shard_map":
        return jax.shard_map(
            run(_jax.as_closed(params["jaxpr"])),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )(*operands)
    return None


def _note(match: Match, eqn: Any, count: int) -> None:
    out = eqn.outvars[0].aval
    kind = tuple(out.shape), str(out.dtype)
    where = source_line(eqn), module_of(eqn)
    note = Replacement(match.what, match.by, match.gradient, *kind, *where, count)
    for notes in _notes.get():
        notes.append(note)
