"""One line for each compile while `fit` works, and a bar in a terminal."""

import sys
from typing import Any

from jaxmem.text import size


class Progress:
    """Says on stderr how far a search is; a context manager."""

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

    def __call__(self, rung: int, rungs: int, predicted: int, needed: int, budget: int) -> None:
        """What one compile came to."""
        self._bar.update()
        if self._shown:
            verdict = "fits" if needed <= budget else f"{size(needed - budget)} too much"
            self._bar.write(
                f"fit: plan {rung + 1} of {rungs} needs {size(needed)} "
                f"(foretold {size(predicted)}): {verdict}",
                file=sys.stderr,
            )
