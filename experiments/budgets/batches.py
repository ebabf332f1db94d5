"""The largest batch that fits a capacity, found by compiling a few sizes for each method."""

from collections.abc import Callable, Sequence

import jax
from tqdm import tqdm

from budgets import study
from budgets.nets import Net
from budgets.published import VGG_19_BATCH
from budgets.study import Study
from budgets.table import FIT, GREEDY, KEPT, LEAST, SQRT, TIME, Row
from common.table import markdown
from side import largest as sizes

# One more forward pass at most, which is a third of a forward and a backward pass.
ALLOWED = 1 / 3

# ---------------------------------------------------------------- API


def largest(
    own: Study, net: Callable[[int], Net], capacity: int, start: int, cuts: int
) -> list[Row]:
    """A row for each way: the largest batch that fits, or one image where none does.

    Args:
      net: for a number of images.
      start: which batch is tried first.
      cuts: how many of the greedy cuts are compiled; the best at one size is taken for all.
    """
    fixed = 8 * sum(leaf.size for leaf in jax.tree.leaves(net(1).params))
    found: list[Row] = []
    with tqdm(total=4, unit="way", disable=None) as bar:

        def search(at: Callable[[int], Row], start: int) -> Row:
            return at(sizes.largest(lambda n: at(n).required_bytes, capacity, start, fixed) or 1)

        for kind in (KEPT, SQRT, GREEDY, FIT):
            bar.set_postfix_str(kind)
            start = sizes.rounded(found[-1].images if found else start)
            if kind == GREEDY:
                made = range(min(cuts, len(study.cuts(net(1)))))
                best = min(made, key=lambda k: _cut(own, net(start), k).required_bytes)
                found.append(search(lambda n, best=best: _cut(own, net(n), best), start))
            else:
                name = LEAST if kind == FIT else ""
                cost = TIME if kind == FIT else ""
                found.append(
                    search(lambda n, k=kind, m=name, c=cost: own.row(net(n), k, m, cost=c), start)
                )
            bar.update()
    # What the largest batch costs where all of the capacity may be used.
    last = found[-1]
    if last.required_bytes <= capacity:
        name = f"in {capacity / 1e9:g} GB"
        found[-1] = own.row(net(last.images), FIT, name, capacity, cost=TIME)
    return found


def summary(rows: Sequence[Row]) -> str:
    """The answers as a Markdown table."""
    lines = [["VGG-19", "largest batch", "needs", "extra matmul FLOPs", "Checkmate's"]]
    for row, given in zip(rows, VGG_19_BATCH.items(), strict=True):
        lines.append(
            [
                row.kind,
                str(row.images),
                f"{row.required_bytes / 1e9:.2f} GB",
                f"{_extra(row):+.1%}",
                f"{given[1]} ({given[0]})",
            ]
        )
    return markdown(lines)


def answer(rows: Sequence[Row]) -> str:
    """What came of it, in a line."""
    kept, fit = rows[0], rows[-1]
    best = max(VGG_19_BATCH.values())
    others = ", ".join(f"{row.kind} {row.images}" for row in rows[:-1])
    over = [row.kind for row in rows if _extra(row) > ALLOWED]
    return (
        f"VGG-19: {FIT} takes {fit.images} images ({fit.images / kept.images:.2f} times "
        f"everything kept, {_extra(fit):+.1%} matmul FLOPs; {others}); Checkmate's ILP {best} "
        f"({best / VGG_19_BATCH['all']:.2f} times its everything kept)."
        + f" More than one forward pass more: {', '.join(over)}."
        * bool(over)
    )


# ---------------------------------------------------------------- implementation


def _cut(own: Study, net: Net, place: int) -> Row:
    return own.row(net, GREEDY, f"cut {place + 1}", number=place)


def _extra(row: Row) -> float:
    """By the model's own work: a batch as large as this is not compiled with everything kept."""
    return row.matmul_flops / row.model_matmul_flops - 1
