"""Schedules of a pipeline, compiled for a GPU, and the bisection for the deepest model."""

from pathlib import Path

import pipeline
import pytest
from pipeline import Depth, Options


@pytest.mark.slow
def test_schedules_of_a_small_pipeline(tmp_path: Path) -> None:
    options = Options(results=tmp_path, small=True, microbatches=(4,))
    rows, deepest = pipeline.main(options)
    assert [row.way for row in rows] == ["gpipe", "1f1b"]
    assert deepest == {}
    message = pipeline.ROWS * 256 * 2
    for row in rows:
        assert row.held_bytes == 4 * message < row.temp_bytes
        assert (row.ticks, row.bubble) == (2 * (4 + 7), round(7 / 11, 4))
    assert pipeline.main(options) == (rows, {})
    assert len(pipeline.summary(rows).splitlines()) == 4
    assert (tmp_path / "pipeline_schedules.png").exists()


def test_the_deepest_that_fits_is_found() -> None:
    asked: list[int] = []

    def probe(each: int) -> Depth:
        asked.append(each)
        return Depth(
            versions="", target="", devices=8, recomputed=True, schedule="", layers=8 * each,
            fits=each <= 17,
        )  # fmt: skip

    deepest = pipeline.bisected(probe)
    assert deepest is not None
    assert deepest.layers == 8 * 17
    assert len(asked) <= 5
    assert pipeline.bisected(lambda each: probe(each + 17)) is None
    assert "| 8, recomputed |    136 |       103 |" in pipeline.depth_summary({(True, 8): deepest})
