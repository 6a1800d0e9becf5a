"""Pauses: time in which the import of a package stands still, since its thread works for autoprof.

Another thread may import a module of that package meanwhile. It has that module's lock then, and the module will wait
for the package's; the first thread has the package's, and will wait for the module's. CPython ends such a circle with
an error in one of them (up to 3.14, https://github.com/python/cpython/issues/83065). It takes two imports at one time,
which a pause would make of many. So the module is executed as long after the package as without autoprof.
"""

import os
import sys
from _thread import get_ident
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_LOOK_S = 0.002
# For locks that CPython's detector of deadlocks does not know: they may be held by who waits here.
_LONGEST_S = 30.0


class _Pause:
    """One pause of a thread."""

    __slots__ = ("began", "ended", "process", "thread")

    def __init__(self) -> None:
        self.process = os.getpid()
        self.thread = get_ident()
        self.began = monotonic()
        self.ended: float | None = None

    def goes_before(self, late: float) -> bool:
        """Return whether who came `late` after its beginning has to wait."""
        return self.ended is None or monotonic() < self.ended + late


class Pauses:
    """The pauses of all threads."""

    def __init__(self) -> None:
        self._going: dict[int, _Pause] = {}

    def during(self, work: "Callable[..., None]", *arguments: "Any") -> None:
        """Do work of autoprof's in the middle of an import."""
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
        """Return whether a module that this thread imports may have to wait."""
        return bool(self._going) and "." in name and get_ident() not in self._going

    def wait(self, name: str) -> None:
        """Wait before a module is executed, if a package that it belongs to is in the middle of an import that pauses.

        The wait ends early when the import is done, or waits for this thread.
        """
        while self.concern(name):
            name = name.rpartition(".")[0]
            lock: Any = _lock_of(name)
            pause = self._going.get(getattr(lock, "owner", None))  # type: ignore[arg-type]
            if pause is not None and pause.process == os.getpid():
                came = monotonic()
                while (
                    lock.owner == pause.thread
                    and pause.goes_before(came - pause.began)
                    and monotonic() < came + _LONGEST_S
                    and not lock.has_deadlock()
                ):
                    sleep(_LOOK_S)
                return


def _no_lock(name: str) -> None:
    """Stand in for `_get_module_lock` where locks of modules are others."""


# CPython 3.10 to 3.14, importlib/_bootstrap.py: a lock has the thread that holds it as its `owner`, and `has_deadlock`
# says whether that one, or one for which it waits, waits for this thread.
_importing = sys.modules["_frozen_importlib"]
_known = hasattr(getattr(_importing, "_ModuleLock", None), "has_deadlock")
_lock_of: "Callable[[str], Any]" = getattr(_importing, "_get_module_lock", _no_lock) if _known else _no_lock
