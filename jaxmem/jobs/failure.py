"""The output of a failed command: one clear message, and stack frames of the user's code only.

Frames of jaxmem, jax, click and the standard library are omitted; an unexpected error
is a fault of jaxmem, and is shown with its whole traceback.
"""

import os
import sys
import sysconfig
import traceback

import click

# What jaxmem, jax and Python raise on purpose, with a text for people.
_EXPECTED = (ValueError, TypeError, RuntimeError, ImportError, OSError, NotImplementedError)
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "click")


def explained(error: BaseException) -> str:
    """The message for standard error."""
    if isinstance(error, SyntaxError):  # the user's file; Python shows the line by itself
        return "".join(traceback.format_exception_only(error)).rstrip()
    if frames := [frame for frame in _frames(error) if _is_users(frame)]:
        shown = "".join(traceback.format_list(frames))
        # Not the notes that jax adds about the frames which it took out.
        return f"Traceback (your code):\n{shown}{type(error).__name__}: {_message(error)}"
    if isinstance(error, _EXPECTED):
        return f"Error: {_message(error)}"
    whole = "".join(traceback.format_exception(error)).rstrip()
    return f"{whole}\nError: this is a fault of jaxmem; please report it with the lines above"


def one_line(error: BaseException) -> str:
    """An error as one line, for a table; further lines are details such as a compiler's log.

    >>> one_line(ValueError("too large\\nby far"))
    'ValueError: too large'
    """
    first = _message(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def is_users(error: BaseException) -> bool:
    """Whether it was raised from the user's code."""
    return any(map(_is_users, _frames(error)))


def _message(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    return str(error) or type(error).__name__


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def _is_users(frame: traceback.FrameSummary) -> bool:
    file = frame.filename
    if file.startswith(_libraries()):
        return False
    # Installed packages live below the standard library's folder, and may be the user's.
    return not file.startswith(sysconfig.get_paths()["stdlib"]) or "-packages" in file


def _libraries() -> tuple[str, ...]:
    modules = [sys.modules.get(name) for name in _LIBRARIES]
    files = [module.__file__ for module in modules if module is not None and module.__file__]
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return ("<", here + os.sep, *(os.path.dirname(file) + os.sep for file in files))
