"""The CSV of a sweep: written row by row, locked against a second sweep, repaired after a crash.

While a sweep runs, rows are only appended, each in one synced write.  A row that
replaces an earlier one of the same settings stands below it until the file is
closed, when it is rewritten with the last row of each.
"""

import contextlib
import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from jaxmem.errors import JaxmemWarning, warn

# What identifies a row.
KEY = ("target", "policy", "batch", "accum", "settings")
NUMBERS = (
    "required_bytes",
    "capacity_bytes",
    "default_capacity_bytes",
    "argument_bytes",
    "output_bytes",
    "alias_bytes",
    "temp_bytes",
    "host_bytes",
    "on_chip_bytes",
    "peak_bytes",
    "flops",
    "bytes_moved",
    "matmul_flops",
    "model_matmul_flops",
)
FRACTIONS = ("recompute_overhead", "estimated_seconds", "compile_seconds")
COLUMNS = (
    *KEY,
    "fits",
    *NUMBERS,
    *FRACTIONS,
    "device",
    "platform",
    "devices",
    "jaxmem",
    "jax",
    "compiler",
    "program",
    "error",
)

Row = dict[str, str]
Key = tuple[str, ...]


class Rows:
    """An open CSV file, locked; a context manager.

    Attributes:
      path: where it is.
      by_key: the last row of each key.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
          OSError: it cannot be opened or written, or another sweep has locked it.
          ValueError: it has other columns, or is not text.
        """
        self.path = path
        self.by_key: dict[Key, Row] = {}
        self._rewrite = False
        self._file = _locked(path)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> None:
        data = self._file.read()
        # A writer killed in mid-row leaves a line without a line end.
        whole = data[: data.rfind(b"\n") + 1]
        text = _decoded(whole, self.path)
        lines = list(csv.reader(io.StringIO(text)))
        if lines and tuple(lines[0]) != COLUMNS:
            raise ValueError(_other_columns(self.path, lines[0]))
        if not lines and data and not ",".join(COLUMNS).encode().startswith(data):
            raise ValueError(f"{self.path} is not empty and not the CSV of a sweep; choose another")
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        self._file.seek(0, os.SEEK_END)
        if not lines:
            self._write(COLUMNS)
        for number, cells in enumerate(lines[1:], start=2):
            if len(cells) != len(COLUMNS):
                raise ValueError(
                    f"{self.path}, line {number}: {len(cells)} cells instead of {len(COLUMNS)}; "
                    "correct or delete that line"
                )
            self._remember(dict(zip(COLUMNS, cells, strict=True)))

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and sync it to disk; None becomes an empty cell."""
        texts = {column: _cell(row.get(column)) for column in COLUMNS}
        self._write(tuple(texts.values()))
        self._remember(texts)

    def _remember(self, row: Row) -> None:
        key = key_of(row)
        self._rewrite |= key in self.by_key
        self.by_key[key] = row

    def _write(self, cells: tuple[str, ...]) -> None:
        self._file.write(_line(cells))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, without the rows that were replaced."""
        try:
            if self._rewrite:
                replacement = self.path.with_name(f".{self.path.name}.new")
                rows = [COLUMNS, *(tuple(row.values()) for row in self.by_key.values())]
                replacement.write_bytes(b"".join(map(_line, rows)))
                os.replace(replacement, self.path)
        finally:
            self._file.close()

    def __enter__(self) -> "Rows":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def key_of(row: dict[str, Any]) -> Key:
    """The columns that identify a row, as text."""
    return tuple(_cell(row.get(column)) for column in KEY)


def values_of(row: Row) -> dict[str, Any]:
    """The cells as values: numbers, True and False; None for an empty cell.

    >>> values_of({"target": "h100-80g", "fits": "true", "temp_bytes": "12", "error": ""})
    {'target': 'h100-80g', 'fits': True, 'temp_bytes': 12, 'error': None}
    """
    return {column: _value(column, cell) for column, cell in row.items()}


def _value(column: str, cell: str) -> Any:
    if not cell:
        return None
    if column in NUMBERS or column == "devices":
        return int(cell)
    if column in FRACTIONS:
        return float(cell)
    return cell == "true" if column == "fits" else cell


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    # A row is one line, so that an incomplete one is recognised.
    return " ".join(str(value).split()) if isinstance(value, str) else str(value)


def _line(cells: tuple[str, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text, so not the CSV of a sweep") from None


def _other_columns(path: Path, found: list[str]) -> str:
    lacking = [column for column in COLUMNS if column not in found]
    beyond = [column for column in found if column not in COLUMNS]
    parts = [
        *([f"it lacks {', '.join(lacking)}"] if lacking else []),
        *([f"it has {', '.join(beyond)} beyond them"] if beyond else []),
    ]
    return (
        f"{path} has other columns than a sweep writes: "
        f"{'; '.join(parts) or 'they are in another order'}; choose another --out"
    )


def _locked(path: Path) -> BinaryIO:
    from filelock import lock_descriptor  # not loaded for a table alone

    while True:
        file = open(path, "a+b")  # noqa: SIM115  held open for the whole sweep
        try:
            mine = lock_descriptor(file.fileno(), blocking=False)
        except OSError as error:  # not every file system of a cluster has locks
            words = f"{path} cannot be locked ({error.strerror}): run one sweep at a time"
            warn(words, JaxmemWarning)
            mine = True
        if not mine:
            file.close()
            raise OSError(f"another sweep is writing {path}; wait for it or choose another --out")
        file.seek(0)
        # The previous holder of the lock may just have replaced the file.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


def lines_of(rows: dict[Key, Row], keys: list[Key]) -> Iterator[Row]:
    """The existing rows of these keys, in the order of the keys."""
    return (rows[key] for key in keys if key in rows)
