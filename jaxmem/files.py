"""Files that are there whole or not at all."""

import os
import uuid
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write beside it, then put it in its place, so that no reader sees half of it."""
    # Not by `tempfile`, whose files are their owner's alone.
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
