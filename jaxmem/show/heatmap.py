"""A picture of policy × batch: the share of the capacity that each needs, and what fits.

Whether it fits is written in each cell and also shown by hatching, so that no
reader depends on colours.
"""

import os
from typing import TYPE_CHECKING, Any

from jaxmem._util.text import size
from jaxmem.show.figure import (
    BAD,
    GREY,
    INK,
    check_path,
    matplotlib_defaults,
    new_figure,
    write,
)
from jaxmem.show.table import axes_of
from jaxmem.show.words import clean, cut, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxmem.report.compare import Comparison
    from jaxmem.report.report import MemoryReport

# ---------------------------------------------------------------- API


def plot_heatmap(
    comparison: "Comparison",
    path: str | os.PathLike[str] | None = None,
    *,
    dpi: int = 200,
) -> "Figure":
    """Draw one cell for each policy and batch.

    Args:
      comparison: of reports by (policy, batch).  Where the capacity is unknown, cells
        show sizes only, coloured relative to the largest.
        path: where to write it, as PNG or SVG by its suffix; None to not write it.
      dpi: dots per inch of a PNG.

    Raises:
      ImportError: matplotlib is not installed; the message says how to install it.
      ValueError: the keys are not pairs, or the file is neither PNG nor SVG.
    """
    file = check_path(path)
    if not comparison.pairs:
        raise ValueError(
            "a heat map is of policies and batches, and the keys of this comparison are single "
            "names; pass compare({('none', 8): report, ('none', 16): report, …})"
        )
    policies, batches = axes_of(comparison)
    names = [cut(clean(str(policy)), 24) for policy in policies]
    margin = 0.55 + 0.085 * max(map(len, names))
    width, height = 1.15 * len(batches), 0.55 * len(policies)
    whole = (max(margin + width + 1.25, 5.2), height + 1.5)
    with matplotlib_defaults():
        figure = new_figure(*whole, dpi)
        box = (margin / whole[0], 0.88 / whole[1], width / whole[0], height / whole[1])
        axes = figure.add_axes(box)
        _cells(comparison, axes, policies, batches)
        _frame(comparison, axes, names, batches)
        bar = figure.add_axes((box[0] + box[2] + 0.2 / whole[0], box[1], 0.16 / whole[0], box[3]))
        _key(comparison, figure, bar)
        notes = _notes(comparison)
        figure.text(0.1 / whole[0], 0.12 / whole[1], notes, fontsize=8, color=GREY, va="bottom")
        write(figure, file)
    return figure


# ---------------------------------------------------------------- implementation


def _colours() -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    # One hue, lighter to darker: ordered for colour-blind readers too, and black text is legible.
    return LinearSegmentedColormap.from_list("need", colormaps["Blues"]([0.06, 0.35, 0.62, 0.85]))


def _whole(comparison: "Comparison") -> int:
    """The bytes of 100 %."""
    largest = max(report.required_bytes for report in comparison.reports.values())
    return comparison.capacity_bytes or largest or 1


def _cells(comparison: "Comparison", axes: "Axes", policies: list[Any], batches: list[Any]) -> None:
    from matplotlib.patches import Rectangle

    colours, whole = _colours(), _whole(comparison)
    for i, policy in enumerate(policies):
        for j, batch in enumerate(batches):
            report = comparison.reports.get((policy, batch))
            how: dict[str, Any] = {"facecolor": "white", "edgecolor": "white", "linewidth": 2}
            ink = GREY
            if report is not None and report.fits is not False:
                shade = colours(min(report.required_bytes / whole, 1.0))
                how["facecolor"] = shade
                ink = INK if sum(shade[:3]) > 1.45 else "white"
            elif report is not None:
                how |= {"facecolor": "#f4f4f4", "hatch": "////", "edgecolor": "#d6d6d6"}
                how["linewidth"], ink = 0, BAD
            axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, **how))
            if report is not None and report.fits is False:
                frame = Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor="white", lw=2)
                axes.add_patch(frame)
            _write_cell(axes, j, i, report, ink)


def _write_cell(axes: "Axes", x: int, y: int, report: "MemoryReport | None", ink: str) -> None:
    how: dict[str, Any] = {"ha": "center", "va": "center", "color": ink, "parse_math": False}
    if report is None:
        axes.text(x, y, "not compiled", fontsize=7.5, **how)
        return
    need = size(report.required_bytes)
    if report.capacity_bytes is None:
        axes.text(x, y, need, fontsize=9.5, **how)
        return
    sign = "✓" if report.fits else "✗"
    if report.fits and report.fits_by_default is False:
        sign = "✓*"
    part = share(report.required_bytes, report.capacity_bytes)
    axes.text(x, y - 0.17, f"{sign} {need}", fontsize=9.5, fontweight="bold", **how)
    axes.text(x, y + 0.22, part, fontsize=8, **how)


def _frame(comparison: "Comparison", axes: "Axes", names: list[str], batches: list[Any]) -> None:
    axes.set_xlim(-0.5, len(batches) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xticks(range(len(batches)), [cut(clean(str(batch)), 12) for batch in batches])
    axes.set_yticks(range(len(names)), names)
    for label in (*axes.get_yticklabels(), *axes.get_xticklabels()):
        label.set_parse_math(False)
    axes.tick_params(length=0, labelsize=9.5, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("batch", fontsize=9.5)
    of = comparison.capacity_bytes
    title = f"required memory on {comparison.target}" + (f", of {size(of)}" if of else "")
    figure: Any = axes.figure
    inches = figure.get_size_inches()
    figure.text(
        0.1 / inches[0],
        1 - 0.18 / inches[1],
        title,
        fontsize=10.5,
        fontweight="bold",
        va="top",
        parse_math=False,
    )


def _key(comparison: "Comparison", figure: "Figure", axes: "Axes") -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import FuncFormatter

    bar = figure.colorbar(ScalarMappable(Normalize(0, 100), _colours()), cax=axes)
    bar.outline.set_visible(False)  # type: ignore[operator]
    of = "capacity" if comparison.capacity_bytes is not None else "the largest"
    axes.set_title(f"of {of}", fontsize=8, color=GREY, loc="left", pad=8)
    few = axes.get_window_extent().height < 100 * figure.dpi / 72
    bar.set_ticks([0, 100] if few else [0, 25, 50, 75, 100])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f} %"))
    axes.tick_params(labelsize=8, length=2, colors=GREY)


def _notes(comparison: "Comparison") -> str:
    reports = comparison.reports.values()
    if comparison.capacity_bytes is None:
        return "the capacity is unknown, and so is what fits"
    notes = ["✓ fits    ✗ does not fit"]
    default = next((r.default_capacity_bytes for r in reports if r.default_capacity_bytes), None)
    if default and any(report.fits and report.fits_by_default is False for report in reports):
        taken = share(default, comparison.capacity_bytes)
        notes.append(f"✓* only in more than the {taken} that jax takes by default")
    return "    ".join(notes)
