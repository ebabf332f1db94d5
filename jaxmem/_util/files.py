"""Files that are written atomically."""

import errno
import os
import uuid
from pathlib import Path
from typing import Self


class Saved:
    """Base of classes saved as JSON text; the subclass has `to_json` and `from_json`."""

    def to_json(self) -> str:
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; the file is replaced atomically."""
        write_whole(Path(path), f"{self.to_json()}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file holds something else; the message names the file and the place.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a temporary file next to it and rename that, so that no reader sees half of it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "there is no such folder to write to", str(path.parent)
        )
    # Not with `tempfile`, whose files only the owner may read.
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
