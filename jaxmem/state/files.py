"""The files of an optimizer's state on disk.

layout.json      which arrays there are
lock, owner      held by the process that uses the folder, and which that is
step-00000050/   the arrays after 50 updates: `0/`, `1/`, …, by tensorstore in zarr's format
    whole        written last, when all of them are on the disk: the number of the update
    held         for a checkpoint
"""

import dataclasses
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmem._util.files import write_whole
from jaxmem.state.stored import Array, Layout

LAYOUT, LOCK, OWNER = "layout.json", "lock", "owner"

# ---------------------------------------------------------------- API


@dataclasses.dataclass(frozen=True)
class StateFiles:
    """What is in the folder at `path`; steps by the number of updates before them."""

    path: Path

    def folder(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def all_steps(self) -> list[int]:
        names = os.listdir(self.path) if self.path.is_dir() else []
        return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)

    def whole_steps(self) -> list[int]:
        return [step for step in self.all_steps() if (self.folder(step) / _WHOLE).exists()]

    def held_steps(self) -> list[int]:
        """Of the whole ones, those that are for checkpoints."""
        return [step for step in self.whole_steps() if (self.folder(step) / _HELD).exists()]

    def ticket(self, step: int) -> int:
        """The number that was drawn for the update that wrote a step."""
        return int((self.folder(step) / _WHOLE).read_text())

    def say_whole(self, step: int, ticket: int) -> None:
        write_whole(self.folder(step) / _WHOLE, str(ticket).encode())

    def say_held(self, step: int) -> None:
        write_whole(self.folder(step) / _HELD, b"")

    def remove(self, step: int) -> None:
        if self.folder(step).exists():
            (self.folder(step) / _WHOLE).unlink(missing_ok=True)
            shutil.rmtree(self.folder(step))

    def has_layout(self) -> bool:
        return (self.path / LAYOUT).exists()

    def write_layout(self, layout: Layout) -> None:
        write_whole(self.path / LAYOUT, _text(layout).encode())

    def difference(self, layout: Layout) -> str | None:
        """The first array in which the layout there differs from this one; None if none does."""
        text = (self.path / LAYOUT).read_text()
        return None if text == _text(layout) else _difference(text, layout)

    def damage(self, layout: Layout, step: int) -> str | None:
        """Which file of a step is missing or cut off; what is in them is checked when read."""
        for number, array in enumerate(layout.arrays):
            chunks = zip(array.shape, array.chunk, strict=True)
            expected = math.prod(-(-length // chunk) for length, chunk in chunks)
            bytes_each = math.prod(array.chunk) * array.itemsize + _DIGEST
            top = self.folder(step) / str(number) / "c"
            files = [Path(at, name) for at, _, names in os.walk(top) for name in names]
            for file in files:
                if (found := file.stat().st_size) != bytes_each:
                    return (
                        f"{file}, of {array.path}, has {found} bytes in the place of "
                        f"{bytes_each}: it was cut off or written to"
                    )
            if len(files) != expected:
                return f"{top} has {len(files)} files of {array.path} in the place of {expected}"
        return None

    def opened(self, step: int, number: int, array: Array, make: bool) -> Any:
        """An array of a step, by tensorstore, which reads and writes in threads of its own."""
        import tensorstore

        grid = {"name": "regular", "configuration": {"chunk_shape": list(array.chunk)}}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(self.folder(step) / str(number))},
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
            "metadata": {
                "shape": list(array.shape),
                "data_type": array.dtype,
                "chunk_grid": grid,
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
            },
        }
        return tensorstore.open(spec, context=_context(), create=make, open=not make).result()


def listed(steps: Sequence[int]) -> str:
    """ "steps 2, 4 and 6"."""
    if not steps:
        return "no step"
    *first, last = map(str, steps)
    return f"steps {', '.join(first)} and {last}" if first else f"step {last}"


# ---------------------------------------------------------------- implementation

_WHOLE, _HELD = "whole", "held"
_STEP = re.compile(r"step-(\d{8,})")
_DIGEST = 4  # bytes of the checksum after each chunk


@functools.cache
def _context() -> Any:
    import tensorstore

    return tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})


def _text(layout: Layout) -> str:
    arrays = [dataclasses.asdict(array) for array in layout.arrays]
    return json.dumps({"format": 1, "arrays": arrays}, indent=1)


def _difference(text: str, layout: Layout) -> str:
    try:
        held = {array["path"]: array for array in json.loads(text)["arrays"]}
    except (ValueError, KeyError, TypeError):
        return f"{LAYOUT} cannot be read"

    def told(array: Any) -> str:
        return f"{array['dtype']}{list(array['shape'])}"

    for array in layout.arrays:
        wanted, found = dataclasses.asdict(array), held.pop(array.path, None)
        if found is None:
            return f"{array.path} is not there"
        if told(found) != told(wanted):
            return f"{array.path} is {told(found)} there and {told(wanted)} here"
    return f"{next(iter(held))} is there, and not here" if held else "its files are cut otherwise"
