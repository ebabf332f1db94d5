"""How far planning and compiling are: a line for each compile, and a bar in a terminal."""

import sys
from typing import Any


class Progress:
    """Says on stderr how far a search for plans is; a context manager around all of it.

    Args:
      total: how many compiles there will be, at most.
    """

    def __init__(self, shown: bool, total: int) -> None:
        from tqdm import tqdm

        # Only in a terminal: in a log each step of the bar would be a line of its own.
        self._bar = tqdm(
            total=total,
            unit="compile",
            desc="planning",
            disable=None if shown else True,
            leave=False,
        )
        self._shown = shown

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.close()

    def planned(self, total: int, what: str) -> None:
        """From now on it is compiled: so often at most, for this."""
        self._bar.total = total
        self._bar.set_description(what)

    def __call__(self, text: str) -> None:
        """One compile is done, and this is what it came to."""
        self._bar.update()
        if self._shown:
            self._bar.write(text, file=sys.stderr)
