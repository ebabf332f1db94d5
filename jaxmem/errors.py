"""Warnings of jaxmem, and the checks that several files share."""

import contextlib
import contextvars
import operator
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any


class JaxmemWarning(UserWarning):
    """Base of all warnings of jaxmem; filter on this to silence them together."""


class NoStackWarning(JaxmemWarning):
    """A policy for layer stacks met code without one; the whole call is checkpointed once."""


class OffloadWarning(JaxmemWarning):
    """Host offload was asked for where device and host memory are one: nothing is saved."""


class NoEffectWarning(JaxmemWarning):
    """A policy was given where it cannot do anything, or where jax will not do what it says."""


class BudgetError(ValueError):
    """No plan brings a step within its budget; the message says what is in the way and what helps.

    Attributes:
      budget: bytes.
      least_bytes: the fewest that the step was compiled to.
      report: the `MemoryReport` of that program.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> @jaxmem.remat_auto
    ... def model(weights, h):
    ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights)[0].sum()
    >>> arrays = jnp.ones((64, 16, 16)), jnp.ones((4096, 16))
    >>> try:
    ...     jaxmem.fit(jax.grad(model), *arrays, budget="64KiB", progress=False)
    ... except jaxmem.BudgetError as error:
    ...     error.budget < error.least_bytes == error.report.required_bytes
    True
    """

    def __init__(self, message: str, budget: int, least_bytes: int, report: Any) -> None:
        super().__init__(message)
        self.budget, self.least_bytes, self.report = budget, least_bytes, report


class StateOnDiskError(OSError):
    """What `jaxmem.disk_state` keeps in a folder cannot be used; the message says what to do."""


def warn(message: str, category: type[JaxmemWarning]) -> None:
    """Warn at the line of the user's code that led here, past jaxmem's, jax's and flax's own."""
    for warned in _noted.get():
        warned.append((message, category))
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


Warned = list[tuple[str, type[JaxmemWarning]]]
_noted: contextvars.ContextVar[tuple[Warned, ...]] = contextvars.ContextVar(
    "jaxmem_warned", default=()
)


@contextlib.contextmanager
def noting() -> Iterator[Warned]:
    """While open, what is warned of is written down as well."""
    warned: Warned = []
    token = _noted.set((*_noted.get(), warned))
    try:
        yield warned
    finally:
        _noted.reset(token)


_LIBRARIES = ("jaxmem", "jax", "flax", "functools", "contextlib")


def check_positive(what: str, value: Any) -> int:
    """`value` as an int, or an error that names `what`.

    Raises:
      TypeError: it is not a whole number.
      ValueError: it is less than 1.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{what} must be a whole number of at least 1, got {value!r} of type "
            f"{type(value).__name__}"
        ) from None
    if number < 1:
        raise ValueError(f"{what} must be at least 1, got {number}")
    return number


def check_seconds(what: str, value: Any) -> None:
    """That `value`, which is called `what`, is a number of seconds.

    Raises:
      TypeError: it is no number.
      ValueError: it is none above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number of seconds, got {value!r}")
    if not value > 0:
        raise ValueError(f"{what} must be more than 0 seconds, got {value!r}")


def check_flags(**flags: Any) -> None:
    """That each of these is True or False.

    Raises:
      TypeError: one is not.
    """
    for what, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"{what} must be True or False, got {value!r} of type {type(value).__name__}"
            )


def check_segments(segments: int | Sequence[int] | None, levels: int) -> tuple[int, ...]:
    """The number of segments at each level that is given one.

    Raises:
      TypeError, ValueError: a number is none or less than 1, or there are more than levels.
    """
    levels = check_positive("levels", levels)
    if segments is None:
        return ()
    if not isinstance(segments, Sequence):
        return (check_positive("segments", segments),)
    given = tuple(check_positive("segments", number) for number in segments)
    if not given:
        raise ValueError("segments=() holds no number; pass None for the best cut")
    if levels not in (1, len(given)) and len(given) > levels:
        raise ValueError(
            f"segments={given} gives numbers for {len(given)} levels, but levels={levels}"
        )
    return given
