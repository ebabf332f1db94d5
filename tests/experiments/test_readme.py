"""What the README shows is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.xla_flags import QUICK

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def test_the_readme_has_code_and_is_read_in_one_go() -> None:
    assert BLOCKS
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


PRINTED = ("Plan of 64 layers", "needs 2", "one backward pass; ", "the loss of 13 rows: 1.0")


@pytest.mark.parametrize(("code", "printed"), list(zip(BLOCKS, PRINTED, strict=True)), ids=PRINTED)
def test_code_runs_as_it_stands_and_warns_of_nothing(
    code: str, printed: str, tmp_path: Path
) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK,
        },
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(printed)
