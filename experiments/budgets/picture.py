"""Extra matmul FLOPs against memory, with published figures; and the largest batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from budgets import table
from budgets.published import VGG_19_BATCH, Published
from budgets.table import CONVS, FIT, GREEDY, HAND, KEPT, PARTS, SQRT, TIME, WORK, Row
from common import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ---------------------------------------------------------------- API


def draw(
    rows: Sequence[Row],
    published: Published,
    name: str,
    path: Path,
    batches: Sequence[Row] = (),
) -> None:
    """Draw the rows of one net, everything kept first; next to them the batches, if any."""
    message = table.message(rows, published, name)
    if batches:
        message = f"{table.batch_message(batches)}; {message}"
    width = 11.6 if batches else 8.6
    with picture.drawn(path, message, width, 4.4, across=2 if batches else 1) as axes:
        _work(rows, published, axes[0])
        if batches:
            _bars(batches, axes[1])


# ---------------------------------------------------------------- implementation

_STYLES = {
    KEPT: ("D", picture.PLAIN, KEPT),
    HAND: ("s", picture.HAND, "jax.checkpoint around each block"),
    CONVS: ("v", "#E69F00", "jax.checkpoint keeping convolutions"),
    SQRT: ("^", picture.PEER, SQRT),
    PARTS: ("P", picture.OURS, "jaxmem.fit, in microbatches"),
}
_COLOURS = {KEPT: picture.PLAIN, SQRT: picture.PEER, GREEDY: picture.HAND, FIT: picture.OURS}
_CHECKMATE = {KEPT: "all", SQRT: "sqrt", GREEDY: "greedy", FIT: "ILP"}


def _work(rows: Sequence[Row], published: Published, axes: "Axes") -> None:
    kept = rows[0]

    def place(row: Row) -> tuple[float, float]:
        return 100 * row.share(kept), 100 * row.extra(kept)

    def time(row: Row) -> tuple[float, float]:
        return 100 * row.share(kept), 100 * (row.slower(kept) or 0)

    for kind, (marker, colour, label) in _STYLES.items():
        if own := [place(row) for row in rows if row.kind == kind and row.fits]:
            axes.plot(*zip(*own, strict=True), marker, color=colour, ms=8, label=label, zorder=3)
    for cost, at, face, label in (
        (WORK, place, picture.OURS, "jaxmem.fit, least matmul FLOPs"),
        (TIME, time, "white", "jaxmem.fit, least roofline time: time"),
    ):
        own = [row for row in rows if row.kind == FIT and row.cost == cost and row.fits]
        if own and (cost == WORK or kept.estimated_seconds):
            axes.plot(
                *zip(*sorted({at(kept), *map(at, own)}), strict=True),
                color=picture.OURS,
                lw=1.2,
                ls="-" if cost == WORK else ":",
                zorder=2,
            )
            xs, ys = zip(*map(at, own), strict=True)
            axes.plot(xs, ys, "o", mec=picture.OURS, mfc=face, ms=7, label=label, zorder=3)
    memories = sorted(published.plans)
    axes.plot(
        [100 * published.share(memory) for memory in memories],
        [published.plans[memory] for memory in memories],
        "*--",
        color="black",
        lw=0.8,
        ms=9,
        label="MONeT on a P100: time",
        zorder=2,
    )
    axes.axhline(0, color=picture.PLAIN, lw=0.8)
    axes.set_xlim(left=0, right=108)
    axes.margins(y=0.12)
    axes.set_xlabel(
        f"memory, % of that with everything kept ({kept.required_bytes / 1e9:.1f} GB; "
        f"published {published.kept:g} GB)"
    )
    axes.set_ylabel("extra matmul FLOPs, or time where stated [%]")
    axes.legend(loc="best", frameon=False, fontsize=8.5)


def _bars(batches: Sequence[Row], axes: "Axes") -> None:
    """The largest batch of each way, and Checkmate's next to it."""
    for y, row in enumerate(batches):
        given = VGG_19_BATCH[_CHECKMATE[row.kind]]
        axes.barh(-y + 0.19, row.images, 0.36, color=_COLOURS[row.kind])
        axes.text(row.images, -y + 0.19, f" {row.images}", va="center", fontsize=9)
        axes.barh(-y - 0.19, given, 0.36, color="#D9D9D9")
        axes.text(given, -y - 0.19, f" {given}", va="center", fontsize=9, color=picture.PLAIN)
    axes.set_yticks([-y for y in range(len(batches))], [row.kind for row in batches])
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlim(0, 1.14 * max([row.images for row in batches] + [*VGG_19_BATCH.values()]))
    axes.set_xlabel("largest batch of VGG-19 in 16 GB; grey: Checkmate (its ILP next to fit)")
