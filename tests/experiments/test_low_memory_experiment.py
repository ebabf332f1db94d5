"""`experiments/low_memory.py`: its smallest form, and what is said."""

from pathlib import Path

import low_memory
import pytest


@pytest.mark.slow
def test_the_smallest_form_and_that_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    options = low_memory.Options(results=tmp_path, small=True)
    rows = low_memory.main(options)
    plain, norms, gelu, both, *fitted = rows
    assert both.temp_bytes < min(norms.temp_bytes, gelu.temp_bytes)
    assert max(norms.temp_bytes, gelu.temp_bytes) < plain.temp_bytes
    assert both.residual_bytes < min(norms.residual_bytes, gelu.residual_bytes)
    assert all(0 < row.required_bytes <= row.budget * 2**30 for row in fitted)
    assert "| h100-80g, both" in low_memory.kept(rows)
    assert "| h100-80g, 3 GiB" in low_memory.fitted(rows)
    assert low_memory.main(options) == rows
