"""A target's own profiler: while the user has it on in a process, autoprof stands aside there."""

from __future__ import annotations

from autoprof import capture, runtime
from autoprof.behaviours import Behaviour
from autoprof.paths import CallPath
from autoprof.wrapping import CALL, Around, Call


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
            capture.stand_aside(self.whose)
        return None


class Stop(Behaviour):
    """The call closes the target's own profiler."""

    def around(self, call: Call) -> Around:
        yield CALL
        capture.come_back()
        return None
