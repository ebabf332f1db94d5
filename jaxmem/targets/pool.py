"""The pool of worker processes: started when needed, used by one thread at a time, ended at exit.

A worker belongs to the process that started it.  After a fork the child has no
workers; it closes its copies of the pipes, so that a worker still ends with its
parent.
"""

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

_IDLE_SECONDS = 600.0
_KEPT = 2  # idle workers of one kind
_LOG_BYTES = 200_000
_MALLOC = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in (
        ("tcache_count", 60_000),
        ("top_pad", 1 << 28),
        ("trim_threshold", 1 << 32),
        ("mmap_threshold", 1 << 30),
    )
)
# Messages of compilers on every machine without an accelerator.
_NOISE = (
    "before absl::InitializeLog() is called",
    "Logging before InitGoogle()",
    "Could not find cuda drivers",
    "Failed to find host bounds",
)

# ---------------------------------------------------------------- types


class Died(Exception):
    """A worker exited without an answer."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(code)
        self.code, self.log = code, log

    @property
    def signal(self) -> str | None:
        """The signal that ended it, None if it exited."""
        return signal.Signals(-self.code).name if self.code < 0 else None


class TimedOut(Exception):
    """A worker gave no answer in time."""

    def __init__(self, log: str) -> None:
        super().__init__("timed out")
        self.log = log


class Worker:
    """One worker process, with a folder for programs, texts and its log."""

    def __init__(self, idle: float = _IDLE_SECONDS) -> None:
        self.folder = tempfile.mkdtemp(prefix="jaxmem-")
        self.pending = 0
        self._unread = b""
        self._begun = 0
        with open(os.path.join(self.folder, "log"), "wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    str(Path(__file__).with_name("worker.py")),
                    self.folder,
                    str(idle),
                    str(Path(jax.__file__).parents[1]),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env=environment(self.folder),
                start_new_session=True,  # to be killed with all that it starts; no Ctrl-C for it
            )

    def send(self, request: dict[str, Any]) -> None:
        """Send a request; `finish` reads the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        self.pending += 1

    def begin(self, request: dict[str, Any], program: bytes) -> None:
        """Have a program compiled; `finish` waits for it.

        Raises:
          Died: the worker has ended.
          OSError: a file could not be written.
        """
        with open(self._program, "wb") as file:
            file.write(program)
        self._begun = os.path.getsize(self._log)
        try:
            self.send({**request, "program": self._program})
        except BrokenPipeError:
            raise self._died() from None

    def answered(self, seconds: float) -> bool:
        """Whether `finish` need not wait any more, after waiting for at most so long."""
        deadline = time.monotonic() + seconds
        try:
            while self._unread.count(b"\n") < self.pending:
                if not self._read_on(deadline):
                    return False
        except Died:  # as `finish` will say
            pass
        return True

    def finish(self, deadline: float) -> dict[str, Any]:
        """The answer to what was begun, and the texts.

        Raises:
          Died, TimedOut: there is no answer; the worker cannot be used again.
          OSError: a file could not be read.
        """
        reply: dict[str, Any] = {}
        while self.pending:
            while b"\n" not in self._unread:
                if not self._read_on(deadline):
                    raise TimedOut(self.log())
            line, _, self._unread = self._unread.partition(b"\n")
            reply = json.loads(line)
            self.pending -= 1
        os.unlink(self._program)
        texts = {}
        for name in reply.get("texts", ()):
            with open(os.path.join(self.folder, name), encoding="utf-8") as file:
                texts[name] = file.read()
            os.unlink(os.path.join(self.folder, name))
        return {**reply, "texts": texts, "log": self.log(self._begun)}

    def _read_on(self, deadline: float) -> bool:
        """More of what it answers; False if there was nothing in time."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return False
        if not (data := os.read(descriptor, 1 << 16)):
            raise self._died()
        self._unread += data
        return True

    def _died(self) -> Died:
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it closed its pipes, and stays
            self.stop()
            self.process.wait()
        return Died(self.process.returncode, self.log())

    @property
    def _program(self) -> str:
        return os.path.join(self.folder, "program")

    @property
    def _log(self) -> str:
        return os.path.join(self.folder, "log")

    def log(self, start: int = 0) -> str:
        """What it printed from an offset on; only the end if that is long."""
        try:
            with open(self._log, "rb") as file:
                file.seek(max(start, os.path.getsize(self._log) - _LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines(keepends=True)
        except OSError:
            return ""
        return "".join(line for line in lines if not any(noise in line for noise in _NOISE))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End the process and its children; a thread that waits for its answer gets `Died`."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """End the process, and remove its folder."""
        self.stop()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        for _ in range(20):  # a compiler that ends with it may still be writing
            shutil.rmtree(self.folder, ignore_errors=True)
            if not os.path.exists(self.folder):
                break
            time.sleep(0.05)

    def forget(self) -> None:
        """Release it in a process that did not start it."""
        self.process.returncode = 0  # it is not this process's to wait for
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                os.close(pipe.fileno())  # type: ignore[union-attr]  # not flushed: it is shared


def environment(folder: str) -> dict[str, str]:
    """The environment of a worker: the user's, without what would interfere.

    Flags of the compilers are passed on.  Those of jax and of Python concern
    tracing, which is complete; settings that make warnings errors, or that cache
    executables, would only do harm here.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_") and name not in ("PYTHONWARNINGS", "PYTHONPROFILEIMPORTTIME")
    }
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONUTF8": "1",
        "TMPDIR": folder,
        # XLA makes and frees small things without end: with glibc's own limits on how many of them
        # are kept at hand, and how soon memory is given back, it takes a tenth longer.
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _MALLOC),
        # Warnings are wanted: one says that XLA rematerialised, or could not.
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "TPU_MIN_LOG_LEVEL": "1",
        "TPU_STDERR_LOG_LEVEL": "2",
        "TPU_LOG_DIR": "disabled",
        # No machine with TPUs is asked which TPU it has, and several may compile at once.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


# ---------------------------------------------------------------- the pool


class Pool:
    """Idle workers by platform and flags, which a process reads only once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resting: dict[tuple[str, ...], list[Worker]] = {}
        self._all: list[Worker] = []

    @contextlib.contextmanager
    def borrowed(self, platform: str) -> Iterator[Worker]:
        """A worker for the exclusive use of the body; it is ended if the body raises."""
        key = _key(platform)
        worker = self._take(key) or self._start()
        try:
            yield worker
        except BaseException:
            self._end(worker)
            raise
        self._give_back(key, worker)

    def warm_up(self, platform: str, request: dict[str, Any]) -> None:
        """Start an idle worker that has loaded what a request needs."""
        key = _key(platform)
        if (worker := self._take(key)) is None:
            worker = self._start()
            try:
                worker.send(request)
            except OSError:  # it ended at once; the next call says why
                return self._end(worker)
        return self._give_back(key, worker)

    def close(self) -> None:
        """End all workers, including those in use."""
        with self._lock:
            resting = [worker for workers in self._resting.values() for worker in workers]
            working = [worker for worker in self._all if worker not in resting]
            self._all, self._resting = [], {}
        for worker in working:
            worker.stop()
        for worker in resting:
            worker.end()

    def after_fork(self) -> None:
        """In the child process: start with no workers."""
        workers = self._all
        self.__init__()
        for worker in workers:
            worker.forget()

    def _take(self, key: tuple[str, ...]) -> Worker | None:
        while True:
            with self._lock:
                resting = self._resting.get(key)
                worker = resting.pop() if resting else None
            if worker is None or worker.alive:
                return worker
            self._end(worker)

    def _start(self) -> Worker:
        worker = Worker()
        with self._lock:
            self._all.append(worker)
        return worker

    def _give_back(self, key: tuple[str, ...], worker: Worker) -> None:
        with self._lock:
            resting = self._resting.setdefault(key, [])
            if len(resting) < _KEPT and worker in self._all:
                return resting.append(worker)
        return self._end(worker)

    def _end(self, worker: Worker) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._all.remove(worker)
        worker.end()


def _key(platform: str) -> tuple[str, ...]:
    return (platform, *(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")))


pool = Pool()
atexit.register(pool.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.after_fork)
