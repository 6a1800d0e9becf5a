"""Captures of whole steps (`AUTOPROF_MODE=continuous`).

Each process makes one capture of a step. The capture lasts from the first stage of the process in the step to the end
of the step, and its trace shows each stage as a range. With `AUTOPROF_CONSECUTIVE=together`, consecutive steps of a
window share one capture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from autoprof.base import log, process, seam
from autoprof.base.originals import threading
from autoprof.capture import profilers
from autoprof.capture.artifacts import Subject, now
from autoprof.capture.profilers import Tool
from autoprof.capture.recorder import Capture
from autoprof.config.settings import Settings
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

STAGE = "step"
TOGETHER = "together"
# Function that ends a stage. If the stage ends early, the argument is the reason. Otherwise it is an empty text.
Leave = Callable[[str], None]


class StepCapture(Capture):
    """Capture of one whole step, or of several consecutive whole steps, in this process."""

    ranged = False

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: Tool) -> None:
        super().__init__(run, subject, settings, tool)
        self.steps: list[int] = []
        self.ends_with_step = settings.consecutive != TOGETHER
        self._stages: list[dict[str, Any]] = []
        self._loop = _running_loop()

    def takes(self, step: int) -> bool:
        """Return True if the capture may also record a stage of this step."""
        last = self.steps[-1]
        return step == last or (not self.ends_with_step and step == last + 1)

    def loop_elsewhere(self) -> asyncio.AbstractEventLoop | None:
        """If this is not the capture's thread, return the event loop of the capture's thread. Otherwise return None.

        Return None also if no event loop ran in the capture's thread when the capture began. If an actor has a
        coroutine function, Ray runs the actor's methods in an event loop, but `__ray_call__` in another thread (Ray
        2.60).
        """
        return None if self.thread == threading.get_ident() else self._loop

    def enter(self, subject: Subject) -> Leave:
        """Begin a stage in this capture. Return the function that ends the stage."""
        if subject.step not in self.steps:
            self._end_range()
            self.steps.append(subject.step)
            self._end_range = self.mark(f"global_step {subject.step}")
        name = f"{subject.role}.{subject.stage}"
        stage: dict[str, Any] = {"step": subject.step, "role": subject.role, "stage": subject.stage}
        stage |= {"stage_kind": subject.stage_kind, "start": now().unix_ns}
        self._stages.append(stage)
        end_range = self.mark(name)

        def leave(reason: str) -> None:
            stage["stop"] = now().unix_ns
            if reason and not self.cut:
                self.cut = f"{name}: {reason}"
            end_range()

        return leave

    def _finish(self, state: str, reason: str) -> None:
        roles = dict.fromkeys(stage["role"] for stage in self._stages)
        for artifacts in self._all_artifacts:
            artifacts.describe("+".join(roles), {"steps": self.steps, "stages": self._stages})
        super()._finish(state, reason)


class _WholeStepState(process.State):
    """The open capture of a whole step in this process, if any."""

    ends = process.STEP

    def reset(self) -> None:
        self.open: StepCapture | None = None
        # Id of the thread that began the current step and will end it; 0 if another process drives the steps.
        self.thread = 0

    def after_fork_in_child(self) -> None:
        self.thread = 0

    def at_exit(self) -> None:
        last = self.open
        with seam.guard("the capture of a step could not be ended", log.error_once):
            stop("the process ended before the step")
            if last is not None:  # the interpreter does not wait for threads that are started at exit
                last.wait()


_state = _WholeStepState()


def enter(run: Runtime, subject: Subject, settings: Settings) -> Leave | None:
    """Enter a stage of a step in the window. The first stage of a step begins the capture of the step.

    Returns:
        The function that ends the stage. None if the stage is not recorded.
    """
    capture = _state.open
    if capture is not None:
        capture.keep_within_budget()
        if not capture.takes(subject.step):
            stop("this process got no notice of the step's end; the trace ends at the next step's first stage")
            capture = None
        elif capture.over_budget:
            return None
    if capture is None or capture.ended.is_set():
        # Another thread will end the step. It could not end a recording that this thread began.
        if _state.thread not in (0, threading.get_ident()) and _running_loop() is None:
            log.warning_once(
                f"{subject.role} {subject.stage} is not recorded: it runs in another thread than its step, "
                "and a trace has only one thread; AUTOPROF_MODE=discrete records it"
            )
            return None
        step_subject = msgspec.structs.replace(subject, stage=STAGE, stage_kind="")
        capture = StepCapture(run, step_subject, settings, profilers.choose(settings))
        _state.open = capture if capture.begin() else None
        if _state.open is None:
            return None
        _state.register_at_exit()
    return capture.enter(subject)


def step_began() -> None:
    """Note that a step begins in this thread. The same thread will end the step."""
    _state.thread = threading.get_ident()


def current() -> Capture | None:
    """Return the open capture of a whole step in this process. Return None if no such capture is open."""
    return _state.open


def stop(reason: str = "") -> None:
    """Stop the open capture of a whole step in this process, if any.

    Args:
        reason: Remark for the meta file, or an empty text.
    """
    capture = _state.open
    if capture is None:
        return
    try:
        capture.stop(reason)
    except BaseException as error:
        seam.undo(error, partial(capture.abort, seam.AT_WORK))
        raise
    finally:
        _state.open = None


def stop_in_worker(actor: object, may_continue: bool) -> None:
    """Stop the capture in the process of a Ray actor. When a step has ended, the trainer calls this in each actor.

    Args:
        actor: The actor. Ray passes it.
        may_continue: True if the next step may belong to the same capture.
    """
    step_ended(may_continue)


def step_ended(may_continue: bool, only: StepCapture | None = None) -> None:
    """Stop the open capture because the trainer's step has ended. Errors of autoprof are only reported.

    If the capture's thread is another thread with an event loop, the capture is stopped a little later in that loop.

    Args:
        may_continue: True if the next step may belong to the same capture.
        only: If set, only this capture is stopped.
    """
    with seam.guard("continuous", runtime.report):
        capture = _state.open
        if only is None:
            _state.thread = 0
        if capture is None or (may_continue and not capture.ends_with_step) or only not in (None, capture):
            return
        if (loop := capture.loop_elsewhere()) is None:
            stop()
        else:
            loop.call_soon_threadsafe(step_ended, may_continue, capture)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        seam.pass_on(error)
        return None
