"""Files that are written atomically."""

import os
import tempfile
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` atomically: a reader sees the old file or the new one."""
    content = content.encode() if isinstance(content, str) else content
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
