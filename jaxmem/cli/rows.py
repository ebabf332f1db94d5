"""The CSV of a sweep: written row by row, locked against a second sweep, repaired after a crash.

Rows are only ever appended while a sweep runs, each in one write that reaches the
disk.  A row that replaces an earlier one of the same settings stands below it until
the file is closed, when it is written anew with the last row of each.
"""

import contextlib
import csv
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

# What a row is of.
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
    """An open CSV file, the only one of its path; a context manager.

    Attributes:
      path: where it is.
      by_key: the last row of each key.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
          OSError: it cannot be opened or written, or another sweep holds it.
          ValueError: it has other columns, or is no text.
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
        # A writer that was killed in mid-row leaves a line without its end.
        whole = data[: data.rfind(b"\n") + 1]
        text = _decoded(whole, self.path)
        lines = list(csv.reader(io.StringIO(text)))
        if lines and tuple(lines[0]) != COLUMNS:
            raise ValueError(_other_columns(self.path, lines[0]))
        if not lines and data and not ",".join(COLUMNS).encode().startswith(data):
            raise ValueError(f"{self.path} is not empty and is no CSV of a sweep; choose another")
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        self._file.seek(0, os.SEEK_END)
        if not lines:
            self._write(COLUMNS)
        for number, cells in enumerate(lines[1:], start=2):
            if len(cells) != len(COLUMNS):
                raise ValueError(
                    f"{self.path}, line {number}: {len(cells)} cells instead of {len(COLUMNS)}; "
                    "mend or delete that line"
                )
            self._remember(dict(zip(COLUMNS, cells, strict=True)))

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, to the disk; None becomes an empty cell."""
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
        """Let go of the file, replaced rows gone from it."""
        try:
            if self._rewrite:
                beside = self.path.with_name(f".{self.path.name}.new")
                rows = [COLUMNS, *(tuple(row.values()) for row in self.by_key.values())]
                beside.write_bytes(b"".join(map(_line, rows)))
                os.replace(beside, self.path)
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
    """What a row is of, as text."""
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
    # A row is one line, so that a torn one can be told.
    return " ".join(str(value).split()) if isinstance(value, str) else str(value)


def _line(cells: tuple[str, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8, so no CSV of a sweep") from None


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
    while True:
        file = open(path, "a+b")  # noqa: SIM115  held open for the whole sweep
        try:
            _lock(file)
        except OSError:
            file.close()
            raise OSError(
                f"another sweep is writing {path}; wait for it or choose another --out"
            ) from None
        file.seek(0)
        # The one who held it may have put a new file in its place just now.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(file: BinaryIO) -> None:
        # A byte far beyond the end, so that others can still read the file.
        file.seek(2**30)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lines_of(rows: dict[Key, Row], keys: list[Key]) -> Iterator[Row]:
    """The rows of these keys that are there, in their order."""
    return (rows[key] for key in keys if key in rows)
