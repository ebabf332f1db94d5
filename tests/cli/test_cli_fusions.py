"""`jaxmem report --fusions`: the kernels after the report, in JSON, and as a picture."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers import light

import jaxmem
from jaxmem.cli.app import app

LIGHT = f"{light.__file__}:job"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the cache of the user who runs the tests."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), prog_name="jaxmem")


def test_kernels_are_shown_where_they_are_asked_for(tmp_path: Path):
    words = "report", LIGHT, "--target", "h100-80g"
    plain, more = run(*words), run(*words, "--fusions")
    assert plain.exit_code == more.exit_code == 0, more.output
    assert "kernels that move most" not in plain.stdout
    assert "by kind of work" in more.stdout
    assert "kernels that move most" in more.stdout
    picture = tmp_path / "fusions.png"
    result = run(*words, "--json", "--fusions", "--plot-fusions", str(picture))
    report = jaxmem.MemoryReport.from_json(result.stdout)
    assert report.fusions is not None
    assert json.loads(result.stdout)["bytes_moved"] == report.fusions.bytes
    assert picture.stat().st_size > 5000
    assert f"wrote {picture}" in result.stderr


def test_a_picture_that_cannot_be_written_is_an_error_before_anything_is_compiled(tmp_path: Path):
    result = run("report", LIGHT, "--plot-fusions", str(tmp_path / "fusions.pdf"))
    assert result.exit_code != 0
    assert "a picture is written as PNG or SVG" in str(result.exception) + result.output
    missing = tmp_path / "none" / "fusions.png"
    result = run("report", LIGHT, "--plot-fusions", str(missing))
    assert result.exit_code == 1
    assert f"--plot-fusions {missing}: there is no folder" in result.output
