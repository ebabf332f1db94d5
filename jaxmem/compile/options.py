"""Options passed to a compiler: errors in them are reported as such, not as the program's."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxmem.targets import CompileError

# How XLA's messages about options begin.
_COMPLAINTS = ("No such compile option", "While setting option")


def checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options, if they are names and plain values; numpy scalars become Python's.

    Raises:
      TypeError: they are not.
    """
    found: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"compiler_options: names of options are texts, got {name!r}")
        if not isinstance(value, str | bool | int | float | np.bool_ | np.integer | np.floating):
            raise TypeError(
                f"compiler_options: {name} is a text, a number, True or False, got an object of "
                f"type {type(value).__name__}"
            )
        found[name] = value.item() if isinstance(value, np.generic) else value
    return found


@contextlib.contextmanager
def named() -> Iterator[None]:
    """While open, a compiler's error about an option is raised as a `ValueError` about it.

    Raises:
      ValueError: the compiler does not know an option, or not its value.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, CompileError) as error:
        text = str(error)
        found = [text[text.index(part) :] for part in _COMPLAINTS if part in text]
        if not found:
            raise
        raise ValueError(
            f"compiler_options: {found[0].splitlines()[0].rstrip('.')}.  Options are XLA's, as in "
            '{"xla_gpu_enable_triton_gemm": False}, and differ between compilers'
        ) from None
