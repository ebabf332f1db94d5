"""Starts the processes of a run on this machine, and ends them all when one is lost.

`--processes N` starts N workers here; under `--cluster` each process that the
cluster's launcher starts is the supervisor of one worker.  A worker is lost
when it ends with an error, is killed, or gives no sign of life.  Workers that
wait for it in a collective would wait for ever, so they are ended, and one line
says which process it was, and from where the same command goes on (`ending`).
"""

import contextlib
import dataclasses
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from types import FrameType
from typing import IO, Any

from lm.config import Config
from lm.ending import End, verdict
from lm.processes import WORKER, Place
from lm.stopping import Listener, listening

_POLL = 0.1  # seconds between looks at the workers
_SETTLE = 1.0  # seconds in which the ends of others follow from the first
_TWICE = 0.5  # seconds within which a second signal is the same one: launchers send some twice

# ---------------------------------------------------------------- API


def supervise(config: Config) -> int:
    """Run the workers until all have ended, say why unless all is well; gives the exit status."""
    with listening(_Patient()) as listener, _started(config) as workers:
        _watch(config, workers, listener)
        found = verdict([worker.end() for worker in workers], config.start_timeout)
    if found.line is not None:
        sys.stderr.write(found.log)
        # One that was ended in the middle of its progress bar has left the line open.
        cut = any(w.said.get("number") == 0 and w.process.returncode < 0 for w in workers)
        print("\n" * cut + found.line, file=sys.stderr)
    return found.code


# ---------------------------------------------------------------- implementation


class _Patient(Listener):
    def __init__(self) -> None:
        super().__init__()
        self._since = 0.0

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.heard is not None and now - self._since > _TWICE:
            raise KeyboardInterrupt
        self.heard, self._since = number, now


@dataclasses.dataclass
class _Worker:
    """A child process, what it has said along its pipe, and when."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    pipe: int
    heard: float
    said: dict[str, Any]
    spoke: bool = False
    silent: int = 0
    _unread: bytes = b""

    def read(self) -> bool:
        """Take what has come; whether more may come."""
        if not (chunk := os.read(self.pipe, 65536)):
            return False
        self.heard, self.spoke = time.monotonic(), True
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            self.said |= json.loads(line)
        return True

    def tell(self, number: int) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"%d\n" % number)
            self.process.stdin.flush()

    def end(self) -> End:
        code = self.process.poll()
        while code is not None and self.read():  # its last words
            pass
        self.log.seek(0)
        log = self.log.read().decode(errors="replace")
        return End(socket.gethostname(), self.process.pid, code, self.silent, self.said, log)


@contextlib.contextmanager
def _started(config: Config) -> Iterator[list[_Worker]]:
    """The workers; on the way out none is left."""
    count = config.processes
    with contextlib.ExitStack() as stack:
        address = None
        if count is not None:
            # Bound here until the end, and by process 0 as well (gRPC sets SO_REUSEPORT): else
            # another program could be given the port in between.
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{held.getsockname()[1]}"
        workers: list[_Worker] = []
        try:
            for number in range(count or 1):
                log = stack.enter_context(tempfile.TemporaryFile())
                workers.append(_start(config, None if count is None else number, address, log))
            yield workers
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.wait()
                os.close(worker.pipe)
                if worker.process.stdin:
                    worker.process.stdin.close()


def _start(config: Config, number: int | None, address: str | None, log: IO[bytes]) -> _Worker:
    read, write = os.pipe()
    place = Place(number, config.processes, address, os.dup(1), os.dup(2), write)
    environment = os.environ | {WORKER: json.dumps(dataclasses.asdict(place))}
    if config.processes is not None:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["JAX_NUM_CPU_DEVICES"] = str(config.devices_per_process or 1)
    passed = (place.out, place.err, write)
    process = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env=environment, pass_fds=passed, stdin=subprocess.PIPE, stdout=log, stderr=log,
        start_new_session=True,  # a terminal's Ctrl-C comes through the supervisor alone
    )  # fmt: skip
    for descriptor in passed:
        os.close(descriptor)
    said = {} if number is None else {"number": number}
    return _Worker(process, log, read, time.monotonic(), said)


def _watch(config: Config, workers: list[_Worker], listener: Listener) -> None:
    """Until all have ended, or one is lost and what follows from it has happened."""
    told, first_end = False, float("inf")
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
        while True:
            running = [worker for worker in workers if worker.process.poll() is None]
            for key, _ in selector.select(0):
                key.data.read()
            now = time.monotonic()
            for worker in running:
                # What comes before the first sign of life, imports above all, takes its time.
                patience = config.heartbeat_timeout + config.start_timeout * (not worker.spoke)
                worker.silent = patience if now - worker.heard > patience else 0
            if not running or any(worker.silent for worker in running):
                return
            if len(running) < len(workers):
                first_end = min(first_end, now)
                ended = [worker for worker in workers if worker not in running]
                # A signal and a success are known to all, who come to their end as well.
                well = all("stopped" in w.said or w.process.returncode == 0 for w in ended)
                if now - first_end > (config.heartbeat_timeout if well else _SETTLE):
                    return
            if listener.heard is not None and not told:
                told = True
                for worker in workers:
                    worker.tell(listener.heard)
            time.sleep(_POLL)
