"""The watcher: a thread that sleeps, and every ten seconds looks at what is open and at who asks where it stands.

`threading` does not know it, so that no program finds it among its threads. It ends before a fork, whose child begins
its own with the first call of a hook; from Python 3.13 on the parent goes on with its next span.
"""

from __future__ import annotations

import _thread
import sys
from collections.abc import Callable
from typing import Protocol

from autoprof.base import interrupts, log, process, threads
from autoprof.base.originals import os, time
from autoprof.config.settings import Settings
from autoprof.run.timeline import Timeline
from autoprof.run.watch import crashes, snapshot
from autoprof.run.watch.hang import HangWatch
from autoprof.rundir.layout import RunDir
from autoprof.rundir.stacks import HANGS, STACKS

# How long it sleeps.
LOOK_S = 10.0
# How long a fork or the end of the process waits for a look that is going on.
_END_S = 1.0
# From Python 3.13 on a fork counts threads, to warn of them, when all that is to be done after it has been done
# (`os_fork_impl` in Modules/posixmodule.c).
_COUNTS_LAST = sys.version_info >= (3, 13)
# How long they wait for its thread to be gone after that.
_EXIT_S = 0.1


class Watched(Protocol):
    """The run of this process, as the watcher sees it."""

    @property
    def settings(self) -> Settings:
        """Return its settings."""

    @property
    def speaks(self) -> bool:
        """Return whether this process says what concerns the whole run."""

    @property
    def rundir(self) -> RunDir:
        """Return its directory."""

    @property
    def timeline(self) -> Timeline:
        """Return the timeline of this process."""


class Watcher:
    """The watcher of one process."""

    def __init__(self, run: Watched) -> None:
        self._run = run
        self._stop, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._native: list[int] = []
        # Those that were there before this process are not meant for it.
        self._answered = set(self._requests())
        self._hangs = HangWatch(run)

    def start(self) -> None:
        """Begin to watch. Raises nothing."""
        stop, ended = _thread.allocate_lock(), _thread.allocate_lock()
        stop.acquire()
        ended.acquire()
        try:
            # Before the start: a signal handler may raise in it, and the thread must end all the same.
            self._stop, self._ended, self._native = stop, ended, []
            threads.start(_thread.start_new_thread, _watch, (self.look, stop, ended, self._native))
        except RuntimeError as error:  # no further thread can be started
            interrupts.pass_on(error)
            stop.release()
            log.info(f"this process is not watched: {error}")

    def start_later(self) -> None:
        """Begin to watch with the next span that begins or ends."""
        timeline, once = self._run.timeline, _thread.allocate_lock()

        def wake() -> None:
            if once.acquire(blocking=False):
                timeline.waking = None
                self.start()

        timeline.waking = wake

    def stop(self) -> None:
        """Stop watching, and wait until the current look ends. Do nothing if the thread has been stopped."""
        stop, self._stop = self._stop, _thread.allocate_lock()
        if stop.locked():  # the thread runs, and has not been stopped
            stop.release()
            if self._ended.acquire(timeout=_END_S):
                _await_exit(self._native)

    def look(self) -> None:
        """Write down what has been open for long, find what takes too long, and answer those who ask."""
        for looker in (self._run.timeline.tell, crashes.check, self._hangs.look):
            self._try(looker)
        for folder in self._requests():
            if folder not in self._answered:
                self._answered.add(folder)
                self._try(lambda: snapshot.write(self._run.rundir, self._run.timeline, folder))  # noqa: B023

    def _try(self, work: Callable[[], None]) -> None:
        """Do one of its works, whatever becomes of the others."""
        try:
            work()
        except Exception as error:
            interrupts.pass_on(error)
            full = isinstance(error, OSError)
            text = self._run.rundir.unwritable(error) if full else f"the watcher: {type(error).__name__}: {error}"
            log.warning_aside(text)

    def _requests(self) -> list[str]:
        """Return the folders in which each process is to write where it stands."""
        found = []
        for kind in (STACKS, HANGS):
            place = os.path.join(self._run.rundir.path, kind)
            try:
                found += [os.path.join(place, name) for name in os.listdir(place) if not name.startswith(".")]
            except OSError as error:  # nobody has asked
                interrupts.pass_on(error)
        return found


def _await_exit(native: list[int]) -> None:
    """Wait until the kernel has no such thread any more: from Python 3.12 on a fork warns where it counts more than one
    (`warn_about_fork_with_threads` in Modules/posixmodule.c)."""
    until = time.monotonic() + _EXIT_S
    while native and os.path.exists(f"/proc/self/task/{native[0]}") and time.monotonic() < until:
        time.sleep(0.0001)


def _watch(look: Callable[[], None], stop: _thread.LockType, ended: _thread.LockType, native: list[int]) -> None:
    native.append(_thread.get_native_id())
    try:
        while not stop.acquire(timeout=LOOK_S):
            try:
                look()
            except Exception as error:
                interrupts.pass_on(error)
                log.warning_aside(f"the watcher: {type(error).__name__}: {error}")
    finally:
        ended.release()


class _State(process.State):
    """The watcher of this process."""

    ends = process.WATCH

    def begin(self) -> None:
        if (watcher := getattr(self, "watcher", None)) is not None:
            watcher.stop()
        self.watcher: Watcher | None = None

    def before_fork(self) -> None:
        if self.watcher is not None:
            self.watcher.stop()

    def in_parent(self) -> None:
        if self.watcher is None:
            return
        if _COUNTS_LAST:
            self.watcher.start_later()
        else:
            self.watcher.start()

    def in_child(self) -> None:
        self.watcher = None

    def at_exit(self) -> None:
        if self.watcher is not None:
            self.watcher.stop()
        crashes.end()


_state = _State()


def start(run: Watched) -> None:
    """Watch this process, if that is not done."""
    if _state.watcher is None:
        crashes.begin(run.rundir)
        _state.watcher = Watcher(run)
        _state.watcher.start()
        _state.end_first()
