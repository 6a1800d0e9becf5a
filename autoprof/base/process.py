"""State of this process, and what a fork, the end of the process and a test do with it.

Each module with state has one object for it, of a subclass of `State`, made when the module is imported. Standard
library only.
"""

from __future__ import annotations

from autoprof.base.originals import atexit, os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ClassVar

# The end of the process, in order: the last step of a loop without a trainer, the capture of a whole step, any other
# capture, files that threads are writing, Ray's workers, the run, the watcher, the timeline.
LAST_STEP, STEP, CAPTURE, FILES, WORKERS, RUN, WATCH, TIMELINE = range(8)

_states: list[State] = []
# The states that have something to end, by their places in that order.
_ending: dict[int, State] = {}


class State:
    """State of one module.

    Attributes:
        ends: Its place in the end of the process, if it has one.
    """

    ends: ClassVar[int]

    def __init__(self) -> None:
        self._registered: Callable[[], None] | None = None
        self.begin()
        _states.append(self)
        # One by one: Python goes on with the next where one raises.
        os.register_at_fork(before=self.before_fork, after_in_parent=self.in_parent, after_in_child=self.in_child)

    def begin(self) -> None:
        """Set all attributes to their values in a process that has just imported autoprof."""

    def before_fork(self) -> None:
        """Prepare for a fork, in the parent."""

    def in_parent(self) -> None:
        """Go on after a fork, in the parent."""

    def in_child(self) -> None:
        """Give up what is the parent's, in a forked child."""

    def at_exit(self) -> None:
        """End what is going on, at the end of the process."""

    def end_first(self) -> None:
        """Put `at_exit` before all that is registered with `atexit` so far, but after those of lower places."""
        _ending[self.ends] = self
        for place in sorted(_ending, reverse=True):
            if place <= self.ends:
                _ending[place]._register()

    def _register(self) -> None:
        # The new one first: between the two somebody may be interrupted.
        before = self._registered
        self._registered = lambda: self.at_exit()
        atexit.register(self._registered)
        if before is not None:
            atexit.unregister(before)

    def forget(self) -> None:
        """Take `at_exit` out of what is registered."""
        if self._registered is not None:
            atexit.unregister(self._registered)


def end() -> None:
    """End what is going on now, in the order of the process's end."""
    for place in range(TIMELINE + 1):  # an end may put another one behind it
        if place in _ending:
            _ending[place].at_exit()


def reset() -> None:
    """Forget all that this process has done since it imported autoprof: after a run, and after a test."""
    while _ending:
        _ending.popitem()[1].forget()
    for state in _states:
        state.begin()
