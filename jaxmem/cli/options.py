"""Options that several commands share: comma-separated lists, settings of a job, targets."""

import os
import tomllib
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

_POLICIES = ("own", "none", "full", "dots", "dots_no_batch", "sqrt", "revolve", "offload")

# ---------------------------------------------------------------- types


class Names(click.ParamType):
    """A comma-separated list without duplicates."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if "" in parts:
            self.fail(f"{value!r} has an empty entry; write a,b,c", param, ctx)
        if twice := [part for k, part in enumerate(parts) if part in parts[:k]]:
            self.fail(f"{twice[0]!r} is given twice in {value!r}", param, ctx)
        return tuple(parts)


class Setting(click.ParamType):
    """key=value."""

    name = "key=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = value.partition("=")
        if not equals or not key.isidentifier():
            self.fail(f"{value!r} is not a setting; write key=value, as in batch=16", param, ctx)
        return key, text


class Budget(click.ParamType):
    """Bytes, as in 40GiB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        from jaxmem._util.text import parse_size

        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


# ---------------------------------------------------------------- options


def _complete_names(known: Callable[[], tuple[str, ...]]) -> Any:
    def complete(ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        used = before.split(",")
        return [
            CompletionItem(before + comma + name)
            for name in known()
            if name.startswith(last) and name not in used
        ]

    return complete


def target_names() -> tuple[str, ...]:
    """The names of the catalogue, read without importing jax."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(os.path.join(package, "targets", "accelerators.toml"), "rb") as file:
        tables = tomllib.load(file)
    rows = [rows for rows in tables.values() if isinstance(rows, dict)]
    return ("local", *(name for table in rows for name in table))


complete_targets = _complete_names(target_names)
complete_policies = _complete_names(lambda: _POLICIES)

job_argument = click.argument("where", metavar="JOB")

set_option = click.option(
    "--set",
    "settings",
    type=Setting(),
    multiple=True,
    metavar="KEY=VALUE",
    help="A keyword argument of the job, such as batch=16; may be repeated.",
)

timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=900.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop a compiler after this time.",
)

cache_option = click.option(
    "--no-cache", is_flag=True, help="Neither read nor write the cache of compiled results."
)

json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help='Print JSON, and nothing else, on standard output; an error is {"error": …}.',
)
