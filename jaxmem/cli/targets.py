"""`jaxmem targets`: the known accelerators, and what must be installed to compile for them."""

from typing import TYPE_CHECKING, Any

import click

from jaxmem.cli.options import json_option
from jaxmem.cli.streams import emit_json

if TYPE_CHECKING:
    from jaxmem.targets import Target


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE.toml]...")
@json_option
def targets(files: tuple[str, ...], as_json: bool) -> None:
    """List the accelerators that reports can be compiled for.

    With files, list the accelerators that they describe.
    """
    from jaxmem import targets as known

    rows = (
        {f"{file}:{name}": row for file in files for name, row in known.load(file).items()}
        if files
        else known.catalog()
    )
    if as_json:
        emit_json([_facts(name, row) for name, row in rows.items()])
    else:
        click.echo(_table(rows))


def _facts(name: str, row: "Target") -> dict[str, Any]:
    return {
        "name": name,
        "device": row.device,
        "platform": row.platform,
        "memory": row.memory,
        "default_bytes": row.default_bytes,
        "bandwidth": row.bandwidth,
        "matrix_peak": row.matrix_peak,
        "link_bandwidth": row.link_bandwidth,
        "link_axes": row.link_axes,
        "link_latency": row.link_latency,
        "network_bandwidth": row.network_bandwidth,
        "source": row.source,
        "missing": list(row.missing()),
    }


def _table(rows: "dict[str, Target]") -> str:
    from jaxmem._util.text import columns, size

    head = ("name", "device", "memory", "bandwidth", "bf16 peak", "links", "source", "to compile")
    # What is missing is long and common to many rows: state it once, below the table.
    reasons: list[str] = []
    lines: list[tuple[str, ...]] = [head]
    for name, row in rows.items():
        marks = []
        for reason in row.missing():
            if reason not in reasons:
                reasons.append(reason)
            marks.append(f"[{reasons.index(reason) + 1}]")
        lines.append(
            (
                name,
                row.device,
                size(row.memory),
                f"{row.bandwidth / 1e9:,.0f} GB/s",
                f"{row.matrix_peak / 1e12:,.0f} TFLOP/s",
                "–" if row.link_bandwidth is None else f"{row.link_bandwidth / 1e9:,.0f} GB/s",
                row.source,
                " ".join(marks) or "ready",
            )
        )
    table = columns(lines, right=(2, 3, 4, 5), indent="")
    notes = [f"[{k}] {reason}" for k, reason in enumerate(reasons, 1)]
    return "\n".join([table, *([""] if notes else []), *notes])
