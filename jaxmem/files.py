"""Files that are there whole or not at all."""

import errno
import os
import uuid
from pathlib import Path
from typing import Self


class Saved:
    """Base of what is saved as its JSON text; `to_json` and `from_json` are the subclass's."""

    def to_json(self) -> str:
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file is there whole or not at all."""
        write_whole(Path(path), f"{self.to_json()}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file holds no such thing; the message names the file and the place.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write beside it, then put it in its place, so that no reader sees half of it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "there is no such folder to write to", str(path.parent)
        )
    # Not by `tempfile`, whose files are their owner's alone.
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
