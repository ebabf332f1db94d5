"""The training script over several processes, and what is left of a run when one is lost."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_lm
from helpers.xla_flags import FLAGS

from lm.config import Config, UserError

SCRIPT = Path(__file__).parents[2] / "experiments" / "train_lm.py"
SMALL: dict[str, Any] = {
    "layers": 2, "width": 16, "heads": 2, "sequence": 16, "batch": 4, "steps": 40,
    "eval_every": 20, "checkpoint_every": 10, "start_timeout": 150, "heartbeat_timeout": 60,
}  # fmt: skip
# Timeouts above are for a machine that is busy with much else; where one is waited for, a test has
# its own.
SPLIT: dict[str, Any] = {"processes": 2, "mesh": "fsdp=2"}
MINUTE = 60.0


def command(workdir: Path, **options: Any) -> list[str]:
    words = [sys.executable, str(SCRIPT), "--no-compare", f"--workdir={workdir}"]
    for name, value in (SMALL | options).items():
        option = name.replace("_", "-")
        words.append(f"--{option}" if value is True else f"--{option}={value}")
    return words


def environment(folder: Path, **more: str) -> dict[str, str]:
    """A user's, with a compiler as quick as this process has; one run compiles for all."""
    return os.environ | {
        "PYTHONPATH": str(SCRIPT.parent.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    } | more  # fmt: skip


def metrics(workdir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir: Path) -> np.ndarray:
    return np.array([row["loss"] for row in metrics(workdir)])


def wait(holds: Callable[[], bool], seconds: float = 240.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.005)


def rows(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def children(process: "subprocess.Popen[str]") -> list[int]:
    """Of a supervisor, in the order of the processes' numbers."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return sorted(map(int, listed.split()))


def start(words: list[str], env: dict[str, str]) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True)


def last_line(said: str) -> str:
    """The only line of an error, below the progress bar."""
    lines = [line for line in said.splitlines() if line.strip() and "training:" not in line]
    assert len(lines) == 1, said
    return lines[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> Path:
    """A run of two processes, which the others are compared with."""
    workdir = folder / "unbroken"
    done = subprocess.run(
        command(workdir, **SPLIT), env=environment(folder), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out text after 40 steps") == 1
    assert "[Gloo]" not in done.stdout
    return workdir


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on_from_their_checkpoint(
    unbroken: Path, tmp_path: Path
) -> None:
    assert [row["step"] for row in metrics(unbroken)] == list(range(1, 41))
    alone = tmp_path / "alone"
    options: dict[str, Any] = SMALL | {"compare": False}
    train_lm.main(Config(**options, workdir=alone))
    np.testing.assert_allclose(losses(unbroken), losses(alone), rtol=0, atol=1e-5)
    held_out = [[row.get("held_out_loss", 0) for row in metrics(d)] for d in (unbroken, alone)]
    np.testing.assert_allclose(*held_out, rtol=0, atol=1e-5)

    resumed = tmp_path / "resumed"
    shutil.copytree(unbroken, resumed)
    shutil.rmtree(resumed / "checkpoints" / "40")
    train_lm.main(Config(**options, workdir=resumed, mesh="data=2,fsdp=2,tensor=2"))
    np.testing.assert_array_equal(losses(resumed)[:30], losses(unbroken)[:30])
    np.testing.assert_allclose(losses(resumed), losses(alone), rtol=0, atol=1e-5)
    assert (losses(resumed)[30:] != losses(unbroken)[30:]).any()  # it was computed anew


@pytest.mark.slow
def test_stages_train_as_one_device(tmp_path: Path) -> None:
    """Beside data and tensor axes, with padding: microbatches of unlike weights."""
    options: dict[str, Any] = SMALL | {
        "compare": False, "steps": 6, "eval_every": 3, "accum": 2, "ragged": True,
    }  # fmt: skip
    train_lm.main(Config(**options, workdir=tmp_path / "alone"))
    train_lm.main(Config(**options, workdir=tmp_path / "stages", mesh="data=2,tensor=2,stage=2"))
    found, expected = (metrics(tmp_path / name) for name in ("stages", "alone"))
    for name in ("loss", "held_out_loss"):
        both = ([row.get(name, 0) for row in rows] for rows in (found, expected))
        np.testing.assert_allclose(*both, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_process_for_each_stage(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "eval_every": 3, "accum": 2}
    done = subprocess.run(
        command(tmp_path / "stages", **options, processes=2, mesh="stage=2"),
        env=environment(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    train_lm.main(Config(**(SMALL | options), compare=False, workdir=tmp_path / "alone"))
    both = (losses(tmp_path / name) for name in ("stages", "alone"))
    np.testing.assert_allclose(*both, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "by", "said"),
    [
        pytest.param(1, signal.SIGKILL, "was killed by SIGKILL", id="a worker killed"),
        pytest.param(
            0, signal.SIGKILL, "was killed by SIGKILL", id="the coordinator killed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            1, signal.SIGSTOP, "has given no sign of life for 15 s", id="a worker stopped",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_when_a_process_is_lost_all_end_and_the_same_command_goes_on(
    unbroken: Path, folder: Path, tmp_path: Path, number: int, by: signal.Signals, said: str
) -> None:
    words = command(tmp_path, **SPLIT, heartbeat_timeout=15)
    with start(words, environment(folder)) as process:
        wait(lambda: process.poll() is not None or rows(tmp_path) >= 15)
        workers = children(process)
        os.kill(workers[number], by)
        before = time.monotonic()
        _, error = process.communicate(timeout=2 * MINUTE)
        assert time.monotonic() - before < MINUTE
    assert process.returncode == 1
    line = last_line(error)
    assert f"error: process {number} ({'coordinator, ' * (number == 0)}" in line
    assert f"pid {workers[number]}) {said}; the other processes were ended; " in line
    assert "the same command goes on after step 10, from its checkpoint" in line
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]

    done = subprocess.run(
        words, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resuming after step 10" in done.stdout
    assert metrics(tmp_path) == metrics(unbroken)


@pytest.mark.slow
def test_a_signal_stops_all_processes_at_one_step(
    unbroken: Path, folder: Path, tmp_path: Path
) -> None:
    words = command(tmp_path, **SPLIT)
    with start(words, environment(folder)) as process:
        wait(lambda: process.poll() is not None or rows(tmp_path) >= 5)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=2 * MINUTE)
    assert process.returncode == 128 + signal.SIGTERM
    assert last_line(error) == "stopped by SIGTERM; the same command resumes the run"
    saved = max(map(int, os.listdir(tmp_path / "checkpoints")))
    assert saved == rows(tmp_path)
    assert 5 <= rows(tmp_path) < 40
    np.testing.assert_array_equal(losses(tmp_path), losses(unbroken)[: rows(tmp_path)])


@pytest.mark.slow
def test_a_full_disk_is_told_and_the_half_written_checkpoint_is_not_restored(
    unbroken: Path, folder: Path, tmp_path: Path
) -> None:
    words = command(tmp_path, **SPLIT)
    with start(words, environment(folder)) as process:
        wait(lambda: process.poll() is not None or rows(tmp_path) >= 12)
        # One process' files may grow no more; a disk that is full fails the same calls.
        resource.prlimit(children(process)[1], resource.RLIMIT_FSIZE, (64, 64))
        before = time.monotonic()
        _, error = process.communicate(timeout=2 * MINUTE)
        assert time.monotonic() - before < MINUTE
    line = last_line(error)
    assert "process 1 (" in line
    assert ": the checkpoint of step 20 cannot be written: File too large; make room" in line
    assert process.returncode == 2
    done = subprocess.run(
        words, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resuming after step 10" in done.stdout
    assert metrics(tmp_path) == metrics(unbroken)


@pytest.mark.slow
def test_a_run_that_sends_signs_goes_on_bit_for_bit_and_over_other_devices(
    folder: Path, tmp_path: Path
) -> None:
    """Two processes, then the same among signs, then three devices of one process."""

    def run(workdir: Path, **options: Any) -> str:
        words = command(workdir, optimizer="one-bit-adam", batch=6, **options)
        done = subprocess.run(
            words, env=environment(folder), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole, again, other = (tmp_path / name for name in ("whole", "again", "other"))
    run(whole, processes=2)
    for workdir in (again, other):
        shutil.copytree(whole, workdir)
        shutil.rmtree(workdir / "checkpoints" / "40")
    assert "resuming after step 30" in run(again, processes=2)
    np.testing.assert_array_equal(losses(again), losses(whole))
    said = run(other, mesh="data=3", devices_per_process=3)
    assert "what the signs of 2 devices were wrong by is dealt to 3: each sends the mean" in said
    np.testing.assert_array_equal(losses(other)[:30], losses(whole)[:30])
    np.testing.assert_allclose(losses(other), losses(whole), atol=0.3)


# ---------------------------------------------------------------- a cluster's launcher


def slurm(number: int, job: int) -> dict[str, str]:
    """What srun sets for a task; the port of the coordinator follows from the job's number."""
    return {
        "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), "SLURM_STEP_NUM_NODES": "1",
        "JAX_NUM_CPU_DEVICES": "1",
    }  # fmt: skip


@pytest.mark.slow
def test_a_process_that_never_starts_is_waited_for_no_longer_than_asked(
    folder: Path, tmp_path: Path
) -> None:
    words = command(tmp_path, cluster=True, mesh="data=2", start_timeout=4)
    before = time.monotonic()
    done = subprocess.run(
        words, env=environment(folder, **slurm(0, os.getpid())), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert time.monotonic() - before < MINUTE
    assert done.returncode == 2
    line = last_line(done.stderr)
    assert "this process (" in line
    assert "waited 4 s for the others, and not all started; see why, or pass a longer" in line


@pytest.mark.slow
def test_under_a_launcher_one_comes_late_and_each_survivor_says_which_was_lost(
    unbroken: Path, folder: Path, tmp_path: Path
) -> None:
    words = command(tmp_path, cluster=True, mesh="fsdp=2", heartbeat_timeout=15)
    envs = [environment(folder, **slurm(number, os.getpid())) for number in range(2)]
    with start(words, envs[0]) as first:
        time.sleep(10)
        with start(words, envs[1]) as second:
            wait(lambda: second.poll() is not None or rows(tmp_path) >= 15)
            [stopped] = children(second)
            os.kill(stopped, signal.SIGSTOP)
            before = time.monotonic()
            _, error = first.communicate(timeout=2 * MINUTE)
            _, other = second.communicate(timeout=2 * MINUTE)
            assert time.monotonic() - before < MINUTE
    line = last_line(error)
    assert "process 1 (" in line
    assert f"pid {stopped}) has ended or given no sign of life; this process ends; " in line
    assert "goes on after step 10, from its checkpoint" in line
    assert f"pid {stopped}) has given no sign of life for 15 s; this process " in last_line(other)


# ---------------------------------------------------------------- options that cannot be


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"mesh": "data=2,model=4"},
            "--mesh data=2,model=4: 'model' is no axis, the model knows how to split itself over "
            "data, fsdp, tensor, stage only; pass for example --mesh data=2,fsdp=2,tensor=1",
        ),
        ({"mesh": "data=2,data=4"}, "--mesh data=2,data=4: data has two sizes; pass one"),
        ({"mesh": "data=0"}, "--mesh data=0: the size of data is '0', and an axis has at least"),
        ({"mesh": "data"}, "--mesh data: the size of data is '', and an axis has at least one"),
        (
            {"mesh": "data=2,fsdp=2", "processes": 2},
            "--mesh data=2,fsdp=2,tensor=1 is for 4 devices and there are 2 devices, 1 in each of "
            "2 processes; pass sizes whose product is 2, for example --mesh data=2, or on CPU",
        ),
        (
            {"mesh": "data=2,fsdp=2", "batch": 6},
            "--batch has 6 sequences, which data × fsdp = 4 devices of --mesh data=2,fsdp=2,"
            "tensor=1 cannot share equally; pass a --batch that is a multiple of 4, or a smaller",
        ),
        (
            {"mesh": "data=4", "accum": 4},
            "a microbatch (--batch 8 in --accum 4) has 2 sequences, which data × fsdp = 4 devices",
        ),
        (
            {"mesh": "stage=8", "layers": 4},
            "stage=8 of --mesh data=1,fsdp=1,tensor=1,stage=8 does not divide --layers 4, of which "
            "each stage holds as many; pass --layers that are a multiple of it, or another stage",
        ),
        (
            {"mesh": "stage=8", "layers": 8, "fused": True},
            "--fused updates layers in the backward pass of one device, and stage= in --mesh makes "
            "a pipeline of several; leave one of them out",
        ),
        (
            {"mesh": "tensor=8", "heads": 4},
            "tensor=8 of --mesh data=1,fsdp=1,tensor=8 does not divide --heads 4, and a head stays",
        ),
        (
            {"mesh": "fsdp=8", "width": 20, "heads": 2},
            "fsdp × tensor = 8 of --mesh data=1,fsdp=8,tensor=1 does not divide --width 20, along",
        ),
        ({"cluster": True, "processes": 2}, "--cluster goes without --processes and --devices-"),
        ({"devices_per_process": 2}, "--devices-per-process goes with --mesh, which says what"),
        ({"processes": 2, "dry_run": True}, "--dry-run is for one process; sizes and plans are"),
        ({"mesh": "fsdp=2", "state": "host"}, "--state host is for one device: what is outside"),
        ({"processes": 0}, "--processes must be at least 1, got 0"),
        ({"heartbeat_timeout": 0}, "--heartbeat-timeout must be at least 1, got 0"),
    ],
)
def test_a_mesh_that_cannot_be_is_told_with_the_remedy(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        Config(**options).check()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_mesh_for_other_devices_than_there_are_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        train_lm.main(Config(mesh="data=2,fsdp=2"))
    assert "is for 4 devices and there are 8 devices; pass sizes whose product is 8" in str(
        caught.value
    )

    divided = command(tmp_path / "none", mesh="data=4", devices_per_process=2)
    done = subprocess.run(
        divided, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "tensor=1 is for 4 devices and there are 2 devices; pass" in last_line(done.stderr)
    assert not (tmp_path / "none").exists()
