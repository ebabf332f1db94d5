"""The rows: a program that was compiled, and what rows say together."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from budgets.published import VGG_19_BATCH, Published
from common.table import Record, Table, markdown

KEPT, HAND, SQRT = "everything kept", "jax.checkpoint by hand", "@jaxmem.remat_sqrt"
CONVS = "jax.checkpoint keeping convolutions"
GREEDY, FIT, PARTS = "greedy cuts by hand", "jaxmem.fit", "jaxmem.fit in microbatches"
LEAST = "the least"
Cost = Literal["flops", "roofline", ""]
WORK: Final = "flops"
TIME: Final = "roofline"

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Row(Record):
    """A compiled program; sizes in bytes.

    Attributes:
      program: the net and its sizes.
      images: in its batch.
      kind: `KEPT`, `HAND`, `CONVS`, `SQRT`, `GREEDY`, `FIT` or `PARTS`.
      name: what was asked for, where a kind can be asked for more than one thing.
      cost: what `fit` was to make least, `WORK` or `TIME`; "" of others.
      budget_bytes: that `fit` was given.
      fits: whether it is within the budget, if there is one; else the row is the least reached.
      predicted_bytes: required bytes, as `fit` predicted them.
      matmul_flops: of the compiled program; `model_matmul_flops` without recomputation.
      estimated_seconds: by the report's roofline.
      compiler_remat: whether the compiler recomputes by itself as well.
      compiles: how often `fit` asked the compiler.
    """

    target: str
    program: str
    images: int
    kind: str
    name: str
    cost: str
    budget_bytes: int | None
    fits: bool
    required_bytes: int
    temp_bytes: int
    predicted_bytes: int | None
    matmul_flops: int
    model_matmul_flops: int
    estimated_seconds: float | None
    compiler_remat: bool
    compiles: int | None

    def share(self, kept: "Row") -> float:
        """Of the memory with everything kept."""
        return self.required_bytes / kept.required_bytes

    def extra(self, kept: "Row") -> float:
        """Matmul FLOPs over that with everything kept, less one."""
        return self.matmul_flops / kept.matmul_flops - 1

    def slower(self, kept: "Row") -> float | None:
        """The same of the roofline's seconds, None where the target's speed is unknown."""
        if not self.estimated_seconds or not kept.estimated_seconds:
            return None
        return self.estimated_seconds / kept.estimated_seconds - 1

    @property
    def is_asked(self) -> bool:
        """Whether it is `fit`'s answer to a published share."""
        return self.kind == FIT and self.name != LEAST


KEY = ("target", "program", "kind", "name", "cost")

# ---------------------------------------------------------------- API


def table(path: Path) -> Table[Row]:
    """The rows that are there."""
    return Table(path, Row, KEY)


def asked(memory: float, published: Published) -> str:
    """The name of a row of `fit` that was given a published share of memory."""
    return f"{memory:.2f} of {published.kept:.2f} GB"


def asked_bytes(memory: float) -> str:
    """The name of a row of `fit` that was given the published bytes themselves."""
    return f"{memory:.2f} GB"


def of_published(row: Row, published: Published) -> float | None:
    """The published memory that a row was asked for."""
    found = {asked(memory, published): memory for memory in published.plans}
    return found.get(row.name) if row.is_asked else None


def summary(rows: Sequence[Row], published: Published) -> str:
    """The rows of one net as a Markdown table, everything kept first; percent of that row's."""
    kept = rows[0]
    lines = [["", "needs", "memory", "extra matmul FLOPs", "roofline", "published", "its time"]]
    for row in rows:
        memory, slower = of_published(row, published), row.slower(kept)
        words = [f": {row.name}"] * (row.name != "")
        words += [f", least {'work' if row.cost == WORK else 'time'}"] * (row.cost != "") + [
            f", over its budget of {_gigabytes(row.budget_bytes or 0)}"
        ] * (not row.fits)
        lines.append(
            [
                row.kind + "".join(words) + ", the compiler recomputes too" * row.compiler_remat,
                _gigabytes(row.required_bytes),
                f"{row.share(kept):.1%}",
                f"{row.extra(kept):+.1%}",
                "" if slower is None else f"{slower:+.1%}",
                "" if memory is None else f"{published.share(memory):.1%}",
                "" if memory is None else f"{published.plans[memory]:+.1f}%",
            ]
        )
    return markdown(lines)


def answer(rows: Sequence[Row], published: Published, name: str) -> str:
    """What became of each published share, in a line."""
    words = []
    for memory in _asked_for(rows, published):
        goal, met = f"{published.share(memory):.0%}", _met(rows, published, memory)
        time = _time(published, memory)
        if met:
            words.append(f"{goal} of the memory: {' or '.join(met)} ({time})")
        else:
            words.append(f"{goal} not reached, the least is {_least(rows):.0%} ({time})")
    for memory in published.plans:
        own = [row for row in rows if row.kind == FIT and row.name == asked_bytes(memory)]
        if own:
            cost = " or ".join(_cost(row, rows[0]) for row in own if row.fits) or "not reached"
            words.append(f"in {memory:.2f} GB: {cost} ({_time(published, memory)})")
    return f"{name}: {'; '.join(words) or 'no published share was asked for'}."


def message(rows: Sequence[Row], published: Published, name: str) -> str:
    """The smallest published share that is reached, in the fewest words; for a picture."""
    asked_for = _asked_for(rows, published)
    met = [memory for memory in asked_for if _met(rows, published, memory)]
    if not met:
        goal = max(published.share(memory) for memory in asked_for)
        return f"{name}: least {_least(rows):.0%} of the memory, MONeT's {goal:.0%} not reached"
    best = min(met)
    missed = len(asked_for) - len(met)
    return (
        f"{name} in {published.share(best):.0%} of its memory: "
        f"{' or '.join(_met(rows, published, best, 0))}; MONeT {published.plans[best]:+.0f}% time"
        + f"; {missed} smaller not reached"
        * bool(missed)
    )


def batch_message(rows: Sequence[Row]) -> str:
    """The largest batch of `fit` and Checkmate's, in the fewest words."""
    (fit,) = (row for row in rows if row.kind == FIT)
    return f"{fit.images} images of VGG-19 in 16 GB, Checkmate {max(VGG_19_BATCH.values())}"


# ---------------------------------------------------------------- implementation


def _asked_for(rows: Sequence[Row], published: Published) -> list[float]:
    """The published memories that rows were asked for."""
    found = (of_published(row, published) for row in rows)
    return list(dict.fromkeys(memory for memory in found if memory is not None))


def _met(rows: Sequence[Row], published: Published, memory: float, digits: int = 1) -> list[str]:
    """What each plan within a published share costs."""
    own = [row for row in rows if of_published(row, published) == memory and row.fits]
    known = [row for row in own if row.cost == WORK or row.slower(rows[0]) is not None]
    return [_cost(row, rows[0], digits) for row in known]


def _cost(row: Row, kept: Row, digits: int = 1) -> str:
    """What a plan costs, counted as it was made least."""
    if row.cost == WORK:
        return f"{row.extra(kept):+.{digits}%} matmul FLOPs"
    return f"{row.slower(kept) or 0.0:+.{digits}%} roofline time"


def _time(published: Published, memory: float) -> str:
    return f"published {published.plans[memory]:+.1f}% time"


def _least(rows: Sequence[Row]) -> float:
    """Share of memory of the smallest plan of `fit` for the whole batch."""
    sizes = [row for row in rows if row.kind == FIT]
    return min(row.share(rows[0]) for row in sizes)


def _gigabytes(size: int) -> str:
    """As the published tables have them, 1e9 bytes; megabytes where that says nothing."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
