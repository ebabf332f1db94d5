"""How far planning and compiling are: a line for each compile, and a bar in a terminal.

What takes longer than two seconds is told of while it lasts.
"""

import sys
import threading
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
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._done()
        self._bar.close()

    def doing(self, what: str) -> None:
        """This has begun."""
        self._done()
        if self._shown:
            self._timer = threading.Timer(_PATIENCE, self._write, [f"fit: {what} ..."])
            self._timer.daemon = True
            self._timer.start()

    def planned(self, total: int, what: str) -> None:
        """From now on it is compiled: so often at most, for this."""
        self._done()
        self._bar.total = total
        self._bar.set_description(what)

    def __call__(self, text: str) -> None:
        """One compile is done, and this is what it came to."""
        self._done()
        self._bar.update()
        if self._shown:
            self._write(text)

    # ------------------------------------------------------------ implementation

    def _done(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _write(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)


# Seconds after which it is told what takes so long.
_PATIENCE = 2.0
