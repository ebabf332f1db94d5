"""Memory by the number of segments, and what each plan recomputes for its memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.picture import HAND, OURS, PLAIN, drawn
from mnist import published
from mnist.table import Need, extra, message

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(rows: Sequence[Need], path: Path) -> None:
    """Two axes side by side; written as PNG."""
    mine = [row for row in rows if row.update == "inside"]
    text = message(rows)
    with drawn(path, text[0].upper() + text[1:], 9.0, 4.4, across=2) as (left, right):
        _by_segments(mine, left)
        _by_work(mine, rows, right)


# ---------------------------------------------------------------- implementation


def _by_segments(rows: Sequence[Need], axes: "Axes") -> None:
    cut = [row for row in rows if row.kind in ("none", "segments")]
    places = range(len(cut))
    given = [published.MEGABYTES.get(row.number) for row in cut]
    axes.plot(
        places,
        [high or float("nan") for high in given],
        "s--",
        color=PLAIN,
        label=f"published; so many of {published.DEPTH + 1} convolutions trained",
    )
    for place, row, high in zip(places, cut, given, strict=True):
        if high:
            _write(axes, str(published.trained(row.number)), (place, high), PLAIN)
    axes.plot(places, [row.megabytes for row in cut], "o-", color=HAND, label="all trained, in JAX")
    for row in rows:
        if row.kind == "sqrt":
            axes.axhline(row.megabytes, color=OURS, lw=1.2, label="@jaxmem.remat_sqrt")
    alone = rows[0].argument_bytes / 1e6
    axes.axhline(alone, color=PLAIN, lw=1, ls=":", label="the parameters alone")
    axes.set_xticks(list(places), [str(row.number or "none") for row in cut])
    axes.set_xlabel("equal segments")
    axes.set_ylabel("memory of a train step [MB]")
    axes.set_xlim(-0.4, len(cut) - 0.4)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8.5, loc="lower left")


def _by_work(mine: Sequence[Need], rows: Sequence[Need], axes: "Axes") -> None:
    for kind, colour, marker, label in (
        ("segments", HAND, "o", "equal segments, as many as marked"),
        ("none", PLAIN, "s", "everything kept"),
        ("sqrt", OURS, "D", "@jaxmem.remat_sqrt"),
        ("fit", OURS, "o", "jaxmem.fit at several budgets"),
    ):
        own = sorted((row for row in mine if row.kind == kind), key=lambda row: row.required_bytes)
        places = [(row.megabytes, 100 * extra(row, rows)) for row in own]
        line = "-" if kind == "fit" else "none"
        axes.plot(*zip(*places, strict=True), ls=line, marker=marker, color=colour, label=label)
        if kind == "segments":
            for place, numbers in _together([row.number for row in own], places).items():
                _write(axes, ", ".join(map(str, sorted(numbers))), place, colour)
    axes.set_xlabel("memory of a train step [MB]")
    axes.set_ylabel("recomputed matmul FLOPs [% of the step]")
    axes.legend(frameon=False, fontsize=8.5, loc="lower right", bbox_to_anchor=(1, 0.15))


def _together(
    numbers: Sequence[int], places: Sequence[tuple[float, float]]
) -> dict[tuple[float, float], list[int]]:
    """Numbers whose points lie on each other, or nearly so, by the highest of these."""
    found: dict[tuple[float, float], list[int]] = {}
    for number, (x, y) in sorted(zip(numbers, places, strict=True), key=lambda one: -one[1][1]):
        near = (p for p in found if abs(p[0] / x - 1) < 0.008 and abs(p[1] - y) < 2)
        found.setdefault(next(near, (x, y)), []).append(number)
    return found


def _write(axes: "Axes", text: str, place: tuple[float, float], colour: str) -> None:
    axes.annotate(text, place, (5, 4), textcoords="offset points", color=colour, fontsize=8.5)
