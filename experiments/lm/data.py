"""Real English text that every CPython carries, as bytes, and batches of it.

The text is the help on Python's topics, `pydoc_data.topics`.  It differs a
little from one Python to the next, so a run records its digest.

Many topics repeat one another's paragraphs word for word.  A plain cut of the
text would therefore hold out what was trained on; here whole topics are held
out, and of those only the paragraphs that no other topic has.
"""

import functools
from pydoc_data import topics

import numpy as np

VOCABULARY = 256
PADDING = 0  # a byte that the text has nowhere
LONGEST = 4096  # tokens of a sequence; the held-out text is longer than that
_ALL = slice(None)
_HELD_OUT = 20  # one topic in so many, from the middle of the first so many


@functools.cache
def text() -> bytes:
    """All topics, in the order of their names."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()


@functools.cache
def split() -> tuple[np.ndarray, np.ndarray]:
    """The text to train on and the text held out, each uint8[bytes]."""
    names = sorted(topics.topics)
    ours = set(names[_HELD_OUT // 2 :: _HELD_OUT])
    train = "\n".join(topics.topics[name] for name in names if name not in ours)
    seen = set(_paragraphs(train))
    rest = [
        paragraph
        for name in sorted(ours)
        for paragraph in _paragraphs(topics.topics[name])
        if paragraph not in seen
    ]
    return _tokens(train), _tokens("\n\n".join(rest))


def unigram_entropy(tokens: np.ndarray | None = None) -> float:
    """Nats per byte of the best guess that looks at no other byte; of the whole text by default."""
    counts = np.bincount(np.frombuffer(text(), np.uint8) if tokens is None else tokens)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def batch(step: int, *, seed: int, size: int, sequence: int, rows: slice = _ALL) -> np.ndarray:
    """The batch of one step, int32[size, sequence + 1]: a function of step and seed alone.

    Args:
      rows: those of the batch that are wanted; the others are not read.
    """
    train, _ = split()
    starts = np.random.default_rng([seed, step]).integers(0, len(train) - sequence, size)
    return _windows(train, starts[rows], sequence)


def ragged_batch(
    step: int, *, seed: int, size: int, sequence: int, rows: slice = _ALL
) -> np.ndarray:
    """The same of pieces of paragraphs, padded with `PADDING`, int32[size, sequence + 1].

    A paragraph is cut into as few pieces as can be; the last byte of one is the first of the
    next, so that every byte but the first of a paragraph is to be guessed once.
    """
    pieces = _pieces(sequence)
    chosen = np.random.default_rng([seed, step]).integers(0, len(pieces), size)
    return pieces[chosen[rows]].astype(np.int32)


def held_out(*, size: int, sequence: int) -> np.ndarray:
    """The same windows of the held-out text every time, int32[size, sequence + 1]."""
    _, rest = split()
    starts = np.linspace(0, len(rest) - sequence - 1, size).astype(int)
    return _windows(rest, starts, sequence)


# ---------------------------------------------------------------- implementation


def _paragraphs(part: str) -> list[str]:
    return [paragraph.strip() for paragraph in part.split("\n\n")]


@functools.cache
def _pieces(sequence: int) -> np.ndarray:
    """All pieces of the text to train on, uint8[pieces, sequence + 1]."""
    train, _ = split()
    found = [
        paragraph[start : start + sequence + 1]
        for paragraph in train.tobytes().split(b"\n\n")
        for start in range(0, len(paragraph) - 1, sequence)
    ]
    padded = b"".join(piece.ljust(sequence + 1, bytes([PADDING])) for piece in found)
    return np.frombuffer(padded, np.uint8).reshape(len(found), sequence + 1)


def _tokens(part: str) -> np.ndarray:
    return np.frombuffer(part.encode(), np.uint8)


def _windows(tokens: np.ndarray, starts: np.ndarray, sequence: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)
