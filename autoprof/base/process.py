"""State of this process, which changes at a fork, at the end of the process, and between tests.

Each module with state makes one object of a subclass of `State` when it is imported. Standard library only.
"""

from __future__ import annotations

from autoprof.base.originals import atexit, os, threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar

# Order in which things end at the end of the process: the last step of a loop without a trainer, the capture of a whole
# step, any other capture, files that threads are writing, Ray's workers, the run, the watcher, the timeline.
LAST_STEP, STEP, CAPTURE, FILES, WORKERS, RUN, WATCH, TIMELINE = range(8)

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_states: list[State] = []
# Dict from position in that order to the state that is registered to end.
_ending: dict[int, State] = {}


class State:
    """Base class of the state of one module.

    Attributes:
        ends: Position of the state in the order of the process's end. Only states that use `at_exit` have a position.
    """

    ends: ClassVar[int]

    def __init__(self) -> None:
        self._registered: Callable[[], None] | None = None
        self.begin()
        _states.append(self)
        # Each state registers its own functions. If a signal interrupts one function, Python still calls the next one.
        os.register_at_fork(before=self.before_fork, after_in_parent=self.in_parent, after_in_child=self.in_child)

    def begin(self) -> None:
        """Set all attributes to their values in a process that has just imported autoprof."""

    def before_fork(self) -> None:
        """Prepare for a fork, in the parent."""

    def in_parent(self) -> None:
        """Continue after a fork, in the parent."""

    def in_child(self) -> None:
        """Give up everything that belongs to the parent, in a forked child.

        By default this only frees the locks, because threads of the parent may have held them. Subclasses that must
        give up more call `self.begin()`.
        """
        for value in vars(self).values():
            if type(value) in _LOCKS:
                value._at_fork_reinit()

    def at_exit(self) -> None:
        """End the work of the module, at the end of the process."""

    def end_first(self) -> None:
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

    def forget(self) -> None:
        """Unregister `at_exit`."""
        if self._registered is not None:
            atexit.unregister(self._registered)


def end() -> None:
    """Call `at_exit` of all registered states now, in the order of the process's end."""
    for position in range(TIMELINE + 1):  # one state's end may register a later one
        if position in _ending:
            _ending[position].at_exit()


def reset() -> None:
    """After a run or a test, reset all states to the values that they had after the import of autoprof."""
    while _ending:
        _ending.popitem()[1].forget()
    for state in _states:
        state.begin()
