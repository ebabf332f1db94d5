"""`jaxmem fit` and `jaxmem report --plan`, as a user types them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers.terminal import in_terminal

import jaxmem
from jaxmem.cli.app import app
from jaxmem.jobs.load import find

TRAINING = str(Path(__file__).parents[1] / "helpers" / "training.py")
MODEL = f"{TRAINING}:job"  # of Flax and optax
JOB = f"{Path(__file__).parents[1] / 'helpers' / 'light.py'}:job"
KIB = 1024


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the cache of the user who runs the tests."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), prog_name="jaxmem")


def needs(*words: str) -> int:
    result = run("report", JOB, "--json", "--no-suggest", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["required_bytes"]


# ---------------------------------------------------------------- fit


@pytest.mark.slow
def test_a_budget_is_kept_and_its_plan_is_saved_and_applied(tmp_path: Path):
    file = tmp_path / "plan.json"
    budget = (needs("--policy", "none") + needs("--policy", "full")) // 2
    result = run("fit", JOB, "--budget", str(budget), "--save", str(file))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("needs ")
    assert "on cpu: fits" in result.stdout.splitlines()[0]
    assert "stack 0: 6 layers" in result.stdout
    assert f"wrote {file}\n" in result.stderr
    plan = jaxmem.StepPlan.load(file)
    assert str(plan) in result.stdout
    assert needs("--plan", str(file)) <= budget < needs("--policy", "none")
    assert "was made for" not in run("report", JOB, "--plan", str(file)).stderr
    elsewhere = run("report", JOB, "--plan", str(file), "--target", "h100-80g")
    assert f"{file} was made for local: on h100-80g it may need more" in elsewhere.stderr


@pytest.mark.slow
def test_json_stands_alone_and_holds_all(tmp_path: Path):
    words = ("fit", MODEL, "--budget", "300KiB", "--json", "--set", "layers=4")
    result = run(*words, "--explain", "--save", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["fits"] is True
    assert data["budget_bytes"] == 300 * KIB
    report = jaxmem.MemoryReport.from_json(json.dumps(data["report"]))
    assert report.required_bytes == data["required_bytes"] <= data["budget_bytes"]
    assert jaxmem.StepPlan.from_json(json.dumps(data["plan"])) == jaxmem.StepPlan.load(
        tmp_path / "plan.json"
    )
    assert 1 <= data["compiles"] <= 6
    assert {row["decision"] for row in data["values"]} <= {"keep", "recompute", "offload"}
    assert "fit: plan " in result.stderr
    job = find(MODEL).make({"layers": 4})
    with jaxmem.use_plan(tmp_path / "plan.json"):
        assert job.report(suggest=False).required_bytes == report.required_bytes


@pytest.mark.slow
def test_what_does_not_fit_ends_with_2_and_says_why(tmp_path: Path):
    file = tmp_path / "plan.json"
    result = run("fit", JOB, "--budget", "1KiB", "--save", str(file))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "no plan brings the step within 1.0 KiB: the least that was reached is" in result.stderr
    assert "What would help:" in result.stderr
    assert "Traceback" not in result.stderr
    assert not file.exists()
    result = run("fit", JOB, "--budget", "1KiB", "--json")
    assert result.exit_code == 2
    data = json.loads(result.stdout)
    assert data["fits"] is False
    assert data["least_bytes"] == data["report"]["required_bytes"] > KIB
    assert data["error"] in result.stderr


@pytest.mark.slow
def test_explain_says_what_becomes_of_each_value():
    result = run("fit", MODEL, "--budget", "400KiB", "--set", "batch=128", "--explain")
    assert result.exit_code == 0, result.stderr
    assert "training.py:" in result.stdout
    assert "recompute" in result.stdout
    assert "optimality gap" in result.stdout


@pytest.mark.slow
def test_the_frontier_is_drawn(tmp_path: Path):
    picture = tmp_path / "frontier.svg"
    words = ("--budget", "1GiB", "--plot", str(picture), "--points", "3")
    result = run("fit", JOB, *words)
    assert result.exit_code == 0, result.stderr
    assert "frontier: 3 of 3 needs" in result.stderr
    assert f"wrote {picture}\n" in result.stderr
    assert "<svg" in picture.read_text()


def test_for_an_accelerator_that_is_not_there(tmp_path: Path):
    result = run("fit", JOB, "--budget", "40GiB", "--target", "h100-80g", "--cost", "flops")
    assert result.exit_code == 0, result.stderr
    assert (
        "of a budget of 40.0 GiB on h100-80g: fits; +0 % matmul FLOPs (1 compile)" in result.stdout
    )


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing option '--budget'"),
        (["--budget", "forty"], "'forty' is not a memory size; write a number of bytes or a text"),
        (["--budget", "0"], "a size must be positive"),
        (["--budget", "1GiB", "--plot", "a.doc"], "a picture is written as PNG or SVG"),
        (
            ["--budget", "1GiB", "--plot", "nowhere/a.png"],
            "--plot nowhere/a.png: there is no folder",
        ),
        (["--budget", "1GiB", "--save", "nowhere/a.json"], "--save nowhere/a.json: there is no"),
        (["--budget", "1GiB", "--target", "h100-8g"], "did you mean 'h100-80g'?"),
        (["--budget", "1GiB", "--cost", "money"], "'money' is not one of"),
        (["--budget", "1GiB", "--points", "1"], "1 is not in the range"),
        (
            ["--budget", "1GiB", "--set", "layer=3"],
            "has no keyword 'layer' (did you mean 'layers'?)",
        ),
    ],
    ids=["none", "size", "zero", "ending", "folder", "save", "target", "cost", "points", "keyword"],
)
def test_wrong_words_end_with_1_before_anything_is_compiled(words: list[str], message: str):
    result = run("fit", JOB, *words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert "fit: plan" not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_step_without_a_stack_is_told_where_to_put_a_decorator():
    result = run("fit", f"{TRAINING}:undecorated", "--budget", "1GiB")
    assert result.exit_code == 1
    assert "nothing in the step is decorated, so there is nothing to plan" in result.stderr
    assert "remat_auto" in result.stderr


def test_keywords_that_are_options_of_fit_are_refused(tmp_path: Path):
    file = tmp_path / "clash.py"
    file.write_text(
        "import jax, jaxmem\n"
        "x = jax.ShapeDtypeStruct((4,), 'float32')\n"
        "job = jaxmem.Job(lambda budget: budget, kwargs={'budget': x})\n"
    )
    result = run("fit", str(file), "--budget", "1GiB")
    assert result.exit_code == 1
    assert "'budget' is also an option of jaxmem.fit" in result.stderr


# ---------------------------------------------------------------- report --plan


def test_a_plan_for_other_layers_is_refused_with_the_difference(tmp_path: Path):
    file = tmp_path / "plan.json"
    assert run("fit", JOB, "--budget", "1GiB", "--save", str(file)).exit_code == 0
    result = run("report", JOB, "--plan", str(file), "--set", "layers=5")
    assert result.exit_code == 1
    assert "it is for 6 layers, and there are 5" in result.stderr


def test_report_refuses_what_is_no_plan_and_two_answers_at_once(tmp_path: Path):
    file = tmp_path / "plan.json"
    file.write_text("{}")
    result = run("report", JOB, "--plan", str(file))
    assert result.exit_code == 1
    assert "plan.json: bad step plan" in result.stderr
    result = run("report", JOB, "--plan", str(file), "--policy", "full")
    assert result.exit_code == 1
    assert "give one of them" in result.stderr
    assert run("report", JOB, "--plan", "nowhere.json").exit_code == 1


def test_a_plan_without_a_stack_is_spoken_of(tmp_path: Path):
    file = tmp_path / "plan.json"
    jaxmem.StepPlan().save(file)
    result = run("report", f"{TRAINING}:undecorated", "--plan", str(file), "--json")
    assert result.exit_code == 0, result.stderr
    assert "the plan does nothing: no layer stack in the step is decorated" in result.stderr


@pytest.mark.slow
def test_a_process_of_its_own(tmp_path: Path):
    """Progress and warnings on standard error, the result alone on standard output."""
    result = subprocess.run(
        [sys.executable, "-m", "jaxmem", "fit", JOB, "--budget", "1GiB", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["fits"] is True
    assert "fit: plan 1 of " in result.stderr


@pytest.mark.slow
def test_a_bar_in_a_terminal():
    """First for planning, which takes half a minute where code without a scan is long."""
    words = [sys.executable, "-m", "jaxmem", "fit", JOB, "--budget", "1GiB"]
    code, said = in_terminal(words)
    assert code == 0, said
    assert said.index("planning:") < said.index("budget 1.0 GiB:") < said.index("fit: plan 1 of ")
