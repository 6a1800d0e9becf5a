"""Background threads that write recordings, so that nothing waits forever for a disk that hangs.

torch's export holds the interpreter's lock from its begin to its end (torch 2.13, `kineto_results.save`): 1 s for
100 MB, in which no other thread of the process runs Python. Another process then compresses the trace.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable

from autoprof.base import interrupts, process, threads
from autoprof.base.originals import time

# Each keeps a whole recording in memory until it is written.
_AT_ONCE = 2
# How often a job is looked at that somebody waits for.
_LOOK_S = 0.2


class Job:
    """Something that a thread writes. Whoever is interrupted between two of its steps leaves it to the next one.

    Attributes:
        done: Whether it is through.
    """

    def __init__(self, write: Callable[[], None], patience_s: float) -> None:
        self.done = False
        self.patience_s = patience_s
        self._write = write
        self._free = [None]
        self._through = _thread.allocate_lock()
        self._through.acquire()

    @property
    def kept(self) -> bool:
        """Return whether it was given to `later`, which sees to it that it is written."""
        return self.done or self in _state.writing

    def run(self) -> None:
        """Write, unless somebody else does."""
        try:
            self._free.pop()
        except IndexError as error:
            interrupts.pass_on(error)
            return
        try:
            self._write()
        finally:
            self.done = True
            _state.writing.pop(self, None)
            self._through.release()

    def start(self) -> None:
        """Have a thread run it, or run it here, where there are no more. May be called again.

        `Thread.start` waits for the thread: one that is interrupted in this has started or not, and nobody knows.
        """
        if not self._free:
            return
        try:
            threads.start(_thread.start_new_thread, self.run, ())
        except RuntimeError as error:  # the interpreter ends, or the system gives no more threads
            interrupts.pass_on(error)
            self.run()

    def wait(self, patience_s: float) -> bool:
        """Wait until it is through, and return whether that is so after `patience_s`."""
        deadline = time.monotonic() + patience_s
        while not self.done and (left := deadline - time.monotonic()) > 0:
            # Somebody who is interrupted here holds the lock, and others look again.
            if self._through.acquire(timeout=min(left, _LOOK_S)):
                self._through.release()
            else:
                self.start()
        return self.done


class _State(process.State):
    """The threads that write in this process.

    Attributes:
        writing: What is being written.
        finalizing: Whether this child of multiprocessing waits for them at its end.
    """

    ends = process.FILES

    def begin(self) -> None:
        self.writing: dict[Job, None] = {}
        self.finalizing = False

    def in_child(self) -> None:
        # A forked child has none of the threads.
        self.begin()

    def at_exit(self) -> None:
        begun = time.monotonic()
        for job in list(self.writing):
            job.wait(begun + job.patience_s - time.monotonic())


_state = _State()


def later(job: Job) -> None:
    """Have a thread write, or write here, where `_AT_ONCE` threads are busy for as long as the job is patient.

    The interpreter's end waits for it as long. It would wait forever for a thread that is no daemon, on a network disk
    that has gone away.
    """
    _state.end_first()
    _wait_in_forked_child()
    deadline = time.monotonic() + job.patience_s
    while len(before := list(_state.writing)) >= _AT_ONCE:
        if not before[0].wait(deadline - time.monotonic()):
            job.run()
            return
    _state.writing[job] = None
    job.start()


def _wait_in_forked_child() -> None:
    """Wait for the threads at the end of a forked child of multiprocessing, which leaves by `os._exit`."""
    module = sys.modules.get("multiprocessing.process")
    if module is not None and module.parent_process() is not None and not _state.finalizing:
        from multiprocessing.util import Finalize

        _state.finalizing = True
        Finalize(None, _state.at_exit, exitpriority=0)


def wait(patience_s: float) -> bool:
    """Wait until nothing is being written in this process; return whether that is so after `patience_s`."""
    deadline = time.monotonic() + patience_s
    return all(job.wait(deadline - time.monotonic()) for job in list(_state.writing))
