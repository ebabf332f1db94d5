"""A digest that identifies a program, independent of where jaxmem was called.

The portable form of a program holds the call stack of every operation: the lines of
the user's function, which reports show, and outside them the lines that called
jaxmem, which are no part of the program.  The digest is of everything but the latter,
so that a report requested from another line is found in the cache.
"""

import hashlib
import re
from pathlib import Path

from jaxmem.compile import program

_DEFINITION = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_USE = re.compile(r"loc\((#loc\d*)\)")
_CALL = re.compile(r"callsite\((#loc\d*) at (#loc\d*)\)")
_NAMED = re.compile(r'(".*")\((#loc\d*)\)')


def digest(module: str) -> str:
    """A digest of a program.

    Args:
      module: as text, including locations.

    >>> inner = '#loc1 = loc("model.py":3:4)\\n#loc2 = loc("f"(#loc1))\\n'
    >>> def called_from(line):
    ...     here = f'#loc3 = loc("{_HERE}":9:0)\\n#loc4 = loc("you.py":{line}:0)\\n'
    ...     calls = "#loc5 = loc(callsite(#loc3 at #loc4))\\n#loc6 = loc(callsite(#loc2 at #loc5))"
    ...     return digest(f"%0 = sine %x loc(#loc6)\\n{inner}{here}{calls}")
    >>> called_from(1) == called_from(2)
    True
    >>> called_from(1) == digest("%0 = sine %x loc(#loc6)")
    False
    """
    definitions = dict(_DEFINITION.findall(module))
    seen: dict[str, str | None] = {}

    def resolved(name: str) -> str | None:
        """The location with its references written out; None if it is outside the program."""
        if name not in seen:
            seen[name] = None  # none refers to itself, but a text from elsewhere might
            seen[name] = written(definitions.get(name, ""))
        return seen[name]

    def written(text: str) -> str | None:
        if call := _CALL.fullmatch(text):
            inner, outer = resolved(call[1]), resolved(call[2])
            return inner if inner is None or outer is None else f"{inner} at {outer}"
        if named := _NAMED.fullmatch(text):
            inner = resolved(named[2])
            # The name of an operation stays; that of a function is dropped with its line.
            return inner and f"{named[1]}({inner})"
        return None if text.startswith(f'"{_HERE}"') else text

    body = _DEFINITION.sub("", module)
    body = _USE.sub(lambda use: f"loc({resolved(use[1])})", body)
    return hashlib.sha256(body.encode()).hexdigest()


_HERE = str(Path(program.__file__))
