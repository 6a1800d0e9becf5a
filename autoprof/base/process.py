"""State of this process, which changes at a fork and at the end of the process, and the start of autoprof's threads.

Each module with state makes one object of a subclass of `State` when it is imported. Standard library only.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` in C: it takes any number, and imports nothing
import _thread
import functools
from itertools import chain, islice

from autoprof.base import seam
from autoprof.base.originals import atexit, os, threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ClassVar

# Order in which things end at the end of the process: the last step of a loop without a trainer, the capture of a whole
# step, any other capture, files that threads are writing, Ray's workers, the run, the watcher, the timeline.
LAST_STEP, STEP, CAPTURE, FILES, WORKERS, RUN, WATCH, TIMELINE = range(8)

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
# A fault in a thread sends one of these signals to that thread. If the thread blocks the signal, Linux kills the
# process without calling the handler, and faulthandler writes nothing (SYNCHRONOUS_MASK in kernel/signal.c).
_FAULTS = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
# Signals that cannot be blocked.
_NEVER = ("SIGKILL", "SIGSTOP")
BLOCKED = frozenset(_signal.valid_signals()) - {getattr(_signal, name, 0) for name in _FAULTS + _NEVER}
# Stack size of autoprof's threads. torch's export needs the most and works in 96 KiB (torch 2.13).
_STACK_BYTES = 1 << 20

_states: list[State] = []
# Dict from position (`State.ends`) to the state whose `at_exit` is registered.
_ending: dict[int, State] = {}


class State:
    """Base class of the state of one module.

    Attributes:
        ends: Position of the state in the order in which states end at the process's end: `LAST_STEP`, `STEP`, ... Only
            states that use `at_exit` have a position.
    """

    ends: ClassVar[int]

    def __init__(self) -> None:
        self._registered: Callable[[], None] | None = None
        self.reset()
        _states.append(self)
        # Each state registers its own functions. If a signal interrupts one function, Python still calls the next one.
        os.register_at_fork(
            before=self.before_fork, after_in_parent=self.after_fork_in_parent, after_in_child=self.after_fork_in_child
        )

    def reset(self) -> None:
        """Set all attributes to their values in a process that has just imported autoprof."""

    def before_fork(self) -> None:
        """Prepare for a fork, in the parent."""

    def after_fork_in_parent(self) -> None:
        """Continue after a fork, in the parent."""

    def after_fork_in_child(self) -> None:
        """Give up everything that belongs to the parent, in a forked child.

        By default this only frees the locks, because threads of the parent may have held them. Subclasses that must
        give up more call `self.reset()`.
        """
        for value in vars(self).values():
            if type(value) in _LOCKS:
                value._at_fork_reinit()

    def at_exit(self) -> None:
        """End the work of the module, at the end of the process."""

    def register_at_exit(self) -> None:
        """Register `at_exit` so that it runs before all functions registered with `atexit` so far.

        The `at_exit` of a state with a lower position still runs before the `at_exit` of this state.
        """
        _ending[self.ends] = self
        for position in sorted(_ending, reverse=True):
            if position <= self.ends:
                _ending[position]._register()

    def _register(self) -> None:
        # Register first, then unregister: a signal may interrupt this in between.
        earlier_function = self._registered
        self._registered = lambda: self.at_exit()
        atexit.register(self._registered)
        if earlier_function is not None:
            atexit.unregister(earlier_function)

    def unregister(self) -> None:
        """Unregister `at_exit`."""
        if self._registered is not None:
            atexit.unregister(self._registered)


def run_exit_functions() -> None:
    """Call `at_exit` of all registered states now, from the state with the lowest position (`State.ends`) on."""
    for position in range(TIMELINE + 1):  # one state's end may register a later one
        if position in _ending:
            _ending[position].at_exit()


def reset() -> None:
    """After a run or a test, reset all states to the values that they had after the import of autoprof."""
    while _ending:
        _ending.popitem()[1].unregister()
    for state in _states:
        state.reset()


class Latch:
    """Variant of `threading.Event` that a signal handler may interrupt.

    If the handler raises in `threading.Event.set`, the lock of the event may stay held, and the next `set`
    waits forever.
    """

    def __init__(self) -> None:
        self.clear()

    def is_set(self) -> bool:
        """Return True if `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Wake the threads that wait. May be called more than once."""
        self._is_set = True
        self._release(self._closed)

    def clear(self) -> None:
        """Let later calls of `wait` wait again."""
        closed = _thread.allocate_lock()
        closed.acquire()
        self._is_set, self._closed = False, closed

    def wait(self, timeout_s: float) -> bool:
        """Wait for `set`, at most `timeout_s`. Return True if `set` was called."""
        closed = self._closed
        if not self._is_set and closed.acquire(timeout=timeout_s):
            self._release(closed)
        return self._is_set

    @staticmethod
    def _release(closed: _thread.LockType) -> None:
        if closed.locked():
            with seam.suppress(RuntimeError):  # another thread was faster
                closed.release()


class _StackSizeState(State):
    """Lock for changes of `threading.stack_size`.

    The lock is reentrant, because a signal handler may start a thread while its thread holds the lock.
    """

    def reset(self) -> None:
        self.lock = _thread.RLock()

    def after_fork_in_child(self) -> None:
        self.reset()


_stack_size_state = _StackSizeState()


def start_thread(begin: Callable[..., Any], *args: Any) -> Any:
    """Call `begin`, and return its result. Threads that `begin` starts block all signals and have a large enough stack.

    Raises:
        BaseException: The exception of `begin` or of a signal handler. The program's `threading.stack_size` and the
            signal mask of this thread are restored.
    """
    with _stack_size_state.lock:
        size = _stack_size()
        if not 0 < size < _STACK_BYTES:  # 0 is the default of the system
            return with_signals_blocked(begin, *args)
        try:
            _thread.stack_size(_STACK_BYTES)
            return with_signals_blocked(begin, *args)
        finally:
            _thread.stack_size(size)


def with_signals_blocked(begin: Callable[..., Any], *args: Any) -> Any:
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


def start_program(begin: Callable[[], Any]) -> Any:
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
    try:  # each use of `suppress` takes three calls
        from ctypes import byref, c_size_t, c_void_p, create_string_buffer

        libc = _libc()
        # `pthread_attr_t` has 56 bytes in glibc for x86-64, and 64 for aarch64.
        attributes, address, size = create_string_buffer(256), c_void_p(), c_size_t()
        if libc.pthread_getattr_np(c_void_p(libc.pthread_self()), attributes):
            return None
        libc.pthread_attr_getstack(attributes, byref(address), byref(size))
        libc.pthread_attr_destroy(attributes)
        return size.value
    except (ImportError, OSError, AttributeError) as error:  # a libc without this function
        seam.pass_on(error)
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
