"""Standard output for results alone: JSON stays JSON, whatever a job or a compiler prints."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import click


@contextlib.contextmanager
def results_only() -> Iterator[None]:
    """While open, what Python or native code prints goes to standard error, warnings in one line.

    Results are printed after it is closed.
    """
    sys.stdout.flush()
    real = _is_real(sys.stdout)
    saved = os.dup(1) if real else None
    shown = warnings.showwarning
    try:
        if saved is not None:
            os.dup2(2, 1)
        warnings.showwarning = _show_warning
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        warnings.showwarning = shown
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


def say(text: str) -> None:
    """A word on standard error, about what goes on or where something was written."""
    click.echo(text, err=True)


def emit(renderable: Any) -> None:
    """A result for people: drawn by rich in a terminal, plain when piped."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(renderable)
    else:
        click.echo(str(renderable))


def _is_real(stream: Any) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):  # a stand-in, as notebooks and tests have
        return False


def _show_warning(message: Any, category: Any, *_: Any) -> None:
    say(f"warning: {' '.join(str(message).split())}")
