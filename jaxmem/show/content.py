"""What is shown of a report, and in which order, in every medium."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxmem._util.text import size
from jaxmem.show.blocks import Bar, Block, Column, Line, Part, Remark, Style, Table
from jaxmem.show.collectives import collectives_table
from jaxmem.show.parts import is_training, parts_table
from jaxmem.show.words import clean, cut_source, flops, seconds, share, signed_share, typed

if TYPE_CHECKING:
    from jaxmem.hlo.buffers import Buffer
    from jaxmem.report.report import MemoryReport

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Item:
    """A row of what is live at the peak: equal buffers, or a group of arguments.

    Attributes:
      bytes: of all of them.
      count: how many.
      type: such as "bf16[24,8]"; how many leaves, for arguments.
      name: of the value, after that of its module.
      source: the line of the user's code.
      kind: that of the buffer.
      place: that of the buffer.
    """

    bytes: int
    count: int
    type: str
    name: str
    source: str
    kind: str
    place: str


# ---------------------------------------------------------------- API


def page(report: "MemoryReport", most: int = 10) -> list[Block]:
    """A report as blocks, the verdict first; `most` rows of what is live at the peak."""
    blocks: list[Block] = [
        Line(clean(report.verdict), verdict_style(report), is_verdict=True),
        bar(report),
    ]
    blocks.append(components(report))
    blocks += tables(report, most)
    blocks += [Remark(clean(lint.message), clean(lint.remedy), "warn") for lint in report.lints]
    blocks += [Remark(f"note: {clean(note)}") for note in report.notes]
    blocks.append(Remark(origin(report), style="dim"))
    return blocks


def tables(report: "MemoryReport", most: int) -> Iterator[Table]:
    """What takes the memory, what is sent between devices, and the operations."""
    groups = argument_groups(report)
    if groups:
        yield Table(
            "arguments",
            (Column(least=8), Column(right=True), Column(least=8, style="dim")),
            tuple((name, size(count), leaves) for name, count, leaves in groups),
        )
    if is_training(report):
        yield parts_table(report)
    elif sum(map(sum, report.state.values())):  # of an older file
        yield state_table(report)
    items = at_peak(report)
    if items:
        yield peak_table(items, most)
    if report.collectives:
        yield collectives_table(report, (most + 1) // 2)
    rows = tuple(work(report))
    if rows:
        yield Table("operations of one call", (Column(), Column(least=20)), rows)


def state_table(report: "MemoryReport") -> Table:
    """The fields of optimizer states among the arguments."""
    rows = []
    for name, (device, host) in report.state.items():
        place = "" if not host else "on the host" if not device else f"and {size(host)} on the host"
        rows.append((clean(name), size(device or host), place))
    columns = (Column(least=8), Column(right=True), Column(least=8, style="dim"))
    return Table("optimizer state", columns, tuple(rows))


def verdict_style(report: "MemoryReport") -> Style:
    """Green, red, or yellow for what is unknown or needs a setting."""
    if report.fits is None:
        return "warn"
    if not report.fits:
        return "bad"
    return "warn" if report.fits_by_default is False else "good"


def components(report: "MemoryReport") -> Table:
    """The terms of `required_bytes`, and figures that are not part of it."""
    devices = f" on each of {report.devices} devices" if report.devices > 1 else ""
    rows = [
        ("arguments", size(report.argument_bytes), ""),
        ("outputs", size(report.output_bytes), ""),
        ("aliased", size(-report.alias_bytes), "results in the buffers of donated arguments"),
        ("temporaries", size(report.temp_bytes), ""),
        ("required", size(report.required_bytes), _of_capacity(report)),
    ]
    if not report.alias_bytes:
        del rows[2]
    strong = len(rows) - 1
    if report.host_bytes:
        rows.append(("on the host", size(report.host_bytes), "not part of the sum"))
    if report.on_chip_bytes:
        rows.append(("on-chip", size(report.on_chip_bytes), "not part of the sum"))
    if report.peak_bytes is not None:
        remark = "counted differently by each backend"
        rows.append(("compiler's peak", size(report.peak_bytes), remark))
    columns = (Column(), Column(right=True), Column(least=8, style="dim"))
    return Table(f"memory{devices}", columns, tuple(rows), (strong,))


def _of_capacity(report: "MemoryReport") -> str:
    if report.capacity_bytes is None:
        return ""
    text = f"{share(report.required_bytes, report.capacity_bytes)} of {size(report.capacity_bytes)}"
    if report.default_capacity_bytes not in (None, report.capacity_bytes):
        by_default = share(report.required_bytes, report.default_capacity_bytes)
        text += f", {by_default} of the default {size(report.default_capacity_bytes)}"
    return text


def bar(report: "MemoryReport") -> Bar:
    """Arguments, what the outputs add, and temporaries: together `required_bytes`."""
    parts = (
        Part("arguments", report.argument_bytes, "argument"),
        Part("outputs", max(report.output_bytes - report.alias_bytes, 0), "output"),
        Part("temporaries", report.temp_bytes, "temporary"),
    )
    return Bar(parts, report.capacity_bytes, report.default_capacity_bytes)


def split_bar(report: "MemoryReport", most: int = 5) -> Bar:
    """The same sum in finer parts: arguments by group, the `most` largest temporaries, the rest."""
    parts = [Part(name, count, "argument") for name, count, _ in argument_groups(report)]
    if sum(part.bytes for part in parts) != report.argument_bytes:
        parts = [Part("arguments", report.argument_bytes, "argument")]
    parts.append(Part("outputs", max(report.output_bytes - report.alias_bytes, 0), "output"))
    rest = report.temp_bytes
    inside = [i for i in at_peak(report) if i.kind == "temporary" and i.place == "device"]
    for item in inside[:most]:
        # Buffers may share a slot; parts of the bar may not overlap.
        if item.bytes <= rest:
            short = item.name.rpartition("/")[2]
            parts.append(Part(f"{item.name} {item.type}", item.bytes, "temporary", short))
            rest -= item.bytes
    others = Part("other temporaries", rest, "rest", "other")
    parts.append(others if inside else Part("temporaries", rest, "temporary"))
    shown = tuple(part for part in parts if part.bytes > 0)
    return Bar(shown, report.capacity_bytes, report.default_capacity_bytes)


def argument_groups(report: "MemoryReport") -> list[tuple[str, int, str]]:
    """Name, bytes and a remark on the leaves, grouped by the first part of the arguments' paths."""
    groups: dict[str, list[int]] = {}
    for path, count in report.arguments.items():
        groups.setdefault(clean(path.partition("/")[0]), []).append(count)
    found = []
    for name, counts in groups.items():
        text = "" if len(counts) == 1 else f"{len(counts)} leaves"
        if empty := counts.count(0):
            which = "" if len(counts) == empty else f"{empty} of them "
            text = f"{text}, " * bool(text) + f"{which}not read, or not on the device"
        found.append((name, sum(counts), text))
    return sorted(found, key=lambda group: -group[1])


def at_peak(report: "MemoryReport") -> list[Item]:
    """What is live at the peak, largest first: arguments by the first part of their paths."""
    groups: dict[tuple[str, ...], list[Buffer]] = {}
    for buffer in report.buffers:
        if buffer.kind == "argument":
            what = (buffer.name.partition("/")[0],)
        else:
            what = (full_name(buffer), buffer.source, buffer.dtype, str(buffer.shape))
        groups.setdefault((buffer.kind, buffer.place, *what), []).append(buffer)
    return sorted(map(_item, groups.values()), key=lambda item: -item.bytes)


def _item(group: "Sequence[Buffer]") -> Item:
    first, many = group[0], len(group)
    is_argument = first.kind == "argument"
    what, name = typed(first.dtype, first.shape), full_name(first)
    if many > 1:
        what = f"{many} leaves" if is_argument else f"{many} × {what}"
    if is_argument:
        name = first.name.partition("/")[0] if many > 1 else first.name
    return Item(
        bytes=sum(buffer.bytes for buffer in group),
        count=many,
        type=clean(what),
        name=clean(name),
        source="" if is_argument else clean(first.source),
        kind=first.kind,
        place=first.place,
    )


def full_name(buffer: "Buffer") -> str:
    """A buffer's name, prefixed with its module."""
    if not buffer.module or buffer.name.startswith(buffer.module):
        return buffer.name or buffer.instruction
    return f"{buffer.module}/{buffer.name or buffer.instruction}"


def peak_table(items: Sequence[Item], most: int) -> Table:
    """The largest of them, and the sum of the rest."""
    rows = [(size(i.bytes), i.type, _placed(i), i.source) for i in items[:most]]
    rest = items[most:]
    columns = (
        Column(right=True),
        Column(least=12),
        Column(least=12),
        Column(least=8, cut=cut_source, style="dim"),
    )
    if rest:
        rows.append(
            (size(sum(i.bytes for i in rest)), f"{sum(i.count for i in rest)} more", "", "")
        )
    return Table("live at the peak", columns, tuple(rows), optional=3)


def _placed(item: Item) -> str:
    words = {"argument": "argument", "output": "result", "constant": "constant"}
    where = [words[item.kind]] if item.kind in words else []
    if item.place != "device":
        where.append(item.place)
    return f"{item.name} ({', '.join(where)})" if where else item.name


def work(report: "MemoryReport") -> Iterator[tuple[str, str]]:
    """Operations, traffic and time, in words."""
    if report.flops is not None:
        yield "operations", flops(report.flops)
    if report.matmul_flops is not None and (report.matmul_flops or report.model_matmul_flops):
        yield "matrix products", f"{flops(report.matmul_flops)} in the compiled program"
    if report.recompute_overhead is not None:
        overhead = signed_share(report.recompute_overhead)
        yield "recomputation", f"{overhead} matmul FLOPs over the model's"
    if report.bytes_moved is not None:
        yield "memory traffic", traffic(report)
    if report.estimated_seconds is not None:
        yield "time", f"at least {seconds(report.estimated_seconds)} (roofline estimate, bf16 peak)"
    if report.communication_seconds:
        told = f"{seconds(report.communication_seconds)} by the peak of the links"
        yield "communication", f"{told}, if none of it is hidden"


def traffic(report: "MemoryReport") -> str:
    """What is read and written, and what fusion saves."""
    moved, found = report.bytes_moved or 0, report.fusions
    if found is None or found.bytes != moved:  # of an older file, or of the traced program
        return f"{size(moved)} (estimate)"
    return f"{size(moved)}; {size(found.separate_bytes)} if nothing were fused"


def origin(report: "MemoryReport") -> str:
    """The source of the numbers: the last line of a report."""
    device = f" ({report.device})" if report.device != report.target else ""
    took = "from the cache" if report.cached else f"in {seconds(report.compile_seconds)}"
    parts = [f"{report.source} for {report.target}{device} {took}", _pairs(report.versions, " ")]
    if report.flags:
        parts.append(_pairs(report.flags, "="))
    return clean("; ".join(part for part in parts if part))


def _pairs(values: dict[str, str], between: str) -> str:
    return ", ".join(f"{key}{between}{value}" for key, value in values.items())
