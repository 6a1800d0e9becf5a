"""Stages: named pieces of work inside a step, in the processes that do the work. The running stages, and behaviours.

While the user's own profiler is on in a process, autoprof does not record in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec

from autoprof.base import identity, process, seam
from autoprof.capture import profilers, recorder, whole_step
from autoprof.capture.artifacts import Subject
from autoprof.capture.recorder import Capture, PassCapture
from autoprof.config import values
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.hooks import registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Wait
from autoprof.hooks.dispatch import ask
from autoprof.run import cluster
from autoprof.run.cluster import StepAnnouncement
from autoprof.run.journal import Span
from autoprof.run.runtime import Runtime

# Role and name of a running stage.
StageKey = tuple[str, str]
# Unit that is counted inside a stage, or an empty string if no unit is counted.
Counted = Literal["", "passes", "mini_batches"]


class RunningStage(msgspec.Struct, eq=False):
    """A running stage of this process, its capture, and its span on the timeline.

    Attributes:
        run: Run of this process.
        key: Role and name of the stage.
        step: Step that the trainer has announced, if any.
        rank: Global rank of this process.
        kind: Kind of the stage.
        counts: Unit that is counted inside the stage, or an empty string. The settings select the units to record.
        paired: True if another call must end the stage.
        owner: Object that both calls of a paired stage have in common, if any.
    """

    run: Runtime
    key: StageKey
    step: int | None
    rank: int
    kind: str
    counts: Counted
    paired: bool = False
    owner: Any = None
    _mini_batches: int = 0
    _capture: PassCapture | None = None
    _leave: whole_step.Leave | None = None
    _span: Span | None = None
    # Calls of the same role that run now and belong to this stage. The span ends with the last of them.
    _joined: set[Call] = set()
    _stopped: bool = False

    def begin(self, wanted: tuple[Subject, Settings] | None) -> None:
        """Begin the stage. If `begin` or `stop` is interrupted, the caller must call `abort`.

        Args:
            wanted: Subject and settings of the capture, or None if the open window does not select the stage.
        """
        state.begun += 1
        if wanted is not None:
            self._begin(*wanted)
        role, name = self.key
        self._span = Span(
            self.run.timeline, "stage", name, step=self.step, role=role, rank=self.rank, stage_kind=self.kind
        )
        running[self.key] = self
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

    def stop(self, error: BaseException | None = None, reason: str = "") -> None:
        """End the stage.

        Args:
            error: Exception that the stage raised, if any.
            reason: Reason why the stage ends early, or an empty string.
        """
        if running.get(self.key) is self:
            running.pop(self.key)
        if self.counts:
            registry.counting(self.counts, self, False)
        self._stopped = True
        try:
            if error is not None or reason or not self._joined:
                self._end_span(error)
        finally:
            if self._leave is not None or self._capture is not None:
                self._end_capture(reason if error is None else f"the stage raised {seam.type_name(error)}")

    def join(self, call: Call) -> None:
        """Let a call, perhaps of another thread, belong to this stage until `leave`."""
        self._joined.add(call)

    def leave(self, call: Call) -> None:
        self._joined.discard(call)
        if self._stopped and not self._joined:
            self._end_span()

    def _end_span(self, error: BaseException | None = None) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end(error)

    def abort(self, reason: str = seam.AT_WORK) -> None:
        """End the stage early, also after an interruption of `begin` or `stop`. May be called repeatedly."""
        self.stop(None, reason)

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

    def _begin(self, subject: Subject, settings: Settings) -> None:
        # If passes are counted, a capture of the whole step would record all passes, not only the selected passes.
        if settings.mode == "continuous" and self.counts != "passes":
            self._leave = whole_step.enter(self.run, subject, settings)
            return
        selections = {"": "all", "passes": settings.rollout_iterations, "mini_batches": settings.mini_batches}
        counted = "there were {} mini-batches" if self.counts == "mini_batches" else "there were {} forward passes"
        tool, selection = profilers.choose(settings), parse_iterations(selections[self.counts])
        self._capture = PassCapture(self.run, subject, settings, tool, selection, counted)
        self._capture.reach()


class _StageState(process.State):
    """Stages of this process.

    Attributes:
        opener: Function that opens the first step of a loop. Only a `step.tick` hook with `at = "end"` sets this
            function.
        open_first: `opener` until the first stage or span of a loop, then None.
        begun: Number of stages, and of spans outside of samples, that have begun in this process.
    """

    def reset(self) -> None:
        self.opener: Callable[[Call], Generator[Wait, Any, None]] | None = None
        self.open_first: Callable[[Call], Generator[Wait, Any, None]] | None = None
        self.begun = 0

    def after_fork_in_child(self) -> None:
        self.reset()


state = _StageState()
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


def in_whole_span() -> bool:
    """Return True if a span is open whose hook has set the option `whole`.

    With this option, a span counts as one piece of work, so the calls inside the span begin no stages.
    """
    return bool(wholes)


class NativeStart(Behaviour):
    """The call starts the target's own profiler, but only in some processes and in some steps.

    Attributes:
        whose: Name of the profiler in messages, such as `verl's own profiler`.
        active: Paths from a parameter of the call to values. If one of these values is true after the call, the
            target's profiler is running in this process.
    """

    whose: str
    active: list[CallPath]

    def around(self, call: Call) -> Around:
        yield CALL
        if any(call.at(path, False) for path in self.active):
            recorder.suspend(self.whose)


class NativeStop(Behaviour):
    """The call stops the target's own profiler."""

    def around(self, call: Call) -> Around:
        yield CALL
        recorder.resume()


class Read(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Option that says how autoprof gets a name, such as the name of a stage, from the call.

    Attributes:
        path: Path from a parameter of the call to the name that the target uses.
        names: Table from patterns, as in fnmatch, to autoprof's names. The first pattern that matches the target's name
            decides. If no pattern matches, the hook ignores the call. Without a table, autoprof uses the target's name.
    """

    path: CallPath
    names: dict[str, str] = {}

    def read_name(self, call: Call) -> str:
        """Return the name for this call, or an empty string if the hook ignores the call."""
        target_name = str(call.at(self.path, ""))
        if not self.names:
            return target_name
        return next((name for pattern, name in self.names.items() if fnmatchcase(target_name, pattern)), "")


class NamedCall(Behaviour):
    """Common part of the behaviours of stages and spans.

    Attributes:
        stage: Name of the stage, or a table with the path, from a parameter of the call, to the name.
        role: Role of the process, such as `actor`, or a table with the path, from a parameter of the call, to the role.
        rank: Path from a parameter of the call to the global rank. Without this path, the rank is the environment
            variable RANK, or else 0.
    """

    makes_stages: ClassVar[bool] = True
    stage: str | Read
    role: str | Read
    rank: CallPath = ""

    def key(self, call: Call) -> StageKey | None:
        """Return the role and the name of the call's stage, or None if the hook ignores the call."""
        role = self.role if isinstance(self.role, str) else self.role.read_name(call)
        stage = self.stage if isinstance(self.stage, str) else self.stage.read_name(call)
        return (role, stage) if role and stage else None

    def concerns(self, call: Call) -> bool:
        return self.key(call) is not None

    def rank_of(self, call: Call) -> int:
        """Return the global rank of this process."""
        return int(call.at(self.rank)) if self.rank else identity.own_rank()


class Stage(NamedCall):
    """Each call is one stage of the step. The stage is captured if the step's window selects its role and rank.

    A call inside a stage of the same role begins no stage and belongs to the running stage. For example, the forward
    pass of an update computes log-probs, too.

    Attributes:
        passes: True if a `stage.pass` hook counts the stage's forward passes. Then only the passes in
            `AUTOPROF_ROLLOUT_ITERATIONS` are recorded.
        mini_batches: True if `stage.mini-batch` hooks count the stage's mini-batches. Then only the mini-batches in
            `AUTOPROF_MINI_BATCHES` are recorded.
        outermost: True if a call inside a stage of any other role begins no stage either.
    """

    passes: bool = False
    mini_batches: bool = False
    outermost: bool = False

    def around(self, call: Call) -> Around:
        key = self.key(call)
        if key is None or (self.outermost and running):
            yield CALL
            return
        announcement = cluster.local_announcement()
        if announcement is None:
            announcement = yield from current_announcement(call)
        stage = self.stage_of(key, call, announcement)
        if stage is None:
            outer = _outer_stage(key, announcement)
            if outer is not None:
                outer.join(call)
            try:
                yield CALL
            finally:
                if outer is not None:
                    outer.leave(call)
            return
        call.on_interrupt = stage.abort
        stage.begin(self.wanted(stage, announcement) if announcement is not None and announcement.captured else None)
        outcome = yield CALL
        if outcome.error is not None or not stage.paired:
            stage.stop(outcome.error)

    def stage_of(self, key: StageKey, call: Call, announcement: StepAnnouncement | None) -> RunningStage | None:
        """Return a new stage, which the caller begins, or None if the call begins no stage.

        The call begins no stage if autoprof is off in the step, inside an open span with `whole`, while the same stage
        is running, or while a stage of the same role is running in the same step.
        """
        off, step = (False, None) if announcement is None else (announcement.off, announcement.step)
        if off or wholes or _outer_stage(key, announcement) is not None:
            return None
        counts: Counted = "passes" if self.passes else "mini_batches" if self.mini_batches else ""
        return RunningStage(call.run, key, step, self.rank_of(call), kind_of(call, key[1]), counts)

    def wanted(self, stage: RunningStage, announcement: StepAnnouncement) -> tuple[Subject, Settings] | None:
        """Return the subject and the settings of the stage's capture.

        Return None if the open window does not select the stage's role and rank.
        """
        (role, name), rank = stage.key, stage.rank
        settings = stage.run.settings.overridden(announcement.overrides)
        if not settings.takes(role, range(rank, rank + 1), stage.kind):
            return None
        subject = Subject(
            step=announcement.step, loop=announcement.loop, role=role, stage=name, rank=rank, stage_kind=stage.kind
        )
        return subject, settings.for_role(role)


class StagePass(Behaviour):
    """The call marks a forward pass, or the end of a mini-batch, in the running stages that count this unit.

    Attributes:
        counted: Unit that the hook counts.
    """

    counted: Literal["passes", "mini_batches"] = "passes"

    def idle_unless(self) -> str:
        return self.counted

    def around(self, call: Call) -> Around:
        yield CALL
        for stage in list(running.values()):
            if stage.counts == self.counted:
                stage.passed()


class MiniBatch(Behaviour):
    """Each call is one mini-batch of the running stages that count mini-batches, and a range in the traces.

    Work between two mini-batches belongs to the earlier mini-batch.
    """

    def idle_unless(self) -> str:
        return "mini_batches"

    def around(self, call: Call) -> Around:
        range_ends = [stage.mini_batch() for stage in list(running.values()) if stage.counts == "mini_batches"]
        yield CALL
        for end_range in filter(None, range_ends):
            end_range()


def _outer_stage(key: StageKey, announcement: StepAnnouncement | None) -> RunningStage | None:
    """Return the running stage to which a call belongs: the same stage, or one of the same role in the same step."""
    step = None if announcement is None or announcement.off else announcement.step
    if (same := running.get(key)) is not None:
        return same
    return next((each for (role, _), each in list(running.items()) if role == key[0] and each.step == step), None)


def kind_of(call: Call, stage: str) -> str:
    """Return the kind of a stage: the kind that the hook of the call sets, or else the kind for the stage's name."""
    hook = registry.bound.get(call.key)
    return values.kind_of(stage, hook.hook.kind if hook is not None else None)


def current_announcement(call: Call) -> Generator[Wait, Any, StepAnnouncement | None]:
    """Return the announcement of the trainer's current step, or None if no step is announced.

    If no step is open yet and the trainer's hook ticks at the end of a step, open the first step. Unlike
    `cluster.local_announcement`, this function may ask Ray for the announcement.
    """
    if (opener := state.open_first) is not None:
        state.open_first = None
        yield from opener(call)
    local = cluster.local_announcement()
    if local is not None:
        return local
    announcement: StepAnnouncement | None = yield from ask(cluster.announced_step, call.run.info.id)
    return announcement


class StageBegin(Stage):
    """The call opens a stage, which a `stage.end` hook closes.

    If no call closes the stage, the stage ends when its step ends, or when the same stage begins in a later step. The
    state of its capture is then `truncated`.

    Attributes:
        of: Path from a parameter of the call to an object. The call that closes the stage must have the same object at
            the path in its own `of`.
    """

    of: CallPath = ""

    def stage_of(self, key: StageKey, call: Call, announcement: StepAnnouncement | None) -> RunningStage | None:
        step = None if announcement is None else announcement.step
        earlier_stage = running.get(key)
        if earlier_stage is not None and earlier_stage.paired and earlier_stage.step != step:
            earlier_stage.abort("no call ended the stage")
        opened = super().stage_of(key, call, announcement)
        if opened is not None:
            opened.paired, opened.owner = True, _owner(self.of, call)
        return opened


class SpanBegin(StageBegin):
    """The call opens a span on the timeline, which a `stage.end` hook closes. The span is not captured."""

    def wanted(self, stage: RunningStage, announcement: StepAnnouncement) -> tuple[Subject, Settings] | None:
        return None


class StageEnd(Behaviour):
    """When the call returns, autoprof closes the latest open stage of a `stage.begin` hook that matches the options.

    Attributes:
        of: Path from a parameter of the call to an object. The call that opened the stage must have had the same object
            at the path in its own `of`.
        stage: Name of the stage to close. Default: any name.
        role: Role of the stage to close. Default: any role.
    """

    of: CallPath = ""
    stage: str = ""
    role: str = ""

    def around(self, call: Call) -> Around:
        call.on_interrupt = partial(self._abort, call)
        outcome = yield CALL
        stage = self._matching_stage(call)
        if stage is not None:
            call.on_interrupt = stage.abort
            stage.stop(outcome.error)

    def _abort(self, call: Call) -> None:
        if (stage := self._matching_stage(call)) is not None:
            stage.abort()

    def _matching_stage(self, call: Call) -> RunningStage | None:
        owner = _owner(self.of, call)
        for (role, name), stage in reversed(list(running.items())):
            matches = self.role in ("", role) and self.stage in ("", name)
            if matches and stage.paired and stage.owner is owner:
                return stage
        return None


def _owner(path: str, call: Call) -> Any:
    return call.at(path) if path else None
