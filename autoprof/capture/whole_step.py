"""Captures of whole steps (`AUTOPROF_MODE=continuous`): one a process, from its first stage in the window to the end.

Stages are ranges in it. Consecutive steps share one where that is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from autoprof.base import interrupts, log, process
from autoprof.base.exception_text import reason
from autoprof.base.originals import threading
from autoprof.capture import lifecycle
from autoprof.capture.facts import clock
from autoprof.capture.profilers import Tool
from autoprof.capture.recording import Capture
from autoprof.capture.subject import Subject
from autoprof.config.settings import Settings
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

STAGE = "step"
TOGETHER = "together"


class StepCapture(Capture):
    """A capture of a step, or of consecutive steps, in this process."""

    ranged = False

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: Tool) -> None:
        super().__init__(run, subject, settings, tool)
        self.steps: list[int] = []
        self.ends_with_step = settings.consecutive != TOGETHER
        self._stages: list[dict[str, Any]] = []
        self._end_range: Callable[[], None] | None = None
        self._loop = _running_loop()

    def takes(self, step: int) -> bool:
        """Return whether a stage of this step belongs to the capture."""
        last = self.steps[-1]
        return step == last or (not self.ends_with_step and step == last + 1)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the capture's own thread, if that runs an event loop, or else here.

        Ray runs the methods of an actor with a coroutine function in its event loop, but `__ray_call__` in a thread
        beside it (Ray 2.60).
        """
        if self._loop is None or self.thread == threading.get_ident():
            function()
        else:
            self._loop.call_soon_threadsafe(function)

    def enter(self, subject: Subject) -> Callable[[], None]:
        """Begin a stage; return the function that ends it."""
        if subject.step not in self.steps:
            self.end_step()
            self.steps.append(subject.step)
            self._end_range = self.mark(f"global_step {subject.step}")
        stage: dict[str, Any] = {"step": subject.step, "role": subject.role, "stage": subject.stage}
        stage |= {"stage_kind": subject.stage_kind, "start": clock()["unix_ns"]}
        self._stages.append(stage)
        end_range = self.mark(f"{subject.role}.{subject.stage}")

        def leave() -> None:
            stage["stop"] = clock()["unix_ns"]
            end_range()

        return leave

    def end_step(self) -> None:
        """End the range of the step that was entered last."""
        end_range, self._end_range = self._end_range, None
        if end_range is not None:
            end_range()

    def finish(self, state: str, reason: str) -> None:
        self.end_step()
        roles = dict.fromkeys(stage["role"] for stage in self._stages)
        if hasattr(self, "artifacts"):
            self.artifacts.describe("+".join(roles), {"steps": self.steps, "stages": self._stages})
        super().finish(state, reason)


class _State(process.State):
    """The capture of a step that is open in this process."""

    ends = process.STEP

    def begin(self) -> None:
        self.open: StepCapture | None = None
        # The thread in which this process began the step that is going on, and will end it; 0 where another one did.
        self.thread = 0

    def in_child(self) -> None:
        self.thread = 0

    def at_exit(self) -> None:
        last = self.open
        try:
            end("the process ended before the step")
            if last is not None:  # the interpreter does not wait for a thread that starts now
                last.wait()
        except Exception as error:
            interrupts.pass_on(error)
            log.warning(f"the capture of a step could not be ended: {reason(error)}")


_state = _State()


def enter(run: Runtime, subject: Subject, settings: Settings) -> Callable[[], None] | None:
    """Enter a stage of a step in the window: it is part of the step's capture, which begins with the first of them.

    Returns:
        Ends the stage; None where this process records something else.
    """
    lifecycle.keep_within_budget(_state.open)
    if _state.open is not None and not _state.open.takes(subject.step):
        end("this process was not told that the step had ended; the trace ends with the next step's first stage")
    if _state.open is not None and _state.open.over_budget:
        return None
    if _state.open is None or _state.open.ended.is_set():
        # The end of the step could not end it.
        if _state.thread not in (0, threading.get_ident()) and _running_loop() is None:
            log.warning_once(
                f"{subject.role} {subject.stage} is not recorded: it runs in another thread than its step, "
                "whose trace is of one thread; AUTOPROF_MODE=discrete records it"
            )
            return None
        whole = msgspec.structs.replace(subject, stage=STAGE, stage_kind="")
        begun = lifecycle.begin(run, whole, settings, StepCapture)
        _state.open = begun if isinstance(begun, StepCapture) else None
        if _state.open is not None:
            _state.end_first()
    return _state.open.enter(subject) if _state.open is not None else None


def step_began() -> None:
    """Note that a step begins in this thread, which will end it, too."""
    _state.thread = threading.get_ident()


def recording() -> Capture | None:
    """Return the capture of a step that is open in this process."""
    return _state.open


def end(reason: str = "") -> None:
    """End the capture that is open, if any."""
    ending = _state.open
    if ending is None:
        return
    try:
        lifecycle.finish(ending, "complete", reason)
    except BaseException as error:
        interrupts.undo(error, partial(lifecycle.finish, ending, "truncated", interrupts.AT_WORK))
        raise
    finally:
        _state.open = None


def end_in_worker(actor: object, together: bool) -> None:
    """Run in a Ray actor by the trainer, when its step has ended. Raises nothing.

    Args:
        actor: The actor, which Ray gives.
        together: Whether the next step may belong to the same capture.
    """
    try:
        step_ended(together)
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("continuous", error)


def step_ended(together: bool) -> None:
    """Note that the trainer's step has ended. `together`: the next step may belong to the same capture."""
    _state.thread = 0
    open_now = _state.open
    if open_now is not None and (open_now.ends_with_step or not together):
        open_now.call(lambda: _end_quietly(open_now))


def _end_quietly(told: StepCapture) -> None:
    try:
        if told is _state.open:
            end()
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("continuous", error)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        interrupts.pass_on(error)
        return None
