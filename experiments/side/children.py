"""Asks a separate process to train a net one way, and survives its failure.

Run as `python -m side.children QUESTION ANSWER`, this file is that process.
"""

import contextlib
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

from side import shapes
from side.methods import Method

OK, OUT_OF_MEMORY, NO_PLAN = "ok", "out of memory", "no plan fits"
TIMED_OUT, FAILED = "timed out", "failed"
FINAL = (OK, OUT_OF_MEMORY, NO_PLAN)
"""What would come out the same if it were asked again."""

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of a method.

    Attributes:
      status: one of those above.
      found: what the processes said.
      note: the reason, where it is not `OK`.
    """

    status: str
    found: Mapping[str, Any]
    note: str = ""


# ---------------------------------------------------------------- API


def measured(
    net: shapes.Net, method: Method, device: str, warmup: int, steps: int, timeout: float
) -> Answer:
    """Train a net one way, in processes that end before this returns.

    Args:
      device: "gpu" or "cpu".
      timeout: seconds for each process.
    """
    common = {
        "net": type(net).__name__,
        "size": dataclasses.asdict(net),
        "family": method.family,
        "how": method.how,
    }
    with tempfile.TemporaryDirectory(prefix="jaxmem-side-") as name:
        folder = Path(name)
        plan = str(folder / "plan.json")
        times = {"warmup": warmup, "steps": steps}
        if method.framework == "torch":
            on = "cuda" if device == "gpu" else "cpu"
            question = {"what": "torch", **common, "device": on, **times}
            return ask(question, folder, device, timeout)
        question = {"what": "prepare", **common, "plan": plan, "budget": method.budget}
        first = ask(question, folder, device, timeout)
        if first.status != OK:
            return first
        question = {"what": "run", **common, "plan": plan, **times}
        second = ask(question, folder, device, timeout)
        return dataclasses.replace(second, found={**first.found, **second.found})


def ask(question: Mapping[str, Any], folder: Path, device: str, timeout: float) -> Answer:
    """What a fresh process answers, however it ends."""
    from jaxmem.jobs.verify import environment

    paths = [folder / name for name in ("question.json", "answer.json", "log.txt")]
    paths[0].write_text(json.dumps(question))
    paths[1].unlink(missing_ok=True)
    env = environment(folder) | ({"JAX_PLATFORMS": "cpu"} if device == "cpu" else {})
    command = [sys.executable, "-m", "side.children", str(paths[0]), str(paths[1])]
    with paths[2].open("wb") as log:
        # A new session, so that the compilers that it started end with it.
        child = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            return Answer(TIMED_OUT, {}, f"stopped after {timeout:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if not paths[1].exists():
        lines = paths[2].read_text(errors="replace").split("\n")
        said = " ".join(line.strip() for line in lines[-4:])
        return Answer(judged(said), {}, f"ended with {code}: {said}"[:_LONGEST])
    found = json.loads(paths[1].read_text())
    if "error" in found:
        return Answer(judged(found["error"]), {}, found["error"][:_LONGEST])
    return Answer(OK, found)


def judged(error: str) -> str:
    """What an error means.

    >>> judged("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 GiB")
    'out of memory'
    >>> judged("OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB.")
    'out of memory'
    >>> judged("BudgetError: no plan of this step is within 3.0 GiB")
    'no plan fits'
    >>> judged("ValueError: shapes")
    'failed'
    """
    if error.startswith("BudgetError"):
        return NO_PLAN
    if "RESOURCE_EXHAUSTED" in error or "out of memory" in error.lower():
        return OUT_OF_MEMORY
    return FAILED


# ---------------------------------------------------------------- implementation

_LONGEST = 300


def _main(question: str, answer: str) -> None:
    """Do what the file says, and write what came of it."""
    asked = json.loads(Path(question).read_text())
    try:
        found = _answer(**asked)
    except Exception as error:  # it is told to the process that asked
        text = " ".join(str(error).split())
        found = {"error": f"{type(error).__name__}: {text}"}
    Path(answer).write_text(json.dumps(found))


def _answer(what: str, net: str, size: dict[str, Any], **rest: Any) -> dict[str, Any]:
    made = {"Gpt": shapes.Gpt, "Cnn": shapes.Cnn}[net](**size)
    if what == "torch":
        from side import run_torch

        return run_torch.run(made, **rest)
    from side import run_jax

    rest["plan"] = Path(rest["plan"])
    return (run_jax.prepare if what == "prepare" else run_jax.run)(made, **rest)


if __name__ == "__main__":
    _main(*sys.argv[1:])
