"""Warnings of jaxmem, and the checks that several files share."""

import operator
from typing import Any


class JaxmemWarning(UserWarning):
    """Base of all warnings of jaxmem; filter on this to silence them together."""


class NoStackWarning(JaxmemWarning):
    """A policy for layer stacks met code without one; the whole call is checkpointed once."""


class OffloadWarning(JaxmemWarning):
    """Host offload was asked for where device and host memory are one: nothing is saved."""


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
