"""The architecture: which package may import which, as `pyproject.toml` lists it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxmem"


def test_packages_import_only_what_stands_below_them_and_files_have_no_circle() -> None:
    code = (
        "from importlinter.cli import lint_imports as lint; raise SystemExit(lint(no_cache=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_top_of_the_package_is_short() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 12


def test_one_file_touches_private_modules() -> None:
    private = re.compile(
        r"\bjax(?:lib)?\._src\b|\bjax\._[a-z]\w*|\bflax\.\w+\._|\boptax\._src\b|import _core\b"
    )
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if private.search(path.read_text())
    }
    assert files == {"_jax/private.py"}


def test_tests_lie_in_the_folders_of_the_rooms() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    folders = {path.name for path in (ROOT / "tests").iterdir() if list(path.glob("test_*.py"))}
    assert folders <= rooms | {"experiments"}
