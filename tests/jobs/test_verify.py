"""Running a job and reading the allocator, as far as that is possible without an accelerator."""

import json
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.xla_flags import QUICK
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxmem.jobs import measure
from jaxmem.jobs.job import Job
from jaxmem.jobs.load import find
from jaxmem.jobs.verify import Verification, ask, compared, environment, verify

TRAINING = str(Path(__file__).parents[1] / "helpers" / "training.py")
LIGHT = str(Path(__file__).parents[1] / "helpers" / "light.py")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes spend no time on machine code that runs for a few steps."""
    monkeypatch.setenv("XLA_FLAGS", QUICK)


def job(name: str, **settings) -> Job:
    return find(f"{TRAINING}:{name}").make(settings)


def test_steps_run_and_without_statistics_nothing_is_claimed():
    measured = measure.run(job("job"), steps=3)
    assert len(measured.seconds) == 3
    assert all(seconds > 0 for seconds in measured.seconds)
    assert measured.device == "cpu"
    assert measured.devices == 1
    assert measured.peak_bytes is None
    assert measured.executable_bytes is not None
    assert measured.executable_bytes > 0


def test_made_arguments_are_what_was_described():
    arguments = measure.Arguments(job("dropout"))
    (key, tokens, table), keywords = arguments.call()
    assert jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert key.shape == ()
    assert tokens.dtype == jnp.int32
    assert not tokens.any()
    assert table.dtype == jnp.bfloat16
    assert 0 < float(table.astype("float32").std()) < 1
    assert float(table.min()) >= 0
    assert keywords["unused"].dtype == bool


def test_an_argument_that_is_never_read_stays_on_the_host():
    arguments = measure.Arguments(job("dropout"), unread=["unused"])
    _, keywords = arguments.call()
    assert isinstance(keywords["unused"], np.ndarray)
    assert len(measure.run(job("dropout"), 2, unread=["unused"]).seconds) == 2


def test_donated_arguments_take_the_results_of_the_step_before():
    """Each step gets what the previous one returned, so the training loss changes."""
    training = job("job")
    arguments = measure.Arguments(training)
    step = jax.jit(training.step, donate_argnums=training.donate_argnums)
    states = []
    for _ in range(3):
        positional, keywords = arguments.call()
        results = step(*positional, **keywords)
        arguments.take(results)
        states.append(jax.tree.map(np.asarray, results[0]))
        chex.assert_trees_all_equal(arguments.call()[0][0], states[-1])
    counts = [int(state[1][0].count) for state in states]
    assert counts == [1, 2, 3]


def test_what_no_result_replaces_is_made_anew():
    def total(x, y):
        return x.sum() + y.sum(), y * 2

    spec = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4,), "float32")
    arguments = measure.Arguments(Job(total, spec, donate_argnums=(0, 1)))
    first, second = arguments.leaves
    first.delete()
    second.delete()
    result = jnp.full((4,), 7.0)
    arguments.take((jnp.float32(0), result))
    assert arguments.leaves[0].shape == (8, 8)
    assert arguments.leaves[0] is not first
    assert arguments.leaves[1] is result


def test_arrays_of_the_job_itself_can_be_donated():
    given = jnp.arange(4.0)
    arguments = measure.Arguments(Job(lambda x, y: x + y, (given, 2.0), donate_argnums=0))
    assert arguments.leaves == [given, 2.0]
    given.delete()
    arguments.take(())
    assert arguments.leaves[0].shape == (4,)
    job = Job(lambda x, y: (x + y).sum(), (jnp.arange(4.0), np.ones(4)), donate_argnums=0)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        assert len(measure.run(job, 3).seconds) == 3


def test_static_arguments_and_arrays_as_they_are():
    def scaled(x, how, y):
        return {"twice": x * 2, "thrice": x * 3}[how] + y

    given = jnp.arange(4.0)
    scale = Job(
        scaled,
        (jax.ShapeDtypeStruct((4,), "float32"), "twice", given),
        static_argnums=1,
        donate_argnums=0,
    )
    arguments = measure.Arguments(scale)
    assert arguments.leaves[1] is given
    assert len(measure.run(scale, 2).seconds) == 2


def test_shardings_over_absent_devices_become_those_over_attached_ones():
    mesh = AbstractMesh((4,), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    spec = jax.ShapeDtypeStruct((16, 4), "float32", sharding=rows)
    made = measure.made(spec)
    assert len(made.sharding.device_set) == 4
    assert made.addressable_shards[0].data.shape == (4, 4)
    large = NamedSharding(AbstractMesh((1024,), ("data",)), PartitionSpec("data"))
    with pytest.raises(RuntimeError, match="a mesh of 1024 devices, and 8 are attached"):
        measure.made(jax.ShapeDtypeStruct((1024,), "float32", sharding=large))


@pytest.mark.slow
def test_the_executable_comes_from_the_cache(tmp_path: Path):
    """So that nothing which the compiler tries out is in the measured peak."""
    settings = tmp_path / "settings.json"
    settings.write_text("{}")
    code = (
        "import sys, jaxmem.jobs.measure as m; from jaxmem.jobs.load import find; "
        "print(m.run(find(sys.argv[1]).make({}), 1).compiled)"
    )
    command = [sys.executable, "-c", code, f"{LIGHT}:job"]
    said = [
        subprocess.run(
            command,
            env=environment(tmp_path, alone=True),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert said == ["True", "False"]


def test_without_an_accelerator_verify_says_what_it_needs():
    with pytest.raises(RuntimeError, match="verify needs an attached GPU or TPU.*found only cpu"):
        verify(f"{TRAINING}:job")


@pytest.mark.slow
def test_the_running_process_runs_the_steps_then_says_what_it_needs(tmp_path: Path):
    asked = {"where": f"{TRAINING}:job", "settings": {"batch": "32"}, "policy": "sqrt"}
    measured = ask({"what": "run", "steps": 2, **asked}, tmp_path, 300.0)
    assert len(measured["seconds"]) == 2
    report = job("job", batch=32).report(suggest=False)
    with pytest.raises(RuntimeError, match="verify needs an attached GPU or TPU"):
        compared(report, measured)


@pytest.mark.parametrize(
    ("where", "settings", "message"),
    [
        ("nowhere:job", {}, "no module 'nowhere'"),
        (f"{TRAINING}:job", {"bacth": 3}, r"did you mean 'batch'\?"),
        (f"{TRAINING}:sometimes", {"batch": 99}, "no batch above 16"),
    ],
    ids=["module", "keyword", "user"],
)
def test_errors_of_the_job_come_back(tmp_path: Path, where: str, settings: dict, message: str):
    asked = {"where": where, "settings": settings, "policy": "own", "steps": 1}
    with pytest.raises(RuntimeError, match=message):
        ask({"what": "run", **asked}, tmp_path, 300.0)


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_an_error(tmp_path: Path):
    killed = tmp_path / "killed.py"
    killed.write_text("import os, signal\nprint('last words', flush=True)\n")
    with killed.open("a") as file:
        file.write("os.kill(os.getpid(), signal.SIGKILL)\n")
    asked = {"what": "run", "settings": {}, "policy": "own", "steps": 1}
    with pytest.raises(RuntimeError, match=r"signal SIGKILL; the end of its log:\nlast words"):
        ask({**asked, "where": f"{killed}:job"}, tmp_path, 300.0)
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(RuntimeError, match="took more than 2 s"):
        ask({**asked, "where": f"{hangs}:job"}, tmp_path, 2.0)


def test_wrong_calls():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        verify("training:job", steps=0)
    with pytest.raises(TypeError, match="a fresh process must find it"):
        verify(job("job"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="pass numbers and texts"):
        verify("training:job", {"batch": object()})


def _measured(**changes):
    return {
        "platform": "gpu",
        "kind": "some GPU",
        "device": "some GPU",
        "devices": 1,
        "before_bytes": 0,
        "argument_bytes": 50_000,
        "start_peak_bytes": 50_000,
        "executable_bytes": None,
        "seconds": [0.5, 0.1, 0.3],
        "compiled": False,
        **changes,
    }


def test_what_a_verification_says():
    report = job("job").report(suggest=False)
    need = report.required_bytes
    close = compared(report, _measured(peak_bytes=need + 1024))
    assert close.measured_bytes == need + 1024
    assert close.error == pytest.approx(-1024 / (need + 1024))
    assert close.seconds == pytest.approx(0.2)
    assert "rounding to 256 B" in close.notes[0]
    assert f"{close.error:+.2%}" in str(close)
    assert json.loads(close.to_json())["relative_error"] == close.error
    far = compared(report, _measured(peak_bytes=2 * need, executable_bytes=need + 8))
    assert "more than predicted: workspace" in far.notes[0]
    assert "autotuner chose other kernels" in far.notes[1]
    early = compared(report, _measured(peak_bytes=need, start_peak_bytes=need, compiled=True))
    assert "reached before the first step" in early.notes[0]
    assert "autotuner tried" in early.notes[1]
    assert isinstance(early, Verification)
