"""Capture of some passes of a stage. A pass is a forward pass of an engine, an output or a mini-batch."""

from __future__ import annotations

import sys

from autoprof.base.originals import threading
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers import Tool
from autoprof.capture.recorder import Capture
from autoprof.config.settings import Settings
from autoprof.run.runtime import Runtime

# End of the reason if no pass was recorded.
TOO_EARLY = ", before the first forward pass that was to be recorded"


class PassCapture(Capture):
    """Capture that counts passes and records a range of them. It begins at most once.

    Attributes:
        passed: Number of passes so far.
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
        self._first, self._stop_before = part
        self._part = range(self._first, sys.maxsize if self._stop_before is None else self._stop_before)
        self._counted = counted

    @property
    def recording(self) -> bool:
        """True while it records."""
        return self.state == "recording"

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
        """Begin or stop the recording between two passes, if it is due.

        Only the thread that began the recording stops it, because torch can't export it in another thread.

        Args:
            wanted: False to begin no recording.
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
        """Wait until the trace is written. If nothing was recorded, write a meta file with the reason.

        Args:
            reason: The reason why nothing was recorded, if it is not the number of passes.

        Returns:
            Description of the error, or an empty text.
        """
        if self.state == "waiting":
            self.fail(reason or self.why_nothing())
        self.wait()
        return self.problem or self.open().problem

    def why_nothing(self) -> str:
        """Return a sentence with the number of passes, and with the first pass that was to be recorded."""
        passes = self._counted.format(self.passed)
        return f"{passes}; recording was to begin after {self._first}" if self._first else passes
