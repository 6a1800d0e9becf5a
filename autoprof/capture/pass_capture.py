"""Capture of some passes of a stage. A pass is a forward pass of an engine, an output or a mini-batch."""

from __future__ import annotations

import sys

from autoprof.base.originals import threading
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers import Tool
from autoprof.capture.recorder import Capture
from autoprof.config.settings import Settings
from autoprof.run.runtime import Runtime

# End of the reason in the meta file, if the capture was aborted before any pass was recorded.
TOO_EARLY = ", before the first forward pass that was to be recorded"


class PassCapture(Capture):
    """Capture that counts the passes of a stage and records only some consecutive passes. It begins at most once.

    Attributes:
        passed: Number of counted passes so far.
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
            part: The index of the first pass to record, and the index of the pass before which recording stops (None
                for no end). `parse_iterations` returns such a pair.
            counted: Template of a sentence for the meta file. `{}` is replaced by the number of counted passes.
        """
        super().__init__(run, subject, settings, tool)
        self.passed = 0
        self._first, self._stop_before = part
        self._part = range(self._first, sys.maxsize if self._stop_before is None else self._stop_before)
        self._counted = counted

    @property
    def recording(self) -> bool:
        """True while the capture is recording."""
        return self.state == "recording"

    def before_pass(self, wanted: bool = True) -> bool:
        """Count a pass that begins now. Return True if the pass is recorded.

        Args:
            wanted: False if the recording must not begin now.
        """
        self.reach(wanted)
        self.passed += 1
        return self.recording

    def after_pass(self) -> None:
        """Count a pass that has ended."""
        self.passed += 1
        self.reach()

    def reach(self, wanted: bool = True) -> None:
        """Begin the recording before the first pass to record, and stop the recording after the last one.

        Call this between two passes. Only the thread that began the recording stops it, because torch can't export a
        recording that another thread has stopped.

        Args:
            wanted: False if the recording must not begin now.
        """
        if self.state == "recording" and self.thread == threading.get_ident():
            if self.passed == self._stop_before:
                self.stop()
            else:
                self.keep_within_budget()
        elif wanted and self.state == "waiting" and not self.tried and self.passed in self._part:
            self.begin()

    def abort(self, reason: str) -> None:
        super().abort(reason if self.tried else f"{reason}{TOO_EARLY}")

    def close(self, reason: str = "") -> str:
        """Wait until this process has written the raw trace. If nothing was recorded, write the reason to a meta file.

        Args:
            reason: The reason why nothing was recorded. If it is empty, the reason is the number of passes.

        Returns:
            If there is no trace or its meta file could not be written: a description of the error. Otherwise an empty
            text.
        """
        if self.state == "waiting":
            self.fail(reason or self.why_nothing())
        self.wait()
        return self.problem or self.open().problem

    def why_nothing(self) -> str:
        """Return a sentence that gives the number of passes, and after how many passes recording was to begin."""
        sentence = self._counted.format(self.passed)
        return f"{sentence}; recording was to begin after {self._first}" if self._first else sentence
