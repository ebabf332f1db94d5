"""Tracing, and what of jax's configuration decides a trace."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxmem._jax import private
from jaxmem._jax.types import Aval


def is_staged() -> bool:
    """Whether what is called now is being traced, not run: under `jax.jit`, a scan and the like.

    False where derivatives are taken or arrays mapped of what runs, operation by operation.
    """
    here: Any = private.trace_ctx.trace
    while type(here).__name__ in ("JVPTrace", "LinearizeTrace", "BatchTrace"):
        here = here.parent_trace
    return not isinstance(here, private.EvalTrace)


def trace_context() -> Any:
    """What of jax's configuration decides a trace (user contexts, mesh, precision), hashable.

    None where this jax does not tell.
    """
    told = private.trace_context
    return None if told is None else told()


def cleared_with_jax(cache: Any) -> None:
    """Has `cache.cache_clear()` called by `jax.clear_caches()`; `cache` is referred to weakly."""
    if private.register_cache is not None:
        private.register_cache(cache, "jaxmem")


def trace(fn: Callable[..., Any], avals: Sequence[Aval]) -> ClosedJaxpr:
    """The jaxpr of a function of flat arguments, for avals exactly as given.

    Of code that is looked at, or runs again: whether it uses random keys twice is not asked.
    """
    with keys_unchecked():
        return jax.make_jaxpr(fn)(*avals)


def keys_are_checked() -> bool:
    """Whether jax looks for random keys that are used twice."""
    return bool(getattr(jax.config, "jax_debug_key_reuse", False))


def keys_unchecked() -> contextlib.AbstractContextManager[None]:
    """While open, jax does not look for them in what runs."""
    return jax.debug_key_reuse(False) if keys_are_checked() else contextlib.nullcontext()


def flax_config() -> Any:
    """Flax's switches, which decide traces of its modules."""
    return private.flax_switches
