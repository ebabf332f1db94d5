"""Memory of each way to run the loop against evaluations of the cell, for jaxmem and equinox."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.picture import OURS, PEER, drawn

if TYPE_CHECKING:
    from sequence.table import Row

_STYLES = {
    "revolve": (OURS, "o", "jaxmem.remat_revolve, slots as marked"),
    "sqrt": ("#56B4E9", "s", "jaxmem.remat_sqrt, levels as marked"),
    "equinox": (PEER, "^", "equinox's checkpointed loop, checkpoints as marked"),
    "none": ("#555555", "D", "everything kept"),
}
# Offsets of the numbers from their points, so that those of neighbouring lines do not overlap.
_AT = {"revolve": (-7, -11), "sqrt": (7, 5), "equinox": (10, 3), "none": (0, 8)}


def draw(rows: Sequence["Row"], message: str, path: Path) -> None:
    """Both axes logarithmic; written as PNG."""
    with drawn(path, message, width=8.0, height=4.8) as (axes,):
        axes.set_xscale("log")
        axes.set_yscale("log")
        for family, (colour, marker, label) in _STYLES.items():
            own = [row for row in rows if _family(row) == family]
            own.sort(key=lambda row: row.own_bytes)
            x = [row.own_bytes / 2**20 for row in own]
            y = [row.passes for row in own]
            axes.plot(x, y, "-", marker=marker, color=colour, ms=6, lw=1.2, label=label)
            for row, place in zip(own, zip(x, y, strict=True), strict=True):
                axes.annotate(
                    str(row.number or 1) if family != "none" else "none",
                    place,
                    _AT[family],
                    textcoords="offset points",
                    color=colour,
                    ha="center",
                    fontsize=8.5,
                )
        axes.set_xlabel("memory without inputs, parameters and their gradient [MiB]")
        axes.set_ylabel(f"evaluations of the cell, counted [× {rows[0].steps:,}]")
        axes.margins(0.08, 0.1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.legend(frameon=False, fontsize=8.5, loc="upper right")


def _family(row: "Row") -> str:
    return "sqrt" if row.kind == "levels" else row.kind
