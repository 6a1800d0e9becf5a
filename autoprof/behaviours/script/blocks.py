"""Steps and stages as `with` blocks: `with autoprof.step(7): with autoprof.stage("learn", role="actor"): ...`.

They may stand in any loop: outside of a run each gives one and the same object, which does nothing. So this module
imports next to nothing.
"""

from __future__ import annotations

import os
import sys

from autoprof import _boot
from autoprof.base import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from autoprof.behaviours.script.opened import Opened


class Block:
    """A `with` block that does nothing."""

    __slots__ = ()

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
        step: The block of the step that is going on.
    """

    def begin(self) -> None:
        self.on = _boot.enabled() and _boot.RUN_ID in os.environ
        self.step: Block | None = None

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
            from autoprof.behaviours.script import opened
        except Exception as error:
            if (theirs := sys.modules.get("autoprof.base.interrupts")) is not None:
                theirs.pass_on(error)
            state.on = False
            return
        if opened.joined() is not None:
            self._opened = self._open()
        else:
            state.on = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.leave(error)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if state.step is self:
            state.step = None
        super().__exit__(kind, error, traceback)

    def _open(self) -> Opened | None:
        from autoprof.behaviours.script import opened

        if state.step is not None:
            opened.nested()
            return None
        found = opened.step(self._number)
        state.step = self
        return found
