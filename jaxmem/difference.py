"""`Difference`: what one report has more than another, and what explains it.

Buffers of two programs have no identity in common.  They are matched by what a
user knows them by: name, line, kind, type and shape; and what is left over by
all but the lengths of the dimensions, which finds the same value of another batch.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from jaxmem.show import changes
from jaxmem.show.blocks import Block, plain

if TYPE_CHECKING:
    from jaxmem.hlo.buffers import Buffer
    from jaxmem.report import MemoryReport

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class ArgumentChange:
    """An argument that has not the same bytes in both; 0 where it is not there."""

    name: str
    after: int
    before: int

    @property
    def bytes(self) -> int:
        return self.after - self.before


@dataclasses.dataclass(frozen=True)
class BufferChange:
    """Buffers alive at the peak that are alike, and not as many in both.

    Attributes:
      change: "appeared", "vanished", or "changed" in number or in shape.
      after, before: those in either report, none or one or several.
    """

    change: Literal["appeared", "vanished", "changed"]
    after: "tuple[Buffer, ...]"
    before: "tuple[Buffer, ...]"

    @property
    def bytes(self) -> int:
        return sum(b.bytes for b in self.after) - sum(b.bytes for b in self.before)

    @property
    def buffer(self) -> "Buffer":
        """One of them, for name, line and kind, which all have in common."""
        return (self.after or self.before)[0]


@dataclasses.dataclass(frozen=True, repr=False)
class Difference:
    """What `after` has more than `before`, as `after - before` gives it; `print` it.

    Every number of a report that both have is an attribute here, as its difference;
    None where one of them does not know it.
    """

    after: "MemoryReport"
    before: "MemoryReport"

    @property
    def required_bytes(self) -> int:
        return self.after.required_bytes - self.before.required_bytes

    @property
    def argument_bytes(self) -> int:
        return self.after.argument_bytes - self.before.argument_bytes

    @property
    def output_bytes(self) -> int:
        return self.after.output_bytes - self.before.output_bytes

    @property
    def alias_bytes(self) -> int:
        return self.after.alias_bytes - self.before.alias_bytes

    @property
    def temp_bytes(self) -> int:
        return self.after.temp_bytes - self.before.temp_bytes

    @property
    def host_bytes(self) -> int:
        return self.after.host_bytes - self.before.host_bytes

    @property
    def on_chip_bytes(self) -> int:
        return self.after.on_chip_bytes - self.before.on_chip_bytes

    @property
    def peak_bytes(self) -> int | None:
        return _minus(self.after.peak_bytes, self.before.peak_bytes)

    @property
    def flops(self) -> int | None:
        return _minus(self.after.flops, self.before.flops)

    @property
    def bytes_moved(self) -> int | None:
        return _minus(self.after.bytes_moved, self.before.bytes_moved)

    @property
    def matmul_flops(self) -> int | None:
        return _minus(self.after.matmul_flops, self.before.matmul_flops)

    @property
    def recompute_overhead(self) -> float | None:
        return _minus(self.after.recompute_overhead, self.before.recompute_overhead)

    @property
    def estimated_seconds(self) -> float | None:
        return _minus(self.after.estimated_seconds, self.before.estimated_seconds)

    @property
    def arguments(self) -> tuple[ArgumentChange, ...]:
        """Arguments that differ, the largest difference first."""
        after, before = self.after.arguments, self.before.arguments
        found = [
            ArgumentChange(name, after.get(name, 0), before.get(name, 0))
            for name in dict.fromkeys((*after, *before))
        ]
        return _largest_first(change for change in found if change.bytes)

    @property
    def buffers(self) -> tuple[BufferChange, ...]:
        """Buffers alive at the peak that differ, the largest difference first."""
        return _largest_first(_buffer_changes(self.after.buffers, self.before.buffers))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the two may not be compared: other targets, versions or flags."""
        return tuple(changes.warnings(self.after, self.before))

    # ------------------------------------------------------------ looking at it

    def to_json(self) -> str:
        """As JSON text: numbers, arguments and buffers that differ, warnings, both verdicts."""
        numbers = {name: getattr(self, name) for name in changes.NUMBERS}
        return json.dumps(
            {
                "jaxmem_difference": 1,
                **numbers,
                "arguments": [dataclasses.asdict(change) for change in self.arguments],
                "buffers": [
                    {"change": c.change, "bytes": c.bytes, **_only_buffers(c)} for c in self.buffers
                ],
                "warnings": list(self.warnings),
                "after": self.after.verdict,
                "before": self.before.verdict,
            }
        )

    def __str__(self) -> str:
        return plain(self._page())

    def __repr__(self) -> str:
        return f"<Difference {changes.headline(self.after, self.before)}>"

    def __rich__(self) -> Any:
        from jaxmem.show.text import Rendered

        return Rendered(self._page())

    def _repr_html_(self) -> str:
        from jaxmem.show.html import fragment

        page = self._page()
        return fragment(page, opened=[getattr(block, "title", "") for block in page])

    def _page(self) -> list[Block]:
        return changes.page(self)


# ---------------------------------------------------------------- implementation


def _minus(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a - b


def _largest_first(found: "Iterable[Any]") -> tuple[Any, ...]:
    return tuple(sorted(found, key=lambda change: -abs(change.bytes)))


def _only_buffers(change: BufferChange) -> dict[str, Any]:
    return {
        side: [dataclasses.asdict(buffer) for buffer in getattr(change, side)]
        for side in ("after", "before")
    }


_Group = dict[Hashable, "list[Buffer]"]


def _buffer_changes(
    after: "Iterable[Buffer]", before: "Iterable[Buffer]"
) -> "Iterable[BufferChange]":
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
    here, there = _grouped(left[0], _nearly), _grouped(left[1], _nearly)
    for key in dict.fromkeys((*here, *there)):
        # From the smallest up: of one value in several shapes, each with its own.
        mine, other = (
            sorted(_grouped(side.get(key, ()), _all).values(), key=lambda alike: alike[0].bytes)
            for side in (here, there)
        )
        paired = min(len(mine), len(other))
        for new, old in zip(mine, other, strict=False):
            yield BufferChange("changed", tuple(new), tuple(old))
        for new in mine[paired:]:
            yield BufferChange("appeared", tuple(new), ())
        for old in other[paired:]:
            yield BufferChange("vanished", (), tuple(old))


def _identity(buffer: "Buffer") -> Hashable:
    return buffer.kind, buffer.place, buffer.module, buffer.name, buffer.source


def _nearly(buffer: "Buffer") -> Hashable:
    return _identity(buffer), buffer.dtype, len(buffer.shape)


def _all(buffer: "Buffer") -> Hashable:
    return _identity(buffer), buffer.dtype, buffer.shape


def _grouped(buffers: "Iterable[Buffer]", key: "Callable[[Buffer], Hashable]") -> _Group:
    groups: _Group = defaultdict(list)
    for buffer in buffers:
        groups[key(buffer)].append(buffer)
    return groups
