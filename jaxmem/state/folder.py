"""A folder with the arrays of an optimizer's state, and what is read ahead and written behind.

The rows of a step are written next to those of the step before it, which go when the next one
begins.  So there is a whole step at any moment, and twice the state's bytes are needed.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from jaxmem._util.files import write_whole
from jaxmem._util.text import size
from jaxmem.errors import JaxmemWarning, StateOnDiskError, warn
from jaxmem.state.files import LAYOUT, LOCK, OWNER, StateFiles, listed
from jaxmem.state.stored import Layout

# ---------------------------------------------------------------- types

# Which rows of which array: its number, the first one, how many.
Key = tuple[int, int, int]


@dataclasses.dataclass
class _Write:
    """Rows on their way to the disk."""

    key: Key
    rows: np.ndarray
    future: Any

    def overlaps(self, key: Key) -> bool:
        (number, first, count), (own, start, length) = key, self.key
        return number == own and first < start + length and start < first + count


@dataclasses.dataclass
class _Step:
    """A step that this process reads or writes.

    Attributes:
      arrays: opened, by number.
      written: of arrays that are not complete, which rows are on their way or on the disk, by
        number; none of a whole step.
      pending: rows on their way to the disk.
      whole: done when all is on the disk.
      ticket: number that was drawn for the update that writes it.
    """

    arrays: dict[int, Any] = dataclasses.field(default_factory=dict)
    written: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    pending: list[_Write] = dataclasses.field(default_factory=list)
    whole: "concurrent.futures.Future[None] | None" = None
    ticket: int = 0


# ---------------------------------------------------------------- API


def state_folder(path: str | os.PathLike[str], every: int | None, memory: int) -> "StateFolder":
    """The folder at a path: one object in a process, as long as it is in use.

    Raises:
      ValueError: it is in use, and keeps other steps.
    """
    real = os.path.realpath(os.path.expanduser(path))
    found = _folders.get(real)
    if found is None:
        found = _folders[real] = StateFolder(Path(real))
    elif found.is_in_use and found.every != every:
        raise ValueError(
            f"{real} is in use in this process with every={found.every}, got every={every}; pass "
            "the same, or close() the optimizer that uses it first"
        )
    found.every, found.memory = every, memory
    return found


class StateFolder:
    """Reads and writes rows of the arrays of one state, step after step.

    Attributes:
      path: of the folder, which is made when it is first used.
      every: the newest two steps whose number is a multiple of this are kept, too.
      memory: bytes of rows read ahead and written behind, about.
      overwrite: whether a state that is there may be replaced by that of step 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = StateFiles(path)
        self.every: int | None = None
        self.memory = 2**30
        self.overwrite = False
        self._guard = threading.RLock()
        self._lock: filelock.FileLock | None = None
        self._layout: Layout | None = None
        self._steps: dict[int, _Step] = {}
        self._failure: BaseException | None = None
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "jaxmem-state")
        # What was read in the step that is being read, and in the one before it, in this order.
        self._reading = -1
        self._now: list[Key] = []
        self._before: list[Key] = []
        self._next = 0  # which of `_before` is read ahead next
        self._ahead: dict[tuple[int, Key], Any] = {}

    def __repr__(self) -> str:
        return f"StateFolder({str(self.path)!r})"

    @property
    def is_in_use(self) -> bool:
        return self._lock is not None

    def start(self, layout: Layout) -> None:
        """Begin with step 0, whose rows are then written.

        Raises:
          StateOnDiskError: the folder is in use, is too small, or holds a state.
        """
        with self._guard:
            self._take()
            held = self._files.whole_steps()
            if held and not self.overwrite:
                raise StateOnDiskError(
                    f"{self.path} holds a state already, after {listed(held)}; to go on from it, "
                    "take the state from your checkpoint in the place of init's (its arrays say "
                    "which step they are of), and to start anew pass another folder, or "
                    "overwrite=True"
                )
            if self._files.all_steps() and not self._files.has_layout():
                raise StateOnDiskError(
                    f"{self._files.folder(self._files.all_steps()[0])} is there, and is not of a "
                    "state; pass another folder"
                )
            self._failure = None
            self._reading, self._now, self._before = -1, [], []
            self._ahead.clear()
            for step in self._files.all_steps():
                self._remove(step)
            self._files.write_layout(layout)
            self._layout = layout
            self._make(0)

    def steps(self) -> tuple[int, ...]:
        """The whole steps that the folder holds."""
        self.wait()
        return tuple(self._files.whole_steps())

    def wait(self) -> None:
        """Until all that was written is on the disk.

        Raises:
          StateOnDiskError: some of it could not be written.
        """
        for step in list(self._steps.values()):
            if step.whole is not None:
                step.whole.result()
        self._check()

    def hold(self, step: int) -> None:
        """Until all that was written is on the disk, of which this step is to stay.

        Raises:
          StateOnDiskError: the step is not there.
        """
        self.wait()
        with self._guard:
            if step not in self._files.whole_steps():
                raise StateOnDiskError(self._is_not_there(step))
            self._files.say_held(step)

    def close(self) -> None:
        """Wait, and leave the folder to other processes.

        Raises:
          StateOnDiskError: some of what was written is not on the disk.
        """
        try:
            self.wait()
        finally:
            with self._guard:
                self._steps.clear()
                self._ahead.clear()
                self._layout, self._failure, self._reading = None, None, -1
                if self._lock is not None:
                    self._lock.release()
                    self._lock = None

    def read(self, layout: Layout, number: int, mark: Any, first: int, count: int) -> np.ndarray:
        """Rows of an array, as they are after a step.

        Args:
          mark: see `OnDisk`.

        Raises:
          StateOnDiskError: the step is not there, or not as it was written.
        """
        key = (number, first, count)
        step, ticket = int(mark[0]), int(mark[1])
        with self._guard:
            self._check()
            self._open(layout)
            self._begin_reading(step, ticket)
            self._note(key)
            own = self._steps[step]
            pending = [write for write in own.pending if write.overlaps(key)]
            if len(pending) == 1 and pending[0].key == key:
                self._read_ahead(step)
                return pending[0].rows
            ahead = self._ahead.pop((step, key), None)
        with self._told(f"{layout.arrays[number].path} after step {step} cannot be read", but=step):
            for write in pending:
                write.future.result()
            rows = (ahead or self._started(step, key)).result()
        with self._guard:
            self._read_ahead(step)
        return rows

    def write(self, layout: Layout, number: int, mark: Any, first: int, rows: Any) -> np.ndarray:
        """Rows of an array, as they are to be after the next step, on their way to the disk.

        Returns:
          The mark with the number of the update that writes.

        Raises:
          StateOnDiskError: the step before is not there, the disk is full, or what was written
            earlier has failed.
        """
        step, ticket, writing = int(mark[0]) + 1, int(mark[1]), int(mark[2])
        own = np.array(rows)  # what a callback is given is there for its time only
        with self._guard:
            self._check()
            key = (number, first, own.shape[0])
            begun = self._is_begun(step, key, writing)
            if step == 0 and not begun:
                self.start(layout)
            self._open(layout)
            if step and not begun:
                self._begin_writing(step, ticket)
            into = self._steps[step]
            others = [write for held in self._steps.values() for write in held.pending]
        self._wait_for_room(others, own.nbytes)
        with self._guard:
            rows_of = self._array(step, number)[first : first + own.shape[0]]
            future = rows_of.write(own, can_reference_source_data_indefinitely=True)
            into.pending = [*filter(self._is_pending, into.pending)]
            into.pending.append(_Write(key, own, future))
            into.written[number][first : first + own.shape[0]] = True
            if into.written[number].all():
                into.written.pop(number)
            is_last = not into.written
            if is_last:
                into.whole = self._worker.submit(self._finish, step, into)
        # Of a step that a checkpoint goes with, nothing is left behind.
        if is_last and into.whole and (step == 0 or (self.every and step % self.every == 0)):
            into.whole.result()
            self._check()
        return np.asarray([step - 1, ticket, into.ticket], np.int32)

    # ------------------------------------------------------------ opening

    def _take(self) -> None:
        """Keep other processes out."""
        if self._lock is not None:
            return
        with self._told(f"{self.path} cannot be used", "pass a folder that can be written"):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.path / LOCK, blocking=False, thread_local=False)
            try:
                lock.acquire()
            except filelock.Timeout:
                by = (self.path / OWNER).read_text().strip()
                raise StateOnDiskError(
                    f"{self.path} is in use by another process ({by}): two would overwrite each "
                    "other's state; stop that one, or pass another folder"
                ) from None
            owner = f"process {os.getpid()} on {socket.gethostname()}\n"
            write_whole(self.path / OWNER, owner.encode())
        self._lock = lock

    def _open(self, layout: Layout) -> None:
        """Take the folder, and see that it holds what is asked for."""
        self._take()
        if layout is self._layout or layout == self._layout:
            return
        if not self._files.has_layout():
            raise StateOnDiskError(
                f"{self.path} holds no state ({LAYOUT} is missing): start with the state that "
                "init returns, or pass the folder of the run that is to go on"
            )
        different = self._files.difference(layout)
        if different:
            raise StateOnDiskError(
                f"{self.path} holds the state of another optimizer or other parameters: "
                f"{different}; pass another folder, or overwrite=True and start with the state "
                "that init returns"
            )
        self._layout = layout

    def _go_on(self, but: int | None = None) -> str:
        """What to do when a step is lost."""
        held = [step for step in self._files.whole_steps() if step != but]
        if not held:
            return f"there is no other whole step in {self.path}, so that the run has to start anew"
        return f"go on from a checkpoint of another whole step that is there, {listed(held)}"

    # ------------------------------------------------------------ reading

    def _is_not_there(self, step: int) -> str:
        return (
            f"the state after step {step} is not in {self.path}, which holds that after "
            f"{listed(self._files.whole_steps())}: what is done to a state replaces it, but for "
            "steps that are multiples of every= or held; go on from a checkpoint of one that is "
            "there, and let every= be the number of steps between checkpoints"
        )

    def _begin_reading(self, step: int, ticket: int) -> None:
        if step not in self._steps:
            if step not in self._files.whole_steps():
                raise StateOnDiskError(self._is_not_there(step))
            assert self._layout is not None
            damage = self._files.damage(self._layout, step)
            if damage:
                raise StateOnDiskError(f"{damage}; {self._go_on(step)}")
            self._steps[step] = _Step(ticket=self._files.ticket(step))
        elif self._steps[step].written:
            raise StateOnDiskError(
                f"the update that was to write the state after step {step} to {self.path} was "
                f"broken off; {self._go_on()}"
            )
        if self._steps[step].ticket != ticket:
            raise StateOnDiskError(
                f"the state after step {step} in {self.path} was written by another update than "
                "the one whose result is given, from another run or from the same state a second "
                "time: a state on disk is there once; go on with the result of the last update, "
                "or with a checkpoint of this run"
            )
        if step != self._reading:
            self._reading = step
            self._before, self._now, self._next = self._now, [], 0
            self._ahead = {key: value for key, value in self._ahead.items() if key[0] == step}

    def _note(self, key: Key) -> None:
        """That these rows are read now."""
        place = len(self._now)
        if self._before[place : place + 1] != [key]:
            self._before = []  # it goes another way than in the step before
        self._now.append(key)
        self._next = max(self._next, place + 1)

    def _read_ahead(self, step: int) -> None:
        """Begin to read what was read next in the step before."""
        assert self._layout is not None
        held = sum(self._bytes(key) for _, key in self._ahead)
        while step == self._reading and self._next < len(self._before):
            key = self._before[self._next]
            held += self._bytes(key)
            if self._ahead and held > self.memory // 2:
                return
            self._next += 1
            if not any(write.overlaps(key) for write in self._steps[step].pending):
                self._ahead.setdefault((step, key), self._started(step, key))

    def _started(self, step: int, key: Key) -> Any:
        number, first, count = key
        return self._array(step, number)[first : first + count].read()

    def _bytes(self, key: Key) -> int:
        assert self._layout is not None
        array = self._layout.arrays[key[0]]
        return array.bytes // array.shape[0] * key[2]

    # ------------------------------------------------------------ writing

    def _is_begun(self, step: int, key: Key, writing: int) -> bool:
        """Whether these rows go to what is there of a step; else it is begun, or begun anew.

        In an update, each array's first write has no number of it yet, and the others have: when
        there is none, and rows of the array are written, the update that did it was broken off.

        Raises:
          StateOnDiskError: the update that they are of did not begin the step.
        """
        own = self._steps.get(step)
        if own is None or not own.written:
            begun = False
        elif writing:
            begun = own.ticket == writing
        else:
            rows = own.written.get(key[0])
            return rows is not None and not rows.any()
        if writing and not begun:
            if own is not None and own.written:
                self._remove(step)  # so that the next attempt begins with nothing
            raise StateOnDiskError(
                f"two updates wrote the state after step {step} to {self.path}, of which one was "
                "broken off; do the step again"
            )
        return begun

    def _begin_writing(self, step: int, ticket: int) -> None:
        before = step - 1
        self._begin_reading(before, ticket)
        whole = self._steps[before].whole
        if whole is not None:
            whole.result()
            self._check()
        held = self._files.whole_steps()
        if before not in held:
            raise StateOnDiskError(self._is_not_there(before))
        kept = [s for s in self._files.held_steps() if s <= before][-2:]
        multiples = [s for s in held if self.every and s % self.every == 0 and s <= before]
        # That a run goes on from its last checkpoint is the usual thing.
        lost = [s for s in held if self.every and s % self.every == 0 and s >= step]
        if lost:
            warn(
                f"{self.path}: the state after {listed(lost)} is removed, for the run goes on "
                f"from step {before}",
                JaxmemWarning,
            )
        for other in self._files.all_steps():
            if other not in (before, *kept, *multiples[-2:]):
                self._remove(other)
        self._make(step)

    def _make(self, step: int) -> None:
        """An empty folder for a step, if there is room for what goes there."""
        layout = self._layout
        assert layout is not None
        with self._told(f"{self.path} cannot be written", "pass a folder that can be written"):
            free = shutil.disk_usage(self.path).free
            if layout.bytes <= free:
                self._files.folder(step).mkdir()
        if layout.bytes > free:
            raise StateOnDiskError(
                f"the state after step {step} needs {size(layout.bytes)} on the disk of "
                f"{self.path}, where {size(free)} are free (the state before it stays until it is "
                "whole); make room there, or let jaxmem.quantize_state store it in 8 bits"
            )
        written = {n: np.zeros(array.shape[0], bool) for n, array in enumerate(layout.arrays)}
        self._steps[step] = _Step(written=written, ticket=secrets.randbelow(2**31 - 1) + 1)

    def _wait_for_room(self, others: Sequence[_Write], wanted: int) -> None:
        todo = [write for write in others if not write.future.done()]
        held = wanted + sum(write.rows.nbytes for write in todo)
        for write in todo:
            if held <= self.memory // 2:
                return
            with self._told(f"{self.path} cannot be written"):
                write.future.result()
            held -= write.rows.nbytes

    def _is_pending(self, write: _Write) -> bool:
        if not write.future.done():
            return True
        if write.future.exception() is not None:
            self._failure = write.future.exception()
        return False

    def _finish(self, step: int, own: _Step) -> None:
        """When all rows are on the disk, say so there."""
        try:
            for write in own.pending:
                write.future.result()
            if self._failure is None:
                self._files.say_whole(step, own.ticket)
                own.pending = []
        except BaseException as error:  # told by `_check`
            self._failure = error

    def _check(self) -> None:
        """Raises what went wrong on the way to the disk, once: then a step may begin anew."""
        error = self._failure
        if error is None:
            return
        with self._guard:
            held = self._files.whole_steps()
            for step in [step for step in self._steps if step not in held]:
                self._remove(step)
            # Only now: to remove a step waits for its writes, which fail by the same cause.
            self._failure = None
        with self._told(f"{self.path} cannot be written"):
            raise error

    @contextlib.contextmanager
    def _told(self, what: str, then: str | None = None, but: int | None = None) -> Iterator[None]:
        """In the words of this file, what the disk or tensorstore refuse, and what to do then."""
        try:
            yield
        except StateOnDiskError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).split(" [")[0]
            raise StateOnDiskError(f"{what}: {reason}; {then or self._go_on(but)}") from error

    # ------------------------------------------------------------ files

    def _array(self, step: int, number: int) -> Any:
        """An array of a step, opened, or made when the step is written."""
        own = self._steps[step]
        if number not in own.arrays:
            assert self._layout is not None
            array = self._layout.arrays[number]
            own.arrays[number] = self._files.opened(step, number, array, make=bool(own.written))
        return own.arrays[number]

    def _remove(self, step: int) -> None:
        own = self._steps.pop(step, _Step())
        self._ahead = {key: value for key, value in self._ahead.items() if key[0] != step}
        self._reading = -1 if self._reading == step else self._reading
        if own.whole is not None:
            own.whole.exception()  # which waits: nothing must be written to what is gone
        for write in own.pending:
            write.future.exception()
        with self._told(f"{self._files.folder(step)} cannot be removed", "see who uses it"):
            self._files.remove(step)


# ---------------------------------------------------------------- implementation

_folders: "weakref.WeakValueDictionary[str, StateFolder]" = weakref.WeakValueDictionary()
