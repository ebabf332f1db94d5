"""A run in one picture: what each policy needs, and how the loss fell."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lm.comparison import Row
from lm.config import Config

_KEPT, _OURS, _TEXT = "#b8c4ce", "#1f77b4", "#444444"


def draw(
    config: Config, rows: Sequence[Row], metrics: Sequence[dict[str, Any]], entropy: float
) -> bytes:
    """The picture as PNG: memory of every policy on the left, loss on the right."""
    # Figure itself and not pyplot: no global state, no display looked for.
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    memory, loss = figure.subplots(1, 2)
    _memory(memory, config, rows)
    _loss(loss, config, metrics, entropy)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _memory(axes: Any, config: Config, rows: Sequence[Row]) -> None:
    known = [row for row in rows if row.temporary_bytes is not None]
    sizes = [(row.temporary_bytes or 0) / 2**20 for row in known]
    places = range(len(known))
    axes.barh(places, sizes, color=[_OURS if r.policy == config.label else _KEPT for r in known])
    axes.set_yticks(places, [row.policy for row in known])
    axes.invert_yaxis()
    for place, row, size in zip(places, known, sizes, strict=True):
        text = f" {size:.1f} MiB, {row.extra_forwards} extra"
        if row.step_time_ratio is not None:
            text += f", {row.step_time_ratio:.2f}× time"
        axes.text(size, place, text, va="center", fontsize=8.5, color=_TEXT)
    axes.set_xlim(0, max(sizes, default=1.0) * 1.5)
    axes.set_xlabel("temporary memory of the compiled train step (MiB)")
    axes.set_title(f"{config.layers} layers: memory, extra layer evaluations, time", fontsize=10)
    _plain(axes)


def _loss(axes: Any, config: Config, metrics: Sequence[dict[str, Any]], entropy: float) -> None:
    steps = [row["step"] for row in metrics]
    axes.plot(steps, [row["loss"] for row in metrics], color=_KEPT, lw=1.2, label="training")
    seen = [row for row in metrics if "held_out_loss" in row]
    axes.plot(
        [row["step"] for row in seen],
        [row["held_out_loss"] for row in seen],
        color=_OURS, marker="o", ms=4, label="held-out text",
    )  # fmt: skip
    axes.axhline(entropy, color=_TEXT, ls="--", lw=1, label=f"unigram entropy, {entropy:.2f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"training under {config.label} ({config.framework})", fontsize=10)
    axes.legend(frameon=False)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
