"""A table of results in one CSV, which the same command resumes after an interruption.

A row is a dataclass that derives from `Record`; its fields are the columns.  A row is valid only
for the versions that made it: with others it is measured anew and replaced.
"""

import csv
import dataclasses
import datetime
import importlib.metadata
import io
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import jaxmem
from jaxmem import targets
from lm import files

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Base of the rows.

    Attributes:
      versions: of the packages that determine the row.
      date: on which it was measured.
    """

    versions: str
    date: str = dataclasses.field(default_factory=lambda: datetime.date.today().isoformat())


R = TypeVar("R", bound=Record)


class Table(Generic[R]):
    """The existing rows; each new one is on disk before the next is begun.

    Args:
      path: of the CSV.
      kind: of row; columns may hold str, bool, int, float and None.
      key: names of the columns that tell one row from the others.

    Raises:
      ValueError: the file has other columns.
    """

    def __init__(self, path: Path, kind: type[R], key: Sequence[str]) -> None:
        self.path = path
        self._kind = kind
        self._key = tuple(key)
        self._rows = {self._key_of(row): row for row in read(path, kind)}

    def find(self, versions: str, **key: Any) -> R | None:
        """The row of this key by these versions, if it has been made."""
        row = self._rows.get(tuple(key[name] for name in self._key))
        return row if row is not None and row.versions == versions else None

    def of(self, versions: str, **values: Any) -> list[R]:
        """All rows by these versions that have these values."""
        return [
            row
            for row in self._rows.values()
            if row.versions == versions
            and all(getattr(row, name) == value for name, value in values.items())
        ]

    def add(self, *rows: R) -> None:
        """Put rows in, in the place of earlier ones of the same key, and write all."""
        self._rows |= {self._key_of(row): row for row in rows}
        self._write()

    def drop(self, rows: Sequence[R]) -> None:
        """Forget these rows."""
        gone = {self._key_of(row) for row in rows}
        self._rows = {key: row for key, row in self._rows.items() if key not in gone}
        self._write()

    def _key_of(self, row: R) -> tuple[Any, ...]:
        return tuple(getattr(row, name) for name in self._key)

    def _write(self) -> None:
        out = io.StringIO()
        names = _columns(self._kind)
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        for row in self._rows.values():
            cells = {name: getattr(row, name) for name in names}
            writer.writerow({key: "" if cell is None else cell for key, cell in cells.items()})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write(self.path, out.getvalue())


# ---------------------------------------------------------------- API


def read(path: Path, kind: type[R]) -> list[R]:
    """The rows of a file; none if there is no such file.

    Raises:
      ValueError: the file has other columns.
    """
    if not path.exists():
        return []
    hints = typing.get_type_hints(kind)
    names = _columns(kind)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or ()) != names:
            raise ValueError(f"{path} has other columns than this experiment writes; remove it")
        return [
            kind(**{name: _value(text, hints[name]) for name, text in cells.items()})
            for cells in reader
        ]


def versions(target: str = "local", *packages: str) -> str:
    """The versions that determine the figures of a compiled program, for `Record.versions`.

    Args:
      packages: other distributions that matter, such as "equinox".
    """
    found = {"jax": importlib.metadata.version("jax")}
    if target != "local":
        found = dict(targets.versions(jaxmem.target(target)))
    found |= {name: importlib.metadata.version(name) for name in packages}
    return ", ".join(f"{name} {number}" for name, number in sorted(found.items()))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first row is the heading, the first column is text, others figures."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join(cells)} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(rows[0]), f"|{rule}|", *map(line, rows[1:])])


# ---------------------------------------------------------------- implementation


def _columns(kind: type[Record]) -> list[str]:
    """The row's own columns, then those of all rows."""
    names = [field.name for field in dataclasses.fields(kind)]
    shared = [field.name for field in dataclasses.fields(Record)]
    return [name for name in names if name not in shared] + shared


def _value(text: str, kind: Any) -> Any:
    optional = isinstance(kind, types.UnionType)
    if optional and not text:
        return None
    kind = typing.get_args(kind)[0] if optional else kind
    return text == "True" if kind is bool else kind(text)
