"""Recordings of a process's profiler. `lifecycle.py` decides which one is active."""

from __future__ import annotations

from collections.abc import Callable

from autoprof.base import files, log
from autoprof.base.originals import threading
from autoprof.capture.artifacts import Artifacts, why_not
from autoprof.capture.profilers import Tool
from autoprof.capture.subject import Subject
from autoprof.config.settings import Settings
from autoprof.run.runtime import Runtime


class Recording:
    """Holder of this process's profiler, and the thread in which it began.

    A recording of torch belongs to the thread that began it. An export after a stop in another thread is a segmentation
    fault, and so is a stop after another profiler has stopped (torch 2.13).
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.thread = threading.get_ident()
        self.ended = threading.Event()
        # The thread that ends it; 0 before that.
        self.ender = 0

    def give_up(self, reason: str) -> None:
        """Clean up after an interrupted begin or end, even if the recording is lost. May be called again."""

    def finish(self, state: str, reason: str) -> None:
        """Stop and write the files. Called once, in the thread that began."""
        raise NotImplementedError

    def abandon(self, reason: str) -> None:
        """Stop in another thread, which loses the recording, and write a meta file with the reason."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the files are written, if this kind of recording has any."""


class Capture(Recording):
    """Capture of a stage in this process."""

    # True to mark the whole recording as a range with the stage's name.
    ranged = True
    # True once it has ended because it was over a limit.
    over_budget = False

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: Tool) -> None:
        super().__init__(subject)
        self.tool = tool
        # As in `Artifacts`.
        self.left_out: list[str] = []
        self._taken: list[str] = []
        self.artifacts: Artifacts
        self._run = run
        self._settings = settings

    def open(self) -> None:
        """Make the step's folder and take a name in it, unless that is done.

        Raises:
            OSError: The folder or the name can't be made.
        """
        if not hasattr(self, "artifacts"):
            self.artifacts = Artifacts(self._run, self.subject, self._settings, self.tool, taken=self._taken)
            self.artifacts.facts.left_out = self.left_out

    def start(self) -> None:
        """Start recording.

        Raises:
            Exception: The tool does not record. A meta file has the reason.
        """
        self.open()
        try:
            self.artifacts.start(self.ranged)
        except Exception as error:
            self.fail(why_not(error))
            raise

    def fail(self, reason: str) -> None:
        """Write a meta file that gives the reason why there is no trace."""
        self.open()
        self.artifacts.fail(reason)

    def exceeded(self) -> str:
        """Return the reason why the capture must end now, or an empty text."""
        return self.artifacts.exceeded()

    def mark(self, name: str) -> Callable[[], None]:
        """Begin a range, if this thread is recorded. Return the function that ends it, if the recording is still on."""
        if self.thread != threading.get_ident() or self.ended.is_set():
            return _nothing
        end_range = self.tool.mark(name)

        def end_if_recorded() -> None:
            if self.thread == threading.get_ident() and not self.ended.is_set():
                end_range()

        return end_if_recorded

    def finish(self, state: str, reason: str) -> None:
        if not hasattr(self, "artifacts"):  # a signal arrived before it began
            return
        if not self.tool.ending:  # the tool records nothing, so nothing is truncated
            state, reason = "complete", ""
        self.artifacts.stop()
        self.artifacts.keep(state, reason)
        if state == "truncated":
            subject = self.subject
            log.warning(f"step {subject.step}, {subject.role} {subject.stage}: the capture ends early, {reason}")

    def give_up(self, reason: str) -> None:
        if hasattr(self, "artifacts"):
            self.artifacts.give_up(reason)
        else:
            files.remove(*self._taken)

    def wait(self) -> None:
        """Wait up to `AUTOPROF_STOP_TIMEOUT_S` until the trace is written."""
        self.artifacts.wait()

    def abandon(self, reason: str) -> None:
        if not self.tool.ending:
            self.finish("complete", "")
            return
        self.artifacts.stop()
        self.fail(reason)


def _nothing() -> None:
    """Do nothing: no range has begun."""
