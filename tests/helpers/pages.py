"""Reports made up for pages and pictures, and what is looked for on those."""

import dataclasses
import itertools
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.image

from jaxmem.hlo.buffers import Buffer
from jaxmem.report.report import MemoryReport

MIB, GIB = 2**20, 2**30


def on_gpu(report: MemoryReport, **changes: Any) -> MemoryReport:
    """The same numbers as if an H100 had them."""
    known: dict[str, Any] = {
        "target": "h100-80g",
        "device": "NVIDIA H100 80GB HBM3",
        "platform": "gpu",
        "capacity_bytes": 80 * GIB,
        "default_capacity_bytes": 60 * GIB,
        "estimated_seconds": 0.0123,
        "lints": (),
        **changes,
    }
    return dataclasses.replace(report, **known)


def some_buffer(**changes: Any) -> Buffer:
    fields: dict[str, Any] = {
        "bytes": GIB,
        "shape": (24, 8, 1024, 4096),
        "dtype": "bf16",
        "name": "tanh",
        "kind": "temporary",
        "place": "device",
        "instruction": "fusion.1",
        "source": "model.py:12 (block)",
        "module": "Encoder/Block_0",
        "parameter": None,
        "padding_bytes": 0,
    }
    return Buffer(**{**fields, **changes})


class Balanced(HTMLParser):
    """Fails on tags that do not close in order, keeps what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parsed(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def overlaps(figure: Any) -> list[tuple[str, str]]:
    """Pairs of labels that lie on one another, those of the ticks included."""
    from matplotlib.text import Text

    draw = figure.canvas.get_renderer()
    figure.canvas.draw()
    boxes = [
        (text.get_text(), text.get_window_extent(draw).padded(-1.5))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text.figure is not None
    ]
    whole = figure.bbox.padded(1)
    inside = [(words, box) for words, box in boxes if box.overlaps(whole)]
    return [
        (one, other) for (one, a), (other, b) in itertools.combinations(inside, 2) if a.overlaps(b)
    ]


def check_png(path: Path, width: int) -> None:
    pixels = matplotlib.image.imread(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert pixels.shape[1] == width
    assert 0.005 < (pixels[..., :3] < 0.9).any(axis=-1).mean() < 0.9


def all_words(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))
