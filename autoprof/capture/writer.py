"""Background threads that write recordings, so that nothing waits forever for a disk that hangs.

torch's export holds the interpreter's lock from its begin to its end (torch 2.13, `kineto_results.save`): 1 s for
100 MB, in which no other thread of the process runs Python. Another process then compresses the trace.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from autoprof.base import interrupts, process

# Each keeps a whole recording in memory until it is written.
_AT_ONCE = 2


class _State(process.State):
    """The threads that write in this process.

    Attributes:
        free: Slots for further ones.
        writing: How long the end of the interpreter may wait for each.
        finalizing: Whether this child of multiprocessing waits for them at its end.
    """

    ends = process.FILES

    def begin(self) -> None:
        self.free = threading.BoundedSemaphore(_AT_ONCE)
        self.writing: dict[threading.Thread, float] = {}
        self.finalizing = False

    def in_child(self) -> None:
        # A forked child has none of the threads, and would wait in vain for the slots that they hold.
        self.begin()

    def at_exit(self) -> None:
        begun = time.monotonic()
        for thread, patience_s in list(self.writing.items()):
            thread.join(max(0.0, begun + patience_s - time.monotonic()))


_state = _State()


def later(write: Callable[[], None], patience_s: float) -> Callable[[float], None]:
    """Run `write` in a thread, or here, where `_AT_ONCE` of them are busy for `patience_s`.

    The interpreter's end waits for it as long. It would wait forever for a thread that is no daemon, on a network disk
    that has gone away.

    Returns:
        A function that waits until `write` is through, but no longer than its argument, in seconds.
    """
    slot, writing = _state.free, _state.writing
    if not slot.acquire(timeout=patience_s):
        write()
        return _nothing

    def run() -> None:
        try:
            write()
        finally:
            writing.pop(thread, None)
            slot.release()

    thread = threading.Thread(target=run, name="autoprof-writing", daemon=True)
    writing[thread] = patience_s
    try:
        thread.start()
    except RuntimeError as error:  # the interpreter ends, or the system gives no more threads
        interrupts.pass_on(error)
        run()
        return _nothing
    _state.end_first()
    _wait_in_forked_child()
    return thread.join


def _wait_in_forked_child() -> None:
    """Wait for the threads at the end of a forked child of multiprocessing, which leaves by `os._exit`."""
    module = sys.modules.get("multiprocessing.process")
    if module is not None and module.parent_process() is not None and not _state.finalizing:
        from multiprocessing.util import Finalize

        _state.finalizing = True
        Finalize(None, _state.at_exit, exitpriority=0)


def wait(patience_s: float) -> bool:
    """Wait until nothing is being written in this process; return whether that is so after `patience_s`."""
    begun = time.monotonic()
    for thread in list(_state.writing):
        thread.join(max(0.0, begun + patience_s - time.monotonic()))
    return not any(thread.is_alive() for thread in list(_state.writing))


def _nothing(_: float) -> None:
    """Wait for nothing: all is written."""
