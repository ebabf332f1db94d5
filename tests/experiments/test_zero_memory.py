"""`experiments/zero_memory.py`: its smallest form, and what is said."""

import dataclasses
from pathlib import Path

import pytest
import zero_memory
from zero_memory import Options, Row, answer, draw, main, summary


@pytest.mark.slow
def test_the_smallest_form_and_that_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(small=True, stages=(0, 3), ways=("ordinary", "fused"), results=tmp_path)
    rows = main(options)
    assert [(row.stage, row.way) for row in rows] == [
        (0, "ordinary"), (0, "fused"), (3, "ordinary"), (3, "fused"),
    ]  # fmt: skip
    whole, split = (rows[k].argument_bytes or 0 for k in (0, 2))
    assert whole > 6 * split
    assert (tmp_path / "zero_memory.png").stat().st_size > 10_000

    def made(*args: object) -> None:
        raise AssertionError("this row was there")

    monkeypatch.setattr(zero_memory, "_made", made)
    assert main(options) == rows


def test_what_is_not_reached_is_said(tmp_path: Path) -> None:
    row = Row(
        "h100-80g", Options().sizes, 2, "ordinary", parameter_bytes=4000, required_bytes=6400,
        argument_bytes=5000, temp_bytes=1400, host_bytes=0, gathered=1000, scattered=1000,
        reduced=0, versions="1",
    )  # fmt: skip
    assert answer([row]) == "stage 2: 1.600, goal 1.50, not reached; sent 2.00, in the papers 2"
    refused = dataclasses.replace(row, stage=3, required_bytes=None, error="too bad")
    assert "stage 3, ordinary: refused: too bad" in answer([row, refused])
    assert "| 2     |   1.38 |    1.600 | 2.00 |" in summary([row])
    draw([row, refused], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
