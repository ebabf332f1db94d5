"""The style of the experiments' pictures: one message above the axes, and little ink."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmem.show.figure import FAINT, GREY, INK, matplotlib_defaults, new_figure, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that colour-blind readers can distinguish (Okabe and Ito).
OURS, HAND, PEER, PLAIN = "#0072B2", "#D55E00", "#009E73", GREY
COLOURS = (OURS, HAND, PEER, "#CC79A7", "#E69F00", "#56B4E9", PLAIN)


@contextlib.contextmanager
def drawn(
    path: Path,
    message: str,
    width: float = 7.0,
    height: float = 4.2,
    across: int = 1,
    down: int = 1,
) -> Iterator[list["Axes"]]:
    """Axes to draw on, row after row; written to `path`, a PNG, when they are done.

    Args:
      message: what a reader should take away, in a line.
      width, height: in inches, of the whole picture.
      across, down: how many axes.
    """
    with matplotlib_defaults():
        import matplotlib

        matplotlib.rcParams.update({"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK})
        figure = new_figure(width, height, 200)
        figure.set_layout_engine("constrained")
        found = figure.subplots(down, across, squeeze=False).ravel()
        figure.suptitle(message, x=0.01, ha="left", fontsize=11, fontweight="bold")
        for axes in found:
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(GREY)
            axes.tick_params(colors=INK)
            axes.grid(True, color=FAINT, linewidth=0.6)
            axes.set_axisbelow(True)
        yield list(found)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(figure, path)
