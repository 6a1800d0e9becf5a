"""Capture of forward passes in one scheduler of SGLang.

Recording begins with the first pass asked for. Before it a scheduler without work polls, and every turn would be in the
trace.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import msgspec

from autoprof.base.originals import time
from autoprof.capture import profilers
from autoprof.capture.pass_capture import PassCapture
from autoprof.capture.subject import Subject
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.run.runtime import Runtime

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
        """Count a pass of this stage that begins. Return the context manager to go around it, if it is recorded."""
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
        """End the recording; return why there is none, or an empty text.

        Args:
            cut: Why the recording ends early, if it does.
        """
        self._let_run()
        for trace in self._traces:
            trace.end("truncated" if cut else "complete", cut)
        # The engine may be ended once it is stopped: the traces have to be written by then.
        begun = [trace for trace in self._traces if trace.begun] or self._traces[:1]
        problems = [
            trace.close(cut and f"{cut}, before the first forward pass that was to be recorded") for trace in begun
        ]
        for trace in self._traces:
            if trace not in begun:  # Its stage never came: its name is for others.
                trace.artifacts.give_back()
        return next(filter(None, problems), "")

    @property
    def _recording(self) -> bool:
        return any(trace.recording for trace in self._traces)

    def _let_run(self) -> None:
        if self._pauses is not None:
            self._pauses.close()
            self._pauses = None


class Trace(PassCapture):
    """Capture of the passes of one stage, or of all where `stage` is empty, in one file."""

    def __init__(self, run: Runtime, settings: Settings, subject: Subject, stage: str) -> None:
        """Make the step's folder.

        Raises:
            OSError: It can't be made.
        """
        part = f"{subject.part}-{stage}" if stage else subject.part
        passes = parse_iterations(settings.rollout_iterations)
        super().__init__(run, msgspec.structs.replace(subject, part=part), settings, profilers.choose(settings), passes)
        self.stage = stage
        self.open()

    def begin(self) -> None:
        super().begin()
        if self.recording:
            self.artifacts.facts.contents += [BY_STAGE] * bool(self.stage)
        elif not self.told:
            self.fail("another profiler is recording in the scheduler's process")


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
