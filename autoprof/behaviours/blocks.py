"""Steps and stages as `with` blocks: `with autoprof.step(7): with autoprof.stage("learn", role="actor"): ...`.

Scripts may use the blocks in any loop. If no run is active, each call returns the same object, which does nothing.
Scripts import this module even if autoprof is off. So this module imports few other modules.
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
    from autoprof.behaviours.opened import OpenBlock


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
    """The run, the open step and the page server of this script or notebook.

    Attributes:
        on: True if the environment variables name a run. `start` sets these variables, also for child processes.
        step: Weak reference to the block of the open step. A signal may prevent Python from calling the block's
            `__exit__`. The reference is then dead, which means that no step is open.
        before: Values of the environment variables before `start` has started a run. None if `start` has started no
            run, or if its run has ended.
        started: Number of runs that this process has started.
        server: Process of `autoprof open` that shows the run of a notebook's last cell. It continues after the end of
            this run.
    """

    started = 0
    server: subprocess.Popen[str] | None = None

    def reset(self) -> None:
        self.on = _boot.enabled() and _boot.RUN_ID in os.environ
        self.step: ref[Block] | None = None
        self.before: dict[str, str | None] | None = None

    def after_fork_in_child(self) -> None:
        self.step = self.before = self.server = None


state = _ScriptState()
_NOTHING = Block()


def step(number: int | None = None) -> Block:
    """Return an object for a `with` statement whose block is one step. If no run is active, the block does nothing.

    Steps do not nest: a step inside another step is part of the outer step.

    Args:
        number: Number of the step. Default: steps are counted from 1.
    """
    if not state.on:
        return _NOTHING
    return _StepBlock("step", {"number": number})


def stage(name: str, *, role: str = "trainer", rank: int | None = None) -> Block:
    """Return an object for a `with` statement whose block is one stage. If no run is active, the block does nothing.

    Use the block in the process that does the work of the stage. The stage is captured if its step is captured and the
    settings select the role and the rank. A stage inside another stage of the same role is part of the outer stage.

    Args:
        name: Name of the stage.
        role: Role of this process, such as `actor` or `rollout`.
        rank: Global rank of this process. Default: the environment variable `RANK`, or else 0.
    """
    if not state.on:
        return _NOTHING
    return _RecordedBlock("stage", {"name": name, "role": role, "rank": rank})


class _RecordedBlock(Block):
    """A `with` block that runs the behaviour of a hook. Errors of autoprof do not leave the block."""

    __slots__ = ("_name", "_opened", "_values")

    def __init__(self, name: str, values: dict[str, int | str | None]) -> None:
        self._name = name
        self._values = values
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
            from autoprof.behaviours import opened
        except Exception as error:
            if (seam := sys.modules.get("autoprof.base.seam")) is not None:
                seam.pass_on(error)
            state.on = False
            return
        if opened.joined() is None:
            state.on = False
            return
        self._opened = opened.open_block(self._name, self._values)
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


class _StepBlock(_RecordedBlock):
    """A `with` block that is one step. Inside another step, the block records nothing."""

    __slots__ = ()

    def _enter(self) -> None:
        if state.step is not None and state.step() is not None:
            from autoprof.base import log

            log.warning_once(
                "a step begins inside another step and is part of it; use autoprof.stage for parts of a step"
            )
            return
        state.step = ref(self)
        super()._enter()

    def _undo(self) -> None:
        super()._undo()
        if state.step is not None and state.step() is self:
            state.step = None
