"""Ctrl-C and SIGTERM, heard between steps and not in the middle of one."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):
    """A signal asked the run to stop, and what is worth keeping has been kept."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Listener:
    """Remembers the first signal; the second one stops the program at once."""

    def __init__(self) -> None:
        self.heard: int | None = None

    def ask(self) -> int | None:
        """The signal that has come, if one has."""
        return self.heard

    def check(self) -> None:
        """Raises `Stopped` if a signal has come."""
        if (number := self.ask()) is not None:
            raise Stopped(number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard is not None:
            raise KeyboardInterrupt
        self.heard = number


@contextlib.contextmanager
def listening(listener: Listener | None = None) -> Iterator[Listener]:
    """Within this block, SIGINT and SIGTERM are only remembered."""
    listener = Listener() if listener is None else listener
    before = {n: signal.signal(n, listener._hear) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield listener
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
