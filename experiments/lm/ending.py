"""Why a run over several processes ended: one line, from what its workers said and left behind.

A process that was killed or has stopped says nothing; its peers fail in a
collective, or jax's coordination service aborts them with a page of text.  So
what was done to a process from outside comes first, then what a process said of
itself, and only then what jax says in a process that lost another.
"""

import dataclasses
import re
import signal
from collections.abc import Sequence
from typing import Any

# ---------------------------------------------------------------- types


@dataclasses.dataclass(frozen=True)
class End:
    """A worker at the end of a run.

    Attributes:
      host: name of the machine.
      pid: of the process there.
      code: exit status, a signal's number below zero, or None if it had to be ended.
      silent: seconds without a sign of life, if those were too many; else 0.
      said: all that it reported.
      log: what it wrote, and C++ in it.
    """

    host: str
    pid: int
    code: int | None
    silent: int
    said: dict[str, Any]
    log: str

    @property
    def name(self) -> str:
        return _name(self.said.get("number"), self.host, self.pid)

    @property
    def by_jax(self) -> bool:
        return self.code == -signal.SIGABRT and _FATAL in self.log


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a person is told.

    Attributes:
      code: exit status of the run.
      line: None where all went well.
      log: what a programmer wants to read above it; mostly nothing.
    """

    code: int
    line: str | None = None
    log: str = ""


# ---------------------------------------------------------------- API


def verdict(ends: Sequence[End], start_timeout: int) -> Verdict:
    """The first cause of the end, and how to go on."""
    if not any(end.code for end in ends) and all(end.code is not None for end in ends):
        return Verdict(0)

    def lost(what: str, log: str = "") -> Verdict:
        return Verdict(1, f"train_lm.py: error: {what}; {_how_to_go_on(ends)}", log)

    for end in ends:
        if end.code is not None and end.code < 0 and not end.by_jax:
            crashed = -end.code in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
            what = f"{end.name} was killed by {signal.Signals(-end.code).name}"
            return lost(what, end.log if crashed else "")
    for end in ends:
        if error := end.said.get("error"):
            if end.code == 2:
                # About the options, which all have, it is said by all.
                whose = "" if all(e.said.get("error") == error for e in ends) else f"{end.name}: "
                return Verdict(2, f"train_lm.py: error: {whose}{error}")
            return lost(f"{end.name} failed: {error}", end.log)
    if silent := [end for end in ends if end.silent]:
        names, seconds = [end.name for end in silent], max(end.silent for end in silent)
        return lost(f"{_these(names)} given no sign of life for {seconds} s")
    stopped = [end.said["stopped"] for end in ends if "stopped" in end.said]
    if len(stopped) == len(ends):
        return Verdict(
            ends[0].code or 1, f"stopped by {stopped[0]}; the same command resumes the run"
        )
    for end in ends:
        if end.by_jax and "number" not in end.said:
            return Verdict(
                2,
                f"train_lm.py: error: {end.name} waited {start_timeout} s for the others, and not "
                "all started; see why, or pass a longer --start-timeout",
            )
        if end.by_jax:
            return lost(_jax_says(end))
    for end in ends:
        if end.code:
            return lost(f"{end.name} ended with status {end.code}", end.log)
    left = [end.name for end in ends if end.code is None]
    return lost(f"{_these(left)} not ended when the other processes did")


# ---------------------------------------------------------------- implementation

_FATAL = "JAX distributed service detected fatal errors"


def _how_to_go_on(ends: Sequence[End]) -> str:
    who = "the other processes were ended" if len(ends) > 1 else "this process ends"
    steps = [end.said["saved"] for end in ends if "saved" in end.said]
    # A checkpoint is whole when all have written it.  One of which the last word did not come
    # through any more is found when the run goes on.
    if len(steps) < len(ends):
        return f"{who}; the same command goes on from the last checkpoint, if there is one"
    if min(steps) == 0:
        return f"{who}; no checkpoint was written yet, so the same command starts over"
    return f"{who}; the same command goes on after step {min(steps)}, from its checkpoint"


def _jax_says(end: End) -> str:
    """Which process was lost, by the coordination service's text; or the text, where it differs."""
    text = end.log.partition(_FATAL)[2]
    status = text.partition("absl::Status: ")[2].partition("\nRPC:")[0]
    found = re.search(r"stopped sending heartbeats\):\s*([\d,\s]+)", status)
    numbers = [int(number) for number in re.findall(r"\d+", found[1])] if found else []
    if not numbers and ("Failed to send RPC" in status or "/Heartbeat" in text):
        numbers = [0]
    if not numbers:
        return f"{end.name} lost the others: {' '.join(status.split())[:200]}"
    peers = dict(enumerate(end.said.get("peers", [])))
    names = _these([_name(number, *peers.get(number, ())) for number in numbers])
    return f"{names} ended or given no sign of life"


def _name(number: int | None, host: str = "", pid: int | None = None) -> str:
    name = "this process" if number is None else f"process {number}"
    role = "coordinator, " if number == 0 else ""
    return name if pid is None else f"{name} ({role}{host}, pid {pid})"


def _these(names: Sequence[str]) -> str:
    """Several names with their auxiliary verb."""
    if len(names) == 1:
        return f"{names[0]} has"
    return f"{', '.join(names[:-1])} and {names[-1]} have"
