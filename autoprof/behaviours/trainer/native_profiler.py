"""A target's own profiler: while the user has it on in a process, autoprof stands aside there."""

from __future__ import annotations

from autoprof.capture import lifecycle
from autoprof.hooks.attribute_path import CallPath
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call
from autoprof.run import runtime


class Start(Behaviour):
    """The call opens the target's own profiler, for some processes and steps only.

    Attributes:
        whose: Whose profiler it is, in words.
        active: Paths of which one is true after the call where the profiler is open in this process.
    """

    whose: str
    active: list[CallPath]

    def around(self, call: Call) -> Around:
        yield CALL
        if runtime.current() is not None and any(call.at(path, False) for path in self.active):
            lifecycle.stand_aside(self.whose)
        return None


class Stop(Behaviour):
    """The call closes the target's own profiler."""

    def around(self, call: Call) -> Around:
        yield CALL
        lifecycle.come_back()
        return None
