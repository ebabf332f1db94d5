"""`experiments/mixed_precision.py`: its smallest form, and what is said."""

from pathlib import Path

import mixed_precision
import pytest
from mixed_precision import Options


@pytest.mark.slow
def test_the_smallest_form_and_that_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    rows = mixed_precision.main(Options(results=tmp_path, small=True))
    ideal, ahead, late = rows
    assert late.required_bytes - ideal.required_bytes <= 2 * late.layer_bytes
    assert ahead.required_bytes - ideal.required_bytes >= 0.75 * late.layers * late.layer_bytes
    text = mixed_precision.summary(rows)
    assert len(text.splitlines()) == 3
    assert "| h100-80g |   full |" in text
    assert mixed_precision.main(Options(results=tmp_path, small=True)) == rows
