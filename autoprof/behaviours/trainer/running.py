"""Running stages and spans of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from autoprof.base import seam
from autoprof.capture import lifecycle, profilers, whole_step
from autoprof.capture.pass_capture import PassCapture
from autoprof.capture.recording import Capture
from autoprof.capture.subject import Subject
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.hooks import gates
from autoprof.run.runtime import Runtime
from autoprof.run.timeline import Span

# Role and name of a running stage.
StageKey = tuple[str, str]
# Unit that is counted inside a stage.
Counted = Literal["", "passes", "mini_batches"]


class RunningStage:
    """A running stage of this process, its capture and its span of the timeline.

    Args:
        run: Run of this process.
        key: Role and name of the stage.
        step: Step that the trainer has announced, if any.
        wanted: Subject and settings of the capture, if the window is open for the stage.
        counts: Unit that is counted inside the stage, if any. The settings may select a part of these units.
        span: Function that begins and returns the stage's span of the timeline.
    """

    def __init__(
        self,
        run: Runtime,
        key: StageKey,
        step: int | None,
        wanted: tuple[Subject, Settings] | None,
        counts: Counted,
        span: Callable[[], Span],
    ) -> None:
        self.step = step
        self.counts = counts
        self._run = run
        self._key = key
        self._wanted = wanted
        self._mini_batches = 0
        self._capture: PassCapture | None = None
        self._leave: Callable[[], None] | None = None
        self._new_span = span
        self._span: Span | None = None

    def begin(self) -> None:
        """Begin the stage. If `begin` or `end` is interrupted, the caller must call `cut`."""
        # Check the stack's room before the choice of a profiler: in a thread with a small stack, its imports can crash.
        if self._wanted is not None and lifecycle.has_room(self._wanted[0]):
            self._begin(self._run, *self._wanted)
        self._span = self._new_span()
        running[self._key] = self
        if self.counts:
            gates.counting(self.counts, self, True)

    def passed(self) -> None:
        """Count a forward pass or a mini-batch that has ended."""
        if self._capture is not None:
            self._capture.after_pass()
        elif self._leave is not None:
            lifecycle.keep_within_budget(whole_step.recording())

    def mini_batch(self) -> Callable[[], None] | None:
        """Count a mini-batch that begins. If it is recorded, return the function that ends its range."""
        number, self._mini_batches = self._mini_batches, self._mini_batches + 1
        recording: Capture | None = None
        if self._capture is not None:
            recording = self._capture if self._capture.before_pass() else None
        elif self._leave is not None:
            recording = whole_step.recording()
            lifecycle.keep_within_budget(recording)
        return recording.mark(f"mini_batch {number}") if recording is not None else None

    def end(self, error: BaseException | None = None, cut: str = "") -> None:
        """End the stage. May be called again after an interruption.

        Args:
            error: Exception that the stage raised, if any.
            cut: Reason why the recording ends early, if it does.
        """
        if running.get(self._key) is self:
            running.pop(self._key)
        if self.counts:
            gates.counting(self.counts, self, False)
        span, self._span = self._span, None
        try:
            if span is not None:
                span.end(error)
        finally:
            self._end_recording(error, cut)

    def cut(self) -> None:
        """End a stage whose begin or end was interrupted."""
        self.end(cut=seam.AT_WORK)

    def _end_recording(self, error: BaseException | None, cut: str) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
        elif self._capture is None:
            return
        elif not self._capture.begun:
            if not self._capture.told:
                self._capture.fail(cut if cut == seam.AT_WORK else self._capture.why_nothing())
        elif cut:
            lifecycle.finish(self._capture, "truncated", cut)
        else:
            lifecycle.end(self._capture, error)

    def _begin(self, run: Runtime, subject: Subject, settings: Settings) -> None:
        # If passes are counted, a capture of the whole step would record the generation to its end, not only a part.
        if settings.mode == "continuous" and self.counts != "passes":
            self._leave = whole_step.enter(run, subject, settings)
            return
        texts = {"": "all", "passes": settings.rollout_iterations, "mini_batches": settings.mini_batches}
        counted = "there were {} mini-batches" if self.counts == "mini_batches" else "there were {} forward passes"
        tool, part = profilers.choose(settings), parse_iterations(texts[self.counts])
        self._capture = PassCapture(run, subject, settings, tool, part, counted)
        self._capture.reach()


running: dict[StageKey, RunningStage] = {}
# Open spans with `whole`: calls inside them are no stages.
wholes: list[Span] = []


def inside(key: StageKey, step: int | None) -> bool:
    """Return whether a new stage would be part of a running one.

    It is part of the same stage, of a stage with the same role in this step, or of an open span with `whole`.
    """
    return (
        bool(wholes)
        or key in running
        or any(role == key[0] and stage.step == step for (role, _), stage in running.items())
    )


def end_all(cut: str) -> None:
    """End all running stages of this process early. `cut` is the reason."""
    for stage in list(running.values()):
        stage.end(cut=cut)
    wholes.clear()


def in_whole() -> bool:
    """Return whether a span with `whole` is open."""
    return bool(wholes)
