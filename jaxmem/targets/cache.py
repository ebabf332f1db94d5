"""Compilers' results cached on disk, so that the same program is not compiled twice.

One file per result, named by a hash of everything that it depends on.  A file is
written under a temporary name and renamed, so that a reader sees all of it or
none, and several processes need no lock.  Errors of the disk count as a cache
miss: the cache never makes a call fail.
"""

import contextlib
import errno
import gzip
import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import platformdirs

from jaxmem.errors import JaxmemWarning, warn

# ---------------------------------------------------------------- API


class Cache:
    """A bounded set of JSON objects on disk, by key.

    Two environment variables control it: JAXMEM_CACHE_DIR names the folder, and
    JAXMEM_CACHE=0 turns the cache off.

    >>> import tempfile
    >>> from jaxmem.targets import Cache
    >>> folder = tempfile.TemporaryDirectory()
    >>> cache, key = Cache(folder.name), Cache.key(program="abc", target="h100-80g")
    >>> cache.get(key)
    >>> cache.put(key, {"bytes": 1024})
    >>> cache.get(key)
    {'bytes': 1024}
    >>> folder.cleanup()
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, max_bytes: int = 2**30) -> None:
        """
        Args:
          root: the folder; None for the one of JAXMEM_CACHE_DIR, or the user's.
          max_bytes: of all files together; beyond it the least recently used are deleted.
        """
        given = root or os.environ.get("JAXMEM_CACHE_DIR") or platformdirs.user_cache_path("jaxmem")
        self.root = Path(given)
        self.max_bytes = max_bytes
        self.enabled = os.environ.get("JAXMEM_CACHE") != "0"

    @staticmethod
    def key(**parts: Any) -> str:
        """A key of everything that a result depends on; the order of the parts does not matter.

        Args:
          **parts: plain data: texts, bytes, numbers, None, and lists and dicts of them.

        Raises:
          TypeError: a part is something else.
        """
        digest = hashlib.sha256()
        for name in sorted(parts):
            data = parts[name]
            if isinstance(data, bytes | bytearray | memoryview):
                kind, text = "bytes", bytes(data)
            else:
                kind, text = "json", json.dumps(data, sort_keys=True, default=_plain).encode()
            # Lengths make the concatenation of the parts unambiguous.
            digest.update(f"{name}:{kind}:{len(text)}:".encode() + text)
        return digest.hexdigest()

    def get(self, key: str) -> dict[str, Any] | None:
        """The object stored under the key, None if there is none that can be read."""
        if not self.enabled:
            return None
        path = self._path(key)
        try:
            found = json.loads(gzip.decompress(path.read_bytes()))
        except (OSError, EOFError, ValueError, zlib.error):
            return None
        if not isinstance(found, dict) or found.get("key") != key:
            return None
        with contextlib.suppress(OSError):  # its place in the order is no more than a wish
            os.utime(path)
        value = found.get("value")
        return value if isinstance(value, dict) else None

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store a JSON object; warns once per process if it cannot be written."""
        if not self.enabled:
            return
        data = gzip.compress(
            json.dumps({"key": key, "value": value}).encode(), compresslevel=3, mtime=0
        )
        try:
            self._write(self._path(key), data)
        except OSError as error:
            _warn_once(self.root, error)
        else:
            self._shrink()

    def usage(self) -> tuple[int, int]:
        """The number of results, and their total bytes."""
        sizes = []
        for path in self._files():
            with contextlib.suppress(OSError):
                sizes.append(path.stat().st_size)
        return len(sizes), sum(sizes)

    def clear(self) -> None:
        """Delete all results."""
        for path in self._files():
            with contextlib.suppress(OSError):
                path.unlink()

    # ------------------------------------------------------------ implementation

    def _path(self, key: str) -> Path:
        return self.root / f"{key}{_SUFFIX}"

    def _write(self, path: Path, data: bytes) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # whoever made it, a file cannot be renamed to it
            path.rmdir()
        descriptor, name = tempfile.mkstemp(dir=self.root, prefix=_UNFINISHED)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _files(self) -> list[Path]:
        try:
            return [
                path
                for path in self.root.iterdir()
                if path.name.endswith(_SUFFIX) or path.name.startswith(_UNFINISHED)
            ]
        except OSError:
            return []

    def _shrink(self) -> None:
        sizes = []
        for path in self._files():
            with contextlib.suppress(OSError):  # another process was faster
                stat = path.stat()
                sizes.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in sizes)
        for _, size, path in sorted(sizes):
            if total <= self.max_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


_SUFFIX = ".json.gz"
_UNFINISHED = ".unfinished-"
_warned = False


def _warn_once(root: Path, error: OSError) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    warn(
        f"the cache in {root} cannot be written ({error.strerror or error}), so results are not "
        f"kept{'; clear it, or' if full else ';'} set JAXMEM_CACHE_DIR to another folder, or "
        "JAXMEM_CACHE=0 to do without",
        JaxmemWarning,
    )


def _plain(value: Any) -> Any:
    raise TypeError(f"a key is made of plain data, got {value!r} of type {type(value).__name__}")
