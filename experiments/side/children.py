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
from side.methods import COMPILED, Method

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


class Child:
    """One way to train one net, in processes that end before a method returns.

    Args:
      device: "gpu" or "cpu".
      timeout: seconds for each process.
    """

    def __init__(self, net: shapes.Net, method: Method, device: str, timeout: float) -> None:
        self._method, self._device, self._timeout = method, device, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="jaxmem-side-")
        self._common = {
            "net": type(net).__name__,
            "size": dataclasses.asdict(net),
            "family": method.family,
            "how": method.how,
        }
        self._before: Answer | None = None

    def prepare(self) -> None:
        """Plan and compile, into caches that `measured` finds; several children may at once."""
        if self._method.framework == "jax":
            plan = {"plan": self._plan, "budget": self._method.budget}
            self._before = self._ask(what="prepare", **plan)
        elif self._method.family == COMPILED:
            self._torch(0, 1)  # a whole step, in as much memory

    def measured(self, warmup: int, steps: int) -> Answer:
        """What came of so many steps, with nothing else on the device."""
        with self._folder:
            if self._method.framework == "torch":
                return self._torch(warmup, steps)
            if self._before is None:
                self.prepare()
            before = self._before
            assert before is not None
            if before.status != OK:
                return before
            after = self._ask(what="run", plan=self._plan, warmup=warmup, steps=steps)
            return dataclasses.replace(after, found={**before.found, **after.found})

    # ------------------------------------------------------------ implementation

    @property
    def _plan(self) -> str:
        return str(Path(self._folder.name) / "plan.json")

    def _torch(self, warmup: int, steps: int) -> Answer:
        on = "cuda" if self._device == "gpu" else "cpu"
        return self._ask(what="torch", device=on, warmup=warmup, steps=steps)

    def _ask(self, **rest: Any) -> Answer:
        question = {**self._common, **rest}
        return ask(question, Path(self._folder.name), self._device, self._timeout)


def ask(question: Mapping[str, Any], folder: Path, device: str, timeout: float) -> Answer:
    """What a fresh process answers, however it ends."""
    from jaxmem.jobs.verify import environment

    paths = [folder / name for name in ("question.json", "answer.json", "log.txt")]
    paths[0].write_text(json.dumps(question))
    paths[1].unlink(missing_ok=True)
    env = environment(folder, alone=question["what"] == "run") | (
        {"JAX_PLATFORMS": "cpu"} if device == "cpu" else {}
    )
    env |= {name: str(folder / "kernels") for name in _TORCH_CACHES}
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
_TORCH_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


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
