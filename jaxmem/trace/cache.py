"""Eager calls of decorated functions: traced once, for what decides the trace.

As under `jax.checkpoint`, a function is traced for the types of its arrays and
for the other arguments by value, and what it reads of changing Python state is
that of the first call.  More careful than there: an object that can change
without being another one (it is compared by identity, and is no function) makes
a call that is traced by itself, and so does a closure over tracers.

Calls under `jax.jit` and in other functions that are being traced come here in
vain: each is traced where it stands, and the outer function only once.
"""

import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem import _jax, errors
from jaxmem.errors import JaxmemWarning

# Of each decorated function; the least recently used goes first.
_MOST = 64

# ---------------------------------------------------------------- types


class Undecided(TypeError):
    """What a call would do is not decided by any key."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What is known of all calls of one kind.

    Attributes:
      run: from the arrays of a call to its arrays.
      rest: whatever else the caller has to know.
      after: what `Call.look` saw after the trace.
      warned: what was warned of, to be said at each call.
    """

    run: Callable[[Sequence[Any]], list[Any]]
    rest: Any
    after: Any = None
    warned: Sequence[tuple[str, type[JaxmemWarning]]] = ()


class Traces:
    """The traces of one decorated function; they go when it goes."""

    def __init__(self) -> None:
        # A trace with the references that take it out once a function among the arguments is gone.
        self._known: dict[Hashable, tuple[Trace, list[Any]]] = {}
        _jax.cleared_with_jax(self)

    def get(self, key: Hashable) -> Trace | None:
        """The trace under a key."""
        found = self._known.pop(key, None)
        if found is None:
            return None
        self._known[key] = found  # the last one to go
        return found[0]

    def put(self, key: Hashable, trace: Trace) -> None:
        """A trace under a key; gone when one of the functions in the key is."""
        while len(self._known) >= _MOST:
            self._known.pop(next(iter(self._known)), None)
        known = self._known
        watch = [weakref.ref(held, lambda _: known.pop(key, None)) for held in _held(key)]
        known[key] = trace, watch

    def cache_clear(self) -> None:
        """By `jax.clear_caches`."""
        self._known.clear()


@dataclasses.dataclass(frozen=True)
class Call:
    """How a call is to be known again.

    Attributes:
      traces: of what is called.
      more: what decides the trace, apart from arguments.
      look: what of Python's state a trace has changed, as plain data.
      again: that state, after a call that was not traced.
    """

    traces: Traces
    more: Hashable = ()
    look: Callable[[], Any] = lambda: None
    again: Callable[[Any], None] = lambda after: None

    def key(self, tree: Any, leaves: Sequence[Any], traced: Sequence[bool]) -> Hashable | None:
        """What decides the trace; None where that is more than a key can say."""
        context = _jax.trace_context()
        if context is None:
            return None
        try:
            parts = [
                jax.typeof(leaf) if is_array else key_of(leaf)
                for is_array, leaf in zip(traced, leaves, strict=True)
            ]
            key = context, tree, tuple(parts), self.more
            hash(key)
        except TypeError:
            return None
        return key


# ---------------------------------------------------------------- API


def known(call: Call, key: Hashable) -> Trace | None:
    """The trace for a key, its warnings given and its changes of Python's state made again."""
    trace = call.traces.get(key)
    if trace is not None:
        for message, category in trace.warned:
            errors.warn(message, category)
        call.again(trace.after)
    return trace


def key_of(value: Any) -> Hashable:
    """What a value is: equal for those that no trace can tell apart.

    Functions are referred to weakly, and everything else by value.

    Raises:
      Undecided, TypeError: it is an array, or may be another value later.
    """
    kind = type(value)
    if isinstance(value, jax.Array | np.ndarray):
        raise Undecided("an array")
    if kind is float:
        return kind, value.hex()  # tells 0.0 from -0.0, and knows nan
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    if isinstance(value, functools.partial):
        return kind, key_of(value.func), key_of(value.args), key_of(value.keywords)
    if isinstance(value, types.MethodType):
        return kind, key_of(value.__func__), key_of(value.__self__)
    if isinstance(value, tuple | list):
        return kind, *map(key_of, value)
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(key_of, value))
    if isinstance(value, Mapping):
        return kind, *((key_of(key), key_of(item)) for key, item in value.items())
    if isinstance(value, _FUNCTIONS):
        return weakref.ref(value)
    if isinstance(value, np.ufunc | enum.Enum):
        return kind, value
    if dataclasses.is_dataclass(value):
        if not value.__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue]
            raise Undecided("an object that can change")
        names = [field.name for field in dataclasses.fields(value)]
        return kind, *(key_of(getattr(value, name, None)) for name in names)
    if value is not None and kind.__eq__ is object.__eq__:
        raise Undecided("an object that can change")
    hash(value)
    return kind, value


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    jax.custom_jvp,
    jax.custom_vjp,
    type(jax.jit(lambda: None)),
)


def is_value(value: Any) -> bool:
    """Whether a result can be given out again as it is."""
    return value is None or isinstance(
        value, bool | int | float | complex | str | bytes | np.generic | np.dtype | type | enum.Enum
    )


def _held(key: Any) -> list[Any]:
    """The functions that are referred to in a key."""
    if isinstance(key, weakref.ref):
        target = key()
        return [] if target is None else [target]
    if isinstance(key, tuple | frozenset):
        return [held for part in key for held in _held(part)]
    return []
