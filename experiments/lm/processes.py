"""One of several processes that train together: what runs in the process itself.

A worker is started by a supervisor (`supervisor`), which holds two pipes to it.
Along one come the signals that the run was sent, and their end tells the worker
that its supervisor is gone; along the other the worker says once a second that
it lives, and how it ended.  A process that aborts inside of jax, or is stopped,
can say nothing itself, so it is the supervisor that speaks for it.

What libraries print from C++ goes to a file of the supervisor's; Python's
output is shown of the first process alone.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.config import Config, UserError
from lm.stopping import Listener, Stopped, listening

WORKER = "TRAIN_LM_WORKER"  # set for a worker alone: a `Place` as JSON
BEAT = 1.0  # seconds between signs of life
# Jax looks so seldom that it gives a process up after half of its timeout at the earliest; its
# supervisor, who can say which it was, is to be the first.
_JAX = 2

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class Place:
    """What a worker is told: who it is, and where to speak.

    Attributes:
      number: of this process, counted from 0; None where a cluster's launcher numbers them.
      count: how many processes there are; None as well.
      coordinator: address that process 0 binds and all connect to; None as well.
      out: file descriptor of what is shown as output.
      err: file descriptor of what is shown as errors.
      report: file descriptor of the pipe to the supervisor.
    """

    number: int | None
    count: int | None
    coordinator: str | None
    out: int
    err: int
    report: int


class Agreed(Listener):
    """A signal that one process has heard, heard by all at the same step.

    Otherwise one would write a checkpoint and end while the others wait for it in a step.
    """

    def ask(self) -> int | None:
        heard = multihost_utils.process_allgather(np.int32(self.heard or 0))
        return int(np.max(heard)) or None

    def _hear(self, number: int, frame: Any) -> None:
        # The supervisor's second signal ends its workers; a launcher may send one twice.
        self.heard = number


# ---------------------------------------------------------------- API


def is_worker() -> bool:
    return WORKER in os.environ


def work(config: Config, body: Callable[[Config, Listener, Callable[[int], None]], None]) -> int:
    """Join the other processes, run `body`, and tell the supervisor how it ended.

    Args:
      body: takes the options, a listener and a function that is told of each checkpoint.
    """
    place = Place(**json.loads(os.environ.pop(WORKER)))
    report = _Report(place.report)
    with listening(Agreed()) as listener:
        threading.Thread(target=_obey, args=(listener,), daemon=True).start()
        threading.Thread(target=_beat, args=(report,), daemon=True).start()
        try:
            _join(config, place, report)
            _show(place)
            body(config, listener, lambda step: report(saved=step))
        except UserError as error:
            report.end(2, error=str(error))
        except Stopped as stopped:
            _leave()
            report.end(128 + stopped.number, stopped=str(stopped))
        except BaseException as error:
            if of_another(error):
                # Some other process is gone.  The supervisor or, after the heartbeat's timeout,
                # jax ends this one as well, and either knows which process it was.
                report(lost=_one_line(error))
                time.sleep((_JAX + 1) * config.heartbeat_timeout)
            else:
                with contextlib.suppress(OSError):
                    traceback.print_exc(file=sys.__stderr__)
            report.end(1, error=_one_line(error))
    _leave()
    report.end(0)


def of_another(error: BaseException) -> bool:
    """Whether it follows from the end of another process, which a collective waited for."""
    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)


# ---------------------------------------------------------------- implementation


class _Report:
    """Lines of JSON to the supervisor."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def __call__(self, **said: Any) -> None:
        try:
            os.write(self._pipe, json.dumps(said).encode() + b"\n")
        except BrokenPipeError:
            os._exit(1)

    def end(self, code: int, **said: Any) -> NoReturn:
        """Say why, and end at once: a normal exit would wait for the other processes."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # it may be on the disk that is full
                stream.flush()
        self(**said)
        os._exit(code)


def _beat(report: _Report) -> None:
    while True:
        report()
        time.sleep(BEAT)


def _obey(listener: Listener) -> None:
    # Unbuffered: a buffered reader would hold signals back until there are many.
    while said := os.read(0, 64):
        listener.heard = int(said.split()[0])
    os._exit(1)  # the supervisor is gone, and with it whoever could be told


def _join(config: Config, place: Place, report: _Report) -> None:
    """Find the other processes, by the supervisor's word or the cluster's variables.

    Raises:
      UserError: not all of them came, or the mesh is not for the devices that they hold.
    """
    report(host=socket.gethostname(), pid=os.getpid())
    known: dict[str, Any] = {}
    if place.coordinator is not None:
        known = {
            "coordinator_address": place.coordinator,
            "coordinator_bind_address": place.coordinator,
            "num_processes": place.count,
            "process_id": place.number,
        }
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=config.start_timeout,
            heartbeat_timeout_seconds=_JAX * config.heartbeat_timeout,
            shutdown_timeout_seconds=config.heartbeat_timeout,
        )
    except Exception as error:
        traceback.print_exc(file=sys.__stderr__)
        raise UserError(_why_not_joined(config, error)) from error
    report(number=jax.process_index(), count=jax.process_count())
    config.check_devices()
    host = np.frombuffer(socket.gethostname().encode()[:64].ljust(64), np.uint8)
    hosts = multihost_utils.process_allgather(host)
    pids = multihost_utils.process_allgather(np.int32(os.getpid()))
    names = [bytes(row).decode().strip() for row in np.reshape(hosts, (-1, 64))]
    report(peers=list(zip(names, np.ravel(pids).tolist(), strict=True)))


def _why_not_joined(config: Config, error: Exception) -> str:
    text = str(error)
    if "coordinator_address should be defined" in text:
        return (
            "no cluster was found by --cluster: jax knows the variables of SLURM, Open MPI and "
            "Kubernetes (with the package jax[k8s]), and Cloud TPUs; start it by srun or mpirun, "
            "or on one machine by --processes"
        )
    return f"the processes did not find one another: {_one_line(error)}"


def _show(place: Place) -> None:
    """Of the first process Python's output is shown; C++ writes on to the supervisor's file."""
    for name, descriptor in (("stdout", place.out), ("stderr", place.err)):
        if jax.process_index() == 0:
            shown = os.fdopen(descriptor, "w", buffering=1)
        else:
            shown = open(os.devnull, "w")  # noqa: SIM115
        setattr(sys, name, shown)
    # What nobody can catch, such as what the loops of a failed write leave, is for the file too.
    sys.unraisablehook = threading.excepthook = _log
    logging.lastResort = logging.StreamHandler(sys.__stderr__)


def _log(args: Any) -> None:
    traceback.print_exception(
        args.exc_type, args.exc_value, args.exc_traceback, file=sys.__stderr__
    )


def _leave() -> None:
    """Wait for the others to come to their end, then part."""
    jax.distributed.shutdown()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0][:200]
