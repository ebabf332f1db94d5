"""The arguments and buffers that explain the difference of two programs.

Buffers of two programs share no identifier.  They are matched by what a user
knows them by: name, line, kind, type and shape; the rest by all of that except the
lengths of the dimensions, which matches the same value at another batch size.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal

from jaxmem.hlo.buffers import Buffer

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class ArgumentChange:
    """An argument whose bytes differ; 0 bytes in a report that does not have it."""

    name: str
    after: int
    before: int

    @property
    def bytes(self) -> int:
        return self.after - self.before


@dataclasses.dataclass(frozen=True)
class BufferChange:
    """Matching buffers live at the peak whose number or shape differs between two reports.

    Attributes:
      change: "appeared", "vanished", or "changed" in number or in shape.
      after, before: the buffers of each report, possibly none.
    """

    change: Literal["appeared", "vanished", "changed"]
    after: tuple[Buffer, ...]
    before: tuple[Buffer, ...]

    @property
    def bytes(self) -> int:
        return sum(b.bytes for b in self.after) - sum(b.bytes for b in self.before)

    @property
    def buffer(self) -> Buffer:
        """One of them, for the name, line and kind that all share."""
        return (self.after or self.before)[0]


# ---------------------------------------------------------------- API


def argument_changes(
    after: Mapping[str, int], before: Mapping[str, int]
) -> tuple[ArgumentChange, ...]:
    """Arguments that differ, given their bytes by name, the largest difference first."""
    found = [
        ArgumentChange(name, after.get(name, 0), before.get(name, 0))
        for name in dict.fromkeys((*after, *before))
    ]
    return _largest_first(change for change in found if change.bytes)


def buffer_changes(after: Iterable[Buffer], before: Iterable[Buffer]) -> tuple[BufferChange, ...]:
    """Buffers that differ, the largest difference first."""
    return _largest_first(_changes(after, before))


# ---------------------------------------------------------------- implementation


def _largest_first(found: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(found, key=lambda change: -abs(change.bytes)))


_Group = dict[Hashable, list[Buffer]]


def _changes(after: Iterable[Buffer], before: Iterable[Buffer]) -> Iterable[BufferChange]:
    here, there = _grouped(after, _all), _grouped(before, _all)
    left: tuple[list[Buffer], list[Buffer]] = ([], [])
    for key in dict.fromkeys((*here, *there)):
        mine, other = here.get(key, []), there.get(key, [])
        if mine and other:
            if sum(b.bytes for b in mine) != sum(b.bytes for b in other):
                yield BufferChange("changed", tuple(mine), tuple(other))
        else:
            left[0].extend(mine)
            left[1].extend(other)
    here, there = _grouped(left[0], _without_lengths), _grouped(left[1], _without_lengths)
    for key in dict.fromkeys((*here, *there)):
        # From the smallest up, so that one value in several shapes is matched shape by shape.
        mine, other = (
            sorted(_grouped(side.get(key, ()), _all).values(), key=lambda group: group[0].bytes)
            for side in (here, there)
        )
        paired = min(len(mine), len(other))
        for new, old in zip(mine, other, strict=False):
            yield BufferChange("changed", tuple(new), tuple(old))
        for new in mine[paired:]:
            yield BufferChange("appeared", tuple(new), ())
        for old in other[paired:]:
            yield BufferChange("vanished", (), tuple(old))


def _identity(buffer: Buffer) -> Hashable:
    return buffer.kind, buffer.place, buffer.module, buffer.name, buffer.source


def _without_lengths(buffer: Buffer) -> Hashable:
    return _identity(buffer), buffer.dtype, len(buffer.shape)


def _all(buffer: Buffer) -> Hashable:
    return _identity(buffer), buffer.dtype, buffer.shape


def _grouped(buffers: Iterable[Buffer], key: Callable[[Buffer], Hashable]) -> _Group:
    groups: _Group = defaultdict(list)
    for buffer in buffers:
        groups[key(buffer)].append(buffer)
    return groups
