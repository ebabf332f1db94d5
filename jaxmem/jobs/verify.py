"""`verify`: compare the prediction of a report with the allocator's peak on an attached device.

The job runs in a fresh process, since an allocator's peak cannot be reset, and with the memory
preallocated, as jax does it by default: an allocator that grows as it goes does not cut a piece to
size that is less than twice as large as asked for, and less than 128 MiB larger, and counts all of
it.
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

from jaxmem._util.records import to_data
from jaxmem._util.text import size
from jaxmem.report.report import MemoryReport

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Verification:
    """A prediction and a measurement of one job; bytes are per device.

    Attributes:
      predicted_bytes: `required_bytes` of the compiled program.
      compiler_peak_bytes: the peak that the compiler states.
      measured_bytes: the allocator's peak while steps ran, beyond what was in use before.
      argument_bytes: the part of it taken by the arguments.
      device: the kind of device.
      devices: how many it ran on.
      platform: "gpu" or "tpu".
      steps: how many ran.
      seconds: the median time of a step, without the first.
      versions: of the packages that compiled and ran it.
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
        """The relative error of the prediction; positive where it is too large."""
        return self.predicted_bytes / self.measured_bytes - 1

    def to_json(self) -> str:
        """As JSON text, `error` under "relative_error", since "error" means a failure."""
        return json.dumps({**to_data(self), "relative_error": self.error})

    def __str__(self) -> str:
        lines = [
            f"predicted {size(self.predicted_bytes)}, measured {size(self.measured_bytes)} on "
            f"{self.device}: {self.error:+.2%}",
            f"  the compiler's peak {_size(self.compiler_peak_bytes)}, "
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

    The arguments are generated: small random numbers, zeros for integers.  Donated ones
    are replaced by results.  This process does not use the device; but if it has
    initialised it before, as any use of jax does, less memory is available to the job.

    Args:
      where: the job, "pkg.module:job" or "path/to/file.py:job"; another process loads it.
      settings: keywords of the job; texts are converted by its annotations.
      steps: how many to run.
      policy: in place of those in the code, such as "sqrt" or "revolve:slots=4".
      timeout: seconds for compiling, and the same for running.

    Raises:
      RuntimeError: no GPU or TPU is attached, or the job failed.
      ValueError: `steps` is less than 1.
      TypeError: a setting is not plain data such as a number or text.
    """
    from jaxmem.errors import check_positive

    check_positive("steps", steps)
    if not isinstance(where, str):
        raise TypeError(
            f'verify takes a job by its name, as in "pkg.module:job", got {type(where).__name__}: '
            "a fresh process must find it"
        )
    asked = {"where": where, "settings": dict(settings or {}), "policy": policy}
    with tempfile.TemporaryDirectory(prefix="jaxmem-verify-") as folder:
        found = ask({"what": "predict", **asked}, Path(folder), timeout)
        if "report" not in found:
            raise RuntimeError(needs(found["platform"], found["kind"]))
        report = MemoryReport.from_json(found["report"])
        request = {"what": "run", **asked, "steps": steps, "unread": found["unread"]}
        measured = ask(request, Path(folder), timeout, alone=True)
    return compared(report, measured)


def ask(
    request: Mapping[str, Any], folder: Path, timeout: float, alone: bool = False
) -> dict[str, Any]:
    """The answer of a fresh process of `jaxmem.jobs.measure`.

    Args:
      alone: as for `environment`.

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
            f"a setting cannot be passed to another process: {error}; pass numbers and texts"
        ) from None
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "jaxmem.jobs.measure", str(question), str(answer)]
    with open(log, "wb") as out:
        try:
            done = subprocess.run(
                command, env=environment(folder, alone), stdout=out, stderr=out, timeout=timeout
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


def environment(folder: Path, alone: bool) -> dict[str, str]:
    """The user's environment, with an allocator that can be measured and a cache of executables.

    Args:
      alone: take the GPU's memory at once, for measuring; else other processes may run beside it.
    """
    # The new process must find the package and the job where this one does.
    paths = [*sys.path, str(Path(__file__).resolve().parents[2])]
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": str(alone and allocator != "cuda_async").lower(),
        # "platform" and others keep no statistics.
        "XLA_PYTHON_CLIENT_ALLOCATOR": allocator if allocator in _COUNTING else "default",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "executables"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def needs(platform: str, kind: str) -> str:
    """The message where nothing can be measured."""
    forced = os.environ.get("JAX_PLATFORMS")
    hint = f" (JAX_PLATFORMS={forced} is set)" if forced else ""
    return (
        f"verify needs an attached GPU or TPU, and jax found only {platform} ({kind}){hint}, whose "
        "allocator keeps no peak; on a machine with an NVIDIA GPU: "
        'pip install "jax[cuda13]"; with a TPU: pip install "jax[tpu]"'
    )


def compared(report: MemoryReport, measured: Mapping[str, Any]) -> Verification:
    """The prediction and the measurement combined.

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

_COUNTING = ("default", "bfc", "cuda_async")
# The GPU allocator rounds each buffer up to this.
_ROUNDING = 256


def _notes(report: MemoryReport, measured: Mapping[str, Any]) -> list[str]:
    peak, predicted = measured["peak_bytes"], report.required_bytes
    notes = []
    if measured["start_peak_bytes"] >= peak:
        notes.append(
            "the peak was reached before the first step, so the steps need at most this much; "
            "something before it, such as arrays that job() allocated, needed more"
        )
    if measured["compiled"] and measured["platform"] == "gpu":
        notes.append(
            "the step was compiled in the measuring process, so workspace of kernels that the "
            "autotuner tried may be in the peak"
        )
    # Arguments, results and the block of temporaries are separate buffers.
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
            f"the executable that ran states that it needs {size(ran)}: it was compiled a second "
            "time, and the autotuner chose other kernels"
        )
    if measured["before_bytes"]:
        notes.append(f"{size(measured['before_bytes'])} were in use before, and are not counted")
    return notes


def _why_dead(code: int, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-12:]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "\n".join(
        [f"the process that ran the job ended with {how}; the end of its log:", *lines]
    )


def _explained(text: str) -> str:
    text = text.removeprefix("Error: ")
    if "RESOURCE_EXHAUSTED" in text:
        return (
            f"the job does not fit on the attached device, so there is no peak to measure: {text}"
        )
    return text


def _size(count: int | None) -> str:
    return "unknown" if count is None else size(count)
