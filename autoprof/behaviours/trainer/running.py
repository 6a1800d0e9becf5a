"""Stages and spans that are running in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from autoprof.base import interrupts
from autoprof.capture import lifecycle, profilers, whole_step
from autoprof.capture.pass_capture import PassCapture
from autoprof.capture.recording import Capture
from autoprof.capture.subject import Subject
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.hooks import gates
from autoprof.run.runtime import Runtime
from autoprof.run.step_announcement import StepAnnouncement
from autoprof.run.timeline import Span

# A running stage is known by its role and its name.
Who = tuple[str, str]
# What is counted inside of a stage.
Counted = Literal["", "passes", "mini_batches"]


class Running:
    """A stage that is running in this process, its capture and its span of the timeline.

    Args:
        wanted: Subject and settings of the capture, if the window is open for the stage.
        counts: Whether passes or mini-batches are counted inside of it, of which the settings may ask for a part.
        span: Makes its span of the timeline.
    """

    def __init__(
        self,
        run: Runtime,
        who: Who,
        posting: StepAnnouncement | None,
        wanted: tuple[Subject, Settings] | None,
        counts: Counted,
        span: Callable[[], Span],
    ) -> None:
        self.step = step_of(posting)
        self.counts = counts
        self._run = run
        self._who = who
        self._wanted = wanted
        self._mini_batches = 0
        self._capture: PassCapture | None = None
        self._leave: Callable[[], None] | None = None
        self._new_span = span
        self._span: Span | None = None

    def begin(self) -> None:
        """Begin the stage. Who is interrupted in this, or in `end`, has to `cut` it."""
        # Here, too: in a small thread even the choice of a profiler, with its imports, can crash.
        if self._wanted is not None and lifecycle.has_room(self._wanted[0]):
            self._begin(self._run, *self._wanted)
        self._span = self._new_span()
        running[self._who] = self
        if self.counts:
            gates.counting(self.counts, self, True)

    def passed(self) -> None:
        """Count a forward pass, or a mini-batch, that is through."""
        if self._capture is not None:
            self._capture.after_pass()
        elif self._leave is not None:
            lifecycle.keep_within_budget(whole_step.recording())

    def mini_batch(self) -> Callable[[], None] | None:
        """Count a mini-batch that begins. Return the function that ends its range, if it is recorded."""
        number, self._mini_batches = self._mini_batches, self._mini_batches + 1
        recording: Capture | None = None
        if self._capture is not None:
            recording = self._capture if self._capture.before_pass() else None
        elif self._leave is not None:
            recording = whole_step.recording()
            lifecycle.keep_within_budget(recording)
        return recording.mark(f"mini_batch {number}") if recording is not None else None

    def end(self, error: BaseException | None = None, cut: str = "") -> None:
        """End the stage, with the exception that it raised, or early: `cut` says why. Does what is left to do of it."""
        if running.get(self._who) is self:
            running.pop(self._who)
        if self.counts:
            gates.counting(self.counts, self, False)
        span, self._span = self._span, None
        try:
            if span is not None:
                span.end(error)
        finally:
            self._end_recording(error, cut)

    def cut(self) -> None:
        """End the stage, whose begin or end was interrupted."""
        self.end(cut=interrupts.AT_WORK)

    def _end_recording(self, error: BaseException | None, cut: str) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
        elif self._capture is None:
            return
        elif not self._capture.begun:
            if not self._capture.told:
                self._capture.fail(cut if cut == interrupts.AT_WORK else self._capture.why_nothing())
        elif cut:
            lifecycle.finish(self._capture, "truncated", cut)
        else:
            lifecycle.end(self._capture, error)

    def _begin(self, run: Runtime, subject: Subject, settings: Settings) -> None:
        # A generation whose passes are counted is no part of a capture of its step: it would be recorded to its end.
        if settings.mode == "continuous" and self.counts != "passes":
            self._leave = whole_step.enter(run, subject, settings)
            return
        texts = {"": "all", "passes": settings.rollout_iterations, "mini_batches": settings.mini_batches}
        counted = "there were {} mini-batches" if self.counts == "mini_batches" else "there were {} forward passes"
        tool, part = profilers.choose(settings), parse_iterations(texts[self.counts])
        self._capture = PassCapture(run, subject, settings, tool, part, counted)
        self._capture.reach()


running: dict[Who, Running] = {}
# Spans inside of which there is no stage.
wholes: list[Span] = []


def inside(who: Who, posting: StepAnnouncement | None) -> bool:
    """Return whether a stage that would begin now is part of a running one: of itself, of its role in this step, or of
    a span that is a whole."""
    step = step_of(posting)
    return (
        bool(wholes)
        or who in running
        or any(role == who[0] and stage.step == step for (role, _), stage in running.items())
    )


def end_all(cut: str) -> None:
    """End all that is running in this process early: `cut` says why."""
    for stage in list(running.values()):
        stage.end(cut=cut)
    wholes.clear()


def in_whole() -> bool:
    """Return whether a span is running inside of which there is no stage."""
    return bool(wholes)


def step_of(posting: StepAnnouncement | None) -> int | None:
    """Return the step that was posted, if one was."""
    return posting.step if posting is not None else None
