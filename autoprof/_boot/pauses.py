"""Pauses: periods in which the import of a package waits while autoprof reads recipes or applies hooks.

Another thread may import a module of that package during a pause. It takes the module's lock, and the module's code
waits for the package's lock. The first thread holds the package's lock, and its code waits for the module's lock.
CPython ends this deadlock with an error in one of the threads (up to 3.14,
https://github.com/python/cpython/issues/83065). Without autoprof, both imports must happen within a few milliseconds
of each other. A pause can last half a second. So the second thread waits until the package's code has run for as long
as it would have without the pause. Meanwhile it releases the module's lock, since the first thread may import the
module, too.
"""

import os
import sys
from _thread import get_ident
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_POLL_S = 0.002
# Maximum wait. CPython does not detect deadlocks with other kinds of locks, which the waiting thread may hold.
_MAX_WAIT_S = 30.0


class _Pause:
    """One pause of a thread."""

    __slots__ = ("began", "ended", "process", "thread")

    def __init__(self) -> None:
        self.process = os.getpid()
        self.thread = get_ident()
        self.began = monotonic()
        self.ended: float | None = None

    def sit_out(self, package: "Any") -> None:
        """Wait for the end of the pause, and then for the time between its beginning and this call.

        The wait ends early if the import is complete, or if it waits for this thread.

        Args:
            package: The lock of the package whose import pauses.
        """
        arrived = monotonic()
        late = arrived - self.began
        while (
            package.owner == self.thread
            and (self.ended is None or monotonic() < self.ended + late)
            and monotonic() < arrived + _MAX_WAIT_S
            and not package.has_deadlock()
        ):
            sleep(_POLL_S)


class Pauses:
    """The pauses of all threads."""

    def __init__(self) -> None:
        self._going: dict[int, _Pause] = {}

    def during(self, work: "Callable[..., None]", *arguments: "Any") -> None:
        """Call `work`, a function of autoprof's, in the middle of an import."""
        if get_ident() in self._going:
            work(*arguments)
            return
        pause = self._going[get_ident()] = _Pause()
        try:
            work(*arguments)
        finally:
            del self._going[pause.thread]
            pause.ended = monotonic()

    def concern(self, name: str) -> bool:
        """Return True if the import of a module by this thread may have to wait."""
        return bool(self._going) and "." in name and get_ident() not in self._going

    def wait(self, name: str) -> "Any":
        """Wait before a module is created, if the import of one of its packages pauses.

        Returns:
            The module if another thread imported it meanwhile, else None.
        """
        package = name
        while self.concern(package):
            package = package.rpartition(".")[0]
            lock: Any = _lock_of(package)
            pause = self._going.get(getattr(lock, "owner", None))  # type: ignore[arg-type]
            if pause is not None and pause.process == os.getpid():
                return _without_lock(name, pause, lock)
        return None


def _without_lock(name: str, pause: _Pause, package: "Any") -> "Any":
    """Sit out a pause without the lock of the module that this thread imports.

    The thread is registered as waiting for the lock. So CPython finds a deadlock if the thread that takes the lock
    wants another module that this thread imports.

    Returns:
        The module if another thread imported it meanwhile, else None.
    """
    lock, thread = _lock_of(name), get_ident()
    if lock.owner != thread:  # the module is only searched for, not imported
        pause.sit_out(package)
        return None
    with _Entry(thread, lock):
        lock.release()
        try:
            pause.sit_out(package)
        finally:
            _take(lock)
    return sys.modules.get(name)


def _take(lock: "Any") -> None:
    """Acquire a lock. An exception of a signal handler is raised once the lock is acquired; the caller releases it."""
    interrupt = None
    while lock.owner != get_ident():
        try:
            lock.acquire()
        except _importing._DeadlockError:
            raise
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class _WaitEntry:
    """Entry of a thread that waits for a module's lock, up to Python 3.11."""

    def __init__(self, thread: int, lock: "Any") -> None:
        self._thread = thread
        self._lock = lock

    def __enter__(self) -> None:
        _importing._blocking_on[self._thread] = self._lock

    def __exit__(self, *exception: object) -> None:
        _importing._blocking_on.pop(self._thread, None)


def _no_lock(name: str) -> None:
    """Stand in for `_get_module_lock` in an interpreter whose module locks are unknown."""


# CPython 3.10 to 3.14, importlib/_bootstrap.py: a lock's `owner` is the thread that holds it. `has_deadlock` returns
# True if that thread waits for this one, directly or through others, by the entries of threads that wait.
_importing: "Any" = sys.modules["_frozen_importlib"]
_known = hasattr(getattr(_importing, "_ModuleLock", None), "has_deadlock") and hasattr(_importing, "_blocking_on")
_Entry: "Any" = getattr(_importing, "_BlockingOnManager", _WaitEntry)
_lock_of: "Callable[[str], Any]" = getattr(_importing, "_get_module_lock", _no_lock) if _known else _no_lock
