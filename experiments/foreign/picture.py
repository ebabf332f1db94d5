"""Extra matmul FLOPs against temporaries, one small picture for each model."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common import picture
from foreign import table
from foreign.table import FIT, OWN, PLAIN, SQRT, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ---------------------------------------------------------------- API


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of one target; written as a PNG."""
    models = table.models(rows)
    across = min(4, len(models))
    down = -(-len(models) // across)
    width, height = 1.0 + 2.6 * max(across, 3), 1.1 + 2.3 * down
    message = textwrap.fill(table.message(rows), round(10.5 * width))
    with picture.drawn(path, message, width, height, across, down) as axes:
        for own, one in zip(models, axes, strict=False):
            _model(own, one)
        for one in axes[len(models) :]:
            one.set_axis_off()
        for one in axes[::across]:
            one.set_ylabel("extra matmul FLOPs [%]")
        for one in axes[max(0, len(models) - across) : len(models)]:
            one.set_xlabel("temporaries, % of plain")
        _legend(axes[0])


# ---------------------------------------------------------------- implementation

_STYLES = {
    PLAIN: ("D", picture.PLAIN, "plain"),
    SQRT: ("^", picture.PEER, "jaxmem.remat_sqrt"),
    OWN: ("s", picture.HAND, "the model's own checkpointing"),
    FIT: ("o", picture.OURS, "jaxmem.fit"),
}


def _model(rows: Sequence[Row], axes: "Axes") -> None:
    plain, sizes = rows[0], rows[0].sizes.replace(", ", ",\n")
    axes.set_title(f"{plain.model}: {sizes}", loc="left", fontsize=9)
    places = {kind: _places(rows, kind) for kind in _STYLES}
    every = [place for own in places.values() for place in own]
    axes.plot(*_lines([*places[PLAIN], *places[FIT]]), color=picture.OURS, lw=1.2, zorder=2)
    for kind, (marker, colour, _) in _STYLES.items():
        size = 5.5 if kind == FIT else 7.5
        axes.plot(
            *_lines(places[kind]), marker, color=colour, ms=size, zorder=4 if kind == FIT else 3
        )
    axes.axhline(0, color=picture.PLAIN, lw=0.8, zorder=1)
    axes.set_xlim(0, 1.08 * max([100.0, *(share for share, _ in every)]))
    most = max([1.0, *(work for _, work in every)])
    axes.set_ylim(-0.08 * most, 1.15 * most)
    words = [f"{row.name}: refused by the compiler" for row in rows if row.error]
    words += [f"{row.name}: does not fit" for row in rows if not (row.error or row.fits)]
    text = "\n".join(line for word in words for line in textwrap.wrap(word, 28))
    axes.text(0.98, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=8)


def _places(rows: Sequence[Row], kind: str) -> list[tuple[float, float]]:
    """Percent of the plain temporaries, and extra percent of matmul FLOPs; most memory first."""
    found = []
    for row in rows:
        share, extra = row.share(rows[0]), row.extra(rows[0])
        if row.kind == kind and row.fits and share is not None and extra is not None:
            found.append((100 * share, 100 * extra))
    return sorted(found, reverse=True)


def _lines(places: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in places], [y for _, y in places]


def _legend(axes: "Axes") -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=marker, ls="-" if kind == FIT else "none", label=words)
        for kind, (marker, colour, words) in _STYLES.items()
    ]
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
