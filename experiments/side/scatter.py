"""The rows of `gpu_side_by_side.py` as a picture: memory across, step time up."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import picture
from jaxmem.show.frontier import label, stairs
from side import rows
from side.methods import COMPILED, EAGER, HAND, OURS
from side.rows import Row

_MARKS = {
    OURS: (picture.OURS, "o"),
    HAND: (picture.HAND, "s"),
    EAGER: (picture.PEER, "^"),
    COMPILED: (picture.COLOURS[3], "v"),
}

# ---------------------------------------------------------------- API


def draw(measured: Sequence[Row], path: Path) -> bool:
    """One axes for each net of which peaks were measured; False if there is none."""
    nets = list(dict.fromkeys(row.net for row in measured if row.place is not None))
    if not nets:
        return False
    width = max(7.0, 5.2 * len(nets))
    with picture.drawn(path, _message(measured, nets), width, 5.2, across=len(nets)) as several:
        for axes, net in zip(several, nets, strict=True):
            _frame(axes, [row for row in measured if row.net == net], net)
        figure: Any = several[0].figure
        figure.legend(
            handles=_handles(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
        )
        # Labels are placed in pixels, so the layout has to be made before.
        figure.draw_without_rendering()
        for axes, net in zip(several, nets, strict=True):
            _fill(axes, [row for row in measured if row.net == net])
    return True


# ---------------------------------------------------------------- implementation


def _message(measured: Sequence[Row], nets: Sequence[str]) -> str:
    pairs = [
        pair for net in nets for pair in rows.paired([row for row in measured if row.net == net])
    ]
    less, faster = rows.won(pairs)
    return (
        f"{measured[0].hardware}: of {len(pairs)} others, jaxmem beats {less} in memory at equal "
        f"time, {faster} in time at equal memory"
    )


def _frame(axes: Any, own: Sequence[Row], net: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    places = [_place(row) for row in own if row.place is not None]
    xs, ys = [x for x, _ in places], [y for _, y in places]
    axes.set_xscale("log")
    axes.set_xlim(min(xs) / 1.4, max(xs) * 1.5)
    room = 0.08 * (max(ys) - min(ys)) + 0.02 * max(ys)
    axes.set_ylim(min(ys) - room, max(ys) + room)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(net, loc="left", fontsize=9.5)
    axes.set_xlabel("peak of the allocator, GiB (logarithmic)")
    axes.set_ylabel("time of a step, ms")


def _fill(axes: Any, own: Sequence[Row]) -> None:
    ours = [_place(row) for row in own if row.place is not None and row.family == OURS]
    front = [p for p in ours if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in ours)]
    taken = stairs(axes, front)
    named, words, colours = [], [], []
    for row in own:
        if row.place is None:
            continue
        x, y = _place(row)
        colour, mark = _MARKS[row.family]
        axes.plot([x], [y], mark, color=colour, mec="white", mew=0.5, ms=7, zorder=3)
        is_fit = row.family == OURS and row.budget_bytes is not None
        if not is_fit or (x, y) in front:
            named.append((x, y))
            words.append("fit" if is_fit else row.method)
            colours.append(colour)
    label(axes, named, words, taken, colours)


def _place(row: Row) -> tuple[float, float]:
    """In the units of the axes, of rows that have a place."""
    peak, seconds = row.place or (0, 0.0)
    return peak / 2**30, 1e3 * seconds


def _handles() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [], [], color=colour, marker=mark, ls="-" if family == OURS else "none", label=family
        )
        for family, (colour, mark) in _MARKS.items()
    ]
