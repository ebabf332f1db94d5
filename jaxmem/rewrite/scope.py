"""The layer of a stack: whose policy the stack runs under, and that the layer's own is spent.

A decorated layer that something of jaxmem stacks passes its policy to the stack.
Inside the stack its own decorator then has nothing left to do, and saying so to
the one object concerned (not to everything traced meanwhile) lets a decorated
stack *within* that layer keep its policy.
"""

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from jaxmem import _jax, policies
from jaxmem.plans.plan import Plan
from jaxmem.rewrite.apply import Choice
from jaxmem.trace import context
from jaxmem.trace.cache import Call, Traces

_owners: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar(
    "jaxmem_layer_owners", default=()
)


@contextlib.contextmanager
def layer_scope(*owners: object) -> Iterator[None]:
    """While open, the policy of these objects (modules, functions) is already being applied."""
    token = _owners.set(_owners.get() + owners)
    try:
        yield
    finally:
        _owners.reset(token)


def inside_layer_scope(owner: object) -> bool:
    """Whether `owner`'s policy is being applied further out; compared by identity."""
    return any(known is owner for known in _owners.get())


def eager_call(
    traces: Traces,
    decided_by: Callable[[], Hashable],
    look: Callable[[], Any] = lambda: None,
    again: Callable[[Any], None] = lambda after: None,
) -> Call | None:
    """How a call is known again that need not be traced, as for `Call`; None to trace it.

    Args:
      decided_by: what else than arguments decides the trace; called where it matters, may raise
        TypeError where nothing says it.
    """
    if _owners.get() or context.is_recording() or _jax.is_staged():
        return None
    try:
        return Call(traces, decided_by(), look, again)
    except TypeError:
        return None


def declared_choice(target: object) -> Choice | None:
    """What a decorator of jaxmem left on a class or function, if one was there."""
    return getattr(target, "__jaxmem_choice__", None)


def stack_choice(remat: Any, declared: Iterable[Choice | None]) -> Choice | None:
    """The one policy of a stack, from its ``remat=`` and from its decorated layers.

    Raises:
      ValueError: they name different policies.
    """
    found: list[Choice] = []
    for choice in declared:
        if choice is not None and choice not in found:
            found.append(choice)
    if len(found) > 1:
        raise ValueError(
            f"the layers of one stack carry different policies, {_words(found)}; decorate them "
            "alike, or decorate none and pass remat= to the scan"
        )
    if remat is None:
        return found[0] if found else None
    policy = remat if isinstance(remat, Plan) else policies.parse(remat)
    if found and found[0].policy != policy:
        raise ValueError(
            f"two policies for one stack: the layer is decorated with {found[0].policy!r} and "
            f"remat={policy!r} was passed; drop one of the two"
        )
    return found[0] if found else Choice(policy)


def method_names(methods: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names in a ``methods=`` argument, which may be one name alone."""
    if methods is None:
        return ("__call__",)
    return (methods,) if isinstance(methods, str) else tuple(methods)


def plain_method(cls: type, name: str, choice: Choice | None) -> Any:
    """The function behind method `name` of `cls`, checked to be one that a policy can wrap.

    Raises:
      TypeError: it is missing, or no plain method.
      ValueError: `cls` itself was decorated with another policy there.
    """
    method = getattr(cls, name, None)
    if method is None:
        raise TypeError(
            f"{cls.__name__} has no method {name!r}; methods= takes names of methods that the "
            "class has"
        )
    raw = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
    raw = getattr(raw, "wrapped", raw)  # linen wraps descriptors
    if isinstance(raw, (staticmethod, classmethod, property)) or not callable(raw):
        raise TypeError(
            f"{cls.__name__}.{name} is a {type(raw).__name__}; a policy applies to plain methods, "
            "which take self"
        )
    # Inherited policies may be overridden, as methods may; two on one class contradict.
    own = declared_choice(vars(cls).get(name))
    if choice is not None and own is not None and own != choice:
        raise ValueError(
            f"two policies for {cls.__name__}.{name}: {_words([own, choice])}; decorate it once"
        )
    return method


def subclass(cls: Any, members: dict[str, Any]) -> Any:
    """A subclass that passes for `cls`: same names and text, with `members` replaced."""
    kept = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (cls,), {**kept, **members})


def _words(choices: Iterable[Choice]) -> str:
    return " and ".join(repr(choice.policy) for choice in choices)
