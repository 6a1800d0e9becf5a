"""What a recording leaves is written in a thread, so that a disk that hangs is not waited for without an end.

torch's export keeps the interpreter's lock from its begin to its end (torch 2.13, `kineto_results.save`): 1 s for
100 MB, in which no other thread of the process runs Python. What comes after it, the compression, is another process's.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

from autoprof import interrupts

# Each keeps a whole recording in memory until it is written.
_AT_ONCE = 2
_free = threading.BoundedSemaphore(_AT_ONCE)
# The threads that write, and how long the end of the interpreter may wait for each.
_writing: dict[threading.Thread, float] = {}
# The child of multiprocessing that waits for them at its end.
_finalizing = 0


def later(write: Callable[[], None], patience_s: float) -> Callable[[float], None]:
    """Run `write` in a thread, or here, where `_AT_ONCE` of them are busy for `patience_s`.

    The interpreter's end waits for it as long. A thread that is not a daemon would be waited for without an end, on a
    network disk that has gone away.

    Returns:
        Waits until `write` is through, but no longer than its argument, in seconds.
    """
    if not _free.acquire(timeout=patience_s):
        write()
        return _nothing

    slot = _free

    def run() -> None:
        try:
            write()
        finally:
            _writing.pop(thread, None)
            slot.release()

    thread = threading.Thread(target=run, name="autoprof-writing", daemon=True)
    _writing[thread] = patience_s
    try:
        thread.start()
    except RuntimeError as error:  # the interpreter ends, or the system gives no more threads
        interrupts.pass_on(error)
        run()
        return _nothing
    atexit.unregister(_flush)
    atexit.register(_flush)
    _wait_in_forked_child()
    return thread.join


def _wait_in_forked_child() -> None:
    """Children of multiprocessing that were forked leave by `os._exit`, without what `atexit` knows."""
    global _finalizing
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None and _finalizing != os.getpid():
        from multiprocessing.util import Finalize

        _finalizing = os.getpid()
        Finalize(None, _flush, exitpriority=0)


def _in_child() -> None:
    """A forked child has none of the threads, and what they held it would wait for in vain."""
    global _free
    _free = threading.BoundedSemaphore(_AT_ONCE)
    _writing.clear()


os.register_at_fork(after_in_child=_in_child)


def wait(patience_s: float) -> bool:
    """Wait until nothing is being written in this process; returns whether that is so after `patience_s`."""
    begun = time.monotonic()
    for thread in list(_writing):
        thread.join(max(0.0, begun + patience_s - time.monotonic()))
    return not any(thread.is_alive() for thread in list(_writing))


def _flush() -> None:
    begun = time.monotonic()
    for thread, patience_s in list(_writing.items()):
        thread.join(max(0.0, begun + patience_s - time.monotonic()))


def _nothing(_: float) -> None:
    """All is written."""
