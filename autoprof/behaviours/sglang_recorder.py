"""One capture in one scheduler of SGLang: passes are counted, recorded, and placed.

Recording begins with the first pass asked for. Before it a scheduler without work polls, and every turn would be in the
trace.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from autoprof import capture, log, tools
from autoprof.budget import OverBudget
from autoprof.capture import Recording
from autoprof.naming import Subject
from autoprof.placement import Placement, why_not
from autoprof.runtime import Runtime
from autoprof.settings import Settings
from autoprof.window import parse_iterations

EXTEND, DECODE = "EXTEND", "DECODE"
# The word of `AUTOPROF_CONTENTS` for a trace of each stage.
BY_STAGE = "profile-by-stage"
# What is polled by a scheduler that has no work, in all releases (managers/scheduler.py, event loops).
_POLLED = "get_next_batch_to_run"
# Turns without a pass after which a scheduler counts as idle. A pipeline makes one for each of its parts.
_IDLE_TURNS = 16
_LONGEST_PAUSE_S = 0.02


class Session:
    """A capture from start to stop: one trace, or one for each stage."""

    def __init__(self, run: Runtime, settings: Settings, subject: Subject) -> None:
        """Make the step's folder.

        Raises:
            OSError: It can't be made.
        """
        stages = (EXTEND, DECODE) if BY_STAGE in settings.contents else ("",)
        self._traces = [Trace(run, settings, subject, stage) for stage in stages]
        self._pauses: _Pauses | None = None

    def passing(self, scheduler: Any, stage: str) -> AbstractContextManager[Any] | None:
        """A pass of this stage begins. Returns what goes around it, if it is recorded."""
        for trace in self._traces:
            if trace.stage in ("", stage):
                trace.before_pass(wanted=not self._recording)
            elif (trace.stage, stage) == (EXTEND, DECODE):
                trace.end()
        if not self._recording:
            self._let_run()
            return None
        if self._pauses is None:
            self._pauses = _Pauses(scheduler)
        self._pauses.turns = 0
        import torch.profiler

        around: AbstractContextManager[Any] = torch.profiler.record_function(f"run_batch {stage}".rstrip())
        return around

    def close(self, cut: str = "") -> str:
        """End what is recorded; returns why nothing was, or an empty text.

        Args:
            cut: Why the recording ends early, if it does.
        """
        self._let_run()
        for trace in self._traces:
            trace.end("truncated" if cut else "complete", cut)
        for trace in self._traces:  # whoever stopped the engine may end it now
            trace.wait()
        if not any(trace.told for trace in self._traces):
            first = self._traces[0]
            reason = f"{cut}, before the first forward pass that was to be recorded" if cut else first.why_nothing()
            first.fail(reason)
        for trace in self._traces:
            trace.give_back()
        return next((trace.problem for trace in self._traces if trace.problem), "")

    @property
    def _recording(self) -> bool:
        return any(trace.recording for trace in self._traces)

    def _let_run(self) -> None:
        if self._pauses is not None:
            self._pauses.close()
            self._pauses = None


class Trace(Recording):
    """The passes of one stage, or of all where `stage` is empty, in one file."""

    def __init__(self, run: Runtime, settings: Settings, subject: Subject, stage: str) -> None:
        part = f"{subject.part}-{stage}" if stage else subject.part
        super().__init__(msgspec.structs.replace(subject, part=part))
        self.stage = stage
        self.recording = False
        # Whether there is a meta file, and so nothing more to say.
        self.told = False
        self.problem = ""
        self._passed = 0
        self._first, self._stop_before = parse_iterations(settings.rollout_iterations)
        self._settings = settings
        self._tool = tools.choose(settings)
        self._placement = Placement(run, self.subject, settings, self._tool.name)

    def before_pass(self, wanted: bool) -> None:
        """A pass begins. `wanted` is false where another stage is still being recorded."""
        passed, self._passed = self._passed, self._passed + 1
        if passed == self._stop_before:
            self.end()
        elif self.recording and (cut := self._placement.exceeded(self._tool)):
            log.warning(f"step {self.subject.step}, {self.subject.role}: the capture ends early, {cut}")
            self.end("truncated", cut)
        elif wanted and not self.told and passed >= self._first and passed < (self._stop_before or passed + 1):
            self._record()

    def end(self, state: str = "complete", reason: str = "") -> None:
        """End the recording, if it is going on."""
        if self.recording and capture.release(self):
            self.finish(state, reason)

    def finish(self, state: str, reason: str) -> None:
        try:
            self.recording = False
            self._placement.stop(self._tool)
            self.told = True
            self._placement.keep(self._tool, state, reason)
        finally:
            self.ended.set()

    def give_back(self) -> None:
        """Leave the name to others, if nothing was recorded under it: a stage may never have come."""
        if not self.told:
            self._placement.give_back()

    def abandon(self, reason: str) -> None:
        try:
            self.recording = False
            self._placement.stop(self._tool)
            self.fail(reason)
        finally:
            self.ended.set()

    def wait(self) -> None:
        """Wait until the trace is written."""
        self._placement.wait()
        self.problem = self.problem or self._placement.problem

    def fail(self, reason: str) -> None:
        """Leave a meta file that says why there is no trace."""
        self.told, self.problem = True, reason
        self._placement.fail(reason)

    def why_nothing(self) -> str:
        passes = f"the engine ran {self._passed} forward passes"
        return f"{passes}; recording was to begin after {self._first}" if self._first else passes

    def _record(self) -> None:
        self.thread = threading.get_ident()
        if not capture.claim(self, self._tool):
            self.fail("another profiler is recording in the scheduler's process")
            return
        try:
            self._placement.start(self._tool)
            self._placement.contents += [BY_STAGE] * bool(self.stage)
        except Exception as error:
            capture.release(self)
            self.fail(why_not(error))
            if isinstance(error, OverBudget):
                return
            raise
        self.recording = True


class _Pauses:
    """Has a scheduler without work pause between the turns of its loop, while it is recorded.

    It would poll thousands of times in a second, and with stacks every call of every turn is in the trace. SGLang's own
    `--sleep-on-idle` does the same, from 0.4.9 on, for those who start the server with it.
    """

    def __init__(self, scheduler: Any) -> None:
        self.turns = 0
        self._scheduler: Any = None
        # One that has it as an attribute of its own is somebody else's patch, which could not be given back.
        if not hasattr(scheduler, _POLLED) or _POLLED in vars(scheduler):
            return
        poll = getattr(scheduler, _POLLED)

        def paused(*args: Any, **kwargs: Any) -> Any:
            self.turns += 1
            if self.turns > _IDLE_TURNS:
                time.sleep(min(_LONGEST_PAUSE_S, (self.turns - _IDLE_TURNS) * 1e-3))
            return poll(*args, **kwargs)

        setattr(scheduler, _POLLED, paused)
        self._scheduler = scheduler

    def close(self) -> None:
        """Give back what was polled."""
        if self._scheduler is not None:
            vars(self._scheduler).pop(_POLLED, None)
