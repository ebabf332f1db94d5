"""The rows of a target as one picture: policies in use, and `fit` in as much memory."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from front import claims
from front.table import DOMINATED, EQUINOX, FIT, FLAX, FRONTIER, HALIAX, HAND, POLICY, RIVALS, Row
from jaxmem.show.figure import INK, matplotlib_defaults, new_figure, write
from jaxmem.show.frontier import label, memory_axes, stairs

_STYLE = {
    HAND: ("#D55E00", "s", "jax.checkpoint by hand"),
    POLICY: ("#009E73", "^", "named policies of jaxmem"),
    FLAX: ("#C2408A", "D", "flax"),
    HALIAX: ("#8A6800", "v", "haliax, by hand"),
    EQUINOX: ("#5A5A5A", "P", "equinox"),
    FIT: ("#0072B2", "o", "jaxmem.fit"),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw recomputed matmul FLOPs against memory, as PNG."""
    drawn = [row for row in rows if row.overhead is not None and not row.too_large]
    with matplotlib_defaults():
        figure = new_figure(9.0, 5.6, 200)
        axes = figure.add_axes((0.075, 0.105, 0.905, 0.765))
        title = f"{_message(rows)} ({rows[0].target})"
        axes.set_title(
            title, loc="left", fontsize=10.5, fontweight="bold", parse_math=False, pad=24
        )
        _draw(drawn, axes)
        if large := [row.name for row in rows if row.too_large and row.kind in RIVALS]:
            words = f"too large for the device, not shown: {', '.join(large)}"
            axes.text(0.99, 0.92, words, transform=axes.transAxes, ha="right", va="top", **_SMALL)
        write(figure, path)


# ---------------------------------------------------------------- implementation


_SMALL: dict[str, Any] = {"fontsize": 9, "color": INK}
# Points of `fit` are drawn if they recompute at most so many times more than any policy.
_BEYOND = 1.5


def _draw(every: Sequence[Row], axes: Any) -> None:
    most = _BEYOND * max((row.overhead or 0 for row in every if row.kind in RIVALS), default=100)
    rows = [row for row in every if (row.overhead or 0) <= most]
    for row in every:
        if row not in rows:
            gib = row.required_bytes / 2**30
            words = f"fit continues down to {gib:.2f} GiB, at {row.overhead:+.0f} %"
            axes.text(0.99, 0.97, words, transform=axes.transAxes, ha="right", va="top", **_SMALL)
    memory = [row.required_bytes for row in rows]
    work = [row.overhead or 0.0 for row in rows]
    unit = memory_axes(axes, memory, work, None)

    def place(row: Row) -> tuple[float, float]:
        return row.required_bytes / unit, row.overhead or 0.0

    rows = [row for row in rows if DOMINATED not in row.note]
    ours = [place(row) for row in rows if row.kind in (FIT, FRONTIER)]
    front = [p for p in ours if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in ours)]
    taken = stairs(axes, sorted(set(front)))
    names: dict[tuple[float, float], list[str]] = {}
    colours: dict[tuple[float, float], str] = {}
    for kind, (colour, marker, _) in _STYLE.items():
        for row in rows:
            if row.kind == kind or (kind == FIT and row.kind == FRONTIER):
                mine = kind == FIT
                x, y = place(row)
                axes.plot(
                    [x], [y], marker, ms=4 if mine else 7, color=colour, mec="white", mew=0.5,
                    zorder=4 if mine else 3,
                )  # fmt: skip
                if not mine:
                    near = next((p for p in names if _same(p, (x, y))), (x, y))
                    names.setdefault(near, []).append(row.name)
                    colours.setdefault(near, colour)
    words = [_together(same) for same in names.values()]
    label(axes, list(names), words, taken, [colours[p] for p in names])
    _legend(axes)


def _message(rows: Sequence[Row]) -> str:
    lost, asked = len(claims.losses(rows)), len(claims.paired(rows))
    if not lost:
        return f"At none of {asked} budgets does any policy in use recompute less than fit"
    return f"At {lost} of {asked} budgets a policy in use recomputes less than fit, or fit fails"


def _together(names: Sequence[str]) -> str:
    """The names of one point."""
    first, *others = names
    if not others:
        return first
    # Lines break between names, not in them.
    words = ", ".join(name.replace(" ", "\N{NO-BREAK SPACE}") for name in others)
    return "\n".join([first, *textwrap.wrap(f"=\N{NO-BREAK SPACE}{words}", 40)])


def _same(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return abs(a[0] / b[0] - 1) < 0.004 and abs(a[1] - b[1]) < 0.1


def _legend(axes: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=marker, ls="-" if kind == FIT else "none", label=words)
        for kind, (colour, marker, words) in _STYLE.items()
    ]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 0.995), ncols=len(handles),
        frameon=False, fontsize=9, labelcolor=INK, borderaxespad=0.2, columnspacing=1.1,
        handlelength=1.5, handletextpad=0.5,
    )  # fmt: skip
