"""Frozen dataclasses to JSON and back, strictly: every mismatch is an error that says where.

The types are read from the dataclass itself: numbers, texts, `None`, unions,
`Literal`, tuples of one type, dicts with texts or numbers as keys, and other such
dataclasses.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from typing import Any


def to_data(record: Any) -> dict[str, Any]:
    """A dataclass as plain data for `json`."""
    return {field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}


def parsed(text: str, what: str) -> Any:
    """The data in a JSON text.

    Args:
      what: is read, for the message.

    Raises:
      ValueError: it is not JSON; says where.

    >>> parsed("[1, 2", "plan")
    Traceback (most recent call last):
      ...
    ValueError: bad plan: not JSON at line 1 column 6: Expecting ',' delimiter
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"bad {what}: not JSON at line {error.lineno} column {error.colno}: {error.msg}"
        ) from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_data(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def from_data(cls: Any, data: Any, where: str = "") -> Any:
    """The dataclass `cls` that `to_data` wrote.

    Raises:
      ValueError: a key is unknown or missing, or a value is of another type; the message says
      which.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     name: str | None = None
    >>> from_data(Point, {"x": 1, "name": "a"})
    Point(x=1, name='a')
    >>> from_data(Point, {"x": "1"})
    Traceback (most recent call last):
      ...
    ValueError: x: expected a whole number, got '1'
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'the whole'}: expected an object, got {_short(data)}")
    path = f"{where}." if where else ""
    hints = _hints(cls)
    fields = dataclasses.fields(cls)
    if unknown := [key for key in data if key not in hints]:
        raise ValueError(f"{path}{unknown[0]}: unknown key")
    for field in fields:
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in data:
            raise ValueError(f"{path}{field.name}: missing")
    return cls(**{key: _read(hints[key], value, path + key) for key, value in data.items()})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in parts:
            return None
        rest = [part for part in parts if part is not type(None)]
        return _read(rest[0], value, where)
    if origin is typing.Literal:
        if value in parts:
            return value
        raise ValueError(f"{where}: expected one of {', '.join(map(repr, parts))}, got {value!r}")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_read(parts[0], item, f"{where}[{k}]") for k, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {
            _key(parts[0], key, where): _read(parts[1], item, f"{where}.{key}")
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(kind):
        return from_data(kind, value, where)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and (whole or isinstance(value, float)) and math.isfinite(value):
        return float(value)
    if (kind is int and whole) or (kind in (str, bool) and isinstance(value, kind)):
        return value
    raise ValueError(f"{where}: expected {_word(kind, origin)}, got {_short(value)}")


def _key(kind: Any, key: Any, where: str) -> Any:
    """A key of a dict, which JSON stores as text."""
    if kind is int and not str(key).isdecimal():
        raise ValueError(f"{where}: expected whole numbers as keys, got {_short(key)}")
    return kind(key)


def _word(kind: Any, origin: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(kind) or {tuple: "a list", dict: "an object"}.get(origin, str(kind))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
