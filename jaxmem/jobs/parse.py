"""Texts from a shell as values of a type, or as a policy with its options."""

import ast
import dataclasses
import types
import typing
from typing import Any

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class PolicyText:
    """A policy on the command line: its name, and options such as slots=4.

    As text "revolve" or "revolve:slots=4", or "own" for the policies in the job's code.
    """

    name: str = "own"
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "PolicyText":
        """Read such a text, without checking that the policy exists.

        Raises:
          ValueError: an option is not written as key=value.

        >>> PolicyText.parse("sqrt:levels=2")
        PolicyText(name='sqrt', options=(('levels', 2),))
        """
        name, *rest = text.split(":")
        options = []
        for part in rest:
            key, equals, value = part.partition("=")
            if not equals or not key.isidentifier():
                raise ValueError(
                    f"bad policy {text!r}: write options as in revolve:slots=4, sqrt:levels=2"
                )
            options.append((key, literal(value)))
        return cls(name, tuple(options))

    @property
    def text(self) -> str:
        """The text that `parse` reads."""
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.options)])

    @property
    def is_own(self) -> bool:
        """Whether the policies in the job's code are left as they are."""
        return self.name == "own"

    @property
    def value(self) -> Any:
        """As a job's keyword `policy` takes it: the name, or a policy if it has options."""
        if not self.options:
            return self.name
        from jaxmem import policies

        return policies.parse(self.name, **dict(self.options))


# ---------------------------------------------------------------- API


def parse(text: str, kind: Any) -> Any:
    """The text as a value of an annotated type; for `Any` as `literal` reads it.

    Raises:
      ValueError: it is not a value of this type.

    >>> parse("16", int), parse("none", int | None), parse("1, 2", tuple), parse("16", str)
    (16, None, (1, 2), '16')
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return parse(text, parts[0])
    if origin in (typing.Union, types.UnionType):
        return _one_of(text, parts)
    if origin is typing.Literal:
        for part in parts:
            if text == str(part):
                return part
        raise ValueError(text)
    if kind is bool:
        if (word := text.lower()) not in _TRUTH:
            raise ValueError(text)
        return _TRUTH[word]
    if kind in (int, float, str):
        return kind(text)
    value = literal(text)
    wanted = origin or kind
    if wanted in (tuple, list):
        return wanted(value if isinstance(value, tuple | list) else (value,))
    if isinstance(wanted, type) and wanted is not object and not isinstance(value, wanted):
        raise ValueError(text)
    return value


def literal(text: str) -> Any:
    """The text as a Python literal such as a number, None, True or a tuple, else as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def words(kind: Any) -> str:
    """The name of a type in messages."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if kind in names:
        return names[kind]
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, parts))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join("none" if part is type(None) else words(part) for part in parts)
    return a(getattr(kind, "__name__", str(kind)))


def a(noun: str) -> str:
    """The noun with its article."""
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


# ---------------------------------------------------------------- implementation


def _one_of(text: str, parts: tuple[Any, ...]) -> Any:
    if type(None) in parts and text.lower() == "none":
        return None
    # Any text is a str, so str comes last.
    for part in sorted((p for p in parts if p is not type(None)), key=lambda p: p is str):
        try:
            return parse(text, part)
        except ValueError:
            continue
    raise ValueError(text)
