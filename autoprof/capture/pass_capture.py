"""Capture of some passes of a stage. A pass is a forward pass of an engine, an output or a mini-batch."""

from __future__ import annotations

from autoprof.base.originals import threading
from autoprof.capture import lifecycle
from autoprof.capture.profilers import Tool
from autoprof.capture.recording import Capture
from autoprof.capture.subject import Subject
from autoprof.config.settings import Settings
from autoprof.run.runtime import Runtime


class PassCapture(Capture):
    """Capture that counts passes and records a range of them.

    Attributes:
        passed: Number of passes so far.
        recording: True while it records.
        begun: True once recording has begun or was tried.
        told: True once a meta file exists or is being written, so that no other reason is reported.
        problem: Description of the error, or an empty text.
    """

    def __init__(
        self,
        run: Runtime,
        subject: Subject,
        settings: Settings,
        tool: Tool,
        part: tuple[int, int | None],
        counted: str = "the engine ran {} forward passes",
    ) -> None:
        """Make a capture of some passes.

        Args:
            run: The run.
            subject: The step, role, stage and rank.
            settings: The settings of the capture.
            tool: The tool that records.
            part: The first pass to record and the one to stop before, as from `parse_iterations`.
            counted: Template of the sentence in a meta file with the number of passes.
        """
        super().__init__(run, subject, settings, tool)
        self.passed = 0
        self.recording = self.begun = self.told = False
        self.problem = ""
        self._first, self._stop_before = part
        self._counted = counted

    def before_pass(self, wanted: bool = True) -> bool:
        """Count a pass that begins now. Return True if it is recorded. `wanted`: as in `reach`."""
        self.reach(wanted)
        self.passed += 1
        return self.recording

    def after_pass(self) -> None:
        """Count a pass that has ended."""
        self.passed += 1
        self.reach()

    def reach(self, wanted: bool = True) -> None:
        """Begin or end the recording between two passes, if it is due.

        Only the thread that began the recording ends it, because torch can't export it in another thread.

        Args:
            wanted: False to begin no recording.
        """
        if self.recording and self.thread == threading.get_ident():
            if self.passed == self._stop_before:
                self.end()
            else:
                lifecycle.keep_within_budget(self)
        elif wanted and not (self.begun or self.told) and self._in_part():
            self.begin()

    def _in_part(self) -> bool:
        return self._first <= self.passed and (self._stop_before is None or self.passed < self._stop_before)

    def begin(self) -> None:
        """Start recording, if this process's profiler is available.

        Raises:
            Exception: The tool does not record. A meta file has the reason.
        """
        self.begun = True
        self.thread = threading.get_ident()
        self.recording = lifecycle.record(self)

    def end(self, state: str = "complete", reason: str = "") -> None:
        """End the recording, if it is active."""
        if self.recording:
            lifecycle.finish(self, state, reason)

    def finish(self, state: str, reason: str) -> None:
        if not self.begun:  # the profiler is claimed, but no pass has begun
            self.fail(f"{reason}, before the first forward pass that was to be recorded")
            return
        self.recording = False
        try:
            super().finish(state, reason)
            self.told = True
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            raise

    def give_up(self, reason: str) -> None:
        self.recording = False
        if not self.told:
            self.told, self.problem = True, reason
        super().give_up(reason)

    def abandon(self, reason: str) -> None:
        self.recording = False
        try:
            if self.begun:
                super().abandon(reason)
            else:
                self.fail(reason)
        finally:
            self.ended.set()

    def fail(self, reason: str) -> None:
        self.told, self.problem = True, reason
        super().fail(reason)

    def close(self, reason: str = "") -> str:
        """Wait until the trace is written. If nothing was recorded, write a meta file with the reason.

        Args:
            reason: The reason why nothing was recorded, if it is not the number of passes.

        Returns:
            Description of the error, or an empty text.
        """
        if not self.told:
            self.fail(self.problem or reason or self.why_nothing())
        self.wait()
        return self.problem or self.artifacts.problem

    def why_nothing(self) -> str:
        """Return a sentence with the number of passes, and with the first pass that was to be recorded."""
        passes = self._counted.format(self.passed)
        return f"{passes}; recording was to begin after {self._first}" if self._first else passes
