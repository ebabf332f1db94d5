"""The line of the user's code that computes a value."""

import os
import sys
from typing import Any

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "equinox", "jaxmem")


def source_line(eqn: Any) -> str:
    """The innermost line of code outside of libraries of layers.

    As "file.py:123 (function)"; empty if there is none.
    """
    traceback = eqn.source_info.traceback
    if traceback is None:
        return ""
    libraries = _libraries()
    for frame in traceback.frames:
        if not frame.file_name.startswith(libraries):
            function = frame.function_name.rsplit("<locals>.", 1)[-1]
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({function})"
    return ""


def _libraries() -> tuple[str, ...]:
    modules = [sys.modules.get(name) for name in _LIBRARIES]
    files = [module.__file__ for module in modules if module is not None and module.__file__]
    return ("<", *(os.path.dirname(file) + os.sep for file in files))
