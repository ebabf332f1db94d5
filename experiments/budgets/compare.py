"""One net in published shares of memory: its rows, printed and drawn."""

from collections.abc import Sequence

from budgets import picture, study, table
from budgets.nets import Net
from budgets.published import Published
from budgets.study import Options
from budgets.table import Row


def shares(
    options: Options, net: Net, published: Published, memories: Sequence[float], stem: str
) -> list[Row]:
    """The rows; they stand in a CSV and a PNG of this stem."""
    found = study.opened(options, stem).shares(net, published, memories)
    file = options.results / f"{stem}.png"
    picture.draw(found, published, net.name, file)
    print(f"{table.summary(found, published)}\n\n{table.answer(found, published, net.name)}")
    print(f"written: {file} and its .csv")
    return found
