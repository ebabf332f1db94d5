"""The command line, as a user types it: what it prints where, and its exit codes."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import jax
import pytest
from click.testing import CliRunner, Result
from helpers.terminal import in_terminal
from helpers.xla_flags import QUICK

import jaxmem
from jaxmem.cli.app import app
from jaxmem.cli.options import target_names
from jaxmem.jobs.job import Job
from jaxmem.jobs.load import JobError, find
from jaxmem.targets import installed

TRAINING = str(Path(__file__).parents[1] / "helpers" / "training.py")
LIGHT = str(Path(__file__).parents[1] / "helpers" / "light.py")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the cache of the user who runs the tests."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), prog_name="jaxmem")


@functools.cache
def in_json(*words: str) -> str:
    """A report as JSON, of each job and policy once."""
    result = run("report", *words, "--json")
    assert result.exit_code == 0, result.output
    return result.stdout


def command(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jaxmem", *words],
        capture_output=True,
        text=True,
        **{"env": {**os.environ, "XLA_FLAGS": QUICK}, **options},
    )


# ---------------------------------------------------------------- jobs


def test_a_job_is_a_small_value():
    x = jax.ShapeDtypeStruct((4,), "float32")
    job = Job(jax.numpy.sin, [x], donate_argnums=-1)
    assert job.args == (x,)
    assert job.donate_argnums == (0,)
    assert repr(job) == "<Job sin, 1 arguments>"
    assert job.allocated_bytes == 0
    with pytest.raises(AttributeError):
        job.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"step": 3}, TypeError, "step must be a function, got 3 of type int"),
        ({"args": 1.0}, TypeError, r"args must be a tuple.*write args=\(x,\)"),
        ({"kwargs": {1: 2}}, TypeError, "kwargs must be a dict of arguments by name"),
        ({"donate_argnums": 2}, ValueError, "donate_argnums=2, but args has 1 entries, 0 to 0"),
        ({"static_argnums": "x"}, TypeError, "static_argnums takes positions.*got 'x'"),
    ],
    ids=["step", "args", "kwargs", "donate", "static"],
)
def test_a_wrong_job_says_what_to_pass(values: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        Job(**{"step": jax.numpy.sin, "args": (1.0,), **values})


def test_keywords_that_are_options_of_the_report_are_refused():
    job = Job(lambda timeout: timeout, kwargs={"timeout": jax.ShapeDtypeStruct((), "float32")})
    with pytest.raises(ValueError, match="'timeout' is also an option of memory_report"):
        job.report()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere.at_all:job", "no module 'nowhere.at_all' .no module 'nowhere'.; it must be"),
        ("nowhere.py:job", "no file 'nowhere.py', seen from"),
        ("not-a-module:job", "'not-a-module' is not a module"),
        (":job", "names no job; write pkg.module:job"),
        (f"{TRAINING}:jobb", "has no 'jobb' .did you mean 'job'.."),
        (f"{TRAINING}:limit", "is an int, not a function; it must be a function that returns"),
        (f"{TRAINING}:returns_a_tuple", "returned a tuple, not a jaxmem.Job; end it with"),
        (f"{TRAINING}:needs_batch", "has no default for batch; pass --set batch=…"),
    ],
    ids=["module", "file", "name", "empty", "attribute", "value", "returned", "missing"],
)
def test_a_job_that_cannot_be_had_says_why(where: str, message: str):
    with pytest.raises(JobError, match=message):
        find(where).make({})
    result = run("report", where)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_job_is_found_by_module_file_and_default_name(tmp_path: Path):
    file = tmp_path / "my_job.py"
    text = Path(TRAINING).read_text()
    file.write_text(text.replace('"""Jobs', 'import neighbour\n"""Jobs'))
    (tmp_path / "neighbour.py").write_text("")
    here = command("report", "my_job", "--json", cwd=tmp_path)
    assert here.returncode == 0, here.stderr
    there = run("report", str(file), "--json")
    assert there.exit_code == 0, there.stderr
    needs = [json.loads(one.stdout)["required_bytes"] for one in (here, there)]
    assert needs[0] == needs[1]


def test_settings_are_of_the_types_of_the_job():
    entry = find(f"{TRAINING}:job")
    assert entry.parse({"batch": "32", "layers": "4"}) == {"batch": 32, "layers": 4}
    with pytest.raises(JobError, match="takes a whole number for batch, got 'many'"):
        entry.parse({"batch": "many"})
    with pytest.raises(JobError, match="has no keyword 'bacth' .did you mean 'batch'..; it takes"):
        entry.parse({"bacth": "1"})
    ready = find(f"{TRAINING}:ready")
    assert ready.make({}).name == "sine"
    with pytest.raises(JobError, match="it takes no keywords"):
        ready.make({"batch": 1})


def test_arrays_in_a_job_work_and_are_spoken_of():
    with pytest.warns(jaxmem.JaxmemWarning, match="made arrays of 32.0 MiB; a report needs only"):
        job = find(f"{TRAINING}:with_arrays").make({})
    assert job.report(suggest=False).argument_bytes == 2**25


# ---------------------------------------------------------------- report


def test_report_in_plain_text():
    result = run("report", f"{TRAINING}:job", "--no-suggest")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("needs ")
    assert "\x1b" not in result.stdout


def test_json_is_the_report():
    result = run("report", f"{TRAINING}:job", "--json", "--set", "layers=2")
    assert result.exit_code == 0, result.output
    report = jaxmem.MemoryReport.from_json(result.stdout)
    same = find(f"{TRAINING}:job").make({"layers": 2}).report(suggest=False)
    assert report.required_bytes == same.required_bytes
    assert report.arguments == same.arguments


@pytest.mark.slow
def test_json_stands_alone_whatever_the_job_prints(tmp_path: Path):
    noisy = tmp_path / "noisy.py"
    noisy.write_text(
        "import os, subprocess, warnings\n"
        "import jax, jaxmem\n"
        "from jaxmem.jobs.job import Job\n"
        "print('loading')\n"
        "def job():\n"
        "    os.write(1, b'from below\\n')\n"
        "    subprocess.run(['echo', 'from a child'])\n"
        "    warnings.warn('a warning\\nof two lines')\n"
        "    def step(x):\n"
        "        print('tracing')\n"
        "        return x + 1\n"
        "    return Job(step, (jax.ShapeDtypeStruct((4,), 'float32'),))\n"
    )
    result = command("report", str(noisy), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["platform"] == "cpu"
    for said in ("loading", "from below", "from a child", "tracing"):
        assert said in result.stderr
    assert "warning: a warning of two lines\n" in result.stderr


@pytest.mark.slow
def test_several_targets_at_once(tmp_path: Path):
    picture = tmp_path / "live.svg"
    result = run(
        *("report", f"{LIGHT}:job", "--target", "h100-80g,v5e-16g", "--json"),
        *("--plot", str(picture)),
    )
    assert result.exit_code == 0, result.output
    reports = [jaxmem.MemoryReport.from_json(json.dumps(one)) for one in json.loads(result.stdout)]
    assert [report.target for report in reports] == ["h100-80g", "v5e-16g"]
    assert all(report.fits for report in reports)
    for name in ("h100-80g", "v5e-16g"):
        assert (tmp_path / f"live-{name}.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
def test_machine_code_is_generated_if_it_is_asked_for():
    """Then the compiler's own peak is known; no other figure changes."""
    words = "report", f"{LIGHT}:job", "--target", "h100-80g", "--json"
    quick, complete = (json.loads(run(*words, *more).stdout) for more in ((), ("--generate-code",)))
    assert quick["peak_bytes"] is None
    assert 0 < complete["peak_bytes"] <= complete["required_bytes"]
    changed = {name for name in quick if quick[name] != complete[name]}
    assert changed <= {"peak_bytes", "compile_seconds", "cached"}


def test_what_does_not_fit_ends_with_2():
    result = run("report", f"{TRAINING}:too_large", "--target", "h100-80g,local")
    assert result.exit_code == 2, result.stderr
    assert "does not fit" in result.stdout


def test_an_error_of_one_target_leaves_the_others():
    result = run("report", f"{TRAINING}:job", "--target", "local,h100-8g", "--json")
    assert result.exit_code == 1
    local, other = json.loads(result.stdout)
    assert local["target"] == "cpu"
    assert other["target"] == "h100-8g"
    assert "did you mean 'h100-80g'?" in other["error"]
    assert result.stderr.startswith("h100-8g: Error: unknown target")


def test_an_error_of_the_only_target_is_json_too():
    result = run("report", f"{TRAINING}:job", "--target", "h100-8g", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert set(data) == {"target", "error"}
    assert data["target"] == "h100-8g"
    assert data["error"].startswith("ValueError: unknown target 'h100-8g': did you mean 'h100-80g'")
    assert result.stderr.startswith("Error: unknown target")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["report", "nowhere.py"], "JobError: no file 'nowhere.py', seen from "),
        (["report", f"{TRAINING}:sometimes", "--set", "batch=99"], "ValueError: no batch above 16"),
        (
            ["report", f"{TRAINING}:job", "--target", "a,a"],
            "BadParameter: Invalid value for '--tar",
        ),
        (
            ["report", f"{TRAINING}:job", "--polcy", "full"],
            "NoSuchOption: No such option '--polcy'",
        ),
        (
            ["report", f"{TRAINING}:job", "--policy", "ful"],
            "ValueError: unknown remat policy 'ful'",
        ),
        (["fit", "nowhere.py", "--budget", "1GiB"], "JobError: no file 'nowhere.py', seen from "),
        (["sweep", "nowhere.py", "--out", "x.csv"], "JobError: no file 'nowhere.py', seen from "),
        (["diff", "a.json", "b.json"], "BadParameter: Invalid value for 'A.json': File 'a.json'"),
        (["targets", "nowhere.toml"], "FileNotFoundError: "),
        (["reprot"], "NoSuchCommand: No such command 'reprot'."),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else "",
)
def test_json_is_one_document_whatever_fails(words: list[str], error: str):
    result = run(*words, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert set(data) == {"error"}
    assert data["error"].startswith(error)
    assert result.stderr


def test_a_missing_compiler_is_json_too(monkeypatch: pytest.MonkeyPatch):
    real = installed._version
    monkeypatch.setattr(
        installed, "_version", lambda name: None if name == "libtpu" else real(name)
    )
    result = run("report", f"{TRAINING}:job", "--target", "v5e-16g", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["target"] == "v5e-16g"
    assert "libtpu is not installed" in data["error"]


def test_json_is_alone_on_standard_output_when_a_program_leaves(tmp_path: Path):
    """It prints before and at its end, and its exit code is not passed on."""
    file = tmp_path / "leaves.py"
    file.write_text(
        "import atexit, sys\n"
        "sys.__stdout__.write('before')\n"
        "atexit.register(print, 'at the end')\n"
        "sys.exit(2)\n"
    )
    done = command("report", str(file), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"error": "SystemExit: 2"}
    assert "sys.exit(2)" in done.stderr
    assert "at the end" in done.stderr


def test_an_error_after_the_json_leaves_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(jaxmem.MemoryReport, "plot", fail)
    words = ("--json", "--no-suggest", "--plot", str(tmp_path / "live.png"))
    result = run("report", f"{TRAINING}:job", *words)
    assert result.exit_code == 1
    assert jaxmem.MemoryReport.from_json(result.stdout).target == "cpu"
    assert "no space left" in result.stderr


@pytest.mark.slow
def test_the_policy_goes_to_the_stacks_or_to_the_job():
    def needs(name: str, policy: str) -> int:
        return json.loads(in_json(f"{TRAINING}:{name}", "--policy", policy))["temp_bytes"]

    assert needs("job", "none") > needs("job", "own") == needs("job", "full")
    assert needs("with_policy", "none") == needs("job", "none")
    assert needs("with_policy", "own") == needs("with_policy", "full")


def test_a_policy_without_a_stack_is_spoken_of():
    result = run("report", f"{TRAINING}:undecorated", "--policy", "sqrt", "--json")
    assert result.exit_code == 0
    assert "the policy does nothing: no layer stack" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "sqrtt"], "unknown remat policy 'sqrtt'"),
        (["--policy", "revolve:slots"], "write options as in revolve:slots=4"),
        (["--policy", "sqrt:slots=4"], "policy 'sqrt' has no option 'slots'"),
        (["--set", "batch"], "write key=value, as in batch=16"),
        (["--set", "batch=1", "--set", "batch=2"], "--set batch=… is given twice"),
        (["--target", "local,local"], "'local' is given twice"),
        (["--target", "local,"], "has an empty entry"),
        (["--timeout", "0"], "0.0 is not in the range"),
        (["--nothing"], "No such option"),
    ],
    ids=["policy", "option", "no-option", "set", "twice", "again", "comma", "timeout", "unknown"],
)
def test_wrong_words_end_with_1(words: list[str], message: str):
    result = run("report", f"{TRAINING}:job", *words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_policy_is_given_once():
    words = ("--policy", "full", "--set", "policy=none")
    result = run("report", f"{TRAINING}:with_policy", *words)
    assert result.exit_code == 1
    assert "the policy is given twice" in result.stderr


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("fails_in_step", "return x @ jnp.zeros((3, 3))", "TypeError: dot_general requires"),
        ("sometimes", 'raise ValueError("no batch above 16")', "ValueError: no batch above 16"),
        ("bad_donation", "donate_argnums=1)", "ValueError: Job: donate_argnums=1, but args has 1"),
    ],
    ids=["step", "job", "value"],
)
def test_the_users_own_lines_are_shown_where_they_raised(name: str, line: str, message: str):
    words = ["--set", "batch=99"] if name == "sometimes" else []
    result = run("report", f"{TRAINING}:{name}", *words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Traceback (your code):\n")
    assert line in result.stderr
    assert message in result.stderr
    files = [text for text in result.stderr.splitlines() if text.lstrip().startswith("File ")]
    assert files
    assert all(TRAINING in file for file in files)


def test_errors_while_the_module_is_loaded(tmp_path: Path):
    (tmp_path / "broken.py").write_text("def job(:\n")
    (tmp_path / "lacks.py").write_text("import a_module_that_is_not_there\n")
    broken = command("report", "broken", cwd=tmp_path)
    assert broken.returncode == 1
    assert "SyntaxError" in broken.stderr
    assert "Traceback" not in broken.stderr
    lacks = run("report", f"{tmp_path / 'lacks.py'}:job")
    assert lacks.exit_code == 1
    assert "import a_module_that_is_not_there" in lacks.stderr
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_there'" in lacks.stderr


@pytest.mark.parametrize("name", ["live.docx", "no_such_folder/live.png"])
def test_a_plot_that_cannot_be_written_is_an_error_before_anything_is_compiled(
    name: str, tmp_path: Path
):
    result = run("report", f"{TRAINING}:job", "--plot", str(tmp_path / name))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert ("docx" if "docx" in name else "there is no folder") in result.stderr


@pytest.mark.slow
def test_colours_in_a_terminal():
    """Through a pseudoterminal; the verdict stands in the first line in any case."""
    words = ["report", f"{LIGHT}:job", "--no-suggest"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    code, said = in_terminal([sys.executable, "-m", "jaxmem", *words], env=env)
    assert code == 0
    assert "compiling step for local" in said
    assert "\x1b[" in said
    assert "needs " in said


# ---------------------------------------------------------------- the other commands


def test_diff_explains_the_second_less_the_first(tmp_path: Path):
    files = []
    for policy in ("none", "full"):
        files.append(tmp_path / f"{policy}.json")
        files[-1].write_text(in_json(f"{TRAINING}:job", "--policy", policy))
    before, after = (jaxmem.MemoryReport.from_json(file.read_text()) for file in files)
    result = run("diff", *map(str, files))
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(after - before).strip()
    data = json.loads(run("diff", *map(str, files), "--json").stdout)
    assert data["required_bytes"] == after.required_bytes - before.required_bytes


def test_diff_refuses_what_is_no_report(tmp_path: Path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text("[]")
    for name, message in (("a", "a.json: bad memory report"), ("b", "b.json: a list, as report")):
        result = run("diff", str(tmp_path / "a.json"), str(tmp_path / f"{name}.json"))
        assert result.exit_code == 1
        assert message in result.stderr
    assert run("diff", "nowhere.json", "nowhere.json").exit_code == 1


def test_targets_lists_the_catalogue():
    result = run("targets")
    assert result.exit_code == 0
    rows = json.loads(run("targets", "--json").stdout)
    assert {row["name"] for row in rows} == set(jaxmem.targets.catalog())
    for row in rows:
        assert row["name"] in result.stdout
        assert row["memory"] > row["bandwidth"] / 1e4
        for reason in row["missing"]:
            assert reason in result.stdout
    assert set(target_names()) == {"local", *jaxmem.targets.catalog()}


def test_targets_of_a_file(tmp_path: Path):
    file = tmp_path / "mine.toml"
    result = run("targets", str(file))
    assert result.exit_code == 1
    assert "mine.toml" in result.stderr
    file.write_text("[gpu.mine]\nname = 3\n")
    result = run("targets", str(file))
    assert result.exit_code == 1
    assert "mine.toml: gpu.mine: name" in result.stderr


def test_doctor_says_what_works():
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "local report" in result.stdout
    found = json.loads(run("doctor", "--json").stdout)
    assert found["works"]
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["jax"]["found"] == jax.__version__
    assert all(check["ok"] or check["remedy"] for check in found["checks"])


@pytest.mark.slow
def test_doctor_where_something_is_missing():
    """A backend that is not there: what is wrong, what to do, and exit code 1."""
    result = command("doctor", env={**os.environ, "JAX_PLATFORMS": "nowhere"})
    assert result.returncode == 1
    assert "-- " in result.stdout
    assert "what to do:" in result.stdout
    assert "JAX_PLATFORMS=cpu jaxmem doctor" in result.stdout


def test_cache_shows_and_clears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path / "cache"))
    assert "0 results, 0 B" in run("cache", "show").stdout
    words = ("report", f"{LIGHT}:job", "--target", "h100-80g", "--json")
    first, second = (json.loads(run(*words).stdout) for _ in range(2))
    assert not first["cached"]
    assert second["cached"]
    shown = run("cache", "show").stdout
    assert str(tmp_path / "cache") in shown
    assert "1 results" in shown
    assert not json.loads(run(*words, "--no-cache").stdout)["cached"]
    assert "deleted 1 results" in run("cache", "clear").stdout
    assert "0 results, 0 B" in run("cache", "show").stdout


@pytest.mark.slow
def test_verify_without_an_accelerator():
    result = run("verify", f"{TRAINING}:job", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"].startswith("RuntimeError: verify needs an attached")
    assert result.stderr.startswith("Error: verify needs an attached GPU or TPU")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str):
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_JAXMEM_COMPLETE" in result.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("jaxmem rep", ["report"]),
        ("jaxmem report m:job --target h100-80g,h2", ["h100-80g,h200-141g"]),
        ("jaxmem sweep m:job --policies none,rev", ["none,revolve"]),
    ],
    ids=["command", "target", "policy"],
)
def test_words_are_completed(words: str, expected: list[str]):
    env = {
        **os.environ,
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_JAXMEM_COMPLETE": "bash_complete",
    }
    code = "import sys; from jaxmem.cli import main; main()"
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert [line.partition(",")[2] for line in said.stdout.splitlines()] == expected


def test_help_and_version():
    for words in (["--help"], ["report", "-h"], ["sweep", "--help"], ["cache", "--help"]):
        result = run(*words)
        assert result.exit_code == 0
        assert result.stdout.startswith("Usage: jaxmem")
    assert run("--version").stdout == f"jaxmem {jaxmem.__version__}\n"
    assert run().exit_code == 1
    assert run("nothing").exit_code == 1
    names = {"report", "fit", "sweep", "diff", "verify", "targets", "doctor", "cache", "completion"}
    assert isinstance(app, click.Group)
    assert set(app.commands) == names
