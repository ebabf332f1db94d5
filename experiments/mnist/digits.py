"""Handwritten digits: MNIST's own files where they are given, else those of scikit-learn."""

import dataclasses
import gzip
import struct
from pathlib import Path

import numpy as np

from mnist.net import CLASSES, SIDE

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True, eq=False)
class Digits:
    """Images from 0 to 1, (n, 28, 28, 1), and labels, (n,), to train on and held out.

    Attributes:
      source: what they are, for the table.
    """

    source: str
    images: np.ndarray
    labels: np.ndarray
    held_out_images: np.ndarray
    held_out_labels: np.ndarray

    def first(self, count: int) -> "Digits":
        """So many to train on, and so many held out."""
        arrays = (self.images, self.labels, self.held_out_images, self.held_out_labels)
        return Digits(self.source, *(array[:count] for array in arrays))


# ---------------------------------------------------------------- API


def load(folder: Path | None) -> Digits:
    """MNIST's four files in a folder, or the digits that scikit-learn carries.

    Raises:
      FileNotFoundError: the folder lacks one of the files.
      ValueError: a file is not what its name says.
      ImportError: scikit-learn is needed and not installed.
    """
    return _sklearn() if folder is None else mnist(folder)


def mnist(folder: Path) -> Digits:
    """The files as they are published, gzipped or not.

    Raises:
      FileNotFoundError, ValueError: as for `load`.
    """
    found = []
    for part in ("train", "t10k"):
        images = read_idx(_file(folder, f"{part}-images-idx3-ubyte"), 3)
        labels = read_idx(_file(folder, f"{part}-labels-idx1-ubyte"), 1)
        if images.shape[1:] != (SIDE, SIDE):
            raise ValueError(
                f"{folder}: images of {part} are {images.shape[1]}×{images.shape[2]}, and MNIST's "
                f"are {SIDE}×{SIDE}; is it another data set?"
            )
        if len(images) != len(labels) or not len(images):
            raise ValueError(
                f"{folder}: {len(images)} images of {part} but {len(labels)} labels; are the files "
                "of one data set, and whole?"
            )
        if labels.max() >= CLASSES:
            raise ValueError(
                f"{folder}: a label of {part} is {labels.max()}, and digits are 0 to {CLASSES - 1}"
            )
        found += [images[..., None].astype(np.float32) / 255, labels.astype(np.int32)]
    return Digits("MNIST", *found)


def read_idx(file: Path, dimensions: int) -> np.ndarray:
    """The bytes of an IDX file as an array of so many dimensions.

    Raises:
      ValueError: it is not such a file, or not whole.
    """
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{file} is not a whole gzip file: {error}; fetch it again") from None
    head = 4 + 4 * dimensions
    # Two zeros, 8 for unsigned bytes, the number of dimensions, then their sizes.
    magic = bytes((0, 0, 8, dimensions))
    if data[:4] != magic:
        hint = "; it is gzipped, so its name must end in .gz" * (data[:2] == b"\x1f\x8b")
        raise ValueError(
            f"{file} does not begin as an IDX file of {dimensions}-dimensional bytes does: "
            f"expected {magic.hex(' ')}, found {data[:4].hex(' ') or 'nothing'}{hint}"
        )
    if len(data) < head:
        raise ValueError(f"{file} ends after {len(data)} bytes, in the middle of its sizes")
    shape = struct.unpack(f">{dimensions}I", data[4:head])
    size = int(np.prod(shape, dtype=np.int64))
    if len(data) - head != size:
        raise ValueError(
            f"{file}: its sizes, {'×'.join(map(str, shape))}, make {size} bytes, and "
            f"{len(data) - head} follow; fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


# ---------------------------------------------------------------- implementation


def _file(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    raise FileNotFoundError(
        f"{folder} has neither {name} nor {name}.gz; --data takes the folder of MNIST's four files "
        "(train- and t10k-, images-idx3-ubyte and labels-idx1-ubyte)"
    )


def _sklearn() -> Digits:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError(
            "the digits are scikit-learn's: pip install scikit-learn, or give --data, a folder of "
            "MNIST's files"
        ) from None
    values, labels = load_digits(return_X_y=True)  # 8×8, each from 0 to 16
    labels = np.asarray(labels, np.int32)
    images = np.reshape(values, (-1, 8, 8)).astype(np.float32) / 16
    # Each value 3×3, and a frame of two: 28×28.
    images = np.pad(images.repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2)))[..., None]
    # The last fifth, not one at random: neighbours in the file look as if one hand wrote them,
    # and are to stay on one side.
    cut = len(images) * 4 // 5
    return Digits("scikit-learn's digits", images[:cut], labels[:cut], images[cut:], labels[cut:])
