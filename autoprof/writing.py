"""What a recording leaves is written in a thread: the training thread goes on meanwhile.

torch's export releases the interpreter's lock (torch 2.13, `kineto_results.save`), so it holds nothing up but for what
it takes of the host's cores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# Each keeps a whole recording in memory until it is written.
_AT_ONCE = 2
_free = threading.BoundedSemaphore(_AT_ONCE)


def later(write: Callable[[], None], patience_s: float) -> Callable[[float], None]:
    """Run `write` in a thread, which the interpreter waits for at its end; or here, if so many are busy for so long.

    Returns:
        Waits until `write` is through, but no longer than its argument, in seconds.
    """
    if not _free.acquire(timeout=patience_s):
        write()
        return _nothing

    def run() -> None:
        try:
            write()
        finally:
            _free.release()

    thread = threading.Thread(target=run, name="autoprof-writing")
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, or the system gives no more threads
        run()
        return _nothing
    return thread.join


def _nothing(_: float) -> None:
    """All is written."""
