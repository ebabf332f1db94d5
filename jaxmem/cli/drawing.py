"""The pictures of a sweep, from the rows of its CSV."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.cli.rows import NUMBERS
from jaxmem.cli.streams import say

if TYPE_CHECKING:
    from jaxmem.report.compare import Comparison
    from jaxmem.report.report import MemoryReport


def draw_heatmaps(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw which policies fit at which batch sizes."""

    def key(row: dict[str, Any]) -> Any:
        return row["policy"], _number(row["batch"])

    for compared, file in _groups(rows, path, ("target", "accum"), key):
        compared.heatmap(file)
        say(f"wrote {file}")


def draw_plots(rows: list[dict[str, Any]], path: Path) -> None:
    """Memory against recomputation, a picture per batch size: smaller batches always need less."""
    by = ("target", "batch", "accum")
    for compared, file in _groups(rows, path, by, lambda row: row["policy"]):
        compared.plot(file)
        say(f"wrote {file}")


def _groups(
    rows: list[dict[str, Any]],
    path: Path,
    by: tuple[str, ...],
    key: Callable[[dict[str, Any]], Any],
) -> list[tuple["Comparison", Path]]:
    """The rows in groups with equal columns `by`, and a file for each group."""
    from jaxmem.report.compare import compare

    groups: dict[tuple[Any, ...], dict[Any, MemoryReport]] = {}
    for row in rows:
        if not row["error"]:
            group = groups.setdefault(tuple(row[name] for name in by), {})
            group[key(row)] = as_report(row)
    several = [k for k in range(len(by)) if len({values[k] for values in groups}) > 1]
    found = []
    for values, reports in groups.items():
        parts = [_file_part(by[k], values[k]) for k in several]
        found.append((compare(reports), path.with_stem("-".join([path.stem, *parts]))))
    return found


def _file_part(column: str, value: Any) -> str:
    if column != "target":
        return f"{column}{value}"
    return str(value).rpartition(":")[2].replace("/", "-")  # it may be "folder/mine.toml:name"


def as_report(row: dict[str, Any]) -> "MemoryReport":
    """A row as a report, without buffers, arguments and lints, which a row does not hold."""
    from jaxmem.report.report import MemoryReport

    return MemoryReport(
        **{name: row[name] for name in NUMBERS},
        estimated_seconds=row["estimated_seconds"],
        compile_seconds=row["compile_seconds"],
        device=row["device"],
        platform=row["platform"],
        devices=row["devices"],
        target=row["device"] if row["target"] == "local" else row["target"],
        versions={"jaxmem": row["jaxmem"], "jax": row["jax"]},
        arguments={},
        buffers=(),
        timeline=None,
        lints=(),
        suggestion=None,
        advice="",
        source="compiled",
        notes=(),
        flags={},
        cached=False,
    )


def _number(text: str | None) -> Any:
    return int(text) if text and text.isdigit() else text or "its own"
