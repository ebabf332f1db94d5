"""Real English text that every CPython carries, as bytes, and batches of it.

The text is the help on Python's topics, `pydoc_data.topics`.  It differs a
little from one Python to the next, so a run records its digest.
"""

import functools
from pydoc_data import topics

import numpy as np

VOCABULARY = 256
_HELD_OUT = 20  # one part in so many, at the end
LONGEST = 4096  # tokens of a sequence; the held-out text is several times that


@functools.cache
def text() -> bytes:
    """All topics, in the order of their names."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()


@functools.cache
def split() -> tuple[np.ndarray, np.ndarray]:
    """The text to train on and the text held out, each uint8[bytes]."""
    tokens = np.frombuffer(text(), np.uint8)
    cut = len(tokens) - len(tokens) // _HELD_OUT
    return tokens[:cut], tokens[cut:]


def unigram_entropy() -> float:
    """Nats per byte of the best guess that looks at no other byte."""
    counts = np.bincount(np.frombuffer(text(), np.uint8))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def batch(step: int, *, seed: int, size: int, sequence: int) -> np.ndarray:
    """The batch of one step, int32[size, sequence + 1]: a function of step and seed alone."""
    train, _ = split()
    starts = np.random.default_rng([seed, step]).integers(0, len(train) - sequence, size)
    return _windows(train, starts, sequence)


def held_out(*, size: int, sequence: int) -> np.ndarray:
    """The same windows of the held-out text every time, int32[size, sequence + 1]."""
    _, rest = split()
    starts = np.linspace(0, len(rest) - sequence - 1, size).astype(int)
    return _windows(rest, starts, sequence)


def _windows(tokens: np.ndarray, starts: np.ndarray, sequence: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)
