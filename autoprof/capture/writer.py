"""Background threads that write recordings, and the start of the process that finishes them.

torch's export holds the interpreter's lock all the time (torch 2.13, `kineto_results.save`): 1 s for 100 MB. Then the
finisher process compresses the trace. It outlives this process.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import autoprof
from autoprof.base import files, interpreter, log, process, seam, threads
from autoprof.base.originals import subprocess, threading, time
from autoprof.capture.finisher import job as finisher_job

# Folder that contains the package, for `-m`.
_PACKAGES = Path(autoprof.__file__).parent.parent
# Folder that contains autoprof's dependencies, and zlib-ng if it is installed.
_DEPENDENCIES = str(Path(msgspec.__file__).parent.parent)
# Maximum wait for the start of the finisher. It takes about 10 ms, and more on a busy machine.
_START_TIMEOUT_S = 60.0


class _WriterState(process.State):
    """Writing threads of this process.

    `Popen` waits until the other end of a pipe is closed. A child that is forked meanwhile would keep it open (CPython,
    `subprocess._execute_child`). So the user's forks wait some milliseconds for the start of the finisher.

    Attributes:
        writing: Jobs that are being written, in their order.
        finalizing: True if this child of multiprocessing waits for them at its end.
        starting: Lock for the start of the finisher. Forks take it, too.
    """

    ends = process.FILES

    def begin(self) -> None:
        self.writing: dict[Job, None] = {}
        self.finalizing = False
        self.starting = threading.RLock()

    def before_fork(self) -> None:
        self.starting.acquire()

    def in_parent(self) -> None:
        self.starting.release()

    def in_child(self) -> None:
        # The threads do not exist in a forked child.
        self.begin()

    def at_exit(self) -> None:
        begun = time.monotonic()
        for job in list(self.writing):
            job.wait(begun + job.patience_s - time.monotonic())


_state = _WriterState()


def spawn(job: dict[str, Any]) -> None:
    """Compress and name a trace in another process, which outlives this one and for which no thread waits."""
    try:
        python = interpreter.find()
        described = job | {"python": job.get("python") and python, "packages": _DEPENDENCIES}
        with interpreter.job_file(described) as file, _state.starting, files.low_numbers_taken():
            started = subprocess.Popen(
                [python, "-E", "-s", "-S", "-m", "autoprof.capture.finisher"],
                cwd=_PACKAGES,
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        # The child forks and exits; its own child does the work.
        try:
            status = started.wait(_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            started.kill()  # this process does the work instead
            raise
        if status:
            raise subprocess.CalledProcessError(status, started.args)
    except (OSError, subprocess.SubprocessError) as error:
        seam.pass_on(error)
        log.warning_once(f"no process could be started to compress traces ({error}); this process compresses them")
        # An empty `python` skips the analysis of torch_npu's folder, which takes too long in this process.
        finisher_job.finish(job | {"python": ""})


# Maximum number of threads that write. Each keeps a whole recording in memory.
_MAX_THREADS = 2
# Seconds between two looks at a job while waiting for it.
_POLL_S = 0.2


class Job:
    """Work of a writing thread. If its start is interrupted, a later caller of `start` or `wait` starts it.

    Attributes:
        done: True once the work has ended.
        patience_s: Maximum wait for the work, in seconds.
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
        """True if it was passed to `later`, so that it will be written."""
        return self.done or self in _state.writing

    def run(self) -> None:
        """Do the work, unless another thread does."""
        try:
            self._free.pop()
        except IndexError as error:
            seam.pass_on(error)
            return
        try:
            self._write()
        finally:
            self.done = True
            _state.writing.pop(self, None)
            self._through.release()

    def start(self) -> None:
        """Run it in a new thread, or in this one if no more threads are available. May be called again.

        `threading.Thread.start` waits for the thread. After an interrupt, it would be unknown whether the thread has
        started. So it is not used.
        """
        if not self._free:
            return
        try:
            threads.start(_thread.start_new_thread, self.run, ())
        except RuntimeError as error:  # the interpreter is ending, or the system has no more threads
            seam.pass_on(error)
            self.run()

    def wait(self, patience_s: float) -> bool:
        """Wait up to `patience_s` until the work has ended. Return True if it has."""
        deadline = time.monotonic() + patience_s
        while not self.done and (left := deadline - time.monotonic()) > 0:
            # A thread that is interrupted here may keep the lock, so all waiters poll `done`.
            if self._through.acquire(timeout=min(left, _POLL_S)):
                self._through.release()
            else:
                self.start()
        return self.done


def later(job: Job) -> None:
    """Run a job in a new thread. If `_MAX_THREADS` threads stay busy for `patience_s`, run it in this thread.

    The end of the interpreter waits up to `patience_s` for the job. For a thread that is not a daemon it would wait
    forever, for example if a network disk does not answer.
    """
    _state.end_first()
    _wait_in_forked_child()
    deadline = time.monotonic() + job.patience_s
    while len(before := list(_state.writing)) >= _MAX_THREADS:
        if not before[0].wait(deadline - time.monotonic()):
            job.run()
            return
    _state.writing[job] = None
    job.start()


def _wait_in_forked_child() -> None:
    """Wait for the threads at the end of a forked child of multiprocessing, which ends by `os._exit`."""
    module = sys.modules.get("multiprocessing.process")
    if module is not None and module.parent_process() is not None and not _state.finalizing:
        from multiprocessing.util import Finalize

        _state.finalizing = True
        Finalize(None, _state.at_exit, exitpriority=0)


def wait(patience_s: float) -> bool:
    """Wait up to `patience_s` until this process has no job. Return True if that is so."""
    deadline = time.monotonic() + patience_s
    return all(job.wait(deadline - time.monotonic()) for job in list(_state.writing))
