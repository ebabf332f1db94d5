"""`verify`: the prediction of a report against what the allocator of an attached device saw.

The job runs in a fresh process, since an allocator's peak cannot be set back, with
preallocation off, since otherwise all memory is in use from the start.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmem.records import to_data
from jaxmem.report import MemoryReport
from jaxmem.text import size

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Verification:
    """A prediction and a measurement of one job; bytes are for one device.

    Attributes:
      predicted_bytes: `required_bytes` of the compiled program.
      compiler_peak_bytes: the compiler's own peak.
      measured_bytes: the allocator's peak while steps ran, beyond what was in use before.
      argument_bytes: what the arguments took of that.
      device: its kind.
      devices: how many it ran on.
      platform: "gpu" or "tpu".
      steps: how many ran.
      seconds: the median of a step, the first left out.
      versions: of what compiled and ran it.
      notes: what explains a difference, or makes the measurement doubtful.
    """

    predicted_bytes: int
    compiler_peak_bytes: int | None
    measured_bytes: int
    argument_bytes: int
    device: str
    devices: int
    platform: str
    steps: int
    seconds: float
    versions: dict[str, str] = dataclasses.field(hash=False)
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """How far the prediction is from the measurement, as a fraction of it; above 0 too much."""
        return self.predicted_bytes / self.measured_bytes - 1

    def to_json(self) -> str:
        """All of it as JSON text, `error` too."""
        return json.dumps({**to_data(self), "error": self.error})

    def __str__(self) -> str:
        lines = [
            f"predicted {size(self.predicted_bytes)}, measured {size(self.measured_bytes)} on "
            f"{self.device}: {self.error:+.2%}",
            f"  the compiler's own peak {_size(self.compiler_peak_bytes)}, "
            f"arguments {size(self.argument_bytes)}",
            f"  {self.steps} steps, {self.seconds * 1e3:.3g} ms each",
            *(f"  {note}" for note in self.notes),
            "  " + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        ]
        return "\n".join(lines)


# ---------------------------------------------------------------- API


def verify(
    where: str,
    settings: Mapping[str, Any] | None = None,
    *,
    steps: int = 3,
    policy: str = "own",
    timeout: float = 1800.0,
) -> Verification:
    """Run steps of a job on the attached GPU or TPU, and compare its peak with the prediction.

    Its arguments are made up: small random numbers, zeros for whole numbers.  Donated
    ones are fed back.  This process leaves the device alone; but if it has taken hold of
    it before, as any use of jax does, less memory is left than there should be.

    Args:
      where: the job, "pkg.module:job" or "path/to/file.py:job"; another process loads it.
      settings: keywords of the job; texts are read as its annotations say.
      steps: how many to run.
      policy: for the decorated stacks instead of their own, such as "sqrt" or "revolve:slots=4".
      timeout: seconds for compiling, and again for running.

    Raises:
      RuntimeError: no such device is attached, or the job failed; never a guess.
      ValueError: `steps` is less than 1.
      TypeError: a setting is no number, text, or the like.
    """
    from jaxmem.errors import check_positive

    check_positive("steps", steps)
    if not isinstance(where, str):
        raise TypeError(
            f'verify takes a job by its name, as in "pkg.module:job", got {type(where).__name__}: '
            "a fresh process has to find it"
        )
    asked = {"where": where, "settings": dict(settings or {}), "policy": policy}
    with tempfile.TemporaryDirectory(prefix="jaxmem-verify-") as folder:
        found = ask({"what": "predict", **asked}, Path(folder), timeout)
        if "report" not in found:
            raise RuntimeError(needs(found["platform"], found["kind"]))
        report = MemoryReport.from_json(found["report"])
        request = {"what": "run", **asked, "steps": steps, "unread": found["unread"]}
        measured = ask(request, Path(folder), timeout)
    return compared(report, measured)


def ask(request: Mapping[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """What a fresh process of `jaxmem.jobs.measure` answers.

    Raises:
      RuntimeError: it failed, was killed, or took too long.
      TypeError: the request cannot be written as JSON.
    """
    paths = [folder / name for name in ("request.json", "answer.json", "log.txt")]
    question, answer, log = paths
    try:
        question.write_text(json.dumps(request))
    except TypeError as error:
        raise TypeError(
            f"a setting cannot be handed to another process: {error}; pass numbers and texts"
        ) from None
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "jaxmem.jobs.measure", str(question), str(answer)]
    with open(log, "wb") as out:
        try:
            done = subprocess.run(
                command, env=environment(folder), stdout=out, stderr=out, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"running the job took more than {timeout:g} s and was stopped; pass more as the "
                "timeout, or fewer steps"
            ) from None
    if done.returncode or not answer.exists():
        raise RuntimeError(_why_dead(done.returncode, log))
    found = json.loads(answer.read_text())
    if "error" in found:
        raise RuntimeError(_explained(found["error"]))
    return found


def environment(folder: Path) -> dict[str, str]:
    """The user's environment, with an allocator that can be measured and a cache of executables."""
    # The package, and the job, are found as this process finds them.
    paths = [*sys.path, str(Path(__file__).resolve().parents[1])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # "platform" and others keep no statistics.
        "XLA_PYTHON_CLIENT_ALLOCATOR": "default",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "executables"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def needs(platform: str, kind: str) -> str:
    """What is missing where nothing can be measured."""
    forced = os.environ.get("JAX_PLATFORMS")
    hint = f" (JAX_PLATFORMS={forced} is set)" if forced else ""
    return (
        f"verify needs an attached GPU or TPU, and jax found only {platform} ({kind}){hint}, whose "
        "allocator keeps no peak; on a machine with an NVIDIA GPU: "
        'pip install "jax[cuda13]"; with a TPU: pip install "jax[tpu]"'
    )


def compared(report: MemoryReport, measured: Mapping[str, Any]) -> Verification:
    """The two together.

    Raises:
      RuntimeError: nothing was measured.
    """
    from jaxmem.jobs.measure import median

    if not measured["peak_bytes"]:
        raise RuntimeError(needs(measured["platform"], measured["kind"]))
    return Verification(
        predicted_bytes=report.required_bytes,
        compiler_peak_bytes=report.peak_bytes,
        measured_bytes=measured["peak_bytes"],
        argument_bytes=measured["argument_bytes"],
        device=measured["device"],
        devices=measured["devices"],
        platform=measured["platform"],
        steps=len(measured["seconds"]),
        seconds=median(measured["seconds"]),
        versions=report.versions,
        notes=tuple(_notes(report, measured)),
    )


# ---------------------------------------------------------------- implementation

# The allocator of GPUs rounds each buffer up to this.
_ROUNDING = 256


def _notes(report: MemoryReport, measured: Mapping[str, Any]) -> list[str]:
    peak, predicted = measured["peak_bytes"], report.required_bytes
    notes = []
    if measured["start_peak_bytes"] >= peak:
        notes.append(
            "the peak was reached before the first step, so the steps need at most this much; "
            "whatever came before, such as arrays that job() made itself, needed more"
        )
    if measured["compiled"] and measured["platform"] == "gpu":
        notes.append(
            "the step was compiled in the measuring process, so workspace of kernels that the "
            "autotuner tried may be in the peak"
        )
    # Arguments, results and the block of temporaries are buffers of their own.
    buffers = len(report.arguments) + 1
    if 0 < peak - predicted <= 2 * _ROUNDING * buffers:
        notes.append(f"the difference is within the allocator's rounding to {_ROUNDING} B")
    elif peak > predicted:
        notes.append(
            f"{size(peak - predicted)} more than predicted: workspace that a library takes when it "
            "runs, and constants of the program, are not in the prediction"
        )
    ran = measured["executable_bytes"]
    if ran is not None and ran != predicted:
        notes.append(
            f"the executable that ran is said to need {size(ran)}: compiled twice, the compiler's "
            "autotuner chose other kernels"
        )
    if measured["before_bytes"]:
        notes.append(f"{size(measured['before_bytes'])} were in use before, and are not counted")
    return notes


def _why_dead(code: int, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-12:]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "\n".join([f"the process that ran the job ended with {how}; its last words:", *lines])


def _explained(text: str) -> str:
    text = text.removeprefix("Error: ")
    if "RESOURCE_EXHAUSTED" in text:
        return (
            f"the job does not fit on the attached device, so there is no peak to measure: {text}"
        )
    return text


def _size(count: int | None) -> str:
    return "unknown" if count is None else size(count)
