"""The page and picture for each type of result: registers them with `jaxmem._util.shown`.

Imported by `jaxmem._util.shown` when a result is first displayed.
"""

from collections.abc import Sequence
from typing import Any

from jaxmem._util.shown import as_html, as_picture, as_rich, as_text
from jaxmem.fitting.frontier import Frontier
from jaxmem.hlo.fusions import Fusions
from jaxmem.pipeline.schedule import PipelineSchedule
from jaxmem.report.compare import Comparison
from jaxmem.report.report import Difference, MemoryReport
from jaxmem.show import changes, content, fusions, table
from jaxmem.show.blocks import Block, plain
from jaxmem.show.html import fragment, html
from jaxmem.show.text import Rendered

# ---------------------------------------------------------------- pages


def _page(value: Any) -> list[Block]:
    match value:
        case MemoryReport():
            return content.page(value)
        case Difference():
            return changes.page(value)
        case Comparison():
            return table.page(value)
        case Fusions():
            return fusions.page(value)
    raise TypeError(f"there is no page for a {type(value).__name__}")


def _unfolded(value: Any) -> str:
    page: Sequence[Block] = _page(value)
    return fragment(page, opened=[getattr(block, "title", "") for block in page])


for kind in (MemoryReport, Difference, Comparison, Fusions):
    as_text.register(kind, lambda value: plain(_page(value)))
    as_rich.register(kind, lambda value: Rendered(_page(value)))
as_html.register(MemoryReport, html)
for kind in (Difference, Comparison, Fusions):
    as_html.register(kind, _unfolded)


# ---------------------------------------------------------------- pictures
# Each draws with matplotlib, which is slow to import.


@as_picture.register
def _(value: MemoryReport, kind: str) -> Any:
    if kind == "plot_fusions":
        from jaxmem.show.traffic import plot_fusions

        return plot_fusions
    from jaxmem.show.plot import plot_report

    return plot_report


@as_picture.register
def _(value: Comparison, kind: str) -> Any:
    if kind == "heatmap":
        from jaxmem.show.heatmap import plot_heatmap

        return plot_heatmap
    from jaxmem.show.scatter import plot_comparison

    return plot_comparison


@as_picture.register
def _(value: Frontier, kind: str) -> Any:
    from jaxmem.show.frontier import plot_frontier

    return plot_frontier


@as_picture.register
def _(value: PipelineSchedule, kind: str) -> Any:
    from jaxmem.show.schedule import plot_schedule

    return plot_schedule
