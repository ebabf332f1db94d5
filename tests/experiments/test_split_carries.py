"""Carries of tensor-parallel layers, whole and split, compiled for a GPU."""

from pathlib import Path

import split_carries
from split_carries import Options


def test_a_device_keeps_an_eighth(tmp_path: Path) -> None:
    whole, split = split_carries.main(Options(results=tmp_path, small=True))
    assert whole.saved_bytes == 8 * split.saved_bytes == whole.layers * 8 * 1024 * 1024 * 2
    assert split.temp_bytes < whole.temp_bytes // 2
    assert split.matmul_flops == whole.matmul_flops
    assert len(split_carries.summary([whole, split]).splitlines()) == 3
    again = split_carries.main(Options(results=tmp_path, small=True))
    assert again == [whole, split]
