"""Start of autoprof's threads, and the stack size of a thread. Standard library only."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` in C: it takes any number, and imports nothing
import _thread
import functools
from itertools import chain, islice

from autoprof.base import process, seam

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# A fault in a thread sends one of these signals to that thread. If the thread blocks the signal, Linux kills the
# process without calling the handler, and faulthandler writes nothing (SYNCHRONOUS_MASK in kernel/signal.c).
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
# Signals that cannot be blocked.
_NEVER = ("SIGKILL", "SIGSTOP")
BLOCKED = frozenset(_signal.valid_signals()) - {getattr(_signal, name, 0) for name in _FAULTS + _NEVER}
# Stack size of autoprof's threads. torch's export needs the most and works in 96 KiB (torch 2.13).
_STACK_BYTES = 1 << 20


class _ThreadsState(process.State):
    """Lock for `threading.stack_size`.

    The lock is reentrant, because a signal handler may start a thread while its thread holds the lock.
    """

    def begin(self) -> None:
        self.lock = _thread.RLock()

    def in_child(self) -> None:
        self.begin()


_state = _ThreadsState()


def start(begin: Callable[..., Any], *args: Any) -> Any:
    """Call `begin`, and return its result. Threads that `begin` starts block all signals and have a large enough stack.

    Raises:
        BaseException: The exception of `begin` or of a signal handler. The program's `threading.stack_size` and the
            signal mask of this thread are restored.
    """
    with _state.lock:
        size = _stack_size()
        if not 0 < size < _STACK_BYTES:  # 0 is the default of the system
            return blocking(begin, *args)
        try:
            _thread.stack_size(_STACK_BYTES)
            return blocking(begin, *args)
        finally:
            _thread.stack_size(size)


def blocking(begin: Callable[..., Any], *args: Any) -> Any:
    """Call `begin`, and return its result. Threads that `begin` starts block all signals.

    The system gives a signal to any thread of the process that does not block the signal. If a program blocks a signal
    in all of its threads, the signal must wait, so no thread of autoprof may receive it. Signals that arrive during the
    call are handled when the mask of this thread is restored.

    Raises:
        BaseException: The exception of `begin` or of a signal handler.
    """
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    # Python calls signal handlers after `pthread_sigmask` has set the mask, so the first call may raise, too.
    try:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, BLOCKED)
        return begin(*args)
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)


def start_process(begin: Callable[[], Any]) -> Any:
    """Call `begin`, which starts a process for the user, and return its result.

    The new process does not inherit the signal mask of autoprof's threads.
    """
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    if not mask >= BLOCKED:  # this is a thread of the program
        return begin()
    try:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        return begin()
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)


def stack_bytes() -> int | None:
    """Return the size of this thread's stack, or None if it is unknown."""
    with seam.suppress(ImportError, OSError, AttributeError):  # a libc without this function
        from ctypes import byref, c_size_t, c_void_p, create_string_buffer

        libc = _libc()
        # `pthread_attr_t` has 56 bytes in glibc for x86-64, and 64 for aarch64.
        attributes, address, size = create_string_buffer(256), c_void_p(), c_size_t()
        if libc.pthread_getattr_np(c_void_p(libc.pthread_self()), attributes):
            return None
        libc.pthread_attr_getstack(attributes, byref(address), byref(size))
        libc.pthread_attr_destroy(attributes)
        return size.value
    return None


def _stack_size() -> int:
    """Return the size that the program has set by `threading.stack_size`, without changing it.

    A call of `threading.stack_size` without an argument returns the size, but also sets it to 0.
    """
    sizes: list[int] = []
    # C code makes both calls, and passes the result of the first call to the second one. So no other thread sees the 0,
    # and no signal handler runs between the calls.
    sizes.extend(map(_thread.stack_size, islice(chain((0,), sizes), 2)))
    return sizes[0]


@functools.lru_cache
def _libc() -> Any:
    from ctypes import CDLL, c_void_p

    libc = CDLL(None)
    libc.pthread_self.restype = c_void_p
    return libc
