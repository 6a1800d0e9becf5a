"""Running stages and spans of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from autoprof.base import exceptions, seam
from autoprof.capture import profilers, recorder, whole_step
from autoprof.capture.artifacts import Subject
from autoprof.capture.pass_capture import PassCapture
from autoprof.capture.recorder import Capture
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.hooks import registry
from autoprof.run.runtime import Runtime
from autoprof.run.timeline import Span

# Role and name of a running stage.
StageKey = tuple[str, str]
# Unit that is counted inside a stage, or an empty string if no unit is counted.
Counted = Literal["", "passes", "mini_batches"]


class RunningStage:
    """A running stage of this process, its capture, and its span on the timeline.

    Args:
        run: Run of this process.
        key: Role and name of the stage.
        step: Step that the trainer has announced, if any.
        rank: Global rank of this process.
        kind: Kind of the stage.
        counts: Unit that is counted inside the stage, or an empty string. The settings select the units to record.

    Attributes:
        paired: True if another call must end the stage.
        owner: Object that both calls of a paired stage have in common, if any.
    """

    def __init__(
        self,
        run: Runtime,
        key: StageKey,
        step: int | None,
        rank: int,
        kind: str,
        counts: Counted,
    ) -> None:
        self.step = step
        self.rank = rank
        self.kind = kind
        self.counts = counts
        self.paired = False
        self.owner: Any = None
        self._run = run
        self._key = key
        self._mini_batches = 0
        self._capture: PassCapture | None = None
        self._leave: whole_step.Leave | None = None
        self._span: Span | None = None

    def begin(self, wanted: tuple[Subject, Settings] | None) -> None:
        """Begin the stage. If `begin` or `stop` is interrupted, the caller must call `abort`.

        Args:
            wanted: Subject and settings of the capture, or None if the open window does not select the stage.
        """
        # Check for room on the stack before a profiler is chosen: on a small stack, the profiler's imports can crash.
        if wanted is not None and recorder.has_room(wanted[0]):
            self._begin(self._run, *wanted)
        role, name = self._key
        self._span = Span(
            self._run.timeline, "stage", name, step=self.step, role=role, rank=self.rank, stage_kind=self.kind
        )
        running[self._key] = self
        if self.counts:
            registry.counting(self.counts, self, True)

    def passed(self) -> None:
        """Count a forward pass or a mini-batch that has ended."""
        if self._capture is not None:
            self._capture.after_pass()
        elif self._leave is not None and (whole := whole_step.current()) is not None:
            whole.keep_within_budget()

    def mini_batch(self) -> Callable[[], None] | None:
        """Count a mini-batch that begins now.

        If the mini-batch is recorded, begin its range in the trace, and return the function that ends the range.
        Otherwise, return None.
        """
        number, self._mini_batches = self._mini_batches, self._mini_batches + 1
        capture: Capture | None = None
        if self._capture is not None:
            capture = self._capture if self._capture.before_pass() else None
        elif self._leave is not None and (capture := whole_step.current()) is not None:
            capture.keep_within_budget()
        return capture.mark(f"mini_batch {number}") if capture is not None else None

    def stop(self, error: BaseException | None = None) -> None:
        """End the stage. `error`: exception that the stage raised, if any."""
        self._end(error, "" if error is None else f"the stage raised {exceptions.type_name(error)}")

    def abort(self, reason: str = seam.AT_WORK) -> None:
        """End the stage early, also after an interruption of `begin` or `stop`. May be called repeatedly."""
        self._end(None, reason)

    def _end(self, error: BaseException | None, reason: str) -> None:
        if running.get(self._key) is self:
            running.pop(self._key)
        if self.counts:
            registry.counting(self.counts, self, False)
        span, self._span = self._span, None
        try:
            if span is not None:
                span.end(error)
        finally:
            if self._leave is not None or self._capture is not None:
                self._end_capture(reason)

    def _end_capture(self, reason: str) -> None:
        """End the capture, if any. `reason`: reason why the capture ends early, or an empty string."""
        leave, self._leave = self._leave, None
        capture = self._capture
        if leave is not None:
            leave(reason)
        elif capture is None:
            return
        elif capture.state == "waiting" and not capture.tried:
            capture.fail(reason if reason == seam.AT_WORK else capture.why_nothing())
        elif reason:
            capture.abort(reason)
        else:
            capture.stop()

    def _begin(self, run: Runtime, subject: Subject, settings: Settings) -> None:
        # If passes are counted, a capture of the whole step would record all passes, not only the selected passes.
        if settings.mode == "continuous" and self.counts != "passes":
            self._leave = whole_step.enter(run, subject, settings)
            return
        selections = {"": "all", "passes": settings.rollout_iterations, "mini_batches": settings.mini_batches}
        counted = "there were {} mini-batches" if self.counts == "mini_batches" else "there were {} forward passes"
        tool, selection = profilers.choose(settings), parse_iterations(selections[self.counts])
        self._capture = PassCapture(run, subject, settings, tool, selection, counted)
        self._capture.reach()


running: dict[StageKey, RunningStage] = {}
# Open spans whose hooks set `whole`. Calls inside these spans begin no stages.
wholes: list[Span] = []


def abort_all(reason: str) -> None:
    """Abort all running stages of this process."""
    for stage in list(running.values()):
        stage.abort(reason)
    wholes.clear()


def abort_paired() -> None:
    """Abort the paired stages that no call has ended, because their step ends."""
    for stage in [stage for stage in running.values() if stage.paired]:
        stage.abort("the step ended before the stage")


def in_whole() -> bool:
    """Return True if a span whose hook sets `whole` is open."""
    return bool(wholes)
