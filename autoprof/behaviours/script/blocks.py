"""Steps and stages as `with` blocks: `with autoprof.step(7): with autoprof.stage("learn", role="actor"): ...`.

They may stand in any loop: outside of a run each gives one and the same object, which does nothing. So this module
imports next to nothing.
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

    from autoprof.behaviours.script.opened import Opened


class Block:
    """A `with` block that does nothing."""

    __slots__ = ("__weakref__",)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class _State(process.State):
    """The run that blocks of this process are part of.

    Attributes:
        on: Whether there is one, as the environment says: `start` puts it there, for child processes too.
        step: The block of the step that is going on, as long as somebody has it: a signal may come before Python calls
            its `__exit__`.
    """

    def begin(self) -> None:
        self.on = _boot.enabled() and _boot.RUN_ID in os.environ
        self.step: ref[Block] | None = None

    def in_child(self) -> None:
        self.step = None


state = _State()
_NOTHING = Block()


def step(number: int | None = None) -> Block:
    """Return a block that is one step of the run. It does nothing where no run was started.

    Steps do not nest: a step inside of another one is part of it.

    Args:
        number: The step's number; without one steps are counted from 1.
    """
    if not state.on:
        return _NOTHING
    return _Step(number)


def stage(name: str, *, role: str = "trainer", rank: int | None = None) -> Block:
    """Return a block that is a stage of the step, in the process that does the work. It does nothing where no run was
    started.

    A stage is captured where the step is, and its role and rank are taken. A stage inside of one of the same role is
    part of it.

    Args:
        name: The stage.
        role: Who does it, such as `actor` or `rollout`.
        rank: The global rank; without one the variable `RANK`, else 0.
    """
    if not state.on:
        return _NOTHING
    return _Stage(name, role, rank)


class _Recorded(Block):
    """A block with a hook behind it. Nothing of autoprof's is raised by it."""

    __slots__ = ("_opened",)

    def __init__(self) -> None:
        self._opened: Opened | None = None

    def __enter__(self) -> None:
        try:
            self._enter()
        except BaseException as error:  # Python does not leave a block that was not entered
            self._undo(error)
            raise

    def _enter(self) -> None:
        try:
            from autoprof.behaviours.script import opened
        except Exception as error:
            if (theirs := sys.modules.get("autoprof.base.interrupts")) is not None:
                theirs.pass_on(error)
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
        except BaseException as interrupt:
            self._undo(interrupt)
            raise
        self._opened = None

    def _undo(self, error: BaseException) -> None:
        if self._opened is not None:
            self._opened.undo(error)

    def _open(self) -> Opened | None:
        raise NotImplementedError


class _Stage(_Recorded):
    """A stage."""

    __slots__ = ("_name", "_rank", "_role")

    def __init__(self, name: str, role: str, rank: int | None) -> None:
        super().__init__()
        self._name, self._role, self._rank = name, role, rank

    def _open(self) -> Opened | None:
        from autoprof.behaviours.script import opened

        return opened.stage(self._name, self._role, self._rank)


class _Step(_Recorded):
    """A step, or a part of the one that is going on."""

    __slots__ = ("_number",)

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self._number = number

    def _open(self) -> Opened | None:
        from autoprof.behaviours.script import opened

        if state.step is not None and state.step() is not None:
            opened.nested()
            return None
        state.step = ref(self)
        return opened.step(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self._forget()

    def _undo(self, error: BaseException) -> None:
        self._forget()
        super()._undo(error)

    def _forget(self) -> None:
        if state.step is not None and state.step() is self:
            state.step = None
