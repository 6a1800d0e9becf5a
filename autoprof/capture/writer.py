"""Background threads that write recordings, and the process that finishes them.

torch's export holds the interpreter's lock from begin to end (torch 2.13, `kineto_results.save`): 1 s for 100 MB. The
finisher process then compresses the trace and outlives this process.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autoprof
from autoprof.base import files, interpreter, interrupts, log, process, threads
from autoprof.base.originals import subprocess, threading, time
from autoprof.capture.finisher import job as finisher_job

# The folder that has the package, from which `-m` takes it.
_PACKAGES = Path(autoprof.__file__).parent.parent
# How long that process may take to start: some 10 ms, and more on a machine that is busy.
_HAND_OVER_S = 60.0


class _SpawnState(process.State):
    """The lock for the start of that process, which the user's forks take, too, for some milliseconds.

    `Popen` waits for the other end of a pipe to be closed, which a child that is forked meanwhile would have (CPython,
    `subprocess._execute_child`).
    """

    def __init__(self) -> None:
        self.starting = threading.RLock()
        super().__init__()

    def before_fork(self) -> None:
        self.starting.acquire()

    def in_parent(self) -> None:
        self.starting.release()

    def in_child(self) -> None:
        self.starting.release()


_spawn_state = _SpawnState()


def spawn(job: dict[str, Any]) -> None:
    """Compress and name a trace without the training thread waiting for it, in a process that outlives this one."""
    try:
        python = interpreter.find()
        described = job | {"python": job.get("python") and python}
        with interpreter.job_file(described) as file, _spawn_state.starting, files.low_numbers_taken():
            started = subprocess.Popen(
                [python, "-E", "-s", "-S", "-m", "autoprof.capture.finisher"],
                cwd=_PACKAGES,
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        # The child forks, and ends when its own child is at work.
        try:
            status = started.wait(_HAND_OVER_S)
        except subprocess.TimeoutExpired:
            started.kill()  # it is done here then, and by nobody else
            raise
        if status:
            raise subprocess.CalledProcessError(status, started.args)
    except (OSError, subprocess.SubprocessError) as error:
        interrupts.pass_on(error)
        log.warning_once(f"no process could be started to compress traces ({error}); this process compresses them")
        # Analysing a folder of torch_npu's takes too long for the training thread.
        finisher_job.finish(job | {"python": ""})


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
