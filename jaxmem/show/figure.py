"""What all pictures share: figures, colours, sizes in bytes along an axis, writing.

Only matplotlib's objects are used and never `pyplot`, so that a script's
figures, backend and settings are not changed.
"""

import contextlib
import io
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem._util.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, FAINT = "#1b1b1b", "#666666", "#d9d9d9"
BAD = "#b3261e"

# ---------------------------------------------------------------- API


def check_path(path: str | os.PathLike[str] | None) -> Path | None:
    """The path of a picture, checked before it is drawn.

    Raises:
      ValueError: it ends neither in .png nor in .svg.
    """
    if path is None:
        return None
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(
            f"a picture is written as PNG or SVG, by the suffix of its name; got {str(path)!r}; "
            f"pass {str(path.with_suffix('.png'))!r}"
        )
    return path


@contextlib.contextmanager
def matplotlib_defaults() -> Iterator[None]:
    """While open, matplotlib draws with its default style, whatever style is set outside.

    Raises:
      ImportError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "pictures are drawn with matplotlib, which is not installed; pip install 'jaxmem[plot]'"
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        # The same picture gives the same bytes each time.
        matplotlib.rcParams["svg.hashsalt"] = "jaxmem"
        yield


def new_figure(width: float, height: float, dpi: int) -> "Figure":
    """An empty figure, in inches; a notebook shows it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            return _drawn(self, "png")

    figure = Picture(figsize=(width, height), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def write(figure: "Figure", path: Path | None) -> None:
    """Write it as PNG or SVG; the file is replaced atomically."""
    if path is not None:
        write_whole(path, _drawn(figure, path.suffix.lower()[1:]))


def renderer(figure: "Figure") -> Any:
    """A renderer that measures text: the layout must not depend on the format of the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    return canvas.get_renderer()


def plain_axes(axes: "Axes") -> None:
    """Remove the top and right frame, and make the ticks unobtrusive."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(colors=GREY, labelcolor=INK, labelsize=9, length=3)


def put(where: Any, x: float, y: float, words: str, points: float, **how: Any) -> Any:
    """Text on a figure or on axes, in which a dollar sign does not begin mathematics."""
    return where.text(x, y, words, fontsize=points, parse_math=False, **{"color": INK, **how})


def line(figure: "Figure", xs: Sequence[float], ys: Sequence[float], colour: str) -> None:
    """A thin line through points given as fractions of the figure."""
    from matplotlib.lines import Line2D

    figure.add_artist(Line2D(xs, ys, color=colour, linewidth=0.9))


def width_of(figure: "Figure", words: str, points: float) -> float:
    """How wide a text will be, in pixels."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=points)
    return renderer(figure).get_text_width_height_descent(words, font, False)[0]


def unit_of(largest: float) -> tuple[float, str]:
    """Bytes of the unit in which this number is readable, and the unit's name.

    >>> unit_of(3 * 2**30), unit_of(0)
    ((1073741824.0, 'GiB'), (1.0, 'B'))
    """
    steps = min(int(math.log2(largest) // 10), 4) if largest >= 1 else 0
    return float(2 ** (10 * steps)), ("B", "KiB", "MiB", "GiB", "TiB")[steps]


# ---------------------------------------------------------------- implementation


def _drawn(figure: "Figure", form: str) -> bytes:
    metadata = {"Date": None} if form == "svg" else {"Software": None}
    file = io.BytesIO()
    with matplotlib_defaults():
        figure.savefig(file, format=form, metadata=metadata, facecolor=figure.get_facecolor())
    return file.getvalue()
