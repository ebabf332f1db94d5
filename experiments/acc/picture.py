"""The table as one picture: the memory of each form on the left, its errors on the right."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from acc.exactness import AFTER_NAN, CASES, GRADIENT, POISONED
from acc.forms import FORMS, Form
from acc.memory import MEMORY
from acc.table import REFUSES, Row

_OURS, _OTHERS, _TEXT, _RIGHT, _WRONG = "#1f77b4", "#b8c4ce", "#444444", "#e3eef7", "#f7d9cf"

# The accuracy of float32; and of a gradient in bfloat16, rounded once.
_CLOSE = {case.name: 2.0**-8 if case.dtype == "bfloat16" else 1e-5 for case in CASES}


def draw(rows: Sequence[Row], problems: Sequence[str], device: str) -> bytes:
    """The picture as PNG: memory of one or two problems on one device, and exactness."""
    forms = [form for form in FORMS if any(row.form == form.name for row in rows)]
    figure = Figure(figsize=(12.5, 0.42 * len(forms) + 2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    memory, exactness = figure.subplots(1, 2, width_ratios=(1, 1.15))
    needs = {
        problem: {
            row.form: float(row.value)
            for row in rows
            if (row.question, row.case, row.device, row.unit) == (MEMORY, problem, device, "P")
        }
        for problem in problems
    }
    _memory(memory, forms, needs)
    memory.set_title(f"memory with Adam, compiled for {device}", fontsize=10)
    _exactness(exactness, [form.name for form in forms], rows)
    figure.suptitle("Gradient accumulation: memory of a step, and error of its gradient")
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def can_be_used(row: Row) -> bool:
    """Whether the gradient is close enough to use."""
    if isinstance(row.value, str):
        return row.value not in (REFUSES, POISONED)
    return row.value <= _CLOSE[row.case]


# ---------------------------------------------------------------- implementation


def _memory(axes: Any, forms: Sequence[Form], needs: dict[str, dict[str, float]]) -> None:
    height = 0.8 / len(needs)
    for number, found in enumerate(needs.values()):
        shade = 1 - 0.5 * number
        for place, form in enumerate(forms):
            y = place + (number - (len(needs) - 1) / 2) * height
            color = to_rgba(_OURS if form.ours else _OTHERS, shade)
            if form.name in found:
                value = found[form.name]
                axes.barh(y, value, height * 0.94, color=color)
                axes.text(value, y, f" {value:.2f}", va="center", fontsize=8, color=_TEXT)
    axes.set_yticks(range(len(forms)), [form.name for form in forms])
    axes.set_ylim(len(forms) - 0.5, -0.5)  # as on the right
    axes.set_xlim(0, 1.12 * max(value for found in needs.values() for value in found.values()))
    described = "; ".join(
        f"{which}: {problem}" for which, problem in zip(("upper bar", "lower"), needs, strict=False)
    )
    axes.set_xlabel(f"bytes over those of the float32 parameters\n({described}; blue: jaxmem)")
    axes.spines[["top", "right"]].set_visible(False)


def _exactness(axes: Any, forms: Sequence[str], rows: Sequence[Row]) -> None:
    columns = [*(case.name for case in CASES), AFTER_NAN]
    for row in rows:
        if row.question != GRADIENT:
            continue
        x, y = columns.index(row.case), forms.index(row.form)
        color = _RIGHT if can_be_used(row) else _WRONG
        axes.fill_between((x, x + 1), y - 0.5, y + 0.5, color=color, edgecolor="white", lw=2)
        axes.text(x + 0.5, y, row.text, ha="center", va="center", fontsize=8.5, color=_TEXT)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(forms) - 0.5, -0.5)
    axes.set_xticks([k + 0.5 for k in range(len(columns))], columns)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    axes.set_yticks([])
    axes.set_xlabel(
        "relative error of the gradient against float64;\n"
        "a microbatch of NaN is skipped, costs its step, or poisons all that follow\n"
        "(red: wrong)"
    )
    axes.spines[:].set_visible(False)
