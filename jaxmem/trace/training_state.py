"""What each leaf of a call's arguments is to training: a parameter, or a field of the state.

Parameters are told by what the caller says; else by their path, where a part of it is "params",
the name that Flax and optax have for them; else by the optimizer's state, whose fields repeat
the paths below the parameters ("nu/layers/up" and "weights/layers/up").  What none of these
tells is no parameter.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from jaxmem.trace.state_fields import StateLeaf

# Arguments, by position or by path.
Named = int | str | Sequence[int | str] | None

_CALLED = frozenset({"params", "parameters"})

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of a call's arguments.

    Attributes:
      path: as reports print it, such as "state/opt_state/mu/w".
      position: of the argument that it is in, None for a keyword.
      shape: of the array.
      state: what its containers say of it.
    """

    path: str
    position: int | None
    shape: tuple[int, ...]
    state: StateLeaf


@dataclasses.dataclass(frozen=True)
class Told:
    """What leaves are, in their order.

    Attributes:
      fields: the field of an optimizer's state that each is of, None for what is none.
      parameters: whether each is a parameter.
    """

    fields: tuple[str | None, ...]
    parameters: tuple[bool, ...]


# ---------------------------------------------------------------- API


def told(
    leaves: Sequence[Leaf], count: int, optimizer_state: Named = None, parameters: Named = None
) -> Told:
    """Tell parameters and optimizer state among the leaves of a call's arguments.

    Args:
      count: of positional arguments.
      optimizer_state, parameters: the arguments that are those, or parts of them; None to tell
        them by their form.  Where one is within the other, a leaf is what the longer path says.

    Raises:
      TypeError: one of them is neither a position nor a path, nor several of those.
      ValueError: one is of no argument, or both are of the same leaf.

    >>> paths = ["weights/w", "mine/m/w", "mine/v/w", "x"]
    >>> leaves = [Leaf(path, k, (3,), StateLeaf(None)) for k, path in enumerate(paths)]
    >>> found = told(leaves, 4, optimizer_state="mine")
    >>> found.fields, found.parameters
    ((None, 'm', 'v', None), (True, False, False, False))
    """
    states = _claimed("optimizer_state", optimizer_state, leaves, count)
    params = _claimed("parameters", parameters, leaves, count)
    for leaf, state, param in zip(leaves, states, params, strict=True):
        if state is not None and state == param:
            raise ValueError(
                f"the argument '{state}' is named in optimizer_state= and in parameters=, and "
                f"{leaf.path} can be one of them only; take it out of one, or give the path of a "
                "part of it"
            )
    fields = tuple(
        _field(leaf, state, param, optimizer_state is not None)
        for leaf, state, param in zip(leaves, states, params, strict=True)
    )
    if parameters is not None:
        is_param = tuple(
            param is not None and field is None for param, field in zip(params, fields, strict=True)
        )
    else:
        is_param = _by_name(leaves, fields)
        if not any(is_param):
            is_param = _by_mirror(leaves, fields)
    return Told(fields, is_param)


# ---------------------------------------------------------------- implementation


def _claimed(what: str, given: Named, leaves: Sequence[Leaf], count: int) -> list[str | None]:
    """For each leaf the longest of the paths given that it is under."""
    several = list(given) if isinstance(given, tuple | list) else [given]
    found: list[str | None] = [None] * len(leaves)
    for one in [] if given is None else several:
        if isinstance(one, str):
            under = {k: one for k, leaf in enumerate(leaves) if _is_under(leaf.path, one)}
        else:
            position = _position(what, one, count)
            under = {
                k: _root(leaf.path) for k, leaf in enumerate(leaves) if leaf.position == position
            }
        if not under:
            roots = ", ".join(dict.fromkeys(_root(leaf.path) for leaf in leaves))
            raise ValueError(
                f"{what}={one!r} is no array among the arguments, which are {roots}; give the "
                "position of one, or a path as the report prints it, such as 'state/mu'"
            )
        for k, path in under.items():
            if found[k] is None or len(path) > len(found[k] or ""):
                found[k] = path
    return found


def _position(what: str, given: Any, count: int) -> int:
    try:
        if isinstance(given, bool):
            raise TypeError
        position = operator.index(given)
    except TypeError:
        raise TypeError(
            f"{what} takes the position of an argument or its path, or several of those, got "
            f"{given!r} of type {type(given).__name__}; an argument of the function of that name "
            "goes by position"
        ) from None
    return position + count if position < 0 else position


def _is_under(path: str, start: str) -> bool:
    return path == start or path.startswith(f"{start}/")


def _root(path: str) -> str:
    return path.partition("/")[0]


def _field(leaf: Leaf, state: str | None, param: str | None, is_named: bool) -> str | None:
    """The field of a leaf: its named tuple's, or else the next part of its path."""
    if state is None or len(param or "") > len(state):
        return None if is_named or param is not None else leaf.state.field
    below = leaf.path[len(state) + 1 :]
    return leaf.state.field or (_root(below) if below else state.rpartition("/")[2])


def _by_name(leaves: Sequence[Leaf], fields: Sequence[str | None]) -> tuple[bool, ...]:
    return tuple(
        field is None and not _CALLED.isdisjoint(leaf.path.split("/"))
        for leaf, field in zip(leaves, fields, strict=True)
    )


def _by_mirror(leaves: Sequence[Leaf], fields: Sequence[str | None]) -> tuple[bool, ...]:
    """Leaves whose paths end as those of a field of the state do, if they are in one place."""
    below = {
        (leaf.path.rpartition(f"/{field}/")[2], leaf.shape)
        for leaf, field in zip(leaves, fields, strict=True)
        if field is not None and f"/{field}/" in leaf.path
    }
    found: dict[str, set[int]] = {}
    for k, (leaf, field) in enumerate(zip(leaves, fields, strict=True)):
        if field is not None:
            continue
        for start in _starts(leaf.path):
            if (leaf.path[len(start) + 1 :], leaf.shape) in below:
                found.setdefault(start, set()).add(k)
    most = max(map(len, found.values()), default=0)
    best = [where for where in found.values() if len(where) == most]
    return tuple(len(best) == 1 and k in best[0] for k in range(len(leaves)))


def _starts(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:k]) for k in range(1, len(parts))]
