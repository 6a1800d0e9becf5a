"""Pauses: periods in which the import of a package waits while autoprof reads recipes or applies hooks.

During a pause, a second thread may import a module of that package, and both threads may end in a deadlock. The second
thread takes the module's lock, and the module's code waits for the package's lock. The first thread holds the package's
lock, and the package's code waits for the module's lock. CPython ends this deadlock with an error in one of the threads
(up to 3.14, https://github.com/python/cpython/issues/83065). Without autoprof, the deadlock occurs only if both imports
happen within a few milliseconds of each other. A pause can last half a second.

So the second thread waits until the package's code has run for as long as it would have run without the pause. While it
waits, the second thread releases the module's lock, because the first thread may import the module, too. Only a thread
that has to wait imports `pauses.py`.
"""

import os
import sys
from _thread import get_ident
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    # The thread, the process and the start time on the monotonic clock.
    Pause = tuple[int, int, float]
    Pauses = Mapping[int, Pause]

_POLL_S = 0.002
# Maximum wait. CPython does not detect deadlocks with other kinds of locks, which the waiting thread may hold.
_MAX_WAIT_S = 30.0


def wait(name: str, pauses: "Pauses") -> "Any":
    """Wait before the module `name` is created, if the import of one of the module's packages pauses.

    Returns:
        The module if another thread imported it meanwhile, else None.
    """
    package = name
    while "." in package:
        package = package.rpartition(".")[0]
        lock: Any = _lock_of(package)
        pause = pauses.get(getattr(lock, "owner", None))  # type: ignore[arg-type]
        if pause is not None and pause[1] == os.getpid():
            return _without_lock(name, pause, pauses, lock)
    return None


def _sit_out(pause: "Pause", pauses: "Pauses", package: "Any") -> None:
    """Wait for the end of a pause. Then wait as long as the pause had already lasted when this function was called.

    The wait ends early if the import of the package is complete, or if that import waits for this thread.

    Args:
        pause: The pause.
        pauses: All pauses. A pause has ended when it is no longer in this dict.
        package: The lock of the package whose import pauses.
    """
    call_time, (thread, _, pause_start) = monotonic(), pause
    is_paused, deadline = True, call_time + _MAX_WAIT_S
    while package.owner == thread and monotonic() < deadline and not package.has_deadlock():
        if is_paused and pauses.get(thread) is not pause:
            is_paused, deadline = False, min(deadline, monotonic() + call_time - pause_start)
        sleep(_POLL_S)


def _without_lock(name: str, pause: "Pause", pauses: "Pauses", package: "Any") -> "Any":
    """Wait for a pause as `_sit_out` does, but meanwhile release the lock of the module that this thread imports.

    This thread is registered as waiting for that lock. Then CPython notices a deadlock if the thread that takes the
    lock needs another module that this thread is importing.

    Returns:
        The module if another thread imported it meanwhile, else None.
    """
    lock, thread = _lock_of(name), get_ident()
    if lock.owner != thread:  # the module is only searched for, not imported
        _sit_out(pause, pauses, package)
        return None
    with _Entry(thread, lock):
        lock.release()
        try:
            _sit_out(pause, pauses, package)
        finally:
            _take(lock)
    return sys.modules.get(name)


def _take(lock: "Any") -> None:
    """Acquire a lock, which the caller releases.

    If a signal handler raises meanwhile, the exception is raised again once the lock is acquired.
    """
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
    """Context manager in which CPython lists a thread as waiting for a module's lock. Only used up to Python 3.11."""

    def __init__(self, thread: int, lock: "Any") -> None:
        self._thread = thread
        self._lock = lock

    def __enter__(self) -> None:
        _importing._blocking_on[self._thread] = self._lock

    def __exit__(self, *exception: object) -> None:
        _importing._blocking_on.pop(self._thread, None)


def _no_lock(name: str) -> None:
    """Return None. Replaces `_get_module_lock` in an interpreter whose module locks autoprof does not know."""


# CPython 3.10 to 3.14, importlib/_bootstrap.py: a lock's `owner` is the thread that holds it. `has_deadlock` returns
# True if that thread waits for this thread, directly or through other threads. It looks at the registered waits.
_importing: "Any" = sys.modules["_frozen_importlib"]
_known = hasattr(getattr(_importing, "_ModuleLock", None), "has_deadlock") and hasattr(_importing, "_blocking_on")
_Entry: "Any" = getattr(_importing, "_BlockingOnManager", _WaitEntry)
_lock_of: "Callable[[str], Any]" = getattr(_importing, "_get_module_lock", _no_lock) if _known else _no_lock
