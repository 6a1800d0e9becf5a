"""Background threads that write recordings, and the start of the finisher process.

While torch exports a trace and frees the recording, it holds the interpreter's lock all the time (torch 2.13,
`kineto_results.save`): 1 s for 100 MB, and with stacks three times as long. After the export, the finisher process
compresses the trace. The finisher may outlive this process.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import autoprof
from autoprof.base import files, interpreter, log, process, seam
from autoprof.base.originals import subprocess, threading, time
from autoprof.capture import finisher

# Folder that contains the package autoprof. The finisher runs there, so that `python -m` finds the package.
_PACKAGES = Path(autoprof.__file__).parent.parent
# Folder that contains autoprof's dependencies. If zlib-ng is installed, it is also in this folder.
_DEPENDENCIES = str(Path(msgspec.__file__).parent.parent)
# Maximum wait for the start of the finisher. The start takes about 10 ms, and more on a busy machine.
_START_TIMEOUT_S = 60.0


class _WriterState(process.State):
    """Write jobs of this process, and the lock for the start of a finisher.

    `Popen` waits until the other end of a pipe is closed. If the user forks a child in the meantime, the child keeps
    the pipe open (CPython, `subprocess._execute_child`). So a fork first waits some milliseconds for the start of the
    finisher.

    Attributes:
        writing: Write jobs that have not ended, in the order in which they were added.
        finalizing: True if this process is a child of multiprocessing that will wait for its write jobs at its end.
        starting: Lock that is held while a finisher starts and while the user forks.
    """

    ends = process.FILES

    def reset(self) -> None:
        self.writing: dict[Job, None] = {}
        self.finalizing = False
        self.starting = threading.RLock()

    def before_fork(self) -> None:
        self.starting.acquire()

    def after_fork_in_parent(self) -> None:
        self.starting.release()

    def after_fork_in_child(self) -> None:
        # A forked child does not have the writing threads of its parent.
        self.reset()

    def at_exit(self) -> None:
        start_s = time.monotonic()
        for job in list(self.writing):
            job.wait(start_s + job.patience_s - time.monotonic())


_state = _WriterState()


def spawn(job: dict[str, Any]) -> None:
    """Start a finisher process, which compresses and renames a trace. If the start fails, do the work in this process.

    No thread waits for the finisher, and the finisher may outlive this process.

    Args:
        job: The description of the capture, as `Artifacts` makes it.
    """
    try:
        python = interpreter.find()
        finisher_input = job | {"python": job.get("python") and python, "packages": _DEPENDENCIES}
        with interpreter.job_file(finisher_input) as file, _state.starting, files.low_numbers_taken():
            child = subprocess.Popen(
                [python, "-E", "-s", "-S", "-m", "autoprof.capture.finisher"],
                cwd=_PACKAGES,
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        # The child forks and exits. The grandchild does the work.
        try:
            status = child.wait(_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()  # this process does the work instead
            raise
        if status:
            raise subprocess.CalledProcessError(status, child.args)
    except (OSError, subprocess.SubprocessError) as error:
        seam.pass_on(error)
        log.warning_once(f"no process could be started to compress traces ({error}); this process compresses them")
        # An empty `python` skips the analysis of torch_npu's folder, which takes too long in this process.
        finisher.finish(job | {"python": ""})


# Maximum number of writing threads. Each thread keeps a whole recording in memory.
_MAX_THREADS = 2
# Seconds between two checks of a write job while a thread waits for the job.
_POLL_S = 0.2


class Job:
    """A write job: the work of one writing thread.

    If the start of the thread is interrupted, a later call of `start` or `wait` starts the thread.

    Attributes:
        done: True once the work has ended.
        patience_s: Maximum time in seconds that other threads wait for the work.
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
        """True if the job was passed to `later`, so that its work will be done."""
        return self.done or self in _state.writing

    def run(self) -> None:
        """Do the work in this thread, unless another thread already does it or has done it."""
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
        """Do the work in a new thread, or in this thread if no thread can start. May be called more than once.

        `threading.Thread.start` waits for the new thread. If a signal interrupted that wait, it would be unknown
        whether the thread has started. So this method does not use `threading.Thread`.
        """
        if not self._free:
            return
        try:
            process.start_thread(_thread.start_new_thread, self.run, ())
        except RuntimeError as error:  # the interpreter is ending, or the system has no more threads
            seam.pass_on(error)
            self.run()

    def wait(self, patience_s: float) -> bool:
        """Wait at most `patience_s` seconds until the work has ended. Return True if it has ended, otherwise False."""
        deadline = time.monotonic() + patience_s
        while not self.done and (remaining_s := deadline - time.monotonic()) > 0:
            # If a thread is interrupted between `acquire` and `release`, it keeps the lock. So all waiters poll `done`.
            if self._through.acquire(timeout=min(remaining_s, _POLL_S)):
                self._through.release()
            else:
                self.start()
        return self.done


def later(job: Job) -> None:
    """Do the work of a write job in a new thread. If `_MAX_THREADS` threads stay busy, do the work in this thread.

    This function waits at most the job's `patience_s` for a free thread.

    The end of the interpreter waits at most `patience_s` for the job. It would wait forever for a thread that is not a
    daemon, for example if a network disk does not answer. So writing threads are daemons.
    """
    _state.register_at_exit()
    _wait_in_forked_child()
    deadline = time.monotonic() + job.patience_s
    while len(earlier_jobs := list(_state.writing)) >= _MAX_THREADS:
        if not earlier_jobs[0].wait(deadline - time.monotonic()):
            job.run()
            return
    _state.writing[job] = None
    job.start()


def _wait_in_forked_child() -> None:
    """If this process is a child of multiprocessing, let it wait for the writing threads at its end.

    Such a child ends by `os._exit`, so functions of `atexit` do not run.
    """
    module = sys.modules.get("multiprocessing.process")
    if module is not None and module.parent_process() is not None and not _state.finalizing:
        from multiprocessing.util import Finalize

        _state.finalizing = True
        Finalize(None, _state.at_exit, exitpriority=0)


def wait(patience_s: float) -> bool:
    """Wait at most `patience_s` seconds until all write jobs of this process have ended.

    Returns:
        True if all have ended, otherwise False.
    """
    deadline = time.monotonic() + patience_s
    return all(job.wait(deadline - time.monotonic()) for job in list(_state.writing))
