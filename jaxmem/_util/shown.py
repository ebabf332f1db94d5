"""Results that can be displayed without depending on how: `jaxmem.show` registers that here.

Data must not depend on its display, yet ``print(report)``, the last line of a notebook's cell
and ``report.plot()`` are calls of the data's methods.  Each function below is a
`functools.singledispatch` that `Shown` calls; `jaxmem.show` is imported when a result is
first displayed.
"""

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---------------------------------------------------------------- API


class Shown:
    """A result that is displayed as text, with rich and as HTML."""

    def __str__(self) -> str:
        _register()
        return as_text(self)

    def __rich__(self) -> Any:
        _register()
        return as_rich(self)

    def _repr_html_(self) -> str:
        _register()
        return as_html(self)


def picture(value: Any, kind: str, path: str | os.PathLike[str] | None, options: Any) -> "Figure":
    """A picture of a result; `kind` is the name of the method that draws it."""
    _register()
    return as_picture(value, kind)(value, path, **options)


@functools.singledispatch
def as_text(value: Any) -> str:
    """The result as plain text."""
    raise TypeError(f"nothing is registered that shows a {type(value).__name__}")


@functools.singledispatch
def as_rich(value: Any) -> Any:
    """The result as an object for rich to print."""
    raise TypeError(f"nothing is registered that shows a {type(value).__name__}")


@functools.singledispatch
def as_html(value: Any) -> str:
    """The result as one element of HTML."""
    raise TypeError(f"nothing is registered that shows a {type(value).__name__}")


@functools.singledispatch
def as_picture(value: Any, kind: str) -> Any:
    """The function of the result, a path and options that draws it."""
    raise TypeError(f"nothing is registered that draws a {type(value).__name__}")


# ---------------------------------------------------------------- implementation


@functools.cache
def _register() -> None:
    importlib.import_module("jaxmem.show.looks")
