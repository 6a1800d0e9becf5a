"""Steps and stages as `with` blocks: `with autoprof.step(7): with autoprof.stage("learn", role="actor"): ...`.

Blocks may be used in any loop. Without a run, each call returns the same object, which does nothing. So this module
imports very little.
"""

from __future__ import annotations

import sys
from _weakref import ref

from autoprof import _boot
from autoprof.base import process
from autoprof.base.originals import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from autoprof.base.originals import subprocess
    from autoprof.behaviours.script.opened import OpenBlock


class Block:
    """A `with` block that does nothing."""

    __slots__ = ("__weakref__",)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class _ScriptState(process.State):
    """Run and open step of this script or notebook.

    Attributes:
        on: True if the environment names a run. `start` sets its variables, also for child processes.
        step: Weak reference to the block of the open step. A signal may prevent the call of its `__exit__`; the
            reference is then dead and the step is no longer open.
        before: Variables as they were before the run that `start` has started; None without such a run.
        started: Number of runs that this process has started.
        server: Server of `autoprof open` that shows the run of a notebook's last cell. It outlives that run.
    """

    started = 0
    server: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        self.on = _boot.enabled() and _boot.RUN_ID in os.environ
        self.step: ref[Block] | None = None
        self.before: dict[str, str | None] | None = None

    def in_child(self) -> None:
        self.step = self.before = self.server = None


state = _ScriptState()
_NOTHING = Block()


def step(number: int | None = None) -> Block:
    """Return a `with` block that is one step of the run. Without a run, the block does nothing.

    Steps do not nest: a step inside another step is part of it.

    Args:
        number: Number of the step. Default: steps are counted from 1.
    """
    if not state.on:
        return _NOTHING
    return _StepBlock(number)


def stage(name: str, *, role: str = "trainer", rank: int | None = None) -> Block:
    """Return a `with` block that is one stage of the step, in the process that does the work.

    Without a run, the block does nothing. A stage is captured if its step is captured and the settings select its role
    and rank. A stage inside another stage of the same role is part of that stage.

    Args:
        name: Name of the stage.
        role: Role of this process, such as `actor` or `rollout`.
        rank: Global rank. Default: the variable `RANK`, or else 0.
    """
    if not state.on:
        return _NOTHING
    return _StageBlock(name, role, rank)


class _RecordedBlock(Block):
    """A block with a hook behind it. It raises no exception of autoprof."""

    __slots__ = ("_opened",)

    def __init__(self) -> None:
        self._opened: OpenBlock | None = None

    def __enter__(self) -> None:
        entered = False
        try:
            self._enter()
            entered = True
        finally:
            if not entered:  # Python does not call `__exit__` if `__enter__` raises
                self._undo()

    def _enter(self) -> None:
        try:
            from autoprof.behaviours.script import opened
        except Exception as error:
            if (seam := sys.modules.get("autoprof.base.seam")) is not None:
                seam.pass_on(error)
            state.on = False
            return
        if opened.joined() is None:
            state.on = False
            return
        self._opened = self._open()
        if self._opened is not None:
            self._opened.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._opened is not None:
                self._opened.leave(error)
        finally:
            self._undo()

    def _undo(self) -> None:
        """End the span and the capture of the block, if they are still open."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.undo()

    def _open(self) -> OpenBlock | None:
        raise NotImplementedError


class _StageBlock(_RecordedBlock):
    """Block of a stage."""

    __slots__ = ("_name", "_rank", "_role")

    def __init__(self, name: str, role: str, rank: int | None) -> None:
        super().__init__()
        self._name, self._role, self._rank = name, role, rank

    def _open(self) -> OpenBlock | None:
        from autoprof.behaviours.script import opened

        return opened.stage(self._name, self._role, self._rank)


class _StepBlock(_RecordedBlock):
    """Block of a step, or of a part of the open step."""

    __slots__ = ("_number",)

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self._number = number

    def _open(self) -> OpenBlock | None:
        from autoprof.behaviours.script import opened

        if state.step is not None and state.step() is not None:
            opened.warn_of_nested_step()
            return None
        state.step = ref(self)
        return opened.step(self._number)

    def _undo(self) -> None:
        super()._undo()
        if state.step is not None and state.step() is self:
            state.step = None
