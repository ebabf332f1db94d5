"""Standard output is for results only: JSON stays valid, whatever a job or a compiler prints."""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import click


@contextlib.contextmanager
def results_only() -> Iterator[None]:
    """Redirect what Python or native code prints to standard error, each warning in one line.

    Print results after the context is closed.
    """
    out = sys.stdout
    out.flush()
    real = _is_real(out)
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
            out.flush()  # what was written to it by another name: `sys.__stdout__`
            os.dup2(saved, 1)
            os.close(saved)


class Document:
    """The JSON on standard output of one run of the command: one document, whatever fails."""

    def __init__(self) -> None:
        self._written = False

    def write(self, data: Any) -> None:
        """Print `data`, unless a document was printed; later errors go to standard error only."""
        if self._written:
            return
        self._written = True
        click.echo(json.dumps(data))
        if _is_real(sys.stdout):  # a job may print when the process ends
            sys.stdout.flush()
            os.dup2(2, 1)


def emit_json(data: Any) -> None:
    """Print a result as JSON."""
    click.get_current_context().ensure_object(Document).write(data)


def say(text: str) -> None:
    """Print a message on standard error: progress, or where a file was written."""
    click.echo(text, err=True)


def emit(renderable: Any) -> None:
    """Print a result for people: with rich in a terminal, as plain text when piped."""
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
