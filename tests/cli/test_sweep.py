"""`jaxmem sweep`: rows that survive being killed, are not compiled twice, and are drawn."""

import csv
import errno
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers.terminal import in_terminal
from helpers.xla_flags import QUICK

import jaxmem
from jaxmem.cli.app import app
from jaxmem.cli.combinations import combinations
from jaxmem.cli.rows import COLUMNS, KEY, Rows, key_of, values_of
from jaxmem.errors import JaxmemWarning
from jaxmem.jobs.load import find
from jaxmem.jobs.parse import PolicyText

TRAINING = str(Path(__file__).parents[1] / "helpers" / "training.py")
LIGHT = str(Path(__file__).parents[1] / "helpers" / "light.py")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the cache of the user who runs the tests."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def sweep(out: Path, *words: str, job: str = f"{LIGHT}:job") -> Result:
    where = job if ":" in job else f"{TRAINING}:{job}"
    return CliRunner().invoke(app, ["sweep", where, "--out", str(out), *words])


def read(out: Path) -> list[dict[str, str]]:
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------- the file


def row(**values) -> dict:
    return {"target": "h100-80g", "policy": "sqrt", **values}


def test_rows_are_on_disk_as_they_come_and_come_back(tmp_path: Path):
    path = tmp_path / "rows.csv"
    with Rows(path) as rows:
        rows.append(row(batch=8, fits=True, temp_bytes=12, estimated_seconds=0.5))
        assert read(path)[0]["temp_bytes"] == "12"
        rows.append(row(batch=16, error='a "quoted", error\nof two lines'))
        assert len(path.read_text().splitlines()) == 3
    with Rows(path) as rows:
        first, second = map(values_of, rows.by_key.values())
    assert (first["batch"], first["fits"], first["temp_bytes"]) == ("8", True, 12)
    assert first["estimated_seconds"] == 0.5
    assert first["host_bytes"] is None
    assert second["error"] == 'a "quoted", error of two lines'


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_goes_and_the_others_stay(tmp_path: Path, cut: int):
    path = tmp_path / "rows.csv"
    with Rows(path) as rows:
        rows.append(row(batch=8))
        whole = path.read_bytes()
        rows.append(row(batch=16, error="an error of some length that is cut somewhere"))
    path.write_bytes(path.read_bytes()[:-cut])
    with Rows(path) as rows:
        assert [key[2] for key in rows.by_key] == ["8"]
        assert path.read_bytes() == whole
        rows.append(row(batch=32))
    assert [one["batch"] for one in read(path)] == ["8", "32"]


def test_a_torn_header_is_written_anew(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text("target,pol")
    with Rows(path) as rows:
        rows.append(row())
    assert tuple(read(path)[0]) == COLUMNS


def test_the_last_row_of_a_key_replaces_the_others_when_closed(tmp_path: Path):
    path = tmp_path / "rows.csv"
    with Rows(path) as rows:
        rows.append(row(batch=8, error="no"))
        rows.append(row(batch=16))
        rows.append(row(batch=8, temp_bytes=1))
        assert len(read(path)) == 3
    assert [(one["batch"], one["error"]) for one in read(path)] == [("8", ""), ("16", "")]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target,policy,loss\n", "lacks batch, accum.*; it has loss beyond them; choose another"),
        (",".join(reversed(COLUMNS)) + "\n", "they are in another order"),
        ("some notes of mine", "is not empty and not the CSV of a sweep"),
        (",".join(COLUMNS) + "\na,b\n", r"rows.csv, line 2: 2 cells instead of"),
        ("\xff\xfe\n", "is not UTF-8 text"),
    ],
    ids=["columns", "order", "text", "cells", "bytes"],
)
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, text: str, message: str):
    path = tmp_path / "rows.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        Rows(path)
    assert path.read_bytes() == text.encode("latin-1")


def test_a_file_is_written_by_one_sweep(tmp_path: Path):
    path = tmp_path / "rows.csv"
    with Rows(path), pytest.raises(OSError, match="another sweep is writing .*rows.csv"):
        Rows(path)
    # Also where the one before put a new file in its place.
    with Rows(path) as rows:
        rows.append(row(temp_bytes=1))
        rows.append(row(temp_bytes=2))
    with Rows(path), pytest.raises(OSError, match="another sweep"):
        Rows(path)


@pytest.mark.parametrize("why", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_said_and_no_other_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: int
):
    """As Lustre and NFS may be mounted."""

    def flock(*_: object) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "rows.csv"
    with pytest.warns(JaxmemWarning, match=r"rows.csv cannot be locked \(.*\): run one sweep at a"):
        rows = Rows(path)
    with rows:
        rows.append(row(batch=8))
    assert [one["batch"] for one in read(path)] == ["8"]


# ---------------------------------------------------------------- the sweep


@pytest.mark.slow
def test_every_combination_is_a_row(tmp_path: Path):
    out = tmp_path / "deep" / "sweep.csv"
    words = ["--policies", "none,sqrt:segments=2", "--batch", "32,64", "--accum", "2"]
    result = sweep(out, *words, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    axes = (["none", "sqrt:segments=2"], ["32", "64"], ["2"])
    assert [(r["policy"], r["batch"], r["accum"]) for r in rows] == list(itertools.product(*axes))
    assert all(row["error"] is None and row["target"] == "local" for row in rows)
    assert rows[1]["temp_bytes"] > rows[0]["temp_bytes"] > rows[2]["temp_bytes"]
    with jaxmem.use_policy("none"):
        report = find(f"{LIGHT}:job").make({"batch": 32, "accum": 2}).report(suggest=False)
    for name in ("required_bytes", "temp_bytes", "matmul_flops", "recompute_overhead", "fits"):
        assert rows[0][name] == getattr(report, name)
    table = sweep(out, *words).stdout.splitlines()
    assert table[0].split()[:5] == ["target", "policy", "batch", "accum", "needs"]
    assert table[-1] == "0 of 4 fit, 4 of unknown capacity"


def test_absent_targets(tmp_path: Path):
    out = tmp_path / "sweep.csv"
    result = sweep(out, "--targets", "h100-80g,v5e-16g", "--policies", "own,none")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "4 of 4 fit"
    rows = {(row["target"], row["policy"]): values_of(row) for row in read(out)}
    assert len(rows) == 4
    for (target, _), row in rows.items():
        assert row["fits"]
        assert row["capacity_bytes"] == jaxmem.targets.target(target).memory
        assert row["batch"] == "64"  # the job's default
        assert "jaxlib" in row["compiler"]
    assert rows["h100-80g", "own"]["temp_bytes"] < rows["h100-80g", "none"]["temp_bytes"]


def test_a_second_sweep_compiles_only_what_is_new(tmp_path: Path):
    out = tmp_path / "sweep.csv"
    assert sweep(out, "--batch", "32").exit_code == 0
    first = out.read_bytes()
    assert sweep(out, "--batch", "32").exit_code == 0
    assert out.read_bytes() == first
    assert sweep(out, "--batch", "32,64").exit_code == 0
    assert out.read_bytes().startswith(first)
    assert [row["batch"] for row in read(out)] == ["32", "64"]
    # The same in other words.
    assert sweep(out, "--set", "batch=32", "--set", "accum=1").exit_code == 0
    assert len(read(out)) == 2
    assert sweep(out, "--batch", "32", "--set", "layers=2").exit_code == 0
    assert [row["settings"] for row in read(out)] == ["", "", '{"layers": 2}']


_EDITABLE = """
import os
import jax, jax.numpy as jnp
from jaxmem.jobs.job import Job

def job(batch=4):
    # a comment
    if os.path.exists("fail"):
        raise RuntimeError("the file is there")
    return Job(lambda x: jnp.sin(x) * 2, (jax.ShapeDtypeStruct((batch,), "float32"),))
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A sweep of mine.py, where that is; the file is read again each time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return lambda *words: sweep(Path("sweep.csv"), *words, job="mine.py:job")


def test_a_changed_program_is_compiled_again_a_changed_comment_is_not(
    tmp_path: Path, in_folder: Callable[..., Result]
):
    mine, out = tmp_path / "mine.py", tmp_path / "sweep.csv"
    mine.write_text(_EDITABLE)
    assert in_folder().exit_code == 0
    first = out.read_bytes()
    mine.write_text(_EDITABLE.replace("a comment", "another"))
    assert in_folder().exit_code == 0
    assert out.read_bytes() == first
    mine.write_text(_EDITABLE.replace("sin", "cos"))
    assert in_folder().exit_code == 0
    (row,) = read(out)
    assert row["program"] not in first.decode()


def test_a_row_that_failed_says_so_and_is_tried_again(
    tmp_path: Path, in_folder: Callable[..., Result]
):
    (tmp_path / "mine.py").write_text(_EDITABLE)
    (tmp_path / "fail").touch()
    failed = in_folder("--batch", "4,8")
    assert failed.exit_code == 1
    assert "0 of 2 fit, 2 failed" in failed.stdout
    assert "batch" in failed.stdout
    rows = read(tmp_path / "sweep.csv")
    assert [row["error"] for row in rows] == ["RuntimeError: the file is there"] * 2
    (tmp_path / "fail").unlink()
    assert in_folder("--batch", "4,8").exit_code == 0
    rows = read(tmp_path / "sweep.csv")
    assert [(row["batch"], row["error"]) for row in rows] == [("4", ""), ("8", "")]


def test_one_row_that_fails_leaves_the_others(tmp_path: Path):
    result = sweep(tmp_path / "sweep.csv", "--batch", "16,32", job="sometimes")
    assert result.exit_code == 1
    assert "1 failed" in result.stdout
    assert "32: ValueError: no batch above 16" in result.stdout
    rows = read(tmp_path / "sweep.csv")
    assert [(row["batch"], bool(row["required_bytes"])) for row in rows] == [
        ("16", True),
        ("32", False),
    ]


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", QUICK)
    out = tmp_path / "sweep.csv"
    words = ["sweep", f"{TRAINING}:job", "--out", str(out), "--batch", "16,32,64,128"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxmem", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (out.exists() and out.read_bytes().count(b"\n") > 1):
        time.sleep(0.02)
    # A second one at the same time would write the same rows.
    second = CliRunner().invoke(app, words)
    process.kill()
    process.wait()
    assert second.exit_code == 1
    assert "another sweep is writing" in second.stderr
    there = out.read_bytes()
    assert 2 <= there.count(b"\n") < 5
    with out.open("ab") as file:
        file.write(b"local,own,64,1,,true,12")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(there)
    assert [row["batch"] for row in read(out)] == ["16", "32", "64", "128"]
    assert all(row["required_bytes"] for row in read(out))


_LONG = """
import jax, jax.numpy as jnp
from jaxmem import Job

def job():
    def step(x):
        for k in range(600):
            x = jnp.sin(x @ x) * k + x.sum(0)
        return x
    return Job(step, (jax.ShapeDtypeStruct((512, 512), "float32"),))
"""


# What runs in the background of a shell that is no terminal ignores interrupts from the start.
_INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("jaxmem", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_compilers(tmp_path: Path):
    (tmp_path / "long.py").write_text(_LONG)
    words = ["sweep", "long.py:job", "--targets", "h100-80g", "--out", "sweep.csv"]
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTIBLE, *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (tmp_path / "sweep.csv").exists():
        time.sleep(0.1)
    # It traces, and then it compiles for twenty seconds or more.
    while time.monotonic() < deadline and not list(tmp_path.glob("jaxmem-*/program")):
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    stdout, stderr = process.communicate()
    assert time.monotonic() - start < 10
    assert process.returncode == 1
    assert stdout == ""
    assert "stopped; the same command resumes sweep.csv" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("job", "words", "message"),
    [
        ("undecorated", ["--batch", "8"], "undecorated has none; add batch= to it, or leave"),
        ("job", ["--batch", "8", "--set", "batch=8"], "by --batch and by --set batch=…"),
        ("job", ["--batch", "eight"], "takes a whole number for batch, got 'eight'"),
        ("job", ["--batch", "8,8"], "'8' is given twice"),
        ("job", ["--policies", "none,sqrtt"], "unknown remat policy 'sqrtt'"),
        ("job", ["--targets", "local,h100-8g"], "did you mean 'h100-80g'"),
    ],
    ids=["keyword", "twice", "number", "again", "policy", "target"],
)
def test_wrong_words_are_refused_before_anything_is_written(
    tmp_path: Path, job: str, words: list[str], message: str
):
    result = sweep(tmp_path / "sweep.csv", *words, job=job)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "sweep.csv").exists()


def test_other_columns_are_refused(tmp_path: Path):
    out = tmp_path / "sweep.csv"
    out.write_text("step,loss\n1,0.5\n")
    result = sweep(out)
    assert result.exit_code == 1
    assert "it has step, loss beyond them" in result.stderr
    assert out.read_text() == "step,loss\n1,0.5\n"


def test_policies_without_a_stack_are_spoken_of(tmp_path: Path):
    result = sweep(tmp_path / "sweep.csv", "--policies", "none,full", job="undecorated")
    assert result.exit_code == 0
    assert "the policy does nothing" in result.stderr
    none, full = read(tmp_path / "sweep.csv")
    assert none["program"] == full["program"]


def test_the_policy_goes_to_a_job_that_takes_one():
    policies = (PolicyText("none"), PolicyText("sqrt", (("segments", 2),)))
    for one in combinations(f"{TRAINING}:with_policy", policies, None, None, ()):
        one.trace(("local",))
        assert not one.undecorated
        assert not one.is_done({}, "local")
        assert len(one.key("local")) == len(KEY) == len(key_of({}))


@pytest.mark.slow
def test_pictures(tmp_path: Path):
    words = ["--targets", "h100-80g,v5e-16g", "--policies", "none,full", "--batch", "32,64"]
    pictures = ["--heatmap", str(tmp_path / "heat.png"), "--plot", str(tmp_path / "front.svg")]
    result = sweep(tmp_path / "sweep.csv", *words, *pictures)
    assert result.exit_code == 0, result.output
    for target in ("h100-80g", "v5e-16g"):
        assert (tmp_path / f"heat-{target}.png").read_bytes().startswith(b"\x89PNG")
        for batch in (32, 64):
            front = tmp_path / f"front-{target}-batch{batch}.svg"
            assert front.read_text().lstrip().startswith("<?xml")
        assert f"heat-{target}.png" in result.stderr


@pytest.mark.parametrize("option", ["--heatmap", "--plot"])
def test_pictures_that_cannot_be_written_are_refused_before_anything_is_compiled(
    tmp_path: Path, option: str
):
    out = tmp_path / "sweep.csv"
    for file, text in ((tmp_path / "no" / "a.png", "there is no folder"), ("a.doc", "PNG")):
        result = sweep(out, option, str(file))
        assert result.exit_code != 0
        assert text.lower() in result.output.lower() + str(result.exception).lower()
        assert not out.exists()


@pytest.mark.slow
def test_a_progress_bar_in_a_terminal(tmp_path: Path):
    (tmp_path / "mine.py").write_text(_EDITABLE)
    words = ["sweep", "mine:job", "--out", "sweep.csv", "--json"]
    with (tmp_path / "rows.json").open("w") as stdout:
        code, said = in_terminal(
            [sys.executable, "-m", "jaxmem", *words], stdout=stdout, cwd=tmp_path
        )
    assert code == 0, said
    assert "1/1" in said
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 1
