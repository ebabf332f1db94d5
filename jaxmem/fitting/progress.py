"""One line for each compile while plans are compiled, and a bar in a terminal."""

import sys
from typing import Any


class Progress:
    """Says on stderr how far the compiling of plans is; a context manager."""

    def __init__(self, shown: bool, total: int, what: str) -> None:
        from tqdm import tqdm

        # Only in a terminal: in a log each step of the bar would be a line of its own.
        self._bar = tqdm(
            total=total, unit="compile", desc=what, disable=None if shown else True, leave=False
        )
        self._shown = shown

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.close()

    def __call__(self, text: str) -> None:
        """One compile is done, and this is what it came to."""
        self._bar.update()
        if self._shown:
            self._bar.write(text, file=sys.stderr)
