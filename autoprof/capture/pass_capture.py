"""Capture of some passes of a piece of work: forward passes of an engine or a stage, its outputs, or mini-batches."""

from __future__ import annotations

from autoprof.base.originals import threading
from autoprof.capture import lifecycle
from autoprof.capture.profilers import Tool
from autoprof.capture.recording import Capture
from autoprof.capture.subject import Subject
from autoprof.config.settings import Settings
from autoprof.run.runtime import Runtime


class PassCapture(Capture):
    """A capture that counts passes, and records from the first that is wanted to the one to stop before.

    Attributes:
        passed: Passes counted so far.
        recording: Whether it records now.
        begun: Whether recording has begun, or was tried.
        told: Whether there is a meta file, or one is being written, so that nothing more is to be said.
        problem: What went wrong, or an empty text.
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
        """Args:
        part: The first pass to record and the one to stop before, as from `parse_iterations`.
        counted: Says in a meta file how many passes there were.
        """
        super().__init__(run, subject, settings, tool)
        self.passed = 0
        self.recording = self.begun = self.told = False
        self.problem = ""
        self._first, self._stop_before = part
        self._counted = counted

    def before_pass(self, wanted: bool = True) -> bool:
        """Count a pass that begins now, and return whether it is recorded. `wanted` as in `reach`."""
        self.reach(wanted)
        self.passed += 1
        return self.recording

    def after_pass(self) -> None:
        """Count a pass that has ended."""
        self.passed += 1
        self.reach()

    def reach(self, wanted: bool = True) -> None:
        """Begin or end recording between two passes, where that is due. Only where `wanted` is true it begins.

        Another thread than the one that began does not end it: torch could export nothing there.
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
        """Record from now on, if this process's profiler is to be had.

        Raises:
            Exception: The tool does not record; a meta file says so.
        """
        self.begun = True
        self.thread = threading.get_ident()
        self.recording = lifecycle.record(self)

    def end(self, state: str = "complete", reason: str = "") -> None:
        """End the recording, if it is going on."""
        if self.recording:
            lifecycle.finish(self, state, reason)

    def finish(self, state: str, reason: str) -> None:
        if not self.begun:  # the profiler is taken, and no pass has come
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
        """Wait until the trace is written, or leave a meta file that says why there is none.

        Args:
            reason: Why nothing was recorded, if that was not for the number of passes.

        Returns:
            What went wrong, or an empty text.
        """
        if not self.told:
            self.fail(self.problem or reason or self.why_nothing())
        self.wait()
        return self.problem or self.artifacts.problem

    def why_nothing(self) -> str:
        """Return how many passes there were, in words, and how many there should have been."""
        passes = self._counted.format(self.passed)
        return f"{passes}; recording was to begin after {self._first}" if self._first else passes
