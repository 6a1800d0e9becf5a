"""Recordings of a process's profiler: how one begins, ends and is given up. Which one goes on is in `lifecycle.py`."""

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
    """The holder of this process's profiler, and the thread in which it began.

    torch gives a recording to the thread that began it only: an export after a stop in another thread, and a stop after
    another profiler has stopped, are segmentation faults (torch 2.13).
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.thread = threading.get_ident()
        self.ended = threading.Event()
        # The thread that ends it.
        self.ender = 0

    def give_up(self, reason: str) -> None:
        """End what an interrupted begin or end has left, whatever is lost by it. May be called again."""

    def finish(self, state: str, reason: str) -> None:
        """Stop and place the files. Called once, in the thread that began."""
        raise NotImplementedError

    def abandon(self, reason: str) -> None:
        """Stop in another thread, where the recording is lost, and say so in a meta file."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the files are written, where a kind of recordings has any."""


class Capture(Recording):
    """A capture of a stage in this process."""

    # Whether the whole is a range of the stage's name.
    ranged = True
    # Whether it was ended for what it costs.
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
        """Make the step's folder and take a name in it, if that is not done.

        Raises:
            OSError: They can't be made.
        """
        if not hasattr(self, "artifacts"):
            self.artifacts = Artifacts(self._run, self.subject, self._settings, self.tool, taken=self._taken)
            self.artifacts.facts.left_out = self.left_out

    def start(self) -> None:
        """Begin to record.

        Raises:
            Exception: The tool does not record; a meta file says so.
        """
        self.open()
        try:
            self.artifacts.start(self.ranged)
        except Exception as error:
            self.fail(why_not(error))
            raise

    def fail(self, reason: str) -> None:
        """Leave a meta file that says why there is no trace."""
        self.open()
        self.artifacts.fail(reason)

    def exceeded(self) -> str:
        """Return why the capture has to end now, or an empty text."""
        return self.artifacts.exceeded()

    def mark(self, name: str) -> Callable[[], None]:
        """Begin a range of this name, if this thread is recorded; return what ends it, while it still is."""
        if self.thread != threading.get_ident() or self.ended.is_set():
            return _nothing
        end_range = self.tool.mark(name)

        def end_if_recorded() -> None:
            if self.thread == threading.get_ident() and not self.ended.is_set():
                end_range()

        return end_if_recorded

    def finish(self, state: str, reason: str) -> None:
        if not hasattr(self, "artifacts"):  # a signal came before it began
            return
        if not self.tool.ending:  # nothing is recorded, so nothing can be cut short
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
        """Wait, within `AUTOPROF_STOP_TIMEOUT_S`, until the trace is written."""
        self.artifacts.wait()

    def abandon(self, reason: str) -> None:
        if not self.tool.ending:
            self.finish("complete", "")
            return
        self.artifacts.stop()
        self.fail(reason)


def _nothing() -> None:
    """End no range."""
