"""A command as it runs in a terminal."""

import os
import pty
import subprocess
import termios
from collections.abc import Sequence
from typing import Any


def in_terminal(command: Sequence[str], stdout: Any = None, **options: Any) -> tuple[int, str]:
    """Its exit code, and what it wrote on the terminal.

    Args:
      command: the words.
      stdout: where standard output goes instead of to the terminal.
      **options: of `subprocess.Popen`.
    """
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))
    with subprocess.Popen(command, stdout=stdout or child, stderr=child, **options) as process:
        os.close(child)
        said = b""
        while more := _read(parent):
            said += more
    os.close(parent)
    return process.returncode, said.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # on Linux, the sign that the other end is closed
        return b""
