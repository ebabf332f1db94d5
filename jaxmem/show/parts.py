"""What a program's memory is for, as a table: parameters, gradient, state, saved values."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxmem._util.text import size
from jaxmem.show.blocks import Column, Table
from jaxmem.show.words import clean, share

if TYPE_CHECKING:
    from jaxmem.report.report import MemoryReport, Places

# Titles, and names in a part.
PLACES = (("device", "device"), ("on-chip", "on_chip"), ("host", "host"), ("disk", "disk"))

# ---------------------------------------------------------------- API


def is_training(report: "MemoryReport") -> bool:
    """Whether a report has any part that only training has."""
    return any(kind.partition("/")[0] in _TRAINING for kind in report.parts)


def parts_table(report: "MemoryReport") -> Table:
    """The parts, small ones of them in one row; a column for each place that anything is in."""
    known = report.parts
    places = [
        (title, name)
        for title, name in PLACES
        if name == "device" or any(getattr(part, name) for part in known.values())
    ]
    least = _SMALL * max(report.required_bytes, report.host_bytes)
    large = [kind for kind, part in known.items() if kind == "rest" or max(part) > least]
    rows = [(label(kind), *_cells(known[kind], places), _share(report, kind)) for kind in large]
    if small := [kind for kind in known if kind not in large]:
        rows.append(("smaller ones", *_cells(_added([known[kind] for kind in small]), places), ""))
    columns = (
        Column(least=8),
        *(Column(title if len(places) > 1 else "", right=True) for title, _ in places),
        Column(right=True, style="dim"),
    )
    return Table("what it is for, at the peak", columns, tuple(rows), after=_AFTER)


def label(kind: str) -> str:
    """A part's name for a reader.

    >>> label("state/mu"), label("saved")
    ('optimizer state: mu', 'saved values')
    """
    head, _, field = kind.partition("/")
    return f"{_LABELS.get(head, head)}: {clean(field)}" if field else _LABELS.get(head, head)


# ---------------------------------------------------------------- implementation

_TRAINING = frozenset({"parameters", "gradient", "state", "saved", "recomputed"})
_LABELS = {
    "state": "optimizer state",
    "saved": "saved values",
    "recomputed": "recomputed values",
    "arguments": "other arguments",
}
_AFTER = (
    "saved values are kept from the forward pass for the backward pass; the rest is cotangents, "
    "working memory, and what the compiler's text does not tell"
)
# Of all that is required: what is less is not worth a row.
_SMALL = 0.001


def _cells(part: "Places", places: list[tuple[str, str]]) -> list[str]:
    return [size(count) if (count := getattr(part, name)) else "" for _, name in places]


def _added(parts: Sequence["Places"]) -> "Places":
    first, *others = parts
    return sum(others, first)


def _share(report: "MemoryReport", kind: str) -> str:
    count = report.parts[kind].device
    return share(count, report.required_bytes) if count else ""
