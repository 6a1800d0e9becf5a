"""The stages and spans that are running in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from autoprof import capture, continuous, gates, tools
from autoprof.board import Posting
from autoprof.capture import Capture
from autoprof.naming import Subject
from autoprof.placement import Placement
from autoprof.runtime import Runtime
from autoprof.settings import Settings
from autoprof.timeline import Span
from autoprof.window import parse_iterations

# A running stage is known by its role and its name.
Who = tuple[str, str]
# What is counted inside of a stage.
Counted = Literal["", "passes", "mini_batches"]


class Running:
    """A stage that is running in this process, its capture and its span of the timeline.

    Args:
        wanted: What is to be captured, and how, if the window is open for the stage.
        counts: What is counted inside of it, of which the settings may ask for a part.
        span: Makes its span of the timeline.
    """

    def __init__(
        self,
        run: Runtime,
        who: Who,
        posting: Posting | None,
        wanted: tuple[Subject, Settings] | None,
        counts: Counted,
        span: Callable[[], Span],
    ) -> None:
        self.step = step_of(posting)
        self.counts = counts
        self._run = run
        self._who = who
        self._wanted = wanted
        self._counted = 0
        self._begun = False
        self._recording: Capture | None = None
        self._leave: Callable[[], None] | None = None
        self._first, self._stop_before = self._part()
        if self._first == 0:
            self._record()
        self._span = span()
        running[who] = self
        if counts:
            gates.counting(counts, 1)

    def passed(self) -> None:
        """A forward pass, or a mini-batch, is through."""
        self._counted += 1
        if self._counted == self._first:
            self._record()
        self._stop_after()
        capture.keep_within_budget(self._current)

    def mini_batch(self) -> Callable[[], None] | None:
        """A mini-batch begins. Returns what ends its range, if it is recorded."""
        self._stop_after()
        capture.keep_within_budget(self._current)
        number, self._counted = self._counted, self._counted + 1
        if number == self._first and not self._begun:
            self._record()
        recording = self._current
        return recording.mark(f"mini_batch {number}") if recording is not None else None

    def end(self, error: BaseException | None = None, cut: str = "") -> None:
        """The stage has ended, with the exception that it raised, or early: `cut` says why."""
        if running.get(self._who) is self:
            del running[self._who]
            if self.counts:
                gates.counting(self.counts, -1)
        try:
            self._span.end(error)
        finally:
            self._end_recording(error, cut)

    def _end_recording(self, error: BaseException | None, cut: str) -> None:
        if self._leave is not None:
            self._leave()
        elif self._recording is not None and cut:
            capture.finish(self._recording, "truncated", cut)
        elif self._recording is not None:
            capture.end(self._recording, error)
        elif self._wanted is not None and not self._begun:
            self._nothing_recorded(*self._wanted)

    def _part(self) -> tuple[int, int | None]:
        """The first pass or mini-batch that is recorded, and the one to stop before."""
        if not self.counts or self._wanted is None or self._whole_step:
            return 0, None
        settings = self._wanted[1]
        return parse_iterations(settings.rollout_iterations if self.counts == "passes" else settings.mini_batches)

    @property
    def _whole_step(self) -> bool:
        """Whether the stage is part of a capture of its step. A generation whose passes are counted is not: it would be
        recorded to its end."""
        return self._wanted is not None and self._wanted[1].mode == "continuous" and self.counts != "passes"

    @property
    def _current(self) -> Capture | None:
        """The capture that the stage is in."""
        return self._recording if self._leave is None else continuous.recording()

    def _record(self) -> None:
        self._begun = True
        if self._wanted is None:
            return
        if self._whole_step:
            self._leave = continuous.enter(self._run, *self._wanted)
        else:
            self._recording = capture.begin(self._run, *self._wanted)

    def _stop_after(self) -> None:
        if self._counted == self._stop_before and self._recording is not None:
            capture.end(self._recording)

    def _nothing_recorded(self, subject: Subject, settings: Settings) -> None:
        Placement(self._run, subject, settings, tools.choose(settings).name).fail(
            f"there were {self._counted} {_IN_WORDS[self.counts]}; recording was to begin after {self._first}"
        )


_IN_WORDS: dict[Counted, str] = {"": "", "passes": "forward passes", "mini_batches": "mini-batches"}
running: dict[Who, Running] = {}
# Spans inside of which there is no stage.
wholes: list[Span] = []


def inside(who: Who, posting: Posting | None) -> bool:
    """Whether a stage that would begin now is part of what is running: of itself, of its role in this step, or of a
    span that is a whole."""
    step = step_of(posting)
    return (
        bool(wholes)
        or who in running
        or any(role == who[0] and stage.step == step for (role, _), stage in running.items())
    )


def in_whole() -> bool:
    """Whether a span is running inside of which there is no stage."""
    return bool(wholes)


def step_of(posting: Posting | None) -> int | None:
    """The step that was posted, if one was."""
    return posting.step if posting is not None else None
