"""A picture of a pipeline schedule: what each stage does when (a Gantt chart)."""

import os
from typing import TYPE_CHECKING

from jaxmem.show.figure import (
    INK,
    check_path,
    matplotlib_defaults,
    new_figure,
    plain_axes,
    put,
    write,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxmem.pipeline.schedule import PipelineSchedule

# Colours that colour-blind readers can distinguish (Okabe and Ito).
FORWARD, RECOMPUTED, BACKWARD, IDLE = "#56B4E9", "#E69F00", "#009E73", "#efefef"

# ---------------------------------------------------------------- API


def plot_schedule(
    schedule: "PipelineSchedule",
    path: str | os.PathLike[str] | None = None,
    *,
    recomputation: float = 1.0,
    title: str = "",
    inches: tuple[float, float] | None = None,
    dpi: int = 200,
) -> "Figure":
    """Draw time on the x axis, in forward passes, and a line for each stage.

    A tick lasts until the slowest stage is done; a backward pass lasts as long as two forward
    passes.

    Args:
      schedule: a `jaxmem.PipelineSchedule`.
      path: where to write it, as PNG or SVG by its suffix; None to not write it.
      recomputation: how long the recomputation of a stage lasts, in forward passes.
      title: above the picture; by default what schedule it is, and its bubble.
      inches: width and height; by default they follow from the stages.
      dpi: dots per inch of a PNG.

    Raises:
      ImportError: matplotlib is not installed; the message says how to install it.
      ValueError: the file is neither PNG nor SVG.
    """
    file = check_path(path)
    with matplotlib_defaults():
        figure = new_figure(*(inches or (9.0, 1.35 + 0.28 * schedule.stages)), dpi)
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        draw_schedule(schedule, axes, recomputation, title)
        figure.legend(
            handles=legend(), loc="outside lower center", ncols=4, frameon=False, fontsize=8.5,
            handlelength=1.2,
        )  # fmt: skip
        write(figure, file)
    return figure


def legend() -> list[object]:
    """What the colours mean."""
    from matplotlib.patches import Patch

    words = ("forward", FORWARD), ("recomputation", RECOMPUTED), ("backward", BACKWARD)
    return [Patch(color=colour, label=label) for label, colour in (*words, ("idle", IDLE))]


def draw_schedule(
    schedule: "PipelineSchedule", axes: "Axes", recomputation: float = 1.0, title: str = ""
) -> None:
    """The chart alone, on axes that are there."""
    plain_axes(axes)
    backward = 2.0 + recomputation
    whole = schedule.span(1.0, backward)
    for stage in range(schedule.stages):
        axes.barh(stage, whole, left=0, height=0.86, color=IDLE, linewidth=0)
    at = 0.0
    room = 500.0 / whole  # points, nearly, for what lasts as long as a forward pass
    for forward, back in zip(schedule.forward, schedule.backward, strict=True):
        length = 0.0
        for stage, (first, second) in enumerate(zip(forward, back, strict=True)):
            now = at
            if first is not None:
                now = _bar(axes, stage, now, 1.0, FORWARD, _number(first, schedule), room)
            if second is not None:
                if recomputation:
                    now = _bar(axes, stage, now, recomputation, RECOMPUTED, "", room)
                now = _bar(axes, stage, now, 2.0, BACKWARD, _number(second, schedule), room)
            length = max(length, now - at)
        at += length
    axes.set_xlim(0, whole)
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_yticks(range(schedule.stages), [f"stage {k}" for k in range(schedule.stages)])
    axes.set_xlabel("time, in forward passes", fontsize=9, color=INK)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    busy = schedule.microbatches * schedule.chunks * (1 + backward)
    words = title or (
        f"{schedule.name}: {schedule.microbatches} microbatches, {schedule.ticks} ticks, idle "
        f"{1 - busy / whole:.0%} of the time; inputs held by stage 0: {schedule.in_flight[0]}"
    )
    axes.set_title(words, loc="left", fontsize=10, fontweight="bold", color=INK, parse_math=False)


# ---------------------------------------------------------------- implementation


def _bar(
    axes: "Axes", stage: int, at: float, length: float, colour: str, words: str, room: float
) -> float:
    axes.barh(stage, length, left=at, height=0.86, color=colour, edgecolor="white", linewidth=0.5)
    points = 6.5
    if words and len(words) * points * 0.62 < length * room:
        put(axes, at + length / 2, stage, words, points, ha="center", va="center")
    return at + length


def _number(work: tuple[int, int], schedule: "PipelineSchedule") -> str:
    microbatch, chunk = work
    own = chunk // schedule.stages
    return f"{microbatch}" if schedule.chunks == 1 else f"{microbatch}{'abcdefghij'[own % 10]}"
