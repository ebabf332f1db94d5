"""The notebook runs from top to bottom, and says what is committed in it."""

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

TOUR = Path(__file__).parents[2] / "experiments" / "tour.ipynb"


@pytest.mark.slow
def test_the_tour_says_what_it_said() -> None:
    """All that is printed but figures of compilers, which other versions of them change."""
    cells = [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    pictures = 0
    for cell in cells:
        shown, printed = run("".join(cell["source"]), names)
        kinds = {output["output_type"] for output in cell["outputs"]}
        assert kinds <= {"stream", "execute_result"}
        said = "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")
        assert _masked(said) == _masked(printed)
        pictures += shown is not None
    assert pictures == 1
    assert names["plain"].fits is False
    assert names["fitted"].report.required_bytes <= 30 * 2**30
    assert names["same"] == {"up": True, "down": True}


def _masked(printed: str) -> str:
    """Without figures that have a fraction, and the name that a cell goes by as a file."""
    return re.sub(r"\d+\.\d+|\S+(?=:\d+ \(stack\))", "#", printed)


def run(source: str, names: dict[str, Any]) -> tuple[Any, str]:
    """What a cell shows as its last expression, and what it prints."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    shown = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, str(TOUR), "exec"), names)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), str(TOUR), "eval"), names)
    return shown, out.getvalue()
